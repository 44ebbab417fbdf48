"""Conditions on columns; see `dualenc.search.where`."""

from dualenc.search.where import (
    Condition,
    Kind,
    Kinds,
    column_kinds,
    meets,
    named_columns,
    parse_conditions,
    rows_that_meet,
)

__all__ = [
    "Condition",
    "Kind",
    "Kinds",
    "column_kinds",
    "meets",
    "named_columns",
    "parse_conditions",
    "rows_that_meet",
]
