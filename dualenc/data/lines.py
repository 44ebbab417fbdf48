"""Readers of text files (jsonl, json, csv, tsv, plain text), line by line so that errors name file and line."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from dualenc.data.bad_rows import BadRows
from dualenc.data.urls import file_format
from dualenc.errors import DualencError
from dualenc.reading import open_regular

LINE_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
Numbered = tuple[int, dict[str, Any]]

_MAX_FIELD_BYTES = 1 << 30
# NaN, as `json.dumps` writes the missing values of pandas, is null.
_parse_json = partial(json.loads, parse_constant=lambda name: None)


def read_records(path: Path, bad_rows: BadRows, quotes: bool | None = None) -> Iterator[Numbered]:
    """Yield (line number from 1, record) for each record of a file of `LINE_FORMATS`, decompressed on the fly.

    A .json file holds a list of records or one record per line; a .txt file one text per line, as {"text": …}. By
    default `"` encloses fields in csv, and in tsv if the header is in quotes or quotes in a field are doubled.
    """
    suffix = file_format(path)
    with _open(path) as stream:
        if suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(path, stream, bad_rows)
        elif suffix == ".json":
            yield from _json_records(path, stream, bad_rows)
        elif suffix == ".txt":
            for number, line in _text_lines(path, stream, bad_rows):
                yield number, {"text": line}
        else:
            yield from _separated(path, stream, bad_rows, "," if suffix == ".csv" else "\t", quotes)


def is_json(path: Path) -> bool:
    """Whether each record of a file has columns of its own."""
    return file_format(path) in (".jsonl", ".ndjson", ".json")


def read_texts(path: Path, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) for each line of a text file that is not blank."""
    with _open(path) as stream:
        yield from _text_lines(path, stream, bad_rows)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed; errors of opening and reading become one line."""
    try:
        with open_regular(path) as stream:
            if path.suffix.lower() == ".gz":
                stream = cast(BinaryIO, gzip.GzipFile(fileobj=stream))
            yield stream
    except UnicodeDecodeError as error:
        raise DualencError(f"{path}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None
    except csv.Error as error:
        raise DualencError(
            f"{path}:1: malformed header ({error}); its first line must name the columns"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DualencError(f"{path}: broken gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None


def _text_lines(path: Path, stream: BinaryIO, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(stream, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            fix = f"{error.reason}; convert the file to UTF-8"
            bad_rows.add("line that is not UTF-8 text", f"{path}:{number}", fix)
            continue
        # Blank lines separate and are no samples.
        if text.strip():
            yield number, text.removesuffix("\n").removesuffix("\r")


def _json_lines(path: Path, stream: BinaryIO, bad_rows: BadRows) -> Iterator[Numbered]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError) as error:
            fix = f"{_json_fault(error)}; fix or remove the line"
            bad_rows.add("malformed JSON line", f"{path}:{number}", fix)
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            bad_rows.add(
                "not a JSON object", f"{path}:{number}", 'write {"column": value, …} on each line'
            )


def _json_fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # The position is named by file and line.
    return str(error).partition(": line ")[0]


def _json_records(path: Path, stream: BinaryIO, bad_rows: BadRows) -> Iterator[Numbered]:
    """Records of a list, which is read as a whole, or of lines."""
    head = stream.peek(1)  # type: ignore[attr-defined]
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _json_lines(path, stream, bad_rows)
        return
    text = stream.read().decode("utf-8-sig")
    try:
        records = _parse_json(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise DualencError(f"{path}:{line}: malformed JSON ({_json_fault(error)}); fix the file") from None
    for number, record in enumerate(records, 1):
        if isinstance(record, dict):
            yield number, record
        else:
            bad_rows.add(
                "not a JSON object", f"{path} record {number}", 'write a list of {"column": value, …}'
            )


def check_distinct(location: str, columns: Sequence[str]) -> None:
    """Raise a `DualencError` if two columns have one name."""
    seen: set[str] = set()
    for name in columns:
        if name in seen:
            raise DualencError(f"{location}: two columns are called {name!r}; rename one of them")
        seen.add(name)


def _separated(
    path: Path, stream: BinaryIO, bad_rows: BadRows, delimiter: str, quotes: bool | None
) -> Iterator[Numbered]:
    # The default refuses documents longer than 131,072 characters.
    csv.field_size_limit(_MAX_FIELD_BYTES)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    first = next(lines, "")
    # In tsv a quote is a character of the text, unless the writer has put even the names of columns in quotes.
    in_quotes = delimiter == "," or first.startswith('"')
    may_double = quotes is None and not in_quotes
    if quotes is not None:
        in_quotes = quotes
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if in_quotes else csv.QUOTE_NONE
    rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True, quoting=quoting)
    header = next(rows, None)
    if not header:
        raise DualencError(f"{path}: empty file; its first line must name the columns")
    check_distinct(f"{path}:1", [name for name in header if name.strip()])
    for start, row, fault in _read_rows(rows, len(header)):
        if not fault:
            fields = [_unquoted(field) for field in row] if may_double else row
            yield rows.line_num, dict(zip(header, fields))
            continue
        # A stray quote swallows the lines up to the next quote: all of them are lost, and counted.
        count = max(1, rows.line_num + 1 - start)
        reason = "malformed line"
        fix = (
            f"{fault}: quote fields that hold the delimiter, or pass quotes=false if quotes are characters"
        )
        if not in_quotes:
            fix = f"{fault}: write a field for each column"
            if any('"' in field for field in row):
                reason = "malformed line with a quote (pass quotes=true if quotes enclose fields)"
        bad_rows.add(reason, f"{path}:{start}", fix, count)


def _read_rows(rows: Any, num_columns: int) -> Iterator[tuple[int, list[str], str]]:
    """The first line, the fields and the fault ("" for none) of every row that is not blank."""
    while True:
        start = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, [], str(error)
            continue
        if row:
            fits = len(row) == num_columns
            yield start, row, "" if fits else f"{len(row)} fields under a header of {num_columns}"


def _unquoted(field: str) -> str:
    """A field as its writer had it: quotes are doubled only by writers that enclose the field in quotes."""
    inner = field[1:-1]
    is_enclosed = field[:1] == field[-1:] == '"'
    if is_enclosed and '""' in inner and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return field
