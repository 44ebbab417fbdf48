"""Text records as Arrow: small ones in memory, large ones in a memory-mapped file that is written once."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.data.identity import file_identity
from dualenc.data.lines import read_records
from dualenc.data.skips import Skips
from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Kind = Literal["value", "list"]
Placed = tuple[int, int, dict[str, Any]]  # number of the file, line in it, record
Reshape = Callable[[dict[str, Any]], dict[str, Any]]
FILE, LINE = "__file__", "__line__"

IN_MEMORY_BYTES = 32 << 20
"""Files that are smaller than this together are kept in memory instead of the cache folder."""

_BATCH_ROWS = 2000
_ROWS_BEFORE_MISSING = 1000  # a column absent from that many records is taken for a typing error
_VERSION = 2  # of what the cache holds; raise it when the reading changes


def cache_folder() -> Path:
    """Where converted files are kept: `dualenc` in the cache folder of `datasets` ($HF_DATASETS_CACHE)."""
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "dualenc"


def check_columns(source: str, available: Iterable[str], wanted: Iterable[str]) -> None:
    """Insist that columns are there.

    Raises:
        DualencError: names the missing column, the nearest one and all there are.
    """
    names = [name for name in available if name not in (FILE, LINE)]
    for name in wanted:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            hint = f"did you mean {nearest[0]!r}? (columns: {', '.join(names)})" if nearest else "it has no columns"
            raise DualencError(f"{source}: no column {name!r}; {hint}")


def read_lines(
    files: Sequence[Path],
    columns: Mapping[str, Kind],
    optional: Collection[str],
    skips: Skips,
    quotes: bool = True,
    limit: int | None = None,
    reshape: Reshape | None = None,
) -> Dataset:
    """Read the named columns of line-based files.

    Args:
        files: all of one format.
        columns: each becomes strings ("value") or lists of strings ("list"; a single text is a list of one).
        optional: columns that may be missing everywhere.
        skips: is told of malformed lines.
        quotes: whether `"` encloses fields of csv and tsv files.
        limit: stop after that many rows.
        reshape: turns each record into one that has the columns, for formats that nest them.

    Returns:
        The columns, and beside them the file number and line of each row.

    Raises:
        DualencError: an unreadable file, or a column that no record has.
    """
    import pyarrow as pa
    from datasets import Dataset

    schema = _schema(columns)
    records = _reshaped(files, _records(files, skips, quotes), reshape, skips)
    rows = islice(_rows(files, records, columns, optional, skips), limit)
    if sum(file.stat().st_size for file in files) <= IN_MEMORY_BYTES:
        return Dataset(_table(schema, rows))
    facts = [(str(file.resolve()), file.stat().st_mtime_ns, file_identity(file).decode()) for file in files]
    key = json.dumps(
        [_VERSION, facts, list(columns.items()), quotes, limit, skips.on_error, str(reshape and reshape.__qualname__)]
    )
    target = _cached(key, schema, rows, skips)
    try:
        return Dataset.from_file(str(target))
    except (pa.ArrowException, OSError) as error:
        raise DualencError(f"{target}: damaged data cache ({_first_line(error)}); remove this file") from None


def _cached(key: str, schema: pa.Schema, rows: Iterator[dict[str, Any]], skips: Skips) -> Path:
    """The Arrow file of these rows, written if it is not there yet; its counts of bad samples lie beside it."""
    target = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"
    counts = target.with_suffix(".json")
    if target.is_file() and counts.is_file():
        known = read_json(counts)
        if not isinstance(known, dict) or not all(isinstance(known.get(part), dict) for part in ("counts", "first")):
            raise DualencError(f"{counts}: damaged data cache; remove this file")
        skips.counts.update(known["counts"])
        skips.first.update(known["first"])
        return target
    try:
        with atomic_path(target) as beside:
            _write(beside, schema, rows)
            write_json(counts, {"counts": skips.counts, "first": skips.first})
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise DualencError(
            f"{target.parent}: cannot write the data cache ({reason}); set HF_DATASETS_CACHE to another folder"
        ) from None
    return target


def _table(schema: pa.Schema, rows: Iterator[dict[str, Any]]) -> Any:
    import pyarrow as pa
    from datasets.table import InMemoryTable

    return InMemoryTable(pa.Table.from_batches(_batches(schema, rows), schema=schema))


def _write(path: Path, schema: pa.Schema, rows: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in _batches(schema, rows):
            writer.write_batch(batch)


def _batches(schema: pa.Schema, rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    while block := list(islice(rows, _BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(block, schema=schema)


def _schema(columns: Mapping[str, Kind]) -> pa.Schema:
    import pyarrow as pa

    types = {"value": pa.large_string(), "list": pa.list_(pa.large_string())}
    fields = [(name, types[kind]) for name, kind in columns.items()]
    return pa.schema([*fields, (FILE, pa.int32()), (LINE, pa.int64())])


def _records(files: Sequence[Path], skips: Skips, quotes: bool) -> Iterator[Placed]:
    for number, file in enumerate(files):
        for line, record in read_records(file, skips, quotes):
            yield number, line, record


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _reshaped(
    files: Sequence[Path], records: Iterator[Placed], reshape: Reshape | None, skips: Skips
) -> Iterator[Placed]:
    for number, line, record in records:
        try:
            yield number, line, record if reshape is None else reshape(record)
        except TypeError as error:
            skips.bad("value of a wrong type", f"{files[number]}:{line}", f"{error}; mend the line")


def _rows(
    files: Sequence[Path],
    records: Iterator[Placed],
    columns: Mapping[str, Kind],
    optional: Collection[str],
    skips: Skips,
) -> Iterator[dict[str, Any]]:
    """Each record's wanted columns; insists early that every one that must be there is met with."""
    absent = {name for name in columns if name not in optional}
    seen: dict[str, None] = {}
    count = 0
    for number, line, record in records:
        if absent:
            seen.update(dict.fromkeys(record))
            absent -= record.keys()
            if count >= _ROWS_BEFORE_MISSING:
                check_columns(str(files[number]), seen, absent)
        count += 1
        row = _row(record, columns, f"{files[number]}:{line}", skips)
        if row is not None:
            yield {**row, FILE: number, LINE: line}
    if count:
        check_columns(str(files[0]), seen, absent)


def _row(record: dict[str, Any], columns: Mapping[str, Kind], where: str, skips: Skips) -> dict[str, Any] | None:
    """The wanted columns as strings and lists of strings; None if one of them cannot be."""
    try:
        return {name: _CONVERT[kind](record.get(name)) for name, kind in columns.items()}
    except (TypeError, UnicodeEncodeError) as error:
        skips.bad("value of a wrong type", where, f"{error}; mend the line")
        return None


def _text(value: Any) -> str | None:
    if value is None:
        return value
    if isinstance(value, str):
        if not value.isascii():
            value.encode()  # half a surrogate pair, which JSON can escape, is no text
        if "\0" in value:
            raise TypeError("a NUL character stands in the text, as when UTF-16 is read as UTF-8")
        return value
    if isinstance(value, (dict, list)):
        raise TypeError(f"a {type(value).__name__} stands where one text is expected")
    return json.dumps(value)  # numbers and truth values


def _texts(value: Any) -> list[str | None]:
    if value is None:
        return []
    return [_text(entry) for entry in value] if isinstance(value, list) else [_text(value)]


_CONVERT = {"value": _text, "list": _texts}
