"""Tables of lines: records of text files as Arrow, in memory or in the cache folder."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa

from dualenc.data.bad_rows import BadRows
from dualenc.data.cache import BATCH_ROWS, dataset_of_batches
from dualenc.data.lines import file_format, read_records
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from datasets import Dataset

ColumnKind = Literal["value", "list", "vector"]
Reshape = Callable[[dict[str, Any]], dict[str, Any]]
FILE = "__file__"
LINE = "__line__"
"""Columns that hold the position of each row."""

_RECORDS_EXAMINED = 100_000  # of each file, to see what its columns hold
_TYPES: dict[ColumnKind, pa.DataType] = {
    "value": pa.large_string(),
    "list": pa.list_(pa.large_string()),
    "vector": pa.large_list(pa.float32()),
}


def table_of_lines(
    files: Sequence[Path],
    columns: Mapping[str, ColumnKind],
    optional: Collection[str],
    bad_rows: BadRows,
    quotes: bool | None = None,
    reshape: Reshape | None = None,
) -> Dataset:
    """Columns of line-based files of one format, and the file number and line of each row; see `TableSource.open`."""
    fields = [(name, _TYPES[kind]) for name, kind in columns.items()]
    schema = pa.schema([*fields, (FILE, pa.int32()), (LINE, pa.int64())])

    def batches(own: BadRows) -> Iterator[pa.RecordBatch]:
        rows = _rows(files, columns, optional, own, quotes, reshape)
        while block := list(islice(rows, BATCH_ROWS)):
            yield pa.RecordBatch.from_pylist(block, schema=schema)

    reshaped = None if reshape is None else reshape.__qualname__
    key = [list(columns.items()), quotes, bad_rows.on_error, reshaped]
    return dataset_of_batches(batches, schema, files, key, bad_rows)


def _rows(
    files: Sequence[Path],
    columns: Mapping[str, ColumnKind],
    optional: Collection[str],
    bad_rows: BadRows,
    quotes: bool | None,
    reshape: Reshape | None,
) -> Iterator[dict[str, Any]]:
    """Each record's columns. A required column may be missing in some records, but not in all."""
    converters = {name: _CONVERTERS[kind] for name, kind in columns.items()}
    absent = {name for name in columns if name not in optional}
    seen: dict[str, None] = {}
    for number, file in enumerate(files):
        for line, record in read_records(file, bad_rows, quotes):
            try:
                if reshape is not None:
                    record = reshape(record)
                if absent:
                    seen.update(dict.fromkeys(record))
                    absent -= record.keys()
                row = {name: convert(record.get(name)) for name, convert in converters.items()}
            except (TypeError, UnicodeEncodeError) as error:
                bad_rows.add("value of a wrong type", f"{file}:{line}", f"{error}; fix the line")
                continue
            row[FILE] = number
            row[LINE] = line
            yield row
    if seen:
        check_columns(str(files[0]), seen, absent)


def check_columns(source: str, available: Iterable[str], required: Iterable[str]) -> None:
    """Raise a `DualencError` for a column that does not exist, with the nearest name."""
    names = [name for name in available if name not in (FILE, LINE)]
    for name in required:
        if name not in names:
            hint = "it has no columns"
            for nearest in difflib.get_close_matches(name, names, n=1, cutoff=0.0):
                hint = f"did you mean {nearest!r}? (columns: {', '.join(names)})"
            raise DualencError(f"{source}: no column {name!r}; {hint}")


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        # Half a surrogate pair, which JSON can escape, is no text: a UnicodeEncodeError.
        value.encode()
        return value
    if isinstance(value, (dict, list)):
        raise TypeError(f"a {type(value).__name__} where one text is expected")
    # Numbers and truth values.
    return None if value is None else json.dumps(value)


def _texts(value: Any) -> list[str | None]:
    if value is None:
        return []
    return [_text(entry) for entry in value] if isinstance(value, list) else [_text(value)]


def _vector(value: Any) -> list[float] | None:
    """Numbers; null becomes NaN, which is found when the vectors are checked."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(entry) in (int, float, NoneType) for entry in value):
        raise TypeError(f"a {type(value).__name__} where a list of numbers is expected")
    return [math.nan if entry is None or abs(entry) > 1e300 else float(entry) for entry in value]


_CONVERTERS: dict[ColumnKind, Callable[[Any], Any]] = {"value": _text, "list": _texts, "vector": _vector}


def kinds_of_records(
    files: Sequence[Path], bad_rows: BadRows, quotes: bool | None = None
) -> dict[str, ColumnKind]:
    """The columns that records of the files have, and what most records hold in each."""
    counts: dict[str, Counter[str]] = {}
    for file in files:
        # The records of other formats than JSON all have the columns of the first.
        examined = _RECORDS_EXAMINED if file_format(file) not in (".csv", ".tsv", ".txt") else 1
        for _, record in islice(read_records(file, bad_rows, quotes), examined):
            for name, value in record.items():
                counts.setdefault(name, Counter())[_kind_of_value(value)] += 1
    bad_rows.require(len(counts), "record")
    return {name: _most_frequent(kinds) for name, kinds in counts.items()}


def _most_frequent(counts: Counter[str]) -> ColumnKind:
    kind = max(get_args(ColumnKind), key=lambda kind: counts[kind])
    if counts[kind]:
        return kind
    return "list" if counts["numbers"] else "value"


def _kind_of_value(value: Any) -> ColumnKind | Literal["missing", "numbers"]:
    """The kind of column that a value suggests; whole numbers may be a vector or a list."""
    if not isinstance(value, list):
        return "missing" if value is None else "value"
    kinds = {type(entry) for entry in value}
    if not kinds <= {int, float, NoneType}:
        return "list"
    return "vector" if float in kinds else "numbers"


def kind_of_type(kind: pa.DataType) -> ColumnKind:
    """How a column of an Arrow type is read: lists of floating-point numbers are vectors, all other lists are lists."""
    if not is_list(kind):
        return "value"
    return "vector" if pa.types.is_floating(kind.value_type) else "list"


def is_list(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
