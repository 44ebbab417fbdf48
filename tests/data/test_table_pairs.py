from __future__ import annotations

import logging
import os
import pickle
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder

from dualenc.data import (
    ImageFolderPairs,
    ImageFolderViews,
    ImageViews,
    MinedPairs,
    PairDataset,
    TablePairs,
    TableViews,
    open_corpus,
    open_pairs,
)
from dualenc.data.store import cache as arrow_cache
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import (
    contents,
    encoded,
    picture,
    shade_of,
    write_csv,
    write_jsonl,
    write_rows,
)

WORD = st.text("ab ", max_size=3)
LISTS = st.lists(WORD, max_size=3)
ROWS = st.lists(st.fixed_dictionaries({"q": WORD, "d": LISTS, "n": LISTS}), max_size=8)


def expected(rows: list[dict]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Every usable (left, right, negatives), by loops."""
    positive = {(row["q"], d) for row in rows for d in row["d"]}
    pairs = []
    for row in rows:
        if row["q"].strip():
            # A repeated negative counts once.
            negatives = tuple(
                dict.fromkeys(n for n in row["n"] if n.strip() and (row["q"], n) not in positive)
            )
            pairs += [(row["q"], d, negatives) for d in row["d"] if d.strip()]
    return pairs


def consistent(pairs: PairDataset) -> None:
    """Ids are dense, and one id is one item."""
    for side, ids in (("left", pairs.left_id), ("right", pairs.right_id)):
        number = pairs.num_left if side == "left" else pairs.num_right
        assert 0 <= ids.min() <= ids.max() < number
        items = [pairs.item(side, i) for i in range(number)]  # type: ignore[arg-type]
        assert len(set(items)) == number
    for pair in pairs:
        assert (pair.left, pair.right) == (
            pairs.item("left", pair.left_id),
            pairs.item("right", pair.right_id),
        )
        assert pair.negatives == tuple(pairs.item("right", i) for i in pair.negative_ids)


@pytest.mark.slow
@given(ROWS)
def test_pairs_are_those_of_a_loop_and_equal_texts_share_ids(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict]
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("pairs") / "x.jsonl", rows)
    pairs = expected(rows)
    if not pairs:
        with pytest.raises(DualencError, match=r"no usable (pair|record)"):
            TablePairs(path, "q", "d", "n")
        return
    read = TablePairs(path, "q", "d", "n")
    assert [(p.left, p.right, p.negatives) for p in read] == pairs
    consistent(read)
    plain = TablePairs(path, "q", "d", deduplicate=False)
    assert [(p.left, p.right) for p in plain] == [(q, d) for q, d, _ in pairs]
    assert plain.right_id.tolist() == list(range(len(pairs)))
    assert plain.num_left == sum(
        bool(row["q"].strip() and "".join(row["d"]).strip()) for row in rows
    )


def test_the_same_from_jsonl_and_parquet_and_memory_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"q": f"q{i % 7}", "d": [f"d{i % 5}", f"d{i}"], "n": [f"d{i + 50}", ""]} for i in range(40)
    ]
    paths = [write_rows(tmp_path, form, rows) for form in ("jsonl", "parquet")]
    small = TablePairs(paths[0], "q", "d", "n")
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    for path in paths:
        pairs = TablePairs(path, "q", "d", "n")
        assert list(pairs) == list(small)
        assert pairs.skipped == small.skipped == 40
        assert list(pickle.loads(pickle.dumps(pairs))) == list(small)


@pytest.mark.parametrize("kind", ["tsv", "bytes", "datasets"])
def test_images_in_and_beside_a_table(tmp_path: Path, kind: str) -> None:
    rows = [(10, ["ten"]), (20, ["twenty", "a twenty"]), (30, ["thirty"])]
    if kind == "tsv":
        for shade, _ in rows:
            picture(shade).save(tmp_path / f"{shade}.png")
        lines = [[f"{shade}.png", caption] for shade, captions in rows for caption in captions]
        path = write_csv(tmp_path / "x.tsv", ["image", "caption"], lines, "\t")
    else:
        images: list[Any] = [encoded(picture(shade)) for shade, _ in rows]
        if kind == "datasets":
            images = [{"bytes": image, "path": None} for image in images]
        columns = {"image": images, "caption": [captions for _, captions in rows]}
        features = {"image": datasets.Image(), "caption": datasets.List(datasets.Value("string"))}
        typed = datasets.Features(features) if kind == "datasets" else None
        datasets.Dataset.from_dict(columns, features=typed).to_parquet(tmp_path / "x.parquet")
        path = tmp_path / "x.parquet"
    pairs = TablePairs(path, "image", "caption")
    assert (pairs.left_modality, pairs.right_modality) == ("image", "text")
    assert contents(pairs) == [(10, "ten"), (20, "twenty"), (20, "a twenty"), (30, "thirty")]
    assert pairs.left_id.tolist() == [0, 1, 1, 2]
    assert pairs.positives("left", np.array([1])).tolist() == [[1, 2]]


def test_bad_rows_are_counted_and_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"q": "q", "d": "d"},
        {"q": " ", "d": "d"},
        "{broken",
        {"q": "q", "d": None},
        {"q": "q", "d": ["", "e"]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with caplog.at_level(logging.WARNING, logger="dualenc.data"):
        pairs = TablePairs(path, "q", "d")
    assert [(p.left, p.right) for p in pairs] == [("q", "d"), ("q", "e")]
    assert pairs.skipped == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: skipped 4 bad samples: 1 malformed JSON line (first: {path}:3), "
        f"1 no text in column 'q' (first: {path}:2), 2 no text in column 'd' (first: {path}:4)"
    ]


def flag(query: str, pos: list[str], neg: list[str]) -> dict:
    """A row as FlagEmbedding's mining script writes it."""
    return {
        "query": query,
        "pos": pos,
        "neg": neg,
        "pos_scores": [0.9] * len(pos),
        "prompt": "",
        "type": "normal",
    }


def tevatron(query: str, pos: list[str], neg: list[str]) -> dict:
    """A row as Tevatron writes it; texts "title|text"."""
    passage = [
        [{"docid": t, "title": t.partition("|")[0], "text": t.partition("|")[2]} for t in ts]
        for ts in (pos, neg)
    ]
    return {
        "query_id": "7",
        "query": query,
        "positive_passages": passage[0],
        "negative_passages": passage[1],
    }


def table(path: Path, **options: Any) -> TablePairs:
    return TablePairs(path, "query", "pos", "neg", **options)


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (table, flag("", ["p"], ["n"]), "no text in column 'query'"),
        (table, flag("q", [], ["n"]), "no text in column 'pos'"),
        (table, flag("q", ["p"], [""]), "no text in column 'neg'"),
        (table, flag("q", ["p"], ["p"]), "negative that is also a positive"),
        (MinedPairs, flag("q", ["p"], [" "]), "no text in column 'neg'"),
        (MinedPairs, {"query": "q", "pos": [["p"]]}, "value of a wrong type"),
        (MinedPairs, {"query": "r", "positive_passages": {"text": "x"}}, "value of a wrong type"),
        (MinedPairs, {"query": "r", "positive_passages": [{"text": 5}]}, "value of a wrong type"),
    ],
)
def test_a_bad_row_is_named_or_skipped(
    tmp_path: Path, read: Any, row: object, message: str
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [flag("q0", ["p0"], ["n0"]), row])
    with pytest.raises(BadSample, match=rf"x\.jsonl:2: {message}.*on_error=skip"):
        read(path, on_error="raise")
    pairs = read(path)
    assert (pairs[0].left, pairs.skipped) == ("q0", 1)


COLUMNS = {"query": pa.array(["q"]), "document": pa.array(["d"]), "negative": pa.array(["n"])}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query": pa.array([{"a": "x"}])}, "column 'query' holds struct"),
        (
            {"query": pa.array([["x"]])},
            "the left column holds lists; name it as right_column instead",
        ),
        ({"document": pa.array([[["x"]]])}, "column 'document' holds list"),
        ({"negative": pa.array([[{"a": 1}]])}, "column 'negative' holds list"),
        (
            {"document": pa.array([b"caf\xe9"]).view(pa.string())},
            "column 'document' is damaged .*; write it again",
        ),
    ],
)
def test_columns_of_another_kind_are_refused(
    tmp_path: Path, columns: dict[str, pa.Array], message: str
) -> None:
    pq.write_table(pa.table({**COLUMNS, **columns}), tmp_path / "x.parquet")
    with pytest.raises(DualencError, match=message):
        TablePairs(tmp_path / "x.parquet", *COLUMNS, left_modality="text", right_modality="text")


@pytest.mark.parametrize(
    "values", [pa.array([1]), pa.array([{"a": b"x"}]), pa.array([{"bytes": 1}])]
)
def test_columns_without_images_are_refused(tmp_path: Path, values: pa.Array) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": values, "text": ["x"]}), path)
    for read in (TableViews, open_corpus):
        with pytest.raises(DualencError, match="column 'image' holds"):
            read(path)


@pytest.mark.parametrize(
    "how", ["dots", "absolute", "link to a file", "link to a folder", "device", "pipe"]
)
def test_images_of_a_table_lie_in_its_folder_unless_allowed(tmp_path: Path, how: str) -> None:
    outside, folder = tmp_path / "secret.png", tmp_path / "data"
    folder.mkdir()
    picture(5).save(outside)
    picture(6).save(folder / "in.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    paths = {"dots": "../secret.png", "absolute": str(outside), "link to a file": "link.png"}
    paths |= {"link to a folder": "up/secret.png", "device": "/dev/zero", "pipe": "pipe"}
    path = write_csv(folder / "x.csv", ["image", "text"], [["in.png", "a"], [paths[how], "b"]])
    for data in (TablePairs(path, "image", "text", left_modality="image"), TableViews(path)):
        assert shade_of(data[0].left) == 6
        with pytest.raises(
            BadSample, match=r"(outside of the folder .* allow_outside=True|not a file).*x\.csv:3"
        ):
            data[1]
        data.identity()  # does not read it either
    with pytest.raises(BadSample, match=r"outside of the folder|not a file"):
        open_corpus(path, modality="image")[1]
    allowed = {"left_modality": "image", "allow_outside": True}
    assert (
        open_pairs(path, "image", "text", **allowed).identity()
        == TablePairs(path, "image", "text", **allowed).identity()
    )
    trusted = TablePairs(path, "image", "text", left_modality="image", allow_outside=True)
    if how in ("device", "pipe"):
        with pytest.raises(BadSample, match="not a file"):
            trusted[1]
    else:
        assert shade_of(trusted[1].left) == 5


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_image_paths_start_at_the_folder_of_their_own_table(tmp_path: Path, suffix: str) -> None:
    """Equal paths in tables of two folders are two images, and each stays in its folder."""
    for shade in (5, 6):
        folder = tmp_path / f"g{shade}"
        folder.mkdir()
        picture(shade).save(folder / "1.png")
        rows = [{"image": "1.png", "text": f"{shade}"}, {"image": f"../{shade}.png", "text": "x"}]
        pd.DataFrame(rows).to_parquet(folder / "metadata.parquet")
        write_csv(folder / "metadata.csv", ["image", "text"], [row.values() for row in rows])
        write_jsonl(folder / "metadata.jsonl", rows)
    glob = f"{tmp_path}/*/metadata.{suffix}"
    if suffix == "parquet":
        with pytest.raises(
            DualencError, match=r"relative paths in column 'image'.*open the folders one by one"
        ):
            TablePairs(glob, "image", "text")
        assert len(TablePairs(f"{tmp_path}/g5/*.parquet", "image", "text")) == 2
        return
    pairs = TablePairs(glob, "image", "text")
    assert [(shade_of(pairs[row].left), pairs[row].right) for row in (0, 2)] == [(5, "5"), (6, "6")]
    assert (pairs.left_id[0], pairs.left_id[2]) == (0, 2)
    with pytest.raises(BadSample, match=r"outside of the folder .*g6; .*metadata\.\w+:[23]"):
        pairs[3]
    corpus = open_corpus(glob, modality="image")
    assert [shade_of(corpus[row]) for row in (0, 2)] == [5, 6]
    identity = pairs.identity()
    picture(7, (9, 9)).save(tmp_path / "g6" / "1.png")
    assert TablePairs(glob, "image", "text").identity() != identity


def test_texts_of_invisible_characters_are_blank(tmp_path: Path) -> None:
    """Tokenizers may make no token of them; emoji, also joined and coloured ones, and texts that
    begin so are texts."""
    blank = ["\u200b", "\ufeff\u00ad", "\x00\x1f\x7f", " \u3000\u2028\u200d\n", "\U000e0041"]
    texts = ["\u200ba", "👨\u200d👩", "❤\ufe0f", "👍🏽", "\u0301", "\n\u200b\u00e9", "."]
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in blank + texts])
    corpus = open_corpus(path)
    assert (list(corpus.items), corpus.skipped) == (texts, len(blank))


def test_decimals_and_dates_are_spelled_out(tmp_path: Path) -> None:
    columns = {
        "text": pa.array([Decimal("1.50"), None]),
        "_id": pa.array([date(2020, 1, 2), date(2021, 1, 2)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    corpus = open_corpus(tmp_path / "x.parquet")
    assert (corpus.ids, corpus[0], corpus.skipped) == (["2020-01-02"], "1.50", 1)


@pytest.mark.parametrize("wrong", ["left_column", "right_column"])
def test_a_wrong_column_is_named_with_its_argument(tmp_path: Path, wrong: str) -> None:
    path = write_jsonl(tmp_path / "faq.jsonl", [{"Frage": "q", "Antwort": "a"}])
    columns = {"left_column": "Frage", "right_column": "Antwort"} | {wrong: "question"}
    message = f"faq.jsonl: {wrong}: no column 'question'; there are: Frage, Antwort"
    with pytest.raises(DualencError, match=message):
        TablePairs(path, **columns)


def test_both_layouts_of_mined_negatives(tmp_path: Path) -> None:
    arguments = [("q0", ["|p0", "|p1"], ["|n0", "|n1"]), ("q1", ["|n0"], ["|p0", "|n2"])]
    plain = [flag(q, [t[1:] for t in pos], [t[1:] for t in neg]) for q, pos, neg in arguments]
    pairs = MinedPairs(write_jsonl(tmp_path / "flag.jsonl", plain))
    assert [(p.left, p.right, p.negatives) for p in pairs] == [
        ("q0", "p0", ("n0", "n1")),
        ("q0", "p1", ("n0", "n1")),
        ("q1", "n0", ("p0", "n2")),
    ]
    # One query's positive is another's negative: the same item, whatever its role.
    assert pairs[2].right_id == pairs[0].negative_ids[0]
    assert (pairs.num_left, pairs.num_right) == (2, 5)
    assert list(
        MinedPairs(write_jsonl(tmp_path / "x.jsonl", [tevatron(*a) for a in arguments]))
    ) == list(pairs)
    path = write_jsonl(tmp_path / "titles.jsonl", [tevatron("q", ["T|one"], ["U|two"])])
    pair = MinedPairs(path)[0]
    assert (pair.left, pair.right, *pair.negatives) == ("q", "T one", "U two")
    with pytest.raises(DualencError, match=r"no column 'pos' \(did you mean positives\?\)"):
        MinedPairs(write_jsonl(tmp_path / "other.jsonl", [{"query": "q", "positives": ["p"]}]))


def test_negatives_are_optional_distinct_and_no_positives(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "pos": ["p"]},
        flag("q", ["p0"], ["p1", "n"]),
        flag("q", ["p1"], ["p0", "n", "m", "n"]),
    ]
    pairs = MinedPairs(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [p.negatives for p in pairs] == [(), ("n",), ("n", "m")]
    assert pairs.skipped == 2
    limited = MinedPairs(tmp_path / "x.jsonl", max_negatives=2)
    assert [p.negatives for p in limited] == [(), ("n",), ("n",)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_weight_column(tmp_path: Path, form: str) -> None:
    rows = [
        {"q": f"q{i}", "d": f"d{i}", "grade": weight}
        for i, weight in enumerate([1.0, 0.5, 0.0, -1.0, None, 2.0])
    ]
    path = write_rows(tmp_path, form, rows)
    pairs = TablePairs(path, "q", "d", weight_column="grade")
    assert [(pair.left, pair.weight) for pair in pairs] == [
        ("q0", 1),
        ("q1", 0.5),
        ("q2", 0),
        ("q5", 2),
    ]
    assert pairs.skipped == 2
    assert [pair.weight for pair in TablePairs(path, "q", "d")] == [1] * 6
    with pytest.raises(BadSample, match="no weight >= 0 in column 'grade'"):
        TablePairs(path, "q", "d", weight_column="grade", on_error="raise")


def test_truth_values_are_weights_in_every_format(tmp_path: Path) -> None:
    frame = pd.DataFrame({"q": ["a", "b"], "d": ["c", "e"], "same": [True, False]})
    frame.to_csv(tmp_path / "x.csv")
    frame.to_json(tmp_path / "x.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "x.parquet")
    for form in ("csv", "jsonl", "parquet"):
        pairs = TablePairs(tmp_path / f"x.{form}", "q", "d", weight_column="same")
        assert pairs.weights.tolist() == [1, 0], form


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["anchor", "positive", "negative_1", "negative_2", "negative_10"], ("n0", "n1", "n2")),
        (["query", "answer", "negative_10", "negative_2", "negative_1"], ("n2", "n1", "n0")),
        (["anchor", "positive", "negative", "score", "note"], ("n0",)),
        (["question", "answer", "hard_negative", "hard_negative_1", "negatively"], ("n0", "n1")),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_columns_of_negatives_are_read_by_their_names(
    tmp_path: Path, names: list[str], read: tuple[str, ...], form: str
) -> None:
    rows = [
        dict(zip(names, values))
        for values in (["q", "p", "n0", "n1", "n2"], ["r", "s", "n1", "n1", "n1"])
    ]
    path = write_rows(tmp_path, form, rows)
    for pairs in (TablePairs(path, names[0], names[1]), open_pairs(path)):
        assert [(p.left, p.right, p.negatives) for p in pairs] == [
            ("q", "p", read),
            ("r", "s", ("n1",)),
        ]
        consistent(pairs)
    assert TablePairs(path, names[0], names[1], []).negatives is None
    assert TablePairs(path, names[0], names[1], names[2])[0].negatives == ("n0",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for shade in (1, 2, 3):
        picture(shade).save(tmp_path / "sub" / f"{shade}.png")
    return tmp_path


def test_captions_in_a_table(folder: Path) -> None:
    records = [{"file_name": f"sub/{i}.png", "text": f"number {i}"} for i in (2, 1, 2, 3)]
    write_jsonl(folder / "metadata.jsonl", records)
    pairs = ImageFolderPairs(folder)
    assert contents(pairs) == [(2, "number 2"), (1, "number 1"), (2, "number 2"), (3, "number 3")]
    assert (pairs.left_modality, pairs.right_modality) == ("image", "text")
    write_jsonl(folder / "metadata.jsonl", records[1:])
    other = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
    assert sorted(contents(ImageFolderPairs(folder))) == sorted(
        (shade_of(row["image"]), row["text"]) for row in other
    )
    write_jsonl(folder / "sub" / "captions.jsonl", [{"path": "1.png", "caption": ["one", "uno"]}])
    assert contents(ImageFolderPairs(folder / "sub")) == [(1, "one"), (1, "uno")]


def test_captions_in_text_files_beside_the_images(folder: Path) -> None:
    with pytest.raises(
        DualencError, match="no usable image with a caption: 3 image without a caption"
    ):
        ImageFolderPairs(folder)
    for shade, text in ((1, b"one\n\nuno\n"), (2, b"uno\ncaf\xe9\n")):
        (folder / "sub" / f"{shade}.txt").write_bytes(text)
    pairs = ImageFolderPairs(folder)
    assert (contents(pairs), pairs.skipped) == ([(1, "one"), (1, "uno"), (2, "uno")], 2)
    assert pairs.right_id.tolist() == [0, 1, 1]
    assert ImageFolderPairs(folder, deduplicate=False).right_id.tolist() == [0, 1, 2]
    with pytest.raises(BadSample, match=r"2\.txt:2: line that is not UTF-8"):
        ImageFolderPairs(folder, on_error="raise")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            ["sub/9.png", "nine"],
            "captions.csv:3: image that is not in the folder; 'sub/9.png' is not in",
        ),
        (["sub/2.png", " "], "captions.csv:3: no text in column 'caption'"),
        (["", "two"], "captions.csv:3: no image in column 'image'"),
    ],
)
def test_bad_captions_are_named_or_skipped(folder: Path, row: list[str], message: str) -> None:
    write_csv(
        folder / "captions.csv",
        ["image", "caption"],
        [["sub/1.png", "one"], row, ["sub/3.png", "three"]],
    )
    with pytest.raises(BadSample, match=message):
        ImageFolderPairs(folder, on_error="raise")
    pairs = ImageFolderPairs(folder)
    assert (contents(pairs), pairs.skipped) == ([(1, "one"), (3, "three")], 1)


def save(
    path: Path, shades: list[int | None], features: dict | None = None, **columns: list
) -> Path:
    images = [None if s is None else {"bytes": encoded(picture(s)), "path": None} for s in shades]
    typed = datasets.Features({"image": datasets.Image(), **(features or {})})
    datasets.Dataset.from_dict({"image": images, **columns}, features=typed).to_parquet(path)
    return path


INTEGERS, STRINGS = datasets.Value("int64"), datasets.Value("string")


@pytest.mark.parametrize(
    ("kind", "values", "numbers", "names"),
    [
        (datasets.ClassLabel(names=["cat", "dog"]), [1, 0, 1], [1, 0, 1], ["cat", "dog"]),
        (STRINGS, ["b", "a", "b"], [1, 0, 1], ["a", "b"]),
        (INTEGERS, [2, 0, 2], [2, 0, 2], ["0", "1", "2"]),
        (STRINGS, ["10", "9", "10"], [10, 9, 10], [str(i) for i in range(11)]),
        (STRINGS, ["a", None, "a"], [0, -1, 0], ["a"]),
        (INTEGERS, [10**12, 5, 10**12], [0, 1, 0], ["1000000000000", "5"]),
    ],
)
def test_classes_of_images(
    tmp_path: Path, kind: Any, values: list, numbers: list, names: list
) -> None:
    views = TableViews(save(tmp_path / "x.parquet", [1, 2, 3], {"label": kind}, label=values))
    assert (views.labels.tolist(), views.class_names) == (numbers, names)
    assert [shade_of(pair.left) for pair in views] == [1, 2, 3]
    assert views.left_id.tolist() == views.right_id.tolist() == [0, 1, 2]
    assert shade_of(pickle.loads(pickle.dumps(views))[2].right) == 3


def test_labels_are_optional_but_a_named_column_is_not(tmp_path: Path) -> None:
    path = save(tmp_path / "x.parquet", [1])
    assert TableViews(path).labels is None
    with pytest.raises(DualencError, match="no column 'klass'; there are: image"):
        TableViews(path, label_column="klass")


def test_rows_without_an_image_are_skipped_with_their_labels(tmp_path: Path) -> None:
    path = save(tmp_path / "x.parquet", [1, None, 3], {"label": INTEGERS}, label=[0, 1, 2])
    views = TableViews(path)
    assert ([shade_of(pair.left) for pair in views], views.labels.tolist(), views.skipped) == (
        [1, 3],
        [0, 2],
        1,
    )
    with pytest.raises(BadSample, match="row 1: no image in column 'image'"):
        TableViews(path, on_error="raise")
    pq.write_table(pa.table({"image": [encoded(picture(1)), b"no image"]}), path)
    with pytest.raises(BadSample, match=r"row 1, column 'image': image cannot be decoded"):
        TableViews(path)[1]


def test_folders_are_classes_as_torchvision_has_them(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/2.png", "cat/deep/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(int(name[-5])).save(tmp_path / name)
    views, other = ImageFolderViews(tmp_path), ImageFolder(str(tmp_path))
    assert (views.labels.tolist(), views.class_names) == (other.targets, other.classes)
    assert [shade_of(pair.left) for pair in views] == [shade_of(image) for image, _ in other]
    assert ImageFolderViews(tmp_path / "dog").labels is None


def test_a_sample_is_a_seeded_part_with_its_labels() -> None:
    images = ImageViews(list("abcdefgh"), np.arange(8) % 3, ["x", "y", "z"])
    part, again, other = (
        images.sample(5, seed=1),
        images.sample(5, seed=1),
        images.sample(5, seed=2),
    )
    drawn = [part.item("left", i) for i in range(5)]
    assert len(set(drawn)) == 5
    assert (
        drawn
        == [again.item("left", i) for i in range(5)]
        != [other.item("left", i) for i in range(5)]
    )
    assert [ord(letter) % 97 % 3 for letter in drawn] == part.labels.tolist()
    assert part.class_names == ["x", "y", "z"]
