"""Columns of a table that are kept with the ids of its items, to filter search results."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.readers.tables import LINE, DataTable
from dualenc.errors import DualencError, explain
from dualenc.types import check_several

logger = logging.getLogger("dualenc.data")

RESERVED = ("id", "vector", "text", "snippet", "score")
"""Names of columns that dualenc or an engine adds."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Types of texts in csv and json lines. 007 and 1e999 are texts, since they would not survive as
# numbers, and so are 19 digits, which may exceed 64 bits.
_LOOKS = {
    "bool": r"^(?i:true|false)$",
    "int64": r"^-?(0|[1-9][0-9]{0,17})$",
    "double": r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?$",
}


def check_column_names(names: Sequence[str]) -> None:
    """Raise a `DualencError` for duplicate names, and names that a filter or engine cannot use."""
    check_several("columns", names)
    seen: set[str] = set()
    for name in names:
        # PostgreSQL folds the case of names.
        lower = name.lower()
        if not _NAME.fullmatch(name):
            raise DualencError(
                f"column {name!r} cannot be kept under this name",
                fix="name it with letters, digits and _, beginning with a letter",
            )
        if lower in RESERVED:
            raise DualencError(
                f"column {name!r} cannot be kept: every result already has a field {lower}",
                fix="rename it",
            )
        if lower in seen:
            raise DualencError(
                f"column {name!r} is given twice",
                fix="name each column once",
            )
        seen.add(lower)


def metadata_columns(table: DataTable, names: Sequence[str], rows: np.ndarray) -> pa.Table:
    """Return some columns in some rows (N,), as large_string, int64, double or bool.

    Lines hold only texts: a column of nothing but numbers becomes numeric. Dates become ISO texts,
    which sort by time. Numbers of half or single precision become the shortest decimals that round
    to them, 0.1 and not 0.10000000149. Empty and infinite values are missing; infinite ones are
    reported.

    Args:
        table: table in which the columns are open.
        names: columns to keep.
        rows: rows to keep, (N,).
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for name in names:
        kind = table.column(name).type
        if pa.types.is_nested(kind):
            raise DualencError(
                f"column {name!r} holds {kind}, which cannot be kept: filters compare single "
                "values",
                fix="leave it out",
                where=table.source,
            )
        with explain(
            f"{table.source}: column {name!r} holds {kind}, which cannot be kept", "leave it out"
        ):
            values = table.column(name).combine_chunks().take(pa.array(rows))
            columns[name] = _plain_values(
                values, table.has(LINE), f"{table.source}: column {name!r}"
            )
    return pa.table(columns)


def plain_columns(columns: pa.Table) -> pa.Table:
    """Convert the columns of a typed table the way `metadata_columns` does."""
    return pa.table(
        {
            name: _plain_values(columns[name].combine_chunks(), False, f"column {name!r}")
            for name in columns.column_names
        }
    )


def _plain_values(values: pa.Array, from_lines: bool, name: str) -> pa.Array:
    kind = values.type
    if pa.types.is_boolean(kind):
        return values
    if pa.types.is_integer(kind):
        return values.cast(pa.int64())
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = _as_double(values)
        if infinite := pc.sum(pc.is_inf(values)).as_py():
            logger.warning("%s: %d infinite numbers become missing values", name, infinite)
        return pc.if_else(pc.is_finite(values), values, None)
    if pa.types.is_timestamp(kind):
        # Independent of the unit in the file: dates if all are at midnight, and whole seconds if
        # that loses nothing (the cast raises otherwise).
        are_days = pc.all(pc.equal(values, pc.floor_temporal(values, unit="day"))).as_py()
        with suppress(pa.ArrowInvalid):
            values = values.cast(pa.date32() if are_days else pa.timestamp("s", kind.tz))
    values = values.cast(pa.large_string())
    values = pc.if_else(pc.equal(pc.utf8_trim_whitespace(values), ""), None, values)
    return _read_as_looks(values) if from_lines else values


def _as_double(values: pa.Array) -> pa.Array:
    """Convert numbers to float64: integers exactly, fractions to their shortest decimals."""
    if values.type == pa.float16():
        # Arrow prints float16 with the digits of float32; NumPy finds the shortest ones.
        halves = values.to_numpy(zero_copy_only=False)
        distinct, rows = np.unique(halves, return_inverse=True)
        decimals = np.array([float(str(value)) for value in distinct])
        exact = pa.array(distinct[rows].astype(np.float64))
        shortest = pa.array(decimals[rows])
    elif values.type == pa.float32():
        exact = values.cast(pa.float64())
        shortest = values.cast(pa.string()).cast(pa.float64())
    else:
        return values.cast(pa.float64())
    return pc.if_else(pc.equal(exact, pc.floor(exact)), exact, shortest)


def _read_as_looks(values: pa.Array) -> pa.Array:
    """Convert texts to what they all look like: truth values, integers, numbers, or texts."""
    # Among numbers nan is a missing value; among texts it may be a word (the language Min Nan).
    numbers = pc.if_else(pc.equal(pc.utf8_lower(values), "nan"), None, values)
    for kind, pattern in _LOOKS.items():
        if pc.all(pc.match_substring_regex(numbers, pattern)).as_py():
            return numbers.cast(kind)
    return values
