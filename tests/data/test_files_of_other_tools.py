"""Files and folders as Spark, Hive, MySQL, DuckDB, Polars and Arrow write them, compressed files,
and huge lines."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import time
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from dualenc.data import (
    BeirPairs,
    Corpus,
    ImageFolderPairs,
    ImageFolderViews,
    TablePairs,
    TableViews,
    VectorPairs,
    WebDatasetPairs,
    open_corpus,
    open_pairs,
)
from dualenc.data.readers import lines
from dualenc.data.readers.detect import default_split, detect
from dualenc.errors import DualencError
from tests.helpers.make import encoded, picture, write_beir, write_csv, write_jsonl
from tests.helpers.tars import write_tar

ROWS = [{"query": f"q{i}", "document": f"d{i}"} for i in range(4)]
CSV = b"query,document\n" + b"".join(f"q{i},d{i}\n".encode() for i in range(4))
PAIRS = [(f"q{i}", f"d{i}") for i in range(4)]


def pairs_of(path: Any, **options: Any) -> list[tuple[Any, Any]]:
    return [(pair.left, pair.right) for pair in open_pairs(path, **options)]


def texts(corpus: Corpus) -> dict[str, str]:
    return {name: corpus[row] for row, name in enumerate(corpus.ids)}


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zip": lambda data: zipped(**{"__MACOSX/._x": b"", "x": data}),
    "gz": gzip.compress,
    "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_tables(tmp_path: Path, suffix: str) -> None:
    for name in (f"train.csv.{suffix}", f"test.CSV.{suffix.upper()}"):
        (tmp_path / name).write_bytes(PACKED[suffix](CSV))
    assert pairs_of(tmp_path / f"train.csv.{suffix}") == pairs_of(tmp_path, split="test") == PAIRS
    if suffix != "zst":  # for which pandas needs a package of its own
        pd.DataFrame(ROWS).to_json(tmp_path / f"x.jsonl.{suffix}", orient="records", lines=True)
        assert pairs_of(tmp_path / f"x.jsonl.{suffix}") == PAIRS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.csv.zip",
            zipped(**{"a.csv": CSV, "b.csv": CSV}),
            r"2 files in this zip \(a.csv, b.csv\); unpack it",
        ),
        ("x.csv.zip", zipped(), r"0 files in this zip \(none\)"),
        (
            "x.zip",
            zipped(**{"a.csv": CSV}),
            "name it by what the one file in it is, such as x.csv.zip",
        ),
        ("x.csv", gzip.compress(CSV, mtime=0), "holds a .gz file, not text; correct its suffix"),
        (
            "x.csv",
            zipped(**{"xl/workbook.xml": b""}),
            "holds a .zip file or a spreadsheet, not text",
        ),
        (
            "x.csv.lz4",
            b"",
            r"a file of another format \(.csv\); decompress it first|\(.lz4\); decompress it first",
        ),
        ("x.xlsx", b"PK", r"a file of another format \(.xlsx\); save the sheet as csv"),
        ("x.tar.gz", b"", r"a file of another format \(.tar\); decompress it first"),
        ("x.parquet.gz", b"", "compressed parquet file; decompress it first"),
        ("x.csv.bz2", bz2.compress(CSV)[:-4], "cannot be read .*ended before"),
    ],
)
def test_what_is_not_decompressed_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DualencError, match=message) as error:
        open_pairs(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["gz", "zip", "bz2", "xz", "zst"])
def test_a_small_file_cannot_unpack_to_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(lines, "_MAX_UNPACKED_BYTES", 1 << 16)
    path = tmp_path / f"x.txt.{suffix}"
    path.write_bytes(PACKED[suffix](b"word\n" * (1 << 20)))
    with pytest.raises(
        DualencError,
        match=r"unpacks to more than .* bytes, 300 times its size; decompress it first",
    ):
        open_corpus(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.txt", "x.jsonl.gz", "x.csv.gz"])
def test_a_huge_line_is_a_bad_row(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    word = b"caf\xc3\xa9 " * (20 << 20)
    content = {
        "jsonl": b'{"text": "%s"}\n{"text": "x"}\n',
        "csv": b"text\n%s\nx\n",
        "txt": b"%s\nx\n",
    }
    data = content[name.split(".")[1]] % word
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    start = time.process_time()
    corpus = open_corpus(tmp_path / name)
    assert time.process_time() - start < 20
    assert (len(corpus), corpus.skipped) == (1, 1)
    assert "1 line of more than 16,777,216 characters" in caplog.text


def test_a_list_of_json_in_one_line_may_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_CHARACTERS", 20)
    pd.DataFrame(ROWS).to_json(tmp_path / "x.json", orient="records")
    assert pairs_of(tmp_path / "x.json") == PAIRS
    (tmp_path / "x.txt").write_text("short\n" + "long " * 9 + "\nlast\n" + "end " * 9)
    corpus = open_corpus(tmp_path / "x.txt")
    assert (list(corpus.items), corpus.skipped) == (["short", "last"], 2)


ESCAPED = [
    # Spark and MySQL put a backslash before a quote; MySQL doubles backslashes.
    (r'1,"he said \"hi\", ok"', 'he said "hi", ok'),
    (r'2,"\"all\""', '"all"'),
    ('3,"two\n\\"lines\\""', 'two\n"lines"'),
    (r'4,"C:\new"', r"C:\new"),
    (r'5,"ends with a backslash \\"', "ends with a backslash \\"),
    (r"6,plain", "plain"),
    (r'7,"a ""doubled"" one"', 'a "doubled" one'),
]


@pytest.mark.parametrize(
    "order", [ESCAPED, ESCAPED[3:4] + ESCAPED[:3] + ESCAPED[4:], ESCAPED[5:] + ESCAPED[:5]]
)
def test_backslashes_before_quotes(
    tmp_path: Path, order: list, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,text\n" + "\n".join(line for line, _ in order) + "\n")
    corpus = open_corpus(path)
    first = next(
        number for number, (line, _) in enumerate(order, 2) if '\\"' in line and line[0] != "5"
    )
    assert (list(corpus.items), corpus.skipped) == ([text for _, text in order], 0)
    assert f"{path}:{first}: " in caplog.text


def test_quotes_are_advised_only_where_they_help(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.csv"
    path.write_text('id,text\n1,a\n2,b,c\n3,"d\\" e" f\n4,g\n')
    corpus = open_corpus(path)
    assert texts(corpus) == {"1": "a", "4": "g"}
    assert "1 malformed line (first: " in caplog.text
    assert "1 malformed line (pass quotes=false if quotes are characters) (first: " in caplog.text


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_missing_values_of_mysql_and_hive(tmp_path: Path, suffix: str) -> None:
    path = write_csv(
        tmp_path / f"x.{suffix}",
        ["id", "text", "year"],
        [["1", "\\N", "2"], ["2", "two", "\\N"], ["3", "\\Nine", "4"]],
        "," if suffix == "csv" else "\t",
    )
    corpus = open_corpus(path, columns=["year"])
    assert texts(corpus) == {"2": "two", "3": "\\Nine"}
    assert corpus.columns.to_pydict() == {"year": [None, 4]}


@pytest.mark.parametrize(
    "first",
    ["How do I reset my password?", "the first text of a file that has no header", "word " * 30],
)
def test_a_text_is_not_taken_for_the_name_of_the_only_column(tmp_path: Path, first: str) -> None:
    path = write_csv(tmp_path / "x.csv", [first.strip()], [["another"], ["third"]])
    with pytest.raises(
        DualencError,
        match="looks like a text, not like the name of a column; write a line `text` above",
    ):
        open_corpus(path)
    assert len(open_corpus(path, text_column=first.strip())) == 2
    path.rename(tmp_path / "x.txt")
    assert len(open_corpus(tmp_path / "x.txt")) == 3


def test_a_name_that_is_guessed_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(open_corpus(write_csv(tmp_path / "x.csv", ["red shoes"], [["blue shoes"]]))) == 1
    assert "the first line is read as the name of the only column, 'red shoes'" in caplog.text


@pytest.mark.parametrize("inside", [False, True])
def test_parts_without_a_header_are_refused(tmp_path: Path, inside: bool) -> None:
    """As `split -l` makes them."""
    first, second = tmp_path / "part_0.csv", tmp_path / "part_1.csv"
    first.write_bytes(CSV)
    second.write_bytes(b"q9,d9\nq10,d10\n" if inside else b"q9,d9\n")
    for source in (tmp_path, f"{tmp_path}/*.csv"):
        with pytest.raises(
            DualencError,
            match=r"part_1.csv: its first line \(q9, d9\) is not that of part_0.csv \(que",
        ):
            open_pairs(source)


def test_other_columns_of_one_file_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_csv(tmp_path / "part0.csv", ["query", "document"], [["a", "b"]])
    write_csv(tmp_path / "part1.csv", ["query", "answer"], [["c", "d"]])
    assert pairs_of(f"{tmp_path}/*.csv") == [("a", "b")]
    assert (
        "its first line (query, answer) is not that of part0.csv (query, document)" in caplog.text
    )


def spark_folder(
    folder: Path, suffix: str, content: bytes, names: tuple[str, ...] = ("part-00000-abc-c000",)
) -> Path:
    """A folder of parts with the files that Spark, Arrow, notebooks and people put beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.{suffix}").write_bytes(content)
        (folder / f".{name}.{suffix}.crc").write_bytes(b"crc")
    for name in (
        "_SUCCESS",
        "._SUCCESS.crc",
        "_committed_1",
        "_common_metadata",
        "README.md",
        "README.txt",
    ):
        (folder / name).write_text("notes")
    (folder / ".ipynb_checkpoints").mkdir(exist_ok=True)
    (folder / ".ipynb_checkpoints" / f"x-checkpoint.{suffix}").write_bytes(content)
    return folder


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "snappy.parquet", "csv.gz"])
def test_folders_of_spark(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    buffer = io.BytesIO()
    frame = pd.DataFrame(ROWS)
    if "parquet" in suffix:
        frame.to_parquet(buffer)
    elif suffix == "jsonl":
        frame.to_json(buffer, orient="records", lines=True)
    else:
        buffer.write(gzip.compress(CSV) if suffix.endswith("gz") else CSV)
    names = ("part-00000-abc-c000", "part-00001-abc-c000")
    folder = spark_folder(tmp_path / "out", suffix, buffer.getvalue(), names)
    assert (detect(folder), default_split(folder)) == ("folder", "train")
    for source in (folder, f"{folder}/*{suffix}", f"{folder}/part-*"):
        assert pairs_of(source) == PAIRS * 2
    assert "no file is named like a split; all part* are read as train (2 files)" in caplog.text
    assert pairs_of(folder, split="part") == PAIRS * 2
    with pytest.raises(DualencError, match="no split 'test'; there are: train"):
        open_pairs(folder, split="test")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "csv.gz"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_empty_part_is_left_out(
    tmp_path: Path, suffix: str, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    pack = gzip.compress if suffix.endswith("gz") else bytes
    for number in range(3):
        write_jsonl(tmp_path / "rows", ROWS)
        content = (tmp_path / "rows").read_bytes() if suffix == "jsonl" else CSV
        (tmp_path / f"part-{number}.{suffix}").write_bytes(
            pack(b"" if number == position else content)
        )
    (tmp_path / "rows").unlink()
    assert pairs_of(tmp_path) == PAIRS * 2
    assert f"1 of 3 files are empty (first: part-{position}.{suffix})" in caplog.text


def hive_folder(folder: Path, form: str) -> Path:
    for number, key in enumerate(["2023", "2024", "__HIVE_DEFAULT_PARTITION__"]):
        part = folder / f"year={key}" / "lang=a%20b"
        part.mkdir(parents=True)
        rows = [{"id": f"{number}{row}", "text": f"text {number}{row}"} for row in range(2)]
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), part / "part-0.parquet")
        else:
            pd.DataFrame(rows).to_csv(part / "part-0.csv", index=False)
    (folder / "_SUCCESS").touch()
    return folder


@pytest.mark.parametrize("form", ["parquet", "csv"])
@pytest.mark.parametrize("inside", [".", "data"])
def test_hive_partitions(
    tmp_path: Path, form: str, inside: str, caplog: pytest.LogCaptureFixture
) -> None:
    hive_folder(tmp_path / inside, form)
    corpus = open_corpus(tmp_path, columns=["year", "lang"])
    assert corpus.ids == ["00", "01", "10", "11", "20", "21"]
    years = [2023, 2023, 2024, 2024, None, None]
    assert corpus.columns.to_pydict() == {"year": years, "lang": ["a b"] * 6}
    assert pa.types.is_integer(corpus.columns["year"].type)
    assert "the names of partition folders are read as columns: lang, year" in caplog.text
    assert default_split(tmp_path) == "train"
    assert len(open_corpus(tmp_path / inside / "year=2023" / "lang=a%20b")) == 2


def test_partitions_as_arrow_and_duckdb_write_them(tmp_path: Path) -> None:
    rows = pa.table(
        {"query": ["a", "b"], "document": ["x", "y"], "dt": ["2024-01-01", "2024-01-02"]}
    )
    pa.dataset.write_dataset(
        rows, tmp_path / "arrow", format="parquet", partitioning=["dt"], partitioning_flavor="hive"
    )
    assert pairs_of(tmp_path / "arrow") == [("a", "x"), ("b", "y")]
    assert open_corpus(tmp_path / "arrow", columns=["dt"]).columns.to_pydict() == {
        "dt": rows["dt"].to_pylist()
    }
    duckdb = pytest.importorskip("duckdb")
    duckdb.sql(
        f"copy rows to '{tmp_path}/duck' "
        "(format parquet, partition_by (dt), write_partition_columns true)"
    )
    assert open_corpus(tmp_path / "duck", columns=["dt"]).columns.to_pydict() == {
        "dt": rows["dt"].to_pylist()
    }


def test_a_table_beside_partitions_or_other_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_csv(tmp_path / "train.csv", ["query", "document"], PAIRS)
    (tmp_path / "more").mkdir()
    write_csv(tmp_path / "more" / "extra.csv", ["query", "document"], [["q9", "d9"]])
    assert pairs_of(tmp_path) == PAIRS
    assert "those in its subfolders are not: more/extra.csv" in caplog.text
    (tmp_path / "dt=1").mkdir()
    (tmp_path / "more" / "extra.csv").rename(tmp_path / "dt=1" / "part-0.csv")
    with pytest.raises(
        DualencError,
        match=r"a table \(train.csv\) lies beside partitions \(dt=1\); move one of them",
    ):
        open_pairs(tmp_path)


def test_configurations_are_named(tmp_path: Path) -> None:
    """Subfolders as the hub has them."""
    for name in ("pair", "triplet"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name / "train-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("# Data\n")
    for read in (open_pairs, open_corpus):
        with pytest.raises(
            DualencError, match=r"in its subfolders \(pair, triplet\); name one of these: .*/pair$"
        ):
            read(tmp_path)
    assert pairs_of(tmp_path / "triplet") == PAIRS


def test_subfolders_named_like_splits_are_splits(tmp_path: Path) -> None:
    for name, rows in (("train", ROWS), ("test", ROWS[:1])):
        folder = tmp_path / name / "year=2024"
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / "part-0.parquet")
    assert (pairs_of(tmp_path), pairs_of(tmp_path, split="test")) == (PAIRS, PAIRS[:1])
    assert default_split(tmp_path) == "test"
    with pytest.raises(DualencError, match="no split 'dev'; there are: test, train"):
        open_pairs(tmp_path, split="dev")


@pytest.mark.parametrize(
    ("marker", "kind"),
    [
        ("_delta_log/0.json", "Delta"),
        (".hoodie/x", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"),
    ],
)
def test_tables_with_a_log_of_their_files_are_refused(
    tmp_path: Path, marker: str, kind: str
) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data" / "part-0.parquet")
    (tmp_path / marker).parent.mkdir()
    (tmp_path / marker).write_text("{}")
    with pytest.raises(
        DualencError,
        match=f"{kind} table, whose log decides which of its files are valid; write its rows",
    ):
        open_pairs(tmp_path)


def test_what_lies_beside_images_and_tars_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("images", "tars"):
        (tmp_path / name).mkdir()
        write_csv(tmp_path / name / "labels.csv", ["a"], [["b"]])
    picture(1).save(tmp_path / "images" / "1.png")
    write_tar(tmp_path / "tars" / "0.tar", [("1.png", encoded(picture(1))), ("1.txt", b"one")])
    assert len(open_corpus(tmp_path / "images")) == len(open_corpus(tmp_path / "tars")) == 1
    assert (
        "the images in this folder are read, tables beside them are not: labels.csv" in caplog.text
    )
    assert "the tars in this folder are read, other files are not: labels.csv" in caplog.text


def test_a_folder_without_images_names_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=r"no image in this folder \(it is empty\)"):
        open_corpus(tmp_path)
    np.save(tmp_path / "x.npy", np.eye(2))
    with pytest.raises(DualencError, match=r"no image in this folder \(it has .npy\)"):
        open_corpus(tmp_path)
    (tmp_path / "data").mkdir()
    picture(3).save(tmp_path / "data" / "1.png")
    assert open_corpus(tmp_path).ids == ["data/1.png"]


IDS = [uuid.UUID(int=number) for number in range(2)]
TYPES: dict[str, tuple[pa.Array, list[str]]] = {
    "uuid": (pa.array([one.bytes for one in IDS], pa.uuid()), [str(one) for one in IDS]),
    "string_view": (pa.array(["a", "b"], pa.string_view()), ["a", "b"]),
    "binary": (pa.array([b"a", "é".encode()]), ["a", "é"]),
    "binary_view": (pa.array([b"a", b"b"], pa.binary_view()), ["a", "b"]),
    "fixed_size_binary": (pa.array([b"ab", b"cd"], pa.binary(2)), ["ab", "cd"]),
    "dictionary": (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    "list_view": (pa.array([["a"], ["b"]], pa.list_view(pa.string())), ["a", "b"]),
    "large_list_view": (pa.array([["a"], ["b"]], pa.large_list_view(pa.string())), ["a", "b"]),
    "list of uuid": (
        pa.ListArray.from_arrays(
            pa.array([0, 1, 2], pa.int32()), pa.array([one.bytes for one in IDS], pa.uuid())
        ),
        [str(one) for one in IDS],
    ),
    "list of binary": (pa.array([[b"a"], [b"b"]]), ["a", "b"]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_parquet(tmp_path: Path, kind: str) -> None:
    array, values = TYPES[kind]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"query": ["q0", "q1"], "document": array, "note": array}), path)
    assert pairs_of(path) == list(zip(["q0", "q1"], values))
    assert list(open_corpus(path).items) == values
    if "list" not in kind:
        assert open_corpus(path, text_column="query", id_column="document").ids == values
        assert open_corpus(path, columns=["note"]).columns["note"].to_pylist() == values


def test_lists_with_missing_and_empty_ones_in_a_view(tmp_path: Path) -> None:
    values = [["a", "b"], None, [], ["c"]]
    pq.write_table(
        pa.table({"text": pa.array(values, pa.list_view(pa.string()))}), tmp_path / "x.parquet"
    )
    assert texts(open_corpus(tmp_path / "x.parquet")) == {"0#0": "a", "0#1": "b", "3#0": "c"}


def test_vectors_in_views(tmp_path: Path) -> None:
    vectors = pa.array([[0.5, 1.0], [2.0, 0.25]], pa.list_view(pa.float32()))
    pq.write_table(pa.table({"id": ["a", "b"], "vector": vectors}), tmp_path / "x.parquet")
    corpus = open_corpus(tmp_path / "x.parquet", vector_column="vector")
    assert [corpus[row].tolist() for row in range(2)] == [[0.5, 1.0], [2.0, 0.25]]


@pytest.mark.parametrize("reader", ["text", "columns"])
def test_a_map_is_refused_where_it_is_read(tmp_path: Path, reader: str) -> None:
    array = pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["x"], "extra": array}), path)
    assert texts(open_corpus(path)) == {"0": "x"}
    options: dict[str, Any] = (
        {"text_column": "extra"} if reader == "text" else {"columns": ["extra"]}
    )
    with pytest.raises(
        DualencError,
        match=r"column 'extra' holds map<string, string.*>, which cannot be read; write it",
    ):
        open_corpus(path, **options)


def test_bytes_are_texts_or_images_by_what_they_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.parquet"
    contents = [b"one", None, b"", b"\xff\xfe", "naïve".encode(), b"three"]
    pq.write_table(pa.table({"query": [f"q{i}" for i in range(6)], "document": contents}), path)
    assert pairs_of(path) == [("q0", "one"), ("q4", "naïve"), ("q5", "three")]
    assert (
        "column 'document' is read as text: 3 of 4 values examined are UTF-8 and not images"
        in caplog.text
    )
    images = [encoded(picture(1)), encoded(picture(2)), b"not found"]
    pq.write_table(pa.table({"query": ["a", "b", "c"], "document": images}), path)
    assert open_pairs(path).right_modality == "image"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_column_of_lists_is_named_where_one_value_is_needed(tmp_path: Path, form: str) -> None:
    rows = [{"text": f"text {i}", "tags": ["a", "b"]} for i in range(3)]
    path = tmp_path / f"x.{form}"
    if form == "jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    for options in ({"columns": ["tags"]}, {"id_column": "tags"}):
        with pytest.raises(
            DualencError, match=r"column 'tags' holds (lists|list<.*string>, which cannot be kept)"
        ):
            open_corpus(path, **options)  # type: ignore[arg-type]


def test_a_list_in_one_row_names_its_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"text": "a", "year": 1}, {"text": "b", "year": [2, 3]}]
    )
    with pytest.raises(DualencError, match="column 'year' holds a list where one text is expected"):
        open_corpus(path, columns=["year"], on_error="raise")
    assert len(open_corpus(path, columns=["year"])) == 1


def test_files_of_duckdb_and_polars(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    duckdb.sql(
        "copy (select uuid() as id, 'text '||i as text, ['a'] as tags, map{'k': i} as m,"
        " {'a': i} as s, 'b'::blob as b,"
        f" i::hugeint as h, 5::decimal(9,2) as d from range(3) t(i)) to '{tmp_path}/duck.parquet'"
    )
    corpus = open_corpus(tmp_path / "duck.parquet", columns=["h", "d"])
    assert list(corpus.items) == ["text 0", "text 1", "text 2"]
    assert corpus.columns.to_pydict() == {"h": [0, 1, 2], "d": [5, 5, 5]}
    assert uuid.UUID(corpus.ids[0])
    frame = polars.DataFrame(
        {"text": ["x", "y"], "kind": polars.Series(["u", "v"], dtype=polars.Categorical)}
    )
    frame.write_parquet(tmp_path / "pl.parquet")
    assert open_corpus(tmp_path / "pl.parquet", columns=["kind"]).columns.to_pydict() == {
        "kind": ["u", "v"]
    }


LATIN = os.fsdecode(b"caf\xe9.png")


@pytest.mark.parametrize("name", [LATIN, "two\nlines.png"])
def test_a_name_of_an_image_that_is_no_id_is_escaped(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        picture(1).save(tmp_path / name)
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    picture(2).save(tmp_path / "b.png")
    (tmp_path / "b.txt").write_text("caption")
    corpus = open_corpus(tmp_path)
    escaped = "caf\\xe9.png" if name == LATIN else "two\\nlines.png"
    assert sorted(corpus.ids) == sorted(["b.png", escaped])
    assert corpus[corpus.ids.index(escaped)].size == (8, 8)
    assert f"their ids have escapes (first: {escaped})" in caplog.text
    assert len(ImageFolderViews(tmp_path)) == 2
    pairs = ImageFolderPairs(tmp_path)
    assert (len(pairs), pairs.skipped) == (1, 1)


def test_every_reader_knows_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    images = [encoded(picture(shade)) for shade in (1, 2)]
    pq.write_table(pa.table({"image": images, "text": ["a", "b"]}), tmp_path / "x.parquet")
    write_tar(tmp_path / "x.tar", [("1.png", images[0]), ("1.txt", b"one")])
    write_beir(
        tmp_path / "beir",
        [{"_id": "d", "text": "x"}],
        [{"_id": "q", "text": "y"}],
        {"train": [("q", "d", 1)]},
    )
    np.save(tmp_path / "x.npy", np.eye(2, dtype=np.float32))
    (tmp_path / "images").mkdir()
    picture(1).save(tmp_path / "images" / "1.png")
    (tmp_path / "images" / "1.txt").write_text("one")
    readers: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
        (open_pairs, ("~/x.parquet",)),
        (open_corpus, ("~/x.parquet",)),
        (open_corpus, ("~/x.*quet",)),
        (open_corpus, ("~/images",)),
        (open_corpus, ("~/x.tar",)),
        (open_corpus, ("~/x.npy",)),
        (open_pairs, ("~/images",)),
        (TablePairs, ("~/x.parquet", "image", "text")),
        (TableViews, ("~/x.parquet",)),
        (WebDatasetPairs, ("~/x.tar",)),
        (VectorPairs, ("~/x.npy", "~/x.npy")),
        (BeirPairs, ("~/beir",)),
        (open_corpus, ("~/beir",)),
        (ImageFolderViews, ("~/images",)),
        (ImageFolderPairs, ("~/images",)),
    ]
    for read, arguments in readers:
        assert len(read(*arguments)), read
    assert len(BeirPairs(Path("~/beir"))) == 1
