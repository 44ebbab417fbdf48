from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.lines import read_records
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import write_csv, write_jsonl

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12)
RECORDS = st.lists(st.dictionaries(st.sampled_from("abc"), TEXT, min_size=1), max_size=6)


def read(path: Path, on_error: str = "raise", **options: bool) -> list:
    return list(read_records(path, BadRows(path, on_error), **options))  # type: ignore[arg-type]


@given(RECORDS)
def test_jsonl_gives_what_json_gives(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict]
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("lines") / "x.jsonl", records)
    assert read(path) == list(enumerate(records, 1))


@given(
    st.lists(st.tuples(TEXT, TEXT), max_size=6), st.sampled_from([(".csv", ","), (".tsv", "\t")])
)
def test_csv_and_tsv_give_what_the_csv_module_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], kind: tuple[str, str]
) -> None:
    path = write_csv(tmp_path_factory.mktemp("lines") / f"x{kind[0]}", ["a", "b"], rows, kind[1])
    assert [record for _, record in read(path, quotes=True)] == [{"a": a, "b": b} for a, b in rows]


BLANK_AND_NAN = '\ufeff{"a": "é"}\n\n{"a": NaN}\n'


@pytest.mark.parametrize(
    ("name", "content", "records"),
    [
        ("list.json", b'[\n {"a": 1},\n {"a": 2}\n]', [(1, {"a": 1}), (2, {"a": 2})]),
        ("list.json", '\ufeff [{"a": "é"}]'.encode(), [(1, {"a": "é"})]),
        ("list.jsonl", b'\n\n[{"a": 1}]', [(1, {"a": 1})]),
        ("lines.json", b'{"a": 1}\n{"a": 2}', [(1, {"a": 1}), (2, {"a": 2})]),
        (
            "x.jsonl.gz",
            gzip.compress(BLANK_AND_NAN.encode(), mtime=0),
            [(1, {"a": "é"}), (3, {"a": None})],
        ),
        ("x.txt", b"one\r\n\n  two \n", [(1, {"text": "one"}), (3, {"text": "  two "})]),
        ("x.csv", b"a\n" + b"y" * 300_000, [(2, {"a": "y" * 300_000})]),
    ],
)
def test_every_format_of_lines(tmp_path: Path, name: str, content: bytes, records: list) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == records


def test_quotes_can_be_ordinary_characters(tmp_path: Path) -> None:
    for path, delimiter in ((tmp_path / "x.tsv", "\t"), (tmp_path / "x.csv", ",")):
        path.write_text(f'a{delimiter}b\n"5 inches{delimiter}six"\n')
        assert read(path, quotes=False) == [(2, {"a": '"5 inches', "b": 'six"'})]
        with pytest.raises(BadSample, match="quotes=false"):
            read(path, quotes=True)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        # Characters of the text, also where they open in one row and close in another.
        (
            'id\ttext\n1\t"Hello\n2\tworld"\n3\t"all"\n4\t5" and 6"\n',
            ['"Hello', 'world"', '"all"', '5" and 6"'],
        ),
        # The csv module and pandas double the quotes of a field, and then enclose it; polars writes
        # an empty text so.
        ('id\ttext\n1\t"a ""b"" c"\n2\t""a"\n3\t"\n4\t""\n', ['a "b" c', '""a"', '"', ""]),
        # R, and pandas with QUOTE_ALL, enclose every field.
        ('"id"\t"text"\n"1"\t"one"\n"2"\t"two\tlines\nhere"\n', ["one", "two\tlines\nhere"]),
    ],
)
def test_quotes_in_tsv(tmp_path: Path, content: str, texts: list[str]) -> None:
    path = tmp_path / "x.tsv"
    path.write_text(content)
    assert [record["text"] for _, record in read(path)] == texts


def test_quoted_fields_in_tsv_that_span_lines_name_the_option(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('id\ttext\n1\t"two\nlines"\n2\tone\n')
    bad_rows = BadRows(path)
    assert len(list(read_records(path, bad_rows))) == 2
    assert bad_rows.describe().startswith(
        "1 malformed line (pass quotes=true if quotes enclose fields)"
    )
    assert [record["text"] for _, record in read(path, quotes=True)] == ["two\nlines", "one"]


def test_lines_swallowed_by_a_stray_quote_are_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,2\n"3,4\n5,6\n"7,8\n9,10\n')
    bad_rows = BadRows(path)
    good = [record["a"] for _, record in read_records(path, bad_rows)]
    assert len(good) + bad_rows.total == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl:2: malformed JSON line; Expecting value; fix"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "x.jsonl:2: line that is not UTF-8"),
        (
            "x.jsonl",
            b'{"a": 1}\n' + b"[" * 100_000 + b"\n",
            "x.jsonl:2: malformed JSON line; maximum recursion depth",
        ),
        ("x.jsonl", b'{"a": 1}\n[1]\n', "x.jsonl:2: not a JSON object"),
        ("x.json", b'[{"a": 1}, 2]', "x.json:2: not a JSON object"),
        ("x.txt", b"one\ncaf\xe9\n", "x.txt:2: line that is not UTF-8"),
        (
            "x.csv",
            b"a,b\n1,2\n1,2,3\n",
            "x.csv:3: malformed line; 3 fields under a header of 2",
        ),
        (
            "x.csv",
            b'a,b\n1,2\n1,"x" y\n',
            "x.csv:3: malformed line (pass quotes=false if quotes are characters); ','",
        ),
        ("x.csv", b"a,b\n1,2\na,b\n", "x.csv:3: header inside the file; remove the line"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadSample) as error:
        read(path)
    assert message in str(error.value)
    bad_rows = BadRows(path)
    assert len(list(read_records(path, bad_rows))) == bad_rows.total == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "its first line must name the columns"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16")[:-1], "cannot be read ('utf-16-le' codec"),
        ("x.jsonl.zst", b"no zstd", "ZSTD decompress failed"),
        ("x.jsonl.zst", pa.compress(b'{"a": 1}\n' * 99, "zstd", asbytes=True)[:-8], "Truncated"),
        (
            "x.csv",
            b'a,"b\n1,2\n',
            "cannot be read (unexpected end of data); check the path and its first line",
        ),
        ("x.csv", b"a,b,b\n1,2,3\n", "x.csv:1: two columns are called 'b'; rename one"),
        ("x.json", b'[{"a": 1},\n,]', "x.json:2: malformed JSON"),
        ("x.json", b"[" * 100_000, "x.json:1: malformed JSON (maximum recursion depth"),
        ("x.jsonl.gz", b"no gzip", "zlib inflate failed"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-20], "Truncated"),
        ("pipe.jsonl", None, "not a file"),
        ("nowhere.jsonl", None, "cannot be read"),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif "pipe" in name:
        os.mkfifo(path)
    with pytest.raises(DualencError) as error:
        read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
