"""Records of text files (jsonl, json, csv, tsv, plain text), read one by one.

Uses Python's csv and json parsers, so that errors name file and line. Arrow's are four times faster
(1 GB of csv or jsonl: 2.5 instead of 10 CPU-seconds), but its csv reader accepts `"3,4⏎5,6⏎"7,8`,
which has a stray quote, as two valid fields and refuses fields larger than a block; its JSON reader
refuses NaN, numbers mixed with texts, and a whole block for one bad line.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import io
import json
import lzma
import re
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, Literal, NamedTuple, TextIO, cast

import pyarrow as pa

from dualenc.data.bad_rows import BadRows, report_once
from dualenc.errors import DualencError, explain
from dualenc.io.reading import is_utf8, open_regular

LINE_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
Record = dict[str, Any]
Numbered = tuple[int, Record]

_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": partial(pa.input_stream, compression="gzip"),
    ".zst": partial(pa.input_stream, compression="zstd"),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
COMPRESSIONS = (*_OPENERS, ".zip")
"""Suffixes of files that are decompressed while being read; a zip must hold one file."""
MAX_LINE_CHARACTERS = 1 << 24
"""Longer lines and csv fields are bad rows, so that a file without line ends cannot fill memory."""

_TOO_LONG = f"line of more than {MAX_LINE_CHARACTERS:,} characters"
# A decompression bomb is larger and compresses better than this; texts reach a ratio of 20.
_MAX_UNPACKED_BYTES = 1 << 30
_MAX_RATIO = 300
_BLOCK_BYTES = 1 << 16
_MAX_ATTEMPTS = 3  # faulty rows that are tried with backslash escapes
_MISSING = r"\N"  # a missing value of MySQL and Hive
_ESCAPED = re.compile(r'(\\+)"')
# First bytes of files that often have the wrong suffix.
_SIGNATURES = {
    ".gz file": re.compile(rb"\x1f\x8b\x08"),
    ".zst file": re.compile(rb"\x28\xb5\x2f\xfd"),
    ".bz2 file": re.compile(rb"BZh[1-9]1AY&SY"),
    ".xz file": re.compile(rb"\xfd7zXZ\0"),
    ".zip file or a spreadsheet": re.compile(rb"PK\x03\x04"),
    "spreadsheet": re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    ".parquet file": re.compile(rb"PAR1\x15"),
}
# `json.dumps` writes the missing values of pandas as NaN: read it as null.
_parse_json = partial(json.loads, parse_constant=lambda name: None)


def file_format(path: PurePath) -> str:
    """Return the suffix that determines how a file is read, in lower case.

    A suffix of `COMPRESSIONS` is removed first.
    """
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def read_records(
    path: Path, bad_rows: BadRows, quotes: bool | None = None, names: list[str] | None = None
) -> Iterator[Numbered]:
    """Yield (line number from 1, record) for each record of a file of `LINE_FORMATS`.

    Compressed files are decompressed on the fly. JSON holds one record per line, or one list, whose
    records are numbered. A .txt file holds one text per line, returned as {"text": …}.

    Args:
        path: file to read.
        bad_rows: counts malformed lines.
        quotes: whether `"` encloses fields. By default it does in csv, and in tsv if the header is
            in quotes or quotes within a field are doubled.
        names: list to which the columns of a csv or tsv header are appended, even if no record
            follows.
    """
    suffix = file_format(path)
    with _open(path) as stream:
        if suffix in (".csv", ".tsv"):
            yield from _separated(path, stream, bad_rows, quotes, [] if names is None else names)
        elif suffix == ".txt":
            for number, line in _lines(path, stream, bad_rows):
                yield number, {"text": line}
        else:
            yield from _json_records(path, stream, bad_rows)


def read_texts(path: Path, bad_rows: BadRows) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) for each line that is not blank."""
    with _open(path) as stream:
        yield from _lines(path, stream, bad_rows)


def is_empty(path: Path) -> bool:
    """Return True if a text file is empty after decompression."""
    with explain(f"{path}: cannot be read", "fetch it again"), _decompressed(path) as stream:
        return not stream.read(1)


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """Open a file as text and report errors in one line; invalid UTF-8 becomes surrogates."""
    is_table = file_format(path) in (".csv", ".tsv")
    with explain(
        f"{path}: cannot be read", "check the path and its first line, or convert it to UTF-8"
    ):
        # Opened twice, since not every decompressed stream is seekable.
        with _decompressed(path) as stream:
            encoding = _encoding(path, stream, is_table)
        if not encoding.startswith("utf-8"):
            report_once(
                f"{path}: read as {encoding}, since it is not UTF-8; if letters look wrong, "
                "convert the file"
            )
        with _decompressed(path) as stream:
            # csv needs the line ends within quoted fields. In other formats only \n ends a line, so
            # that a lone \r stays part of the text.
            yield io.TextIOWrapper(
                stream, encoding, "surrogateescape", newline="" if is_table else "\n"
            )


def _decompressed(path: Path) -> BinaryIO:
    """Open a file for reading its decompressed bytes."""
    stream = open_regular(path)
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return stream
    inner = _only_member(path, stream) if suffix == ".zip" else _OPENERS[suffix](stream)
    bounded = _Bounded(
        inner, stream, path, max(_MAX_UNPACKED_BYTES, _MAX_RATIO * path.stat().st_size)
    )
    return cast(BinaryIO, io.BufferedReader(bounded, _BLOCK_BYTES))


def _only_member(path: Path, stream: BinaryIO) -> IO[bytes]:
    """Open the single file in a zip, ignoring what macOS adds."""
    archive = zipfile.ZipFile(stream)
    members = [info for info in archive.infolist() if not info.is_dir()]
    members = [info for info in members if not info.filename.startswith(("__MACOSX/", "."))]
    if len(members) != 1:
        shown = ", ".join(info.filename for info in members[:3]) or "none"
        raise DualencError(
            f"{len(members)} files in this zip ({shown}{(', …' if len(members) > 3 else '')})",
            fix="unpack it and name one of them",
            where=path,
        )
    if members[0].flag_bits & 1:
        raise DualencError(
            "encrypted zip",
            fix="unpack it first",
            where=path,
        )
    return archive.open(members[0])


class _Bounded(io.RawIOBase):
    """Decompressed stream with a size limit, so that a small file cannot fill the disk."""

    def __init__(self, stream: Any, file: BinaryIO, path: Path, max_bytes: int) -> None:
        super().__init__()
        self._stream = stream
        self._file = file
        self._path = path
        self._max_bytes = max_bytes
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._count += len(data)
        if self._count > self._max_bytes:
            raise DualencError(
                f"unpacks to more than {self._max_bytes:,} bytes, {_MAX_RATIO} times its size",
                fix="decompress it first if you trust it",
                where=self._path,
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def _encoding(path: Path, stream: BinaryIO, is_table: bool) -> str:
    """Return the encoding of a file: UTF-8, UTF-16 or UTF-32, for tables also Windows-1252.

    Excel writes Windows-1252. It is chosen if most of the first accented characters are not valid
    UTF-8.
    """
    block = stream.read(_BLOCK_BYTES)
    for kind, signature in _SIGNATURES.items():
        if signature.match(block):
            raise DualencError(
                f"holds a {kind}, not text",
                fix="correct its suffix, or convert it to text",
                where=path,
            )
    encoding = json.detect_encoding(block)
    while is_table and block and encoding.startswith("utf-8"):
        if not block.isascii():
            line = stream.readline(_BLOCK_BYTES)
            # `final` is False if a long line was cut, perhaps within a character.
            decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
            text = decoder.decode(block + line, final=len(line) < _BLOCK_BYTES)
            # `surrogateescape` maps each byte that is not UTF-8 to U+DC80–U+DCFF. One such byte may
            # be damage; a majority means another encoding.
            accents = sum(character > "\x7f" for character in text)
            broken = sum("\udc80" <= character <= "\udcff" for character in text)
            return "cp1252" if 2 * broken > accents else encoding
        block = stream.read(_BLOCK_BYTES)
    return encoding


class _LongLine(csv.Error):
    """A line of more than `MAX_LINE_CHARACTERS`; csv.reader propagates it as a `csv.Error`."""


class _Lines(Iterator[str]):
    """The lines of a stream with their ends.

    A line that is too long raises `_LongLine`; reading continues with the next one. The first line
    of a JSON list may have any length. `rewind` returns the lines since `start_row` again, with
    backslash-escaped quotes as doubled quotes if `unescapes` is set.

    Attributes:
        number: number of the latest line, from 1.
        row: the lines since `start_row`.
        unescapes: True to convert backslash-escaped quotes.
    """

    def __init__(self, stream: TextIO, may_be_list: bool = False) -> None:
        self.number = 0
        self.row: list[str] = []
        self.unescapes = False
        self._stream = stream
        self._may_be_list = may_be_list
        self._again: deque[str] = deque()

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._read()
        self.number += 1
        # A list may be written on one line of any length, but only before the first record.
        if len(line) > MAX_LINE_CHARACTERS and not self._may_be_list:
            raise _LongLine(_TOO_LONG)
        self._may_be_list = self._may_be_list and line.isspace()
        self.row.append(line)
        return _ESCAPED.sub(_double_quote, line) if self.unescapes else line

    def _read(self) -> str:
        """Return the next line, or its beginning if it is too long."""
        line = self._stream.readline(MAX_LINE_CHARACTERS + 1)
        if not line:
            raise StopIteration
        # One character beyond the limit shows that the line is too long.
        if len(line) > MAX_LINE_CHARACTERS:
            self._may_be_list = self._may_be_list and line.lstrip().startswith("[")
            rest = self._stream.readline if self._may_be_list else self._skip
            line += rest()
        return line

    def _skip(self) -> str:
        """Skip the rest of a line."""
        while True:
            part = self._stream.readline(_BLOCK_BYTES)
            if not part or part[-1] in "\r\n":
                return ""

    def start_row(self) -> int:
        """Forget the lines so far and return the number of the next one."""
        self.row = []
        return self.number + 1

    def rewind(self) -> None:
        """Return the lines since `start_row` once more."""
        self.number -= len(self.row)
        self._again.extendleft(reversed(self.row))


def _double_quote(match: re.Match[str]) -> str:
    """Return backslashes and a quote the way csv writes them: an escaped quote is doubled."""
    count = len(match[1])
    return "\\" * (count // 2) + ('""' if count % 2 else '"')


def _lines(
    path: Path, stream: TextIO, bad_rows: BadRows, may_be_list: bool = False
) -> Iterator[tuple[int, str]]:
    lines = _Lines(stream, may_be_list)
    while True:
        lines.start_row()
        try:
            line = next(lines, None)
        except _LongLine as error:
            bad_rows.add(str(error), f"{path}:{lines.number}", "divide or remove it")
            continue
        if line is None:
            return
        if not is_utf8(line):
            bad_rows.add(
                "line that is not UTF-8 text", f"{path}:{lines.number}", "convert the file to UTF-8"
            )
        # Blank lines separate records and do not count as bad samples.
        elif not line.isspace():
            yield lines.number, line.removesuffix("\n").removesuffix("\r")


def _json_records(path: Path, stream: TextIO, bad_rows: BadRows) -> Iterator[Numbered]:
    """Yield numbered records, either one per line or from a list that is read as a whole."""
    is_first = True
    for number, line in _lines(path, stream, bad_rows, may_be_list=True):
        is_list = is_first and line.lstrip().startswith("[")
        is_first = False
        if is_list:
            line = f"{line}\n{stream.read()}"
        try:
            value = _parse_json(line)
        except (ValueError, RecursionError) as error:
            # The parser counts lines from the start of its text, which begins at `number`.
            position = f"{path}:{number + getattr(error, 'lineno', 1) - 1}"
            fault = str(error).partition(": line ")[0]
            if is_list:
                raise DualencError(
                    f"malformed JSON ({fault})",
                    fix="fix the file",
                    where=position,
                ) from None
            bad_rows.add("malformed JSON line", position, f"{fault}; fix or remove the line")
            continue
        records = [(number, value)]
        if is_list:
            records = list(enumerate(value, 1))
        for record_number, record in records:
            if isinstance(record, dict):
                yield record_number, record
            else:
                bad_rows.add(
                    "not a JSON object", f"{path}:{record_number}", 'write {"column": value, …}'
                )


class _Layout(NamedTuple):
    """How a table of delimited fields is written."""

    header: list[str]
    delimiter: str
    in_quotes: bool

    def reader(self, lines: Iterator[str]) -> Any:
        """Return the csv module's reader of lines."""
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.in_quotes else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.delimiter, strict=True, quoting=quoting)


def _separated(
    path: Path, stream: TextIO, bad_rows: BadRows, quotes: bool | None, names: list[str]
) -> Iterator[Numbered]:
    # Python's default limit is 131,072 characters, less than long documents have.
    csv.field_size_limit(MAX_LINE_CHARACTERS)
    lines = _Lines(stream)
    layout = _read_layout(path, lines, quotes)
    names += filter(None, layout.header)
    # A tsv file with an unquoted header: quotes are text, except where fields show otherwise.
    may_double = quotes is None and not layout.in_quotes
    rows = _without_headers(_read_rows(path, lines, layout), layout.header, path, bad_rows)
    for start, row, fault in rows:
        if fault:
            # A stray quote swallows the lines up to the next quote: all of them are lost and
            # counted.
            lost = max(1, lines.number + 1 - start)
            reason = (
                fault if fault == _TOO_LONG else f"malformed line{_quotes_advice(lines, layout)}"
            )
            bad_rows.add(reason, f"{path}:{start}", f"{fault}: write a field for each column", lost)
            continue
        fields = map(_unquoted, row) if may_double else row
        record = {
            name: None if field == _MISSING else field for name, field in zip(layout.header, fields)
        }
        record.pop("", None)  # the index column of pandas or R
        yield lines.number, record


def _without_headers(
    rows: Iterator[tuple[int, list[str], str]], header: list[str], path: Path, bad_rows: BadRows
) -> Iterator[tuple[int, list[str], str]]:
    """Yield the rows of concatenated files in the column order of the first header.

    Later headers are skipped.
    """
    names = header
    for start, row, fault in rows:
        if not fault and len(row) > 1 and sorted(row) == sorted(header):
            bad_rows.add("header inside the file", f"{path}:{start}", "remove the line")
            names = row
            continue
        if names != header and not fault:
            values = dict(zip(names, row))
            row = [values[name] for name in header]
        yield start, row, fault


def _read_layout(path: Path, lines: _Lines, quotes: bool | None) -> _Layout:
    """Return the column names and how fields are delimited."""
    first = next(lines, "")
    while first.isspace():
        first = next(lines, "")
    # The delimiter that occurs most in the header, preferably the comma. Excel writes semicolons in
    # countries with a decimal comma. Delimiters within quotes do not count.
    delimiter = max(",;\t", key=re.sub('"[^"]*"', "", first).count)
    if file_format(path) == ".tsv":
        delimiter = "\t"
    if first[:4] == "sep=" and len(first.strip()) == 5:  # Excel's way to declare a delimiter
        delimiter = first[4]
        first = next(lines, "")
    # In tsv a quote is part of the text, unless the writer has quoted even the column names.
    in_quotes = delimiter != "\t" or first.startswith('"') if quotes is None else quotes
    start = lines.number
    # Chained, because a quoted column name may contain line breaks.
    header = next(_Layout([], delimiter, in_quotes).reader(chain([first], lines)), None)
    if not header:
        raise DualencError(
            "empty file",
            fix="its first line must name the columns",
            where=path,
        )
    for name, count in Counter(header).items():
        if count > 1 and name.strip():
            raise DualencError(
                f"two columns are called {name!r}",
                fix="rename one of them",
                where=f"{path}:{start}",
            )
    return _Layout(header, delimiter, in_quotes)


def _read_rows(path: Path, lines: _Lines, layout: _Layout) -> Iterator[tuple[int, list[str], str]]:
    """Yield the first line, the fields and the fault ("" if none) of each row that is not blank.

    Spark and MySQL escape quotes with backslashes. A faulty row with such quotes is read again that
    way; if it is then valid, all further rows are read the same way.
    """
    rows = layout.reader(lines)
    attempts = _MAX_ATTEMPTS if layout.in_quotes else 0
    attempted = 0  # first line of the row being tried with escapes
    while True:
        start = lines.start_row()
        row, fault = _next_row(rows, layout.header)
        if row is None:
            return
        if fault and not lines.unescapes and start != attempted and attempts:
            # csv.reader cannot read both kinds of escapes, so convert the lines and read again.
            if any('\\"' in line for line in lines.row):
                attempts -= 1
                attempted = start
                lines.unescapes = True
                lines.rewind()
                continue
        elif start == attempted and lines.unescapes:
            # The attempt failed: the quote was stray. Read the row as plain csv and report it.
            if fault:
                lines.unescapes = False
                lines.rewind()
                continue
            report_once(
                f'{path}:{start}: \\" in a field; from this line on, quotes are read as '
                "backslash-escaped, which is how Spark and MySQL write them"
            )
        if row or fault:
            yield start, row, fault


def _next_row(rows: Any, header: list[str]) -> tuple[list[str] | None, str]:
    """Return the fields of the next row (None at the end) and its fault ("" if none)."""
    try:
        row = next(rows, None)
    except csv.Error as error:
        return [], str(error)
    if not row:
        return row, ""
    surplus = len(row) - len(header)
    # A delimiter at the end of the header, or of the other lines, makes one more, empty field.
    if surplus == 1 and not row[-1]:
        return row[:-1], ""
    if surplus == -1 and not header[-1]:
        return [*row, ""], ""
    return row, f"{len(row)} fields under a header of {len(header)}" if surplus else ""


def _quotes_advice(lines: _Lines, layout: _Layout) -> str:
    """Return the option that may fix a faulty row, if the row has quotes."""
    if lines.unescapes or not any('"' in line for line in lines.row):
        return ""
    if layout.in_quotes:
        return " (pass quotes=false if quotes are characters)"
    return " (pass quotes=true if quotes enclose fields)"


def _unquoted(field: str) -> str:
    """Remove the quotes that enclose a field of a tsv file.

    Quotes are text unless inner quotes are doubled or the field is just two quotes: only writers
    that enclose fields in quotes write those.
    """
    inner = field[1:-1]
    is_enclosed = field[:1] == field[-1:] == '"'
    if field == '""' or (is_enclosed and '""' in inner and '"' not in inner.replace('""', "")):
        return inner.replace('""', '"')
    return field
