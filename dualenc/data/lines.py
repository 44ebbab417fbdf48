"""Records of text files (jsonl, json, csv, tsv, plain text), one by one so that errors name file and line.

They are Python's. Arrow's are four times as fast (1 GB of csv or jsonl: 2.5 seconds of a core against 10), but its csv
reader takes `"3,4⏎5,6⏎"7,8`, where a quote strays, for two good fields, and refuses fields larger than a block; its
JSON reader refuses NaN, numbers beside texts, and a whole block for one bad line.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, TextIO, cast

import pyarrow as pa

from dualenc.data.bad_rows import BadRows
from dualenc.errors import DualencError
from dualenc.reading import is_utf8, open_regular

LINE_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
Record = dict[str, Any]
Numbered = tuple[int, Record]

logger = logging.getLogger("dualenc.data")

_MAX_FIELD_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 16
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# NaN, as `json.dumps` writes the missing values of pandas, is null.
_parse_json = partial(json.loads, parse_constant=lambda name: None)


def file_format(path: PurePath) -> str:
    """The suffix that decides how a file is read, in lower case and without `.gz` or `.zst`."""
    return PurePath(path.stem if path.suffix.lower() in (".gz", ".zst") else path.name).suffix.lower()


def read_records(path: Path, bad_rows: BadRows, quotes: bool | None = None) -> Iterator[Numbered]:
    """Yield (line number from 1, record) for each record of a file of `LINE_FORMATS`, decompressed on the fly.

    JSON is a list of records or one record per line; a .txt file one text per line, as {"text": …}. By default `"`
    encloses fields in csv, and in tsv if the header is in quotes or quotes in a field are doubled.
    """
    suffix = file_format(path)
    with _open(path) as stream:
        if suffix in (".csv", ".tsv"):
            yield from _separated(path, stream, bad_rows, quotes)
        elif suffix == ".txt":
            for number, line in _lines(path, stream, bad_rows):
                yield number, {"text": line}
        else:
            yield from _json_records(path, stream, bad_rows)


def read_texts(path: Path, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) for each line of a text file that is not blank."""
    with _open(path) as stream:
        yield from _lines(path, stream, bad_rows)


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """Open a file as text; errors of opening and reading become one line. Bytes that are no UTF-8 are surrogates."""
    is_table = file_format(path) in (".csv", ".tsv")
    try:
        with open_regular(path) as stream:
            encoding = _encoding(_decompressed(path, stream), is_table)
        with open_regular(path) as stream:
            if encoding != "utf-8-sig":
                _report_encoding(path, encoding)
            newline = "" if is_table else "\n"
            yield io.TextIOWrapper(_decompressed(path, stream), encoding, "surrogateescape", newline)
    except UnicodeDecodeError as error:
        reason = f"broken {error.encoding} ({error.reason}); convert the file to UTF-8"
        raise DualencError(f"{path}: {reason}") from None
    except csv.Error as error:
        reason = f"malformed header ({error}); its first line must name the columns"
        raise DualencError(f"{path}:1: {reason}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DualencError(f"{path}: broken gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None


def _decompressed(path: Path, stream: BinaryIO) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if path.suffix.lower() == ".zst":
        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream), "zstd")))
    return stream


def _encoding(stream: BinaryIO, is_table: bool) -> str:
    """UTF-8, UTF-16 or UTF-32; of a table also what Excel writes, if most of its first accents are no UTF-8."""
    block = stream.read(_BLOCK_BYTES)
    for mark, encoding in _MARKS.items():
        if block.startswith(mark):
            return encoding
    for second, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        # Of western text in UTF-16 every other byte is 0.
        zeros = block[second::2].count(0)
        if len(block) > 3 and zeros > 0.4 * len(block) and zeros > 4 * block[1 - second :: 2].count(0):
            return encoding
    while is_table and block:
        if not block.isascii():
            text = (block + stream.readline()).decode("utf-8", "surrogateescape")
            accents = sum(character > "\x7f" for character in text)
            broken = sum("\udc80" <= character <= "\udcff" for character in text)
            return "cp1252" if 2 * broken > accents else "utf-8-sig"
        block = stream.read(_BLOCK_BYTES)
    return "utf-8-sig"


@cache
def _report_encoding(path: Path, encoding: str) -> None:
    logger.warning(
        "%s: read as %s, for it is not UTF-8; if letters look wrong, convert the file", path, encoding
    )


def _lines(path: Path, stream: TextIO, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(stream, 1):
        if not line.isascii() and not is_utf8(line):
            fix = "convert the file to UTF-8"
            bad_rows.add("line that is not UTF-8 text", f"{path}:{number}", fix)
        # Blank lines separate and are no samples.
        elif not line.isspace():
            yield number, line.removesuffix("\n").removesuffix("\r")


def _json_records(path: Path, stream: TextIO, bad_rows: BadRows) -> Iterator[Numbered]:
    """Records of lines, or of a list, which is read as a whole."""
    is_first = True
    for number, line in enumerate(stream, 1):
        if line.isspace():
            continue
        if is_first and line.lstrip().startswith("["):
            yield from _json_list(path, line + stream.read(), bad_rows)
            return
        is_first = False
        try:
            record = _parse_json(line)
            if not line.isascii():
                line.encode()  # refuses bytes that are no UTF-8
        except (ValueError, RecursionError) as error:
            fix = f"{_json_fault(error)}; fix or remove the line"
            bad_rows.add("malformed JSON line", f"{path}:{number}", fix)
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            fix = 'write {"column": value, …} on each line'
            bad_rows.add("not a JSON object", f"{path}:{number}", fix)


def _json_list(path: Path, text: str, bad_rows: BadRows) -> Iterator[Numbered]:
    try:
        records = _parse_json(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise DualencError(f"{path}:{line}: malformed JSON ({_json_fault(error)}); fix the file") from None
    for number, record in enumerate(records, 1):
        if isinstance(record, dict):
            yield number, record
        else:
            fix = 'write a list of {"column": value, …}'
            bad_rows.add("not a JSON object", f"{path} record {number}", fix)


def _json_fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # The position is named by file and line.
    return str(error).partition(": line ")[0]


def check_distinct(location: str, columns: Sequence[str]) -> None:
    """Raise a `DualencError` if two columns have one name."""
    for name, count in Counter(columns).items():
        if count > 1:
            raise DualencError(f"{location}: two columns are called {name!r}; rename one of them")


def _separated(path: Path, stream: TextIO, bad_rows: BadRows, quotes: bool | None) -> Iterator[Numbered]:
    # The default refuses documents longer than 131,072 characters.
    csv.field_size_limit(_MAX_FIELD_BYTES)
    number, first = next(((n, line) for n, line in enumerate(stream, 1) if line.strip()), (1, ""))
    delimiter = "\t" if file_format(path) == ".tsv" else _delimiter(first)
    if first[:4] == "sep=" and len(first.strip()) == 5:  # Excel's own
        delimiter = first[4]
        first = next(stream, "")
        number += 1
    # In tsv a quote is a character of the text, unless the writer has put even the names of columns in quotes.
    in_quotes = delimiter != "\t" or first.startswith('"') if quotes is None else quotes
    may_double = quotes is None and not in_quotes
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if in_quotes else csv.QUOTE_NONE
    rows = csv.reader(chain([first], stream), delimiter=delimiter, strict=True, quoting=quoting)
    header = next(rows, None)
    if not header:
        raise DualencError(f"{path}: empty file; its first line must name the columns")
    check_distinct(f"{path}:{number}", [name for name in header if name.strip()])
    has_nameless = "" in header  # an index that pandas or R has written
    for start, row, fault in _read_rows(rows, header):
        if not fault:
            record = dict(zip(header, map(_unquoted, row) if may_double else row))
            if has_nameless:
                del record[""]
            yield rows.line_num + number - 1, record
            continue
        # A stray quote swallows the lines up to the next quote: all of them are lost, and counted.
        lost = max(1, rows.line_num + 1 - start)
        reason = "malformed line"
        fix = (
            f"{fault}: quote fields that hold the delimiter, or pass quotes=false if quotes are characters"
        )
        if not in_quotes:
            fix = f"{fault}: write a field for each column"
            if any('"' in field for field in row):
                reason = "malformed line with a quote (pass quotes=true if quotes enclose fields)"
        bad_rows.add(reason, f"{path}:{start + number - 1}", fix, lost)


def _delimiter(header: str) -> str:
    """The comma, or what divides a csv's header into more fields: Excel writes semicolons in half of the world."""
    return max(",;\t", key=re.sub('"[^"]*"', "", header).count)


def _read_rows(rows: Any, header: list[str]) -> Iterator[tuple[int, list[str], str]]:
    """The first line, the fields and the fault ("" for none) of every row that is not blank."""
    while True:
        start = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield start, [], str(error)
            continue
        if row is None:
            return
        surplus = len(row) - len(header)
        # A delimiter at the end of lines, of the header's or of the others, makes one more field that is empty.
        if surplus == 1 and not row[-1]:
            yield start, row[:-1], ""
        elif surplus == -1 and row and not header[-1]:
            yield start, [*row, ""], ""
        elif row:
            yield start, row, f"{len(row)} fields under a header of {len(header)}" if surplus else ""


def _unquoted(field: str) -> str:
    """A field as its writer had it: quotes are doubled only by writers that enclose the field in quotes."""
    inner = field[1:-1]
    is_enclosed = field[:1] == field[-1:] == '"'
    if is_enclosed and '""' in inner and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return field
