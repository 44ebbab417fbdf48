"""Records of text files (jsonl, json, csv, tsv, plain text), one by one so that errors name file and line.

They are Python's. Arrow's are four times as fast (1 GB of csv or jsonl: 2.5 seconds of a core against 10), but its csv
reader takes `"3,4⏎5,6⏎"7,8`, where a quote strays, for two good fields, and refuses fields larger than a block; its
JSON reader refuses NaN, numbers beside texts, and a whole block for one bad line.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal, TextIO, cast

import pyarrow as pa

from dualenc.data.bad_rows import BadRows
from dualenc.errors import DualencError, explain
from dualenc.reading import is_utf8, open_regular

LINE_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
Record = dict[str, Any]
Numbered = tuple[int, Record]

logger = logging.getLogger("dualenc.data")

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_MAX_FIELD_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 16
# NaN, as `json.dumps` writes the missing values of pandas, is null.
_parse_json = partial(json.loads, parse_constant=lambda name: None)


def file_format(path: PurePath) -> str:
    """The suffix that decides how a file is read, in lower case and without `.gz` or `.zst`."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in _COMPRESSIONS else suffix


def read_records(path: Path, bad_rows: BadRows, quotes: bool | None = None) -> Iterator[Numbered]:
    """Yield (line number from 1, record) for each record of a file of `LINE_FORMATS`, decompressed on the fly.

    JSON is one record per line, or a list whose records are numbered; a .txt file one text per line, as {"text": …}. By
    default `"` encloses fields in csv, and in tsv if the header is in quotes or quotes in a field are doubled.
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
    with explain(f"{path}: cannot be read", "check the path and its first line, or convert it to UTF-8"):
        with _decompressed(path) as stream:
            encoding = _encoding(stream, is_table)
        if not encoding.startswith("utf-8"):
            _report_encoding(path, encoding)
        with _decompressed(path) as stream:
            yield io.TextIOWrapper(stream, encoding, "surrogateescape", newline="" if is_table else "\n")


def _decompressed(path: Path) -> BinaryIO:
    stream = open_regular(path)
    compression = _COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return stream
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(stream, compression)))


def _encoding(stream: BinaryIO, is_table: bool) -> str:
    """UTF-8, UTF-16 or UTF-32; of a table also what Excel writes, if most of its first accents are no UTF-8."""
    block = stream.read(_BLOCK_BYTES)
    encoding = json.detect_encoding(block)
    while is_table and block and encoding.startswith("utf-8"):
        if not block.isascii():
            text = (block + stream.readline()).decode("utf-8", "surrogateescape")
            accents = sum(character > "\x7f" for character in text)
            broken = sum("\udc80" <= character <= "\udcff" for character in text)
            return "cp1252" if 2 * broken > accents else encoding
        block = stream.read(_BLOCK_BYTES)
    return encoding


@cache
def _report_encoding(path: Path, encoding: str) -> None:
    advice = "for it is not UTF-8; if letters look wrong, convert the file"
    logger.warning("%s: read as %s, %s", path, encoding, advice)


def _lines(path: Path, stream: TextIO, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(stream, 1):
        if not is_utf8(line):
            bad_rows.add("line that is not UTF-8 text", f"{path}:{number}", "convert the file to UTF-8")
        # Blank lines separate and are no samples.
        elif not line.isspace():
            yield number, line.removesuffix("\n").removesuffix("\r")


def _json_records(path: Path, stream: TextIO, bad_rows: BadRows) -> Iterator[Numbered]:
    """Records of lines, or of a list, which is read as a whole."""
    is_first = True
    for number, line in _lines(path, stream, bad_rows):
        is_list = is_first and line.lstrip().startswith("[")
        is_first = False
        if is_list:
            line = f"{line}\n{stream.read()}"
        try:
            value = _parse_json(line)
        except (ValueError, RecursionError) as error:
            position = f"{path}:{number + getattr(error, 'lineno', 1) - 1}"
            fault = str(error).partition(": line ")[0]
            if is_list:
                raise DualencError(f"{position}: malformed JSON ({fault}); fix the file") from None
            bad_rows.add("malformed JSON line", position, f"{fault}; fix or remove the line")
            continue
        records = [(number, value)]
        if is_list:
            records = list(enumerate(value, 1))
        for record_number, record in records:
            if isinstance(record, dict):
                yield record_number, record
            else:
                bad_rows.add("not a JSON object", f"{path}:{record_number}", 'write {"column": value, …}')


def _separated(path: Path, stream: TextIO, bad_rows: BadRows, quotes: bool | None) -> Iterator[Numbered]:
    # The default refuses documents longer than 131,072 characters.
    csv.field_size_limit(_MAX_FIELD_BYTES)
    skipped = 0
    first = next(stream, "")
    while first.isspace():
        skipped += 1
        first = next(stream, "")
    # The comma, or what divides the header into more fields: Excel writes semicolons in half of the world.
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", first).count)
    if file_format(path) == ".tsv":
        delimiter = "\t"
    if first[:4] == "sep=" and len(first.strip()) == 5:  # Excel's own
        delimiter = first[4]
        first = next(stream, "")
        skipped += 1
    # In tsv a quote is a character of the text, unless the writer has put even the names of columns in quotes.
    in_quotes = delimiter != "\t" or first.startswith('"') if quotes is None else quotes
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if in_quotes else csv.QUOTE_NONE
    rows = csv.reader(chain([first], stream), delimiter=delimiter, strict=True, quoting=quoting)
    header = next(rows, None)
    if not header:
        raise DualencError(f"{path}: empty file; its first line must name the columns")
    for name, count in Counter(header).items():
        if count > 1 and name.strip():
            position = f"{path}:{skipped + 1}"
            raise DualencError(f"{position}: two columns are called {name!r}; rename one of them")
    option = "quotes=true if quotes enclose fields"
    if in_quotes:
        option = "quotes=false if quotes are characters"
    for start, row, fault in _without_headers(_read_rows(rows, header), header, path, skipped, bad_rows):
        if fault:
            # A stray quote swallows the lines up to the next quote: all of them are lost, and counted.
            lost = max(1, rows.line_num + 1 - start)
            fix = f"{fault}: write a field for each column"
            bad_rows.add(f"malformed line (pass {option})", f"{path}:{start + skipped}", fix, lost)
            continue
        may_double = quotes is None and not in_quotes
        record = dict(zip(header, map(_unquoted, row) if may_double else row))
        record.pop("", None)  # an index that pandas or R has written
        yield rows.line_num + skipped, record


def _without_headers(
    rows: Iterator[tuple[int, list[str], str]], header: list[str], path: Path, skipped: int, bad_rows: BadRows
) -> Iterator[tuple[int, list[str], str]]:
    """The rows of files that were joined as they were, in the order of the first header, without the later ones."""
    names = header
    for start, row, fault in rows:
        if not fault and sorted(row) == sorted(header):
            bad_rows.add("header inside the file", f"{path}:{start + skipped}", "remove the line")
            names = row
            continue
        if names != header and not fault:
            row = [dict(zip(names, row))[name] for name in header]
        yield start, row, fault


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
    """A field as its writer had it: only writers that enclose fields in quotes double quotes, or write two alone."""
    inner = field[1:-1]
    is_enclosed = field[:1] == field[-1:] == '"'
    if field == '""' or (is_enclosed and '""' in inner and '"' not in inner.replace('""', "")):
        return inner.replace('""', '"')
    return field
