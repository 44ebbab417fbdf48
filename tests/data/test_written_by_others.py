"""Tables as pandas, Kaggle and annotators write them: missing values, columns that not all rows
have, shards."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import random
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import (
    Corpus,
    ImageFolderPairs,
    MinedPairs,
    PairDataset,
    TablePairs,
    TableViews,
    open_corpus,
    open_pairs,
)
from dualenc.data.store import cache as arrow_cache
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import picture, shade_of, write_beir, write_csv, write_jsonl, write_rows

ACCENTS = "id,text\n1,café\n2,“naïve”\n"
READ = {"1": "café", "2": "“naïve”"}
TWO = {"1": "one", "2": "two"}
BIG = 2**63 + 5
NAN = float("nan")
FILES: list[tuple[str, bytes, dict[str, str]]] = [
    ("x.csv", ACCENTS.encode(), READ),
    ("x.csv", ACCENTS.encode("utf-8-sig"), READ),
    ("x.csv", ACCENTS.encode("cp1252"), READ),
    ("x.csv", ACCENTS.encode("utf-16"), READ),
    ("x.csv", ACCENTS.encode("utf-16-le"), READ),
    ("x.csv", ACCENTS.encode("utf-16-be"), READ),
    ("x.csv", ("id,text\n" + "0,x\n" * 300_000 + ACCENTS[8:]).encode("cp1252"), {"0": "x"} | READ),
    ("x.csv", ACCENTS.replace(",", ";").replace("\n", "\r\n").encode("cp1252"), READ),
    ("x.csv", b"sep=;\r\nid;text\r\n1;one\r\n2;two\r\n", TWO),
    ("x.csv", b"id;text\n1;one, two\n", {"1": "one, two"}),
    ("x.csv", b'"id","text","a;b;c;d"\n1,one,2\n', {"1": "one"}),
    ("x.csv", b"id\ttext\n1\tone\n2\ttwo\n", TWO),
    ("x.tsv", ACCENTS.replace(",", "\t").encode("utf-16"), READ),
    ("x.csv", b"\n\nid,text\r1,one\r2,two\r", TWO),
    ("x.csv", b'id,text\n1,"one\r\nand"\n2,two\n', {"1": "one\r\nand", "2": "two"}),
    ("x.csv", b"id,text\n1,one,\n2,two,\n", TWO),
    ("x.csv", b"id,text,\n1,one\n2,two\n", TWO),
    ("x.csv", b"id,text,\n1,one,\n2,two,\n", TWO),
    ("x.csv", b'"","id","text"\n"0","1","one"\n"1","2","two"\n', TWO),
    ("x.csv", b",text\n7,one\n8,two\n", {"0": "one", "1": "two"}),
    ("x.csv", b"id,text\n1,o\0ne\n", {"1": "o\0ne"}),
    ("x.csv", b"id,text\n1,one\n2,caf\xc3\xa9 \xe9\n3,\xc3\xa9\n", {"1": "one", "3": "é"}),
    ("x.csv", b"id,text" + b",c" * 3000 + b"\n", {}),
    ("x.csv.gz", gzip.compress(ACCENTS.encode("cp1252"), mtime=0), READ),
    ("x.csv.zst", pa.compress(ACCENTS.encode(), "zstd", asbytes=True), READ),
    ("x.jsonl.zst", pa.compress(b'{"id":1,"text":"one"}\n', "zstd", asbytes=True), {"1": "one"}),
    (
        "x.jsonl",
        '\ufeff{"id":1,"text":"é"}\r\n{"id":2,"text":"a\u2028b"}'.encode(),
        {"1": "é", "2": "a\u2028b"},
    ),
    (
        "x.jsonl",
        '{"id":1,"text":"é"}\n{"id":2,"text":"b"}\n'.encode("utf-16"),
        {"1": "é", "2": "b"},
    ),
    ("x.jsonl", b'[\n{"id":1,"text":"one"},\n{"id":2,"text":"two"}\n]\n', TWO),
    ("x.json", '[{"id":1,"text":"é"}]'.encode("utf-16"), {"1": "é"}),
    (
        "x.jsonl",
        f'{{"id":{BIG},"text":"a"}}\n{{"id":{2**53 + 1},"text":"b"}}'.encode(),
        {str(BIG): "a", str(2**53 + 1): "b"},
    ),
    (
        "x.jsonl",
        b'{"id":1,"text":5}\n{"id":"a","text":{"en":1}}\n{"id":2.5,"text":true}',
        {"1": "5", "2.5": "true"},
    ),
    ("x.txt", "one\ncafé\n".encode("utf-16"), {"0": "one", "1": "café"}),
]


@pytest.mark.parametrize(("name", "content", "expected"), FILES)
def test_files_as_excel_pandas_and_annotators_write_them(
    tmp_path: Path,
    name: str,
    content: bytes,
    expected: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if not expected:
        with pytest.raises(
            DualencError, match=r"x\.csv:1: two columns are called 'c'; rename one of them"
        ):
            open_corpus(path)
        return
    with caplog.at_level(logging.WARNING, logger="dualenc.data"):
        assert texts(open_corpus(path)) == expected
    # One line names the encoding, if it is not UTF-8.
    reports = [record.getMessage() for record in caplog.records if "read as" in record.getMessage()]
    plain = gzip.decompress(content) if name.endswith(".gz") else content
    try:
        is_other = "zst" not in name and "\0" in plain.decode()[:4]
    except UnicodeDecodeError:
        is_other = b"\xc3" not in plain
    assert len(reports) == is_other


FORMS = ["jsonl", "json", "csv", "tsv", "parquet", "saved"]


def texts(corpus: Corpus) -> dict[str, str]:
    return {name: corpus[row] for row, name in enumerate(corpus.ids)}


def pairs_of(data: PairDataset) -> list[tuple[str, str]]:
    return [(pair.left, pair.right) for pair in data]


@pytest.mark.parametrize("form", FORMS)
def test_missing_texts_ids_titles_and_columns(tmp_path: Path, form: str) -> None:
    rows = [
        {"id": "a", "title": "T", "text": "one", "year": 2020, "lang": "en"},
        {"id": "b", "title": NAN, "text": "two", "year": NAN, "lang": NAN},
        {"id": "c", "title": NAN, "text": NAN, "year": 1999, "lang": "de"},
        {"id": NAN, "title": "U", "text": "four", "year": 2001, "lang": "de"},
        {"id": NAN, "title": "V", "text": "five", "year": 2002, "lang": "de"},
    ]
    corpus = open_corpus(write_rows(tmp_path, form, rows), columns=["year", "lang"])
    assert texts(corpus) == {"a": "T one", "b": "two"}
    assert corpus.skipped == 3
    assert corpus.columns is not None
    assert corpus.columns.to_pydict() == {"year": [2020, None], "lang": ["en", None]}
    assert pa.types.is_integer(corpus.columns["year"].type) or pa.types.is_floating(
        corpus.columns["year"].type
    )


@pytest.mark.parametrize("form", FORMS)
def test_numbers_as_ids_beside_a_missing_one(tmp_path: Path, form: str) -> None:
    rows = [{"id": 1, "text": "one"}, {"id": NAN, "text": "two"}, {"id": 12, "text": "three"}]
    frame = pd.DataFrame(rows).to_dict("records")  # 1.0, nan, 12.0
    corpus = open_corpus(write_rows(tmp_path, form, frame))
    assert (texts(corpus), corpus.skipped) == ({"1": "one", "12": "three"}, 1)


@pytest.mark.parametrize("form", FORMS)
def test_missing_sides_and_weights_of_pairs(tmp_path: Path, form: str) -> None:
    rows = [
        {"query": "a", "document": "x", "grade": 1.0},
        {"query": "b", "document": NAN, "grade": 1.0},
        {"query": "c", "document": NAN, "grade": 1.0},
        {"query": NAN, "document": "y", "grade": 1.0},
        {"query": "d", "document": "z", "grade": NAN},
    ]
    path = write_rows(tmp_path, form, rows)
    data = TablePairs(path, "query", "document", weight_column="grade")
    assert pairs_of(data) == [("a", "x")]
    assert data.skipped == 4
    # Where it is not read its missing values are no fault.
    assert len(TablePairs(path, "query", "document", weight_column="")) == 2


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_columns_of_numbers_with_nan(tmp_path: Path, form: str) -> None:
    rows = [
        {"query": 1.5, "document": 2.5},
        {"query": 3.5, "document": NAN},
        {"query": NAN, "document": NAN},
    ]
    data = TablePairs(write_rows(tmp_path, form, rows), "query", "document")
    assert (pairs_of(data), data.skipped) == ([("1.5", "2.5")], 2)


@pytest.mark.parametrize("missing", [NAN, None])
def test_missing_values_in_mined_negatives_and_beir_folders(
    tmp_path: Path, missing: float | None
) -> None:
    rows = [
        {
            "query": "a",
            "pos": ["p"],
            "neg": ["n", missing],
            "pos_scores": [1.0],
            "neg_scores": [missing, 0.5],
        },
        {"query": missing, "pos": ["p"], "neg": ["n"], "pos_scores": [1.0], "neg_scores": [0.5]},
        {
            "query": "b",
            "pos": missing,
            "neg": missing,
            "pos_scores": missing,
            "neg_scores": missing,
        },
    ]
    mined = MinedPairs(write_jsonl(tmp_path / "flag.jsonl", rows))
    assert (len(mined), mined[0].right, list(mined[0].negatives)) == (1, "p", ["n"])
    passage = {"docid": "1", "title": missing, "text": "p", "score": missing}
    tevatron = {
        "query": "a",
        "positive_passages": [passage],
        "negative_passages": [passage | {"text": "n"}],
    }
    assert MinedPairs(write_jsonl(tmp_path / "tevatron.jsonl", [tevatron]))[0].right == "p"

    documents = [
        {"_id": "1", "title": missing, "text": "x"},
        {"_id": missing, "text": "y"},
        {"_id": "2", "text": "z"},
    ]
    folder = write_beir(
        tmp_path / "beir", documents, [{"_id": "q", "text": "why"}], {"train": [("q", 1, 1)]}
    )
    assert texts(open_corpus(folder)) == {"1": "x", "2": "z"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["numbers", "names"])
def test_rows_without_a_label_have_no_class(tmp_path: Path, form: str, kind: str) -> None:
    labels: list[Any] = [3, NAN, 10, 3] if kind == "numbers" else ["cat", NAN, "dog", "cat"]
    folder = tmp_path / "rows.saved" if form == "saved" else tmp_path
    path = write_rows(
        tmp_path, form, [{"image": f"{i}.png", "label": label} for i, label in enumerate(labels)]
    )
    for i in range(4):
        picture(i).save(folder / f"{i}.png")
    numbers = [3, -1, 10, 3] if kind == "numbers" else [0, -1, 1, 0]
    for data in (TableViews(path), open_corpus(path, modality="image")):
        assert data.labels is not None
        assert data.labels.tolist() == numbers
        assert data.class_names == (
            [str(i) for i in range(11)] if kind == "numbers" else ["cat", "dog"]
        )


@pytest.mark.parametrize("label", ["", " ", "nan"])
def test_blank_labels_in_csv(tmp_path: Path, label: str) -> None:
    path = write_csv(
        tmp_path / "x.csv", ["image", "label"], [["0.png", "3"], ["1.png", label], ["2.png", "10"]]
    )
    for i in range(3):
        picture(i).save(tmp_path / f"{i}.png")
    views = TableViews(path)
    assert views.labels is not None
    assert views.labels.tolist() == [3, -1, 10]
    write_csv(path, ["image", "label"], [["0.png", label], ["1.png", label]])
    assert label == "nan" or TableViews(path).labels is None


def test_numbers_in_csv_stay_numbers_beside_nan(tmp_path: Path) -> None:
    rows = [["one", "2020", "nan"], ["two", "nan", "de"], ["three", " ", "en"]]
    corpus = open_corpus(
        write_csv(tmp_path / "x.csv", ["text", "year", "lang"], rows), columns=["year", "lang"]
    )
    assert corpus.columns is not None
    assert corpus.columns.to_pydict() == {"year": [2020, None, None], "lang": ["nan", "de", "en"]}


ROWS: list[dict[str, Any]] = [
    {"text": "no id"},
    *({"_id": f"d{i}", "title": f"T{i}", "text": f"text {i}"} for i in range(3)),
    {"_id": "d3", "text": "text 3"},
]
WANTED = {**{f"d{i}": f"T{i} text {i}" for i in range(3)}, "d3": "text 3"}


@pytest.mark.parametrize("form", ["jsonl", "json", "ndjson"])
def test_the_same_json_rows_in_any_order_are_the_same_data(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    for order in itertools.permutations(ROWS):
        path.write_text(
            json.dumps(order)
            if form == "json"
            else "".join(f"{json.dumps(row)}\n" for row in order)
        )
        corpus = open_corpus(path)
        assert (texts(corpus), corpus.skipped) == (WANTED, 1)


@pytest.mark.parametrize("cached", [False, True])
def test_a_column_may_begin_in_any_row_and_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    if cached:
        monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
        monkeypatch.setattr(arrow_cache, "cache_folder", lambda: tmp_path / "cache")
    late = [{"text": f"early {i}"} for i in range(900)] + ROWS
    write_jsonl(tmp_path / "late.jsonl", late)
    for _ in range(2):  # the second time from the cache, if there is one
        corpus = open_corpus(tmp_path / "late.jsonl")
        assert (texts(corpus), corpus.skipped) == (WANTED, 901)
    write_jsonl(tmp_path / "part0.jsonl", late[:900])
    write_jsonl(tmp_path / "part1.jsonl", late[900:])
    assert texts(open_corpus(str(tmp_path / "part*.jsonl"))) == WANTED
    write_csv(tmp_path / "csv0.csv", ["text"], [["no id"]])
    write_csv(tmp_path / "csv1.csv", ["_id", "title", "text"], [["d0", "T0", "text 0"]])
    assert texts(open_corpus(str(tmp_path / "csv*.csv"))) == {"d0": "T0 text 0"}


def test_pairs_and_beir_folders_in_any_order(tmp_path: Path) -> None:
    rows = [
        {"note": "no pair"},
        {"query": "a", "document": "x"},
        {"query": "b", "document": ["y", "z"]},
    ]
    rows += [{"query": f"{i}", "document": [f"{i}"]} for i in range(2)]
    found = []
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        found.append(sorted(pairs_of(open_pairs(write_jsonl(tmp_path / "pairs.jsonl", rows)))))
    assert found == [[("0", "0"), ("1", "1"), ("a", "x"), ("b", "y"), ("b", "z")]] * 5
    # A file of texts with their vectors is one of texts, wherever the first text stands.
    documents = [
        {"_id": "a", "vector": [1.0, 2.0]},
        {"_id": "b", "text": "t", "vector": [2.0, 1.0]},
    ]
    for order in (documents, documents[::-1]):
        folder = write_beir(
            tmp_path / order[0]["_id"],
            order,
            [{"_id": "q", "text": "q"}],
            {"test": [("q", "b", 1)]},
        )
        assert texts(open_corpus(folder)) == {"b": "t"}


VALUES = {
    "strings": (pa.string(), ["one", "two"]),
    "lists": (pa.list_(pa.string()), [["one", "more"], ["two"]]),
    "numbers": (pa.float64(), [1.5, 2.5]),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("form", ["null", "absent", "empty"])
def test_parquet_shards_without_a_value_in_a_column(tmp_path: Path, kind: str, form: str) -> None:
    type_, values = VALUES[kind]
    count = 0 if form == "empty" else 2
    nothing = {"query": pa.array(["q0", "q1"][:count], pa.string()), "document": pa.nulls(count)}
    if form == "absent":
        del nothing["document"]
    shards = [
        pa.table(nothing),
        pa.table({"query": ["a", "b"], "document": pa.array(values, type_)}),
    ]
    found = []
    for number, order in enumerate((shards, shards[::-1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for part, shard in enumerate(order):
            pq.write_table(shard, folder / f"part-{part}.parquet")
        data = open_pairs(f"{folder}/*.parquet")
        assert data.skipped == count
        found.append(pairs_of(data))
    expected = [
        (q, str(text)) for q, v in zip("ab", values) for text in (v if isinstance(v, list) else [v])
    ]
    assert found == [expected, expected]


def test_parquet_shards_of_other_types(tmp_path: Path) -> None:
    def table(ids: list[Any], first: str) -> None:
        for name, value in zip((first, "b" if first == "a" else "a"), ids):
            pq.write_table(pa.table({"id": [value], "text": [name]}), tmp_path / f"{name}.parquet")

    for first in "ab":
        table([1, 2.5], first)
        corpus = open_corpus(f"{tmp_path}/*.parquet", text_column="text", columns=[])
        assert len(corpus) == 2
    table([2**53 + 1, 1.5], "a")
    with pytest.raises(
        DualencError,
        match=r"a\.parquet: cannot be read .*not in range.* write all files with the same types",
    ):
        open_corpus(f"{tmp_path}/*.parquet")
    for ids in ([1, "x"], [[1], 2], [date(2020, 1, 2), datetime(2020, 1, 3)]):
        table(ids, "a")
        with pytest.raises(
            DualencError, match=r"b\.parquet: cannot be read .*Field id has incompat"
        ) as error:
            open_corpus(f"{tmp_path}/*.parquet")
        assert "\n" not in str(error.value)


QUESTIONS = [
    "Which of these is photo.jpg",
    *(f"question {i}" for i in range(20)),
    "and what is scan.png",
]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_column_of_questions_is_no_column_of_images(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(
        tmp_path, form, [{"question": text, "answer": f"a{i}"} for i, text in enumerate(QUESTIONS)]
    )
    with caplog.at_level(logging.WARNING, logger="dualenc.data"):
        data = open_pairs(path)
    assert [pair.left for pair in data] == QUESTIONS
    assert "column 'question' is read as text: 2 of 22 values" in caplog.text
    assert "left_modality" in caplog.text
    assert open_pairs(path, left_modality="image").left_modality == "image"


def test_a_column_of_image_files_with_few_others_is_one_of_images(tmp_path: Path) -> None:
    rows = [["no file", "x"], *([f"{i}.png", f"c{i}"] for i in range(5))]
    for i in range(5):
        picture(i).save(tmp_path / f"{i}.png")
    path = write_csv(tmp_path / "x.csv", ["image", "caption"], rows)
    data = open_pairs(path)
    assert (data.left_modality, shade_of(data[1].left)) == ("image", 0)
    assert open_pairs(path, left_modality="text")[1].left == "0.png"


def test_every_reader_of_tables_takes_the_option_for_quotes(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('query,document\n"a,x\n2,y"\n3,z\n')
    assert pairs_of(open_pairs(path, quotes=False)) == [('"a', "x"), ("2", 'y"'), ("3", "z")]
    assert texts(open_corpus(path, text_column="document", quotes=False)) == {
        "0": "x",
        "1": 'y"',
        "2": "z",
    }
    with pytest.raises(BadSample, match="pass quotes=false"):
        open_pairs(path, on_error="raise")
    picture(1).save(tmp_path / "1.png")
    (tmp_path / "metadata.csv").write_text('file_name,caption\n1.png,"a\n1.png,b"\n')
    path.unlink()
    assert len(ImageFolderPairs(tmp_path, quotes=False)) == 2
    assert len(ImageFolderPairs(tmp_path)) == 1


def test_documents_of_a_tsv_with_plain_quotes_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "corpus.tsv"
    path.write_text('id\ttext\n1\t"Hello\n2\tworld"\n3\tthird\n')
    corpus = open_corpus(path)
    assert (texts(corpus), corpus.skipped) == ({"1": '"Hello', "2": 'world"', "3": "third"}, 0)
