"""Filters of Qdrant: conditions on columns translated, and the user's own parsed and checked."""

from __future__ import annotations

import json
import math
from typing import Any

from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.search.where import Condition, Kinds

RANGES = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
MAX_EXACT = 1 << 53
"""Qdrant compares numbers as doubles, which represent all integers up to here."""
INTEGERS = range(-(1 << 63), 1 << 63)
FILTER_EXAMPLE = '{"must": [{"key": "year", "range": {"gte": 2020}}]}'


def as_filter(condition: Condition, kinds: Kinds) -> dict[str, Any]:
    """Translate a condition.

    Args:
        condition: a column compared with values.
        kinds: types of the columns, by name.
    """
    key = condition.column
    if condition.operator in RANGES:
        value = condition.values[0]
        if isinstance(value, int) and abs(value) > MAX_EXACT:
            return _large_range(key, condition.operator, value)
        return {"key": key, "range": {RANGES[condition.operator]: value}}
    equal: list[Any] = []
    for value in condition.values:
        # Qdrant's match only takes integers, texts and booleans, so use a range of one number.
        is_number = kinds[key] == "number"
        test = {"range": {"gte": value, "lte": value}} if is_number else {"match": {"value": value}}
        equal.append({"key": key, **test})
    if condition.operator == "=":
        return {"should": equal}
    # `must_not` alone would also return points without a value.
    return {"must_not": [*equal, {"is_empty": {"key": key}}]}


def _large_range(key: str, operator: str, value: int) -> dict[str, Any]:
    """Return a filter that orders integers beyond 2^53 exactly, although Qdrant rounds them.

    Integers near the value are matched one by one. All others are compared with a double that is
    two rounding steps away, so that rounding cannot move them across it.
    """
    sign = 1 if operator in (">", ">=") else -1
    # ulp: distance between neighboring doubles at this magnitude.
    step = int(math.ulp(float(value)))
    far = int(float(value)) + sign * 2 * step
    first = value if operator in (">=", "<=") else value + sign
    near = [each for each in range(first, far, sign) if each in INTEGERS]
    tests = [{"key": key, "match": {"any": near}}]
    # Qdrant would clip a bound outside of int64 to the last integer, which may match.
    if far in INTEGERS:
        tests.append({"key": key, "range": {RANGES[">=" if sign > 0 else "<="]: float(far)}})
    return {"should": tests}


def parse_filter(text: str) -> models.Filter:
    """Parse a filter with the client's own class, which rejects unknown fields.

    Args:
        text: a filter of Qdrant in JSON.

    Raises:
        DualencError: it is not a filter, or the client would round a number in it.
    """
    try:
        json.loads(text, object_hook=_check_range)
        return models.Filter.model_validate_json(text)
    except DualencError:
        raise
    # JSON of thousands of brackets exceeds the depth of recursion.
    except (ValueError, RecursionError) as error:
        raise DualencError(
            f"the filter is not a Qdrant filter ({one_line(error)})",
            fix=f"write for example {FILTER_EXAMPLE}",
        ) from None


def _check_range(part: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a filter; raise for bounds that the client would round to doubles."""
    bounds = part.get("range")
    for value in bounds.values() if isinstance(bounds, dict) else ():
        if isinstance(value, int) and abs(value) > MAX_EXACT:
            raise DualencError(
                f"the filter compares with {value}, and Qdrant rounds numbers beyond 2^53",
                fix="write --where for that, which compares exactly",
            )
    return part


def one_line(error: object) -> str:
    """Return the beginning of a message of the client, which may have many lines."""
    return " ".join(str(error).split())[:200]
