"""Filter conditions such as `year>=2020`, evaluated as Arrow expressions."""

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
from dualenc.types import one_or_several

Kind = Literal["text", "integer", "number", "truth"]
"""Type of a column's values."""
Kinds = Mapping[str, Kind]
Value = str | int | float | bool
Operator = Literal["=", "!=", "<", "<=", ">", ">="]

_COMPARISON = r"\s*(?P<column>[A-Za-z][A-Za-z0-9_]*)\s*(?P<operator>!=|<=|>=|==?|<|>)"
_QUOTED = r"""\s*(?:"(?:[^"]|"")*"|'(?:[^']|'')*')\s*"""
_CONDITION = re.compile(rf"{_COMPARISON}(?P<value>.*)", re.S)
_PART = re.compile(rf"(?:{_COMPARISON})?(?P<value>{_QUOTED}|[^,]*),")
"""A condition with its first value, or one more value. A single quote that is never closed is an
apostrophe."""
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
"""The operators that only numbers take."""
_FORMS: dict[Kind, str] = {
    "integer": "a whole number of 64 bits",
    "number": "a number",
    "truth": "true or false",
    "text": "a text",
}
"""Valid values of each type of column, for error messages."""


class Condition(NamedTuple):
    """A column compared with one or several values.

    With several values, "=" matches any of them and "!=" none of them. Missing values never match.

        Condition("lang", "=", ("en", "de"))

    Attributes:
        column: name of the column.
        operator: comparison operator.
        values: values to compare with; exactly one for an order.
    """

    column: str
    operator: Operator
    values: tuple[Value, ...]


def parse_conditions(where: str | Sequence[str | Condition], kinds: Kinds) -> list[Condition]:
    """Parse conditions, all of which must hold.

    Args:
        where: `year>=2020`, `lang=en`, `lang!=en`; `lang=en,de` matches either, and may be split
            into two words. Quote a value with commas, as in `author="Doe, Jane","Roe, Max"`, or the
            whole word: `"author=Doe, Jane"`. A doubled quote stands for one quote. Parsed
            conditions are returned unchanged.
        kinds: types of the columns, by name.

    Raises:
        DualencError: a condition is malformed, or does not fit the columns.
    """
    conditions: list[Condition] = []
    words: list[str] = []
    for part in one_or_several(where):
        if isinstance(part, Condition):
            conditions.append(part)
        else:
            words.append(part)
    for name, sign, texts in _split(words):
        if name not in kinds:
            remedy = f"there are {', '.join(kinds)}"
            if not kinds:
                remedy = "none were kept; embed with --columns"
            raise DualencError(f"condition: no column {name!r}", fix=remedy)
        if sign in _ORDERS and kinds[name] not in ("integer", "number"):
            raise DualencError(
                f"condition: {f'{name}{sign}{texts[0]}'!r} orders a column of {kinds[name]} values",
                fix="give = or !=",
            )
        values = tuple(_value(name, kinds[name], text) for text in texts)
        conditions.append(Condition(name, sign, values))
    return conditions


def _split(words: Sequence[str]) -> list[tuple[str, Operator, list[str]]]:
    """Split words into column, operator and values as texts; the columns need not exist."""
    conditions: list[tuple[str, Operator, list[str]]] = []
    for word in words:
        whole = None
        if re.fullmatch(_QUOTED, word):
            whole = _CONDITION.fullmatch(_without_quotes(word))
        # The added comma ends the last value, so that one pattern matches all of them.
        for part in [whole] if whole else _PART.finditer(f"{word},"):
            value = _without_quotes(part["value"])
            if part["column"]:
                sign = cast(Operator, part["operator"].replace("==", "="))
                conditions.append((part["column"], sign, [value]))
            elif conditions and conditions[-1][1] in ("=", "!="):
                conditions[-1][2].append(value)
            else:
                raise DualencError(
                    f"{part['value'][:200]!r} is not a condition",
                    fix='write for example year>=2020, lang=en,de or author="Doe, Jane"',
                )
    return conditions


def _without_quotes(text: str) -> str:
    text = text.strip()
    quote = text[:1]
    if re.fullmatch(_QUOTED, text):
        return text[1:-1].replace(2 * quote, quote)
    # An apostrophe may begin a word, so only a double quote must be closed.
    if quote == '"':
        raise DualencError(f"condition: {text[:200]!r} does not end with the quote it begins with")
    return text


def _value(name: str, kind: Kind, word: str) -> Value:
    try:
        # Columns are int64; a larger number could not be compared with them.
        if kind == "integer" and abs(int(word)) < 1 << 63:
            return int(word)
        if kind == "number" and np.isfinite(float(word)):
            return float(word)
        if kind == "truth":
            return {"true": True, "false": False}[word.strip().lower()]
    except (ValueError, KeyError):
        pass  # reported below, like a number out of range
    if kind == "text" and word:
        return word
    raise DualencError(
        f"condition: column {name!r} is compared with {word[:200]!r}", fix=f"give {_FORMS[kind]}"
    )


def column_kinds(columns: pa.Table | None) -> dict[str, Kind]:
    """Return the types of the columns stored with embeddings, by name."""
    kinds: dict[str, Kind] = {}
    for field in () if columns is None else columns.schema:
        if types.is_boolean(field.type):
            kinds[field.name] = "truth"
        elif types.is_integer(field.type):
            kinds[field.name] = "integer"
        elif types.is_floating(field.type):
            kinds[field.name] = "number"
        else:
            kinds[field.name] = "text"
    return kinds


def _in_precision_of(column: pa.ChunkedArray, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Round values to the precision that a column had before it was widened to float64.

    A float32 column that holds 0.1 stores 0.10000000149, so a condition on 0.1 must compare with
    that. Current indexes store the shortest decimals, 0.1 itself; earlier versions did not.
    """
    fractions = [value for value in values if isinstance(value, float) and not value.is_integer()]
    if not fractions or not types.is_floating(column.type):
        return values
    numbers = column.drop_null().to_numpy().astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    for kind in (np.float16, np.float32):
        with np.errstate(over="ignore"):
            is_exact = (numbers.astype(kind) == numbers).all()
            # Round only values that the precision prints back unchanged: 0.1, but not a fraction
            # with more digits than it has.
            short = {v: float(kind(v)) for v in fractions if float(str(kind(v))) == v}
        if is_exact:
            return tuple(
                short.get(value, value) if isinstance(value, float) else value for value in values
            )
    return values


def meets(conditions: Sequence[Condition], columns: pa.Table) -> np.ndarray:
    """Return the rows (N,) bool of a table that meet all conditions; missing values never match."""
    combined = pc.scalar(True)
    for name, sign, values in conditions:
        field = pc.field(name)
        values = _in_precision_of(columns.column(name), values)
        if sign in _ORDERS:
            met = _ORDERS[sign](field, pc.scalar(values[0]))
        else:
            # `isin` needs values of the column's exact type, such as int32 or large_string.
            is_any = field.isin(pa.array(values).cast(columns.schema.field(name).type))
            met = (is_any if sign == "=" else ~is_any) & field.is_valid()
        combined = combined & met
    # A scan keeps the order of the rows.
    scanned = dataset.dataset(columns).to_table(columns={"met": combined})
    return pc.fill_null(scanned.column("met"), False).to_numpy()
