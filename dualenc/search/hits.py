"""Hits: the results of a search, of an index as of an engine."""

from __future__ import annotations

from typing import Any, NamedTuple


class Hit(NamedTuple):
    """One result.

    Attributes:
        id: of the item.
        score: higher is nearer.
        snippet: the text to show, if texts are kept.
        columns: the values of kept columns by name; missing ones are left out.
    """

    id: str
    score: float
    snippet: str
    columns: dict[str, Any]


def as_hit(id: str, score: float, text: str | None, columns: dict[str, Any]) -> Hit:
    """A hit of a stored item, whose columns may have missing values."""
    return Hit(id, score, text or "", {name: value for name, value in columns.items() if value is not None})
