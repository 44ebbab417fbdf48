"""Text files of records (jsonl, json, csv, tsv, plain text), read line by line so that errors name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from tqdm import tqdm

from dualenc.data.skips import Skips
from dualenc.errors import DualencError

LINE_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")

Numbered = tuple[int, dict[str, Any]]


def file_format(path: Path) -> str:
    """The suffix that says how to read a file, in lower case, `.gz` put aside."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def read_records(path: Path, skips: Skips, quotes: bool = True) -> Iterator[Numbered]:
    """Yield (line number from 1, record) for each record of a file; gzip is undone on the fly.

    Args:
        path: a .jsonl, .ndjson, .json, .csv, .tsv or .txt file, possibly with .gz behind. A .json file holds a
            list of records or one record per line; a .txt file one text per line, as {"text": …}.
        skips: is told of malformed lines.
        quotes: whether `"` encloses fields of csv and tsv files; False takes every character as it is.

    Raises:
        DualencError: the file is missing, of another format, or not UTF-8.
        BadSample: a malformed line, under on_error="raise".
    """
    suffix = file_format(path)
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_records, ".txt": _plain_lines}
    try:
        with _open(path) as stream:
            if suffix in (".csv", ".tsv"):
                yield from _separated(path, stream, skips, "," if suffix == ".csv" else "\t", quotes)
            else:
                yield from readers[suffix](path, stream, skips)
    except KeyError:
        raise DualencError(f"{path}: unknown format {suffix!r}; give one of {', '.join(LINE_FORMATS)}") from None
    except UnicodeDecodeError as error:
        raise DualencError(f"{path}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None
    except csv.Error as error:
        raise DualencError(f"{path}:1: malformed header ({error}); its first line must name the columns") from None
    except (gzip.BadGzipFile, EOFError) as error:
        raise DualencError(f"{path}: broken gzip file ({error}); fetch it again") from None


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open for reading with a progress bar that shows itself only if the file takes more than two seconds."""
    try:
        raw = open(path, "rb")  # noqa: SIM115  closed by the with statement below
    except OSError as error:
        raise DualencError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    bar = tqdm(total=path.stat().st_size, desc=path.name, unit="B", unit_scale=True, delay=2, leave=False)
    with raw, bar:
        counted = cast(BinaryIO, io.BufferedReader(_Counted(raw, bar), 1 << 20))
        yield cast(BinaryIO, gzip.GzipFile(fileobj=counted)) if path.suffix.lower() == ".gz" else counted


class _Counted(io.RawIOBase):
    """A readable stream that tells a progress bar how many bytes went through."""

    def __init__(self, stream: BinaryIO, bar: tqdm) -> None:
        self.stream, self.bar = stream, bar

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        self.bar.update(len(block))
        return len(block)


def _json_lines(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[Numbered]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error.reason
            skips.bad("malformed JSON line", f"{path}:{number}", f"{reason}; mend or remove the line")
            continue
        if isinstance(record, dict):
            yield number, record
        else:
            skips.bad("not a JSON object", f"{path}:{number}", 'write {"column": value, …} on each line')


def _json_records(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[Numbered]:
    """A list of records is read whole; anything else is taken line by line."""
    stream = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream)))
    if stream.peek(1).lstrip()[:1] != b"[":  # type: ignore[attr-defined]
        yield from _json_lines(path, stream, skips)
        return
    try:
        records = json.load(stream)
    except json.JSONDecodeError as error:
        raise DualencError(f"{path}:{error.lineno}: malformed JSON ({error.msg}); mend the file") from None
    for number, record in enumerate(records, 1):
        if isinstance(record, dict):
            yield number, record
        else:
            skips.bad("not a JSON object", f"{path} record {number}", 'write a list of {"column": value, …}')


def _plain_lines(path: Path, stream: BinaryIO, skips: Skips) -> Iterator[Numbered]:
    """One text per line; blank lines separate and are no samples."""
    del path, skips
    for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8-sig"), 1):
        if line.strip():
            yield number, {"text": line.rstrip("\r\n")}


def _separated(path: Path, stream: BinaryIO, skips: Skips, delimiter: str, quotes: bool) -> Iterator[Numbered]:
    csv.field_size_limit(sys.maxsize)  # the default refuses documents longer than 131,072 characters
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    quoting = {"quoting": csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE}
    rows = csv.reader(text, delimiter=delimiter, strict=True, **quoting)  # type: ignore[arg-type]
    header = next(rows, None)
    if header is None:
        raise DualencError(f"{path}: empty file; its first line must name the columns")
    while True:
        before = rows.line_num
        try:
            row = next(rows)
            fault = f"{len(row)} fields under a header of {len(header)}"
        except StopIteration:
            return
        except csv.Error as error:
            row, fault = ["?"] * (len(header) + 1), str(error)
        if len(row) == len(header):
            yield rows.line_num, dict(zip(header, row, strict=True))
        elif row:  # a stray quote swallows lines up to the next one: all of them are lost
            mend = f"{fault}: quote fields that hold the delimiter, or pass quotes=False if quotes are characters"
            skips.bad("malformed line", f"{path}:{before + 1}", mend, rows.line_num - before)
