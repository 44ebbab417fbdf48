"""Filter conditions: `year>=2020` and the like, evaluated as Arrow expressions."""

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
"""A condition with its first value, or one more value. A single quote that does not close is an
apostrophe."""
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
"""The operators that only numbers take."""


class Condition(NamedTuple):
    """A column compared with a value; with several, "=" is any of them and "!=" none. Missing
    values meet none."""

    column: str
    operator: Operator
    values: tuple[Value, ...]


def parse_conditions(words: Sequence[str], kinds: Kinds) -> list[Condition]:
    """Parse conditions, all of which must hold.

    Args:
        words: `year>=2020`, `lang=en`, `lang!=en`; `lang=en,de` is either of the two, and may come
            as two words. A value with commas is quoted, as in `author="Doe, Jane","Roe, Max"`, or
            the whole word is: `"author=Doe, Jane"`. A doubled quote stands for one.
        kinds: types of the columns, by name.
    """
    conditions: list[Condition] = []
    for name, sign, texts in _split(list(one_or_several(words))):
        if name not in kinds:
            raise DualencError(
                f"condition: no column {name!r}",
                fix=f"there are {', '.join(kinds)}"
                if kinds
                else "none were kept; embed with --columns",
            )
        if sign in _ORDERS and kinds[name] not in ("integer", "number"):
            word = f"{name}{sign}{texts[0]}"
            raise DualencError(
                f"condition: {word!r} orders a column of {kinds[name]} values", fix="give = or !="
            )
        conditions.append(
            Condition(name, sign, tuple(_value(name, kinds[name], text) for text in texts))
        )
    return conditions


def _split(words: Sequence[str]) -> list[tuple[str, Operator, list[str]]]:
    """Conditions as column, operator and values as texts; the columns need not exist."""
    conditions: list[tuple[str, Operator, list[str]]] = []
    for word in words:
        whole = _CONDITION.fullmatch(_without_quotes(word)) if re.fullmatch(_QUOTED, word) else None
        for part in [whole] if whole else _PART.finditer(f"{word},"):
            value = _without_quotes(part["value"])
            if part["column"]:
                conditions.append(
                    (part["column"], cast(Operator, part["operator"].replace("==", "=")), [value])
                )
            elif conditions and conditions[-1][1] in ("=", "!="):
                conditions[-1][2].append(value)
            else:
                raise DualencError(
                    f"{part['value'][:200]!r} is no condition",
                    fix='write for example year>=2020, lang=en,de or author="Doe, Jane"',
                )
    return conditions


def _without_quotes(text: str) -> str:
    text = text.strip()
    quote = text[:1]
    if re.fullmatch(_QUOTED, text):
        return text[1:-1].replace(2 * quote, quote)
    if quote == '"':
        raise DualencError(f"condition: {text[:200]!r} does not end with the quote it begins with")
    return text


def _value(name: str, kind: Kind, word: str) -> Value:
    try:
        if kind == "integer" and abs(int(word)) < 1 << 63:
            return int(word)
        if kind == "number" and np.isfinite(float(word)):
            return float(word)
        if kind == "truth":
            return {"true": True, "false": False}[word.strip().lower()]
    except (ValueError, KeyError):
        pass
    if kind == "text" and word:
        return word
    form = {
        "integer": "a whole number of 64 bits",
        "number": "a number",
        "truth": "true or false",
        "text": "a text",
    }
    raise DualencError(
        f"condition: column {name!r} is compared with {word[:200]!r}", fix=f"give {form[kind]}"
    )


def column_kinds(columns: pa.Table | None) -> dict[str, Kind]:
    """Types of the columns kept with embeddings, by name."""
    kinds: dict[str, Kind] = {}
    for field in () if columns is None else columns.schema:
        if types.is_boolean(field.type):
            kinds[field.name] = "truth"
        elif types.is_integer(field.type):
            kinds[field.name] = "integer"
        else:
            kinds[field.name] = "number" if types.is_floating(field.type) else "text"
    return kinds


def _in_precision_of(column: pa.ChunkedArray, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Round values to the precision that a column had before it was widened: 0.1 to 0.10000000149
    among float32.

    Indexes hold the shortest decimals of such columns, 0.1 itself, unless they are of an earlier
    version.
    """
    fractions = [value for value in values if isinstance(value, float) and not value.is_integer()]
    if not fractions or not types.is_floating(column.type):
        return values
    numbers = column.drop_null().to_numpy().astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    for kind in (np.float16, np.float32):
        with np.errstate(over="ignore"):
            if (numbers.astype(kind) == numbers).all():
                # Only what the precision writes so: 0.1, but no fraction with more digits than it
                # has.
                return tuple(
                    float(kind(value))
                    if value in fractions and float(str(kind(value))) == value
                    else value
                    for value in values
                )
    return values


def meets(conditions: Sequence[Condition], columns: pa.Table) -> np.ndarray:
    """Evaluate conditions on a table: (N,) bool, the rows that meet all of them; a missing value
    meets none."""
    combined = pc.scalar(True)
    for name, sign, values in conditions:
        field = pc.field(name)
        values = _in_precision_of(columns.column(name), values)
        if sign in _ORDERS:
            met = _ORDERS[sign](field, pc.scalar(values[0]))
        else:
            # `isin` wants values of the column's own type, such as int32 or large_string.
            is_any = field.isin(pa.array(values).cast(columns.schema.field(name).type))
            met = (is_any if sign == "=" else ~is_any) & field.is_valid()
        combined = combined & met
    # A scan keeps the order of the rows.
    scanned = dataset.dataset(columns).to_table(columns={"met": combined})
    return pc.fill_null(scanned.column("met"), False).to_numpy()
