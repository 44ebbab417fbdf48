"""How the values of a column are read: as single values, lists or vectors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, Literal

import pyarrow as pa

from dualenc.data.readers.plain_types import is_list, is_type
from dualenc.data.readers.written_lists import parse_list

ColumnKind = Literal["value", "list", "vector"]
TYPES: dict[ColumnKind, pa.DataType] = {
    "value": pa.large_string(),
    "list": pa.list_(pa.large_string()),
    "vector": pa.large_list(pa.float32()),
}
"""Arrow type in which the values of each kind are stored."""

_NAMES = {
    list: "a list",
    dict: "a record",
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
}


def kind_of_type(kind: pa.DataType) -> ColumnKind:
    """Return how to read a column of an Arrow type: floating-point lists are vectors."""
    if not is_list(kind):
        return "value"
    return "vector" if is_type(kind.value_type, "floating") else "list"


def kind_of_value(value: Any) -> ColumnKind | None:
    """Return the kind of column that a value suggests.

    None for null, and for lists that hold neither texts nor fractions.
    """
    if not isinstance(value, list):
        return None if value is None else "value"
    # Integers occur in lists of ids and in vectors, so they decide nothing.
    types = {*map(type, value)} - {int, NoneType}
    if not types:
        return None
    return "vector" if types == {float} else "list"


def kind_of_written(values: Iterable[object]) -> ColumnKind | None:
    """Return "vector" or "list" if all nonblank values are lists written as text, else None."""
    kinds: set[ColumnKind | None] = set()
    has_entries = False
    for value in values:
        if _is_blank(value) or value != value:  # pandas writes a missing value as NaN
            continue
        entries = parse_list(value)
        if entries is None:
            return None
        kinds.add(kind_of_value(entries))
        has_entries = has_entries or bool(entries)
    kinds.discard(None)
    # Integers may be ids, or vectors if other rows have fractions.
    if not kinds and has_entries:
        return "list"
    return kinds.pop() if len(kinds) == 1 else None


def written_list(value: Any) -> Any:
    """Return the list that a text stands for, None for a blank text."""
    if not isinstance(value, str) or _is_blank(value):
        return None
    values = parse_list(value)
    if values is None:
        raise TypeError("a text where a list written as a text is expected")
    return values


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def is_plain(kind: pa.DataType) -> bool:
    """Return True for texts, numbers and truth values, and lists of texts or integers."""
    if is_list(kind):
        return is_plain(kind.value_type) and not is_type(kind.value_type, "floating")
    return not is_type(kind, "nested", "binary", "large_binary")


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        # JSON can escape half of a surrogate pair; encoding it raises UnicodeEncodeError.
        value.encode()
        return value
    if isinstance(value, (dict, list)):
        raise TypeError(f"{_NAMES[type(value)]} where one text is expected")
    # Numbers and truth values as in JSON: `true`, and not Python's `True`.
    return None if value is None else json.dumps(value)


def _texts(value: Any) -> list[str | None]:
    if _is_blank(value):
        return []
    if not isinstance(value, list):
        value = [value]
    return [_text(entry) for entry in value]


def _vector(value: Any) -> list[float] | None:
    """Return a list of numbers; null becomes NaN, which the check of vectors finds later."""
    if value is None:
        return None
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float, NoneType}:
        raise TypeError(
            f"{_NAMES.get(type(value), type(value).__name__)} where a list of numbers is expected"
        )
    # Python integers and JSON numbers may exceed what a float holds.
    return [math.nan if entry is None or abs(entry) > 1e300 else float(entry) for entry in value]


CONVERTERS: dict[ColumnKind, Callable[[Any], Any]] = {
    "value": _text,
    "list": _texts,
    "vector": _vector,
}
"""Convert a Python value to what each kind stores; raise a `TypeError` for other values."""
