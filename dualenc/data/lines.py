"""Readers of text files (jsonl, json, csv, tsv, plain text), line by line so that errors name file and line."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from tqdm import tqdm

from dualenc.data.skips import Skips
from dualenc.data.urls import file_format
from dualenc.errors import DualencError
from dualenc.reading import open_regular

LINE_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")

Numbered = tuple[int, dict[str, Any]]


MAX_LINE_BYTES = 64 << 20
"""Longer lines are skipped unread."""
MAX_LIST_BYTES = 1 << 30
"""Size up to which a JSON list of records is read, as a whole."""

# NaN, as `json.dumps` writes the missing values of pandas, is null.
_parse_json = partial(json.loads, parse_constant=lambda name: None)


def read_records(path: Path, skips: Skips, quotes: bool | None = None) -> Iterator[Numbered]:
    """Yield (line number from 1, record) for each record of a file of `LINE_FORMATS`, decompressed on the fly.

    A .json file holds a list of records or one record per line; a .txt file one text per line, as {"text": …}.

    Args:
        path: the file, also with .gz.
        skips: counts malformed lines, and lines above 64 MiB.
        quotes: whether `"` encloses fields. By default it does in csv, and in tsv if the header is in quotes; in other
            tsv files it encloses only fields in which quotes are doubled, as csv writers do.

    Raises:
        DualencError: the file is missing, no regular file, not UTF-8, broken, or names a column twice.
        BadSample: a malformed line, under on_error="raise".
    """
    suffix = file_format(path)
    with _open(path) as stream:
        if suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(path, stream, skips)
        elif suffix == ".json":
            yield from _json_records(path, stream, skips)
        elif suffix == ".txt":
            for number, line in _text_lines(path, stream, skips):
                yield number, {"text": line}
        else:
            yield from _separated(path, stream, skips, "," if suffix == ".csv" else "\t", quotes)


def is_json(path: Path) -> bool:
    """Whether each record of a file has columns of its own."""
    return file_format(path) in (".jsonl", ".ndjson", ".json")


def read_texts(path: Path, skips: Skips) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) for each line of a text file that is not blank.

    Raises:
        DualencError: the file is missing or no regular file.
        BadSample: a line that is not UTF-8 or above 64 MiB, under on_error="raise".
    """
    with _open(path) as stream:
        yield from _text_lines(path, stream, skips)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed, with a progress bar; errors of opening and reading become one line."""
    try:
        with open_regular(path) as raw:
            size = os.fstat(raw.fileno()).st_size
            with tqdm(total=size, desc=path.name, unit="B", unit_scale=True, delay=2, leave=False) as bar:
                stream = cast(BinaryIO, io.BufferedReader(_Counted(raw, bar), 1 << 20))
                if path.suffix.lower() == ".gz":
                    stream = cast(BinaryIO, gzip.GzipFile(fileobj=stream))
                yield stream
    except UnicodeDecodeError as error:
        raise DualencError(f"{path}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None
    except csv.Error as error:
        raise DualencError(f"{path}:1: malformed header ({error}); its first line must name the columns") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DualencError(f"{path}: broken gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None


class _Counted(io.RawIOBase):
    """A readable stream that advances a progress bar by the bytes read."""

    def __init__(self, stream: BinaryIO, bar: tqdm) -> None:
        self.stream = stream
        self.bar = bar

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        self.bar.update(len(block))
        return len(block)


def _byte_lines(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their ends; a line that is too long is skipped without being in memory."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) <= MAX_LINE_BYTES:
            yield number, line
            continue
        # The rest of the line is read in pieces that are dropped.
        while line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        skips.bad(f"line above {MAX_LINE_BYTES >> 20} MiB", f"{path}:{number}", "write one record on each line")


def _text_lines(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[tuple[int, str]]:
    for number, line in _byte_lines(path, stream, skips):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            skips.bad("line that is not UTF-8 text", f"{path}:{number}", f"{error.reason}; convert the file to UTF-8")
            continue
        # Blank lines separate and are no samples.
        if text.strip():
            yield number, text.removesuffix("\n").removesuffix("\r")


def _json_lines(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[Numbered]:
    for number, line in _byte_lines(path, stream, skips):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError) as error:
            skips.bad("malformed JSON line", f"{path}:{number}", f"{_json_fault(error)}; mend or remove the line")
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            skips.bad("not a JSON object", f"{path}:{number}", 'write {"column": value, …} on each line')


def _json_fault(error: ValueError | RecursionError) -> str:
    """Why JSON cannot be read."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    if isinstance(error, UnicodeDecodeError):
        return error.reason
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # Numbers of thousands of digits are a plain ValueError, with advice for programmers behind the semicolon.
    return str(error).partition(";")[0]


def _json_records(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[Numbered]:
    """Records of a list, which is read as a whole, or of lines."""
    # To look at the first byte without consuming it.
    stream = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream)))
    if stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":  # type: ignore[attr-defined]
        yield from _json_lines(path, stream, skips)
        return
    data = stream.read(MAX_LIST_BYTES + 1)
    if len(data) > MAX_LIST_BYTES:
        raise DualencError(f"{path}: a JSON list above {MAX_LIST_BYTES >> 20} MiB; write one record on each line")
    try:
        records = _parse_json(data)
    # `_open` explains it.
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise DualencError(f"{path}:{line}: malformed JSON ({_json_fault(error)}); mend the file") from None
    for number, record in enumerate(records, 1):
        if isinstance(record, dict):
            yield number, record
        else:
            skips.bad("not a JSON object", f"{path} record {number}", 'write a list of {"column": value, …}')


def check_distinct(where: str, columns: Sequence[str]) -> None:
    """Insist that no two columns have one name."""
    seen: set[str] = set()
    for name in columns:
        if name in seen:
            raise DualencError(f"{where}: two columns are called {name!r}; rename one of them")
        seen.add(name)


def _csv_line(text: io.TextIOWrapper) -> str:
    line = text.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        while line and not line.endswith(("\n", "\r")):
            line = text.readline(MAX_LINE_BYTES)
        raise csv.Error(f"line above {MAX_LINE_BYTES >> 20} MiB")
    return line


def _separated(path: Path, stream: BinaryIO, skips: Skips, delimiter: str, quotes: bool | None) -> Iterator[Numbered]:
    # The default refuses documents longer than 131,072 characters.
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    # Not a generator, which ends with the first error: the csv module reads on after a line that is too long.
    lines = iter(partial(_csv_line, text), "")
    first = next(lines, "")
    # In tsv a quote is a character of the text, unless the writer has put even the names of columns in quotes.
    in_quotes = (delimiter == "," or first.startswith('"')) if quotes is None else quotes
    lines = chain([first] if first else [], lines)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if in_quotes else csv.QUOTE_NONE
    rows = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting)
    header = next(rows, None)
    if header is None:
        raise DualencError(f"{path}: empty file; its first line must name the columns")
    # The csv module reads UTF-16 as text with NUL characters, without an error.
    if any("\0" in name for name in header):
        raise DualencError(f"{path}:1: NUL characters in the header, as in UTF-16; convert the file to UTF-8")
    check_distinct(f"{path}:1", [name for name in header if name.strip()])
    while True:
        before = rows.line_num
        try:
            row = next(rows)
            fault = f"{len(row)} fields under a header of {len(header)}"
        except StopIteration:
            return
        except csv.Error as error:
            row = ["?"] * (len(header) + 1)
            fault = str(error)
        if len(row) == len(header):
            if quotes is None and not in_quotes:
                row = [_unquoted(field) for field in row]
            yield rows.line_num, dict(zip(header, row, strict=True))
        elif row:
            # A stray quote swallows the lines up to the next quote: all of them are lost, and counted.
            reason = "malformed line"
            mend = f"{fault}: quote fields that hold the delimiter, or pass quotes=false if quotes are characters"
            if not in_quotes:
                mend = f"{fault}: write a field for each column"
                if any('"' in field for field in row):
                    reason = "malformed line with a quote (pass quotes=true if quotes enclose fields)"
            skips.bad(reason, f"{path}:{before + 1}", mend, max(1, rows.line_num - before))


def _unquoted(field: str) -> str:
    """A field as its writer had it: quotes are doubled only by writers that enclose the field in quotes."""
    inner = field[1:-1]
    enclosed = field[:1] == field[-1:] == '"' and '""' in inner and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if enclosed else field
