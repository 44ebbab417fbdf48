"""Conditions on columns, such as `year>=2020`, as Arrow expressions."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import dataset, types

from dualenc.errors import DualencError

Kind = Literal["text", "integer", "number", "truth"]
"""What a column holds."""
Kinds = Mapping[str, Kind]
Value = str | int | float | bool
Operator = Literal["=", "!=", "<", "<=", ">", ">="]

_CONDITION = re.compile(r"\s*(?P<column>[A-Za-z][A-Za-z0-9_]*)\s*(?P<operator>!=|<=|>=|==?|<|>)\s*(?P<value>.*)", re.S)
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
"""The operators that only numbers take."""


class Condition(NamedTuple):
    """A column compared with a value; with several values, "=" is any of them and "!=" none of them.

    An item without a value in the column meets no condition.
    """

    column: str
    operator: Operator
    values: tuple[Value, ...]


def parse_conditions(words: Sequence[str], kinds: Kinds) -> list[Condition]:
    """Read conditions, all of which must hold.

    Args:
        words: `year>=2020`, `lang=en`, `lang!=en`; `lang=en,de` is any of the two, and may come as two words, as a
            command line splits it at commas.
        kinds: what the columns hold, by name.

    Raises:
        DualencError: no condition, no such column, a value that does not fit the column, or an order of texts.
    """
    conditions: list[Condition] = []
    for name, sign, texts in _split(words):
        if name not in kinds:
            there = f"there are {', '.join(kinds)}" if kinds else "none were kept; embed with --columns"
            raise DualencError(f"--where: no column {name!r}; {there}")
        if sign in _ORDERS and kinds[name] not in ("integer", "number"):
            word = f"{name}{sign}{texts[0]}"
            raise DualencError(f"--where: {word!r} orders a column of {kinds[name]} values; only = and != apply to it")
        conditions.append(Condition(name, sign, tuple(_value(name, kinds[name], text) for text in texts)))
    return conditions


def named_columns(words: Sequence[str]) -> list[str]:
    """The columns that conditions are about, each once, to read them.

    Raises:
        DualencError: no condition.
    """
    return list(dict.fromkeys(name for name, _, _ in _split(words)))


def rows_that_meet(words: Sequence[str], columns: pa.Table | None) -> np.ndarray:
    """Which rows of a table meet all conditions, as they are written: (N,) bool.

    Raises:
        DualencError: what `parse_conditions` raises.
    """
    conditions = parse_conditions(words, column_kinds(columns))
    return np.ones(0, dtype=bool) if columns is None else meets(conditions, columns)


def _split(words: Sequence[str]) -> list[tuple[str, Operator, list[str]]]:
    """Conditions as column, operator and values, before anything is known of the column."""
    found: list[tuple[str, Operator, list[str]]] = []
    for word in ",".join(words).split(",") if words else ():
        match = _CONDITION.fullmatch(word)
        if match is not None:
            found.append((match["column"], cast(Operator, match["operator"].replace("==", "=")), [match["value"]]))
        elif found and found[-1][1] in ("=", "!="):
            found[-1][2].append(word)
        else:
            raise DualencError(f"--where: {word!r} is no condition; write for example year>=2020 or lang=en,de")
    return found


def _value(name: str, kind: Kind, word: str) -> Value:
    word = word.strip()
    try:
        if kind == "integer" and abs(int(word)) < 1 << 63:
            return int(word)
        if kind == "number" and np.isfinite(float(word)):
            return float(word)
        if kind == "truth":
            return {"true": True, "false": False}[word.lower()]
    except (ValueError, KeyError):
        pass
    if kind == "text" and word:
        return word
    wanted = {"integer": "a whole number of 64 bits", "number": "a number", "truth": "true or false", "text": "a text"}
    raise DualencError(f"--where: column {name!r} is compared with {word[:200]!r}; give {wanted[kind]}")


def column_kinds(columns: pa.Table | None) -> dict[str, Kind]:
    """What the columns kept with embeddings hold, by name."""
    kinds: dict[str, Kind] = {}
    for field in () if columns is None else columns.schema:
        if types.is_boolean(field.type):
            kinds[field.name] = "truth"
        elif types.is_integer(field.type):
            kinds[field.name] = "integer"
        else:
            kinds[field.name] = "number" if types.is_floating(field.type) else "text"
    return kinds


def expression(conditions: Sequence[Condition], columns: pa.Schema) -> pc.Expression:
    """All conditions as an Arrow expression; a missing value meets none of them."""
    every = pc.scalar(True)
    for name, sign, values in conditions:
        field = pc.field(name)
        if sign in _ORDERS:
            met = _ORDERS[sign](field, pc.scalar(values[0]))
        else:
            among = field.isin(pa.array(values).cast(columns.field(name).type))
            met = (among if sign == "=" else ~among) & field.is_valid()
        every = every & met
    return every


def meets(conditions: Sequence[Condition], columns: pa.Table) -> np.ndarray:
    """Which rows meet all conditions: (N,) bool."""
    wanted = {"met": expression(conditions, columns.schema)}
    # A scan keeps the order of the rows.
    met = dataset.dataset(columns).to_table(columns=wanted).column("met")
    return pc.fill_null(met, False).to_numpy()
