"""A table of a log: nested records as columns, and its columns as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.columns import Column, ItemColumn
from dualenc.data.item_lists import Picked, distinct_items
from dualenc.data.readers import parquet_files
from dualenc.data.readers.column_kinds import ColumnKind, kind_of_type
from dualenc.data.readers.lines import Record
from dualenc.data.readers.plain_types import is_type
from dualenc.data.readers.relevance import as_number
from dualenc.data.readers.tables import DataTable, TableSource, check_columns
from dualenc.data.readers.written_lists import parse_list
from dualenc.errors import DualencError
from dualenc.types import Integers, Items

_EXAMINED = 1000
_IMAGE_FIELDS = {"bytes", "path"}  # records of `datasets`, which are values and not nested columns


def flat_record(record: Record) -> Record:
    """Return a record whose nested records are columns with dotted names.

    A document exported from OpenSearch is in its field `_source`.
    """
    if isinstance(record.get("_source"), dict):
        record = record["_source"]
    if not any(isinstance(value, dict) for value in record.values()):
        return record
    flat: Record = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": entry for key, entry in flat_record(value).items()})
        else:
            flat[name] = value
    return flat


class LogTable:
    """A table of a log, whose nested fields are columns with dotted names.

        LogTable(TableSource("events.parquet", bad_rows, reshape=flat_record)).kinds

    Args:
        source: the table; lines must be reshaped by `flat_record`.
    """

    def __init__(self, source: TableSource) -> None:
        self.source = source
        self.path = source.path
        self.bad_rows = source.bad_rows

    @cached_property
    def nested(self) -> dict[str, tuple[list[str], pa.DataType]]:
        """Path and type of each nested field, by dotted name."""
        source = self.source
        if source.dataset is not None:
            schema = source.dataset.data.schema
        elif source.files and source.files[0].suffix.lower() == ".parquet":
            schema = parquet_files.plain_schema(parquet_files.stored_schema(source.files))
        else:
            return {}
        return dict(_nested_fields(schema, []))

    @cached_property
    def kinds(self) -> dict[str, ColumnKind]:
        """Kind of each column, nested fields included."""
        roots = {path[0] for path, _ in self.nested.values()}
        own = {name: kind for name, kind in self.source.kinds.items() if name not in roots}
        for name, kind in own.items():
            # Other readers leave lists of whole numbers open; in a log they are ids or ranks.
            if kind == "value" and any(isinstance(value, list) for value in self.examined(name)):
                own[name] = "list"
        return own | {name: kind_of_type(kind) for name, (_, kind) in self.nested.items()}

    @cached_property
    def _nested_records(self) -> list[Record]:
        roots = sorted({path[0] for path, _ in self.nested.values()})
        if self.source.dataset is not None:
            rows = self.source.dataset.data.table.select(roots).slice(0, _EXAMINED).to_pylist()
        else:
            rows = parquet_files.first_rows(self.source.files[0], roots, _EXAMINED)
        return [flat_record(row) for row in rows]

    def examined(self, name: str) -> list[Any]:
        """Return a column's values in the first thousand records."""
        if name in self.nested:
            return [record.get(name) for record in self._nested_records]
        return self.source.examined(name)

    def examined_values(self, name: str) -> list[str]:
        """Return the examined values that are not blank, with lists flattened."""
        values: list[str] = []
        for value in self.examined(name):
            if name in self.source.written_lists:
                value = parse_list(value)
            for entry in value if isinstance(value, list) else [value]:
                if entry is not None and str(entry).strip():
                    values.append(str(entry))
        return values

    @property
    def wrapper(self) -> str:
        """Advice if the table is one record whose field lists the rows, else ""."""
        for name in self.kinds:
            values = self.examined(name)
            if len(values) == 1 and _lists_records(values[0]):
                return f"; {name!r} lists records, so write these alone: jq '.{name}' FILE"
        return ""

    def holds_numbers(self, name: str) -> bool:
        """Return True if all examined values, at least one, are single numbers."""
        if name in self.nested:
            return is_type(self.nested[name][1], "integer", "floating")
        return self.kinds[name] == "value" and self.source.holds_numbers(name)

    def holds_lists(self, name: str) -> bool:
        """Return True if the rows of a column hold lists."""
        return self.kinds[name] != "value"

    def label_kind(self, name: str) -> ColumnKind:
        """Return how to read labels, weights or numbers: lists as lists, even of fractions."""
        return "value" if name in self.nested else self.source.label_kind(name)

    def open(self, columns: Mapping[str, ColumnKind]) -> DataTable:
        """Open some columns, nested fields under their dotted names."""
        check_columns(self.path, self.kinds, columns)
        opened: dict[str, ColumnKind] = {}
        for name, kind in columns.items():
            opened |= {self.nested[name][0][0]: "value"} if name in self.nested else {name: kind}
        table = self.source.open(opened)
        if not any(name in self.nested for name in columns):
            return table
        from datasets import Dataset
        from datasets.table import InMemoryTable

        data = table.dataset.data.table
        extra = [name for name in data.column_names if name not in opened]
        arrays = {name: data.column(name) for name in extra}
        for name in columns:
            path = self.nested[name][0] if name in self.nested else [name]
            array = data.column(path[0])
            for part in path[1:]:
                array = pc.struct_field(array, part)
            arrays[name] = array
        return replace(table, dataset=Dataset(InMemoryTable(pa.table(arrays))))


def _nested_fields(
    fields: Iterable[pa.Field], above: list[str]
) -> Iterable[tuple[str, tuple[list[str], pa.DataType]]]:
    for field in fields:
        path = [*above, field.name]
        kind = field.type
        if is_type(kind, "struct") and not {part.name for part in kind} <= _IMAGE_FIELDS:
            yield from _nested_fields(kind, path)
        elif above:
            yield ".".join(path), (path, kind)


def _lists_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def values_of(array: pa.ChunkedArray, convert: Callable[[Any], float]) -> np.ndarray:
    """Return a number for each value (n,) float64, converting each distinct value once."""
    if is_type(array.type, "integer", "floating", "boolean", "decimal"):
        return array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    codes = array.dictionary_encode().combine_chunks()
    by_code = np.array([*map(convert, codes.dictionary.to_pylist()), np.nan])
    return by_code[codes.indices.fill_null(len(codes.dictionary)).to_numpy(zero_copy_only=False)]


def number_of(value: object) -> float:
    """Return the number that a value spells, NaN if it spells none; words count as 1 or 0."""
    try:
        return float(as_number(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return np.nan


def read_numbers(table: DataTable, name: str) -> tuple[np.ndarray, Column]:
    """Return the numbers of a column with lists flattened (n,), NaN where there is none."""
    column = Column(table, name, "text", lists=True)
    return values_of(column.array, number_of), column


def id_texts(array: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return ids as texts, whole numbers without a fraction, as pandas writes them."""
    texts = array.cast(pa.large_string())
    return pc.replace_substring_regex(texts, r"^(-?[0-9]+)\.0$", r"\1")


def codes_of(array: pa.ChunkedArray) -> Integers:
    """Return a number for each value (n,), equal for equal values; -1 for missing or blank ones."""
    codes = array.dictionary_encode().combine_chunks()
    values = codes.dictionary
    numbers = codes.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    if is_type(values.type, "string", "large_string"):
        # csv writes a missing value as a blank one.
        blank = pc.equal(pc.utf8_trim_whitespace(values), "").to_numpy(zero_copy_only=False)
        numbers[np.isin(numbers, np.flatnonzero(blank))] = -1
    return numbers


def number_queries(left: ItemColumn, rows: Integers) -> tuple[Items, Integers]:
    """Return the distinct queries of some rows, and the number of each row's query (n,)."""
    column = getattr(left.items, "column", None)
    if left.modality != "text" or column is None:
        used, row_number = np.unique(rows, return_inverse=True)
        items, number = distinct_items(left.items, used)
        return items, number[row_number]
    first, numbers = by_appearance(codes_of(column.array)[rows])
    return Picked(left.items, rows[first]), numbers


def by_appearance(keys: Integers) -> tuple[Integers, Integers]:
    """Return where each key (n,) first appears, and numbers (n,) by first appearance."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return first[order], place[inverse]


def refuse_two(names: list[str], what: str, option: str, where: object) -> None:
    """Raise a `DualencError` that names two candidates for one role."""
    if len(names) > 1:
        raise DualencError(
            f"columns {names[0]!r} and {names[1]!r} both look like {what}",
            fix=f"name one as {option} (--{option.replace('_', '-')}), or pass {option}=none",
            where=where,
        )
