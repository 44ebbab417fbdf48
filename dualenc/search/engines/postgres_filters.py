"""WHERE clauses of PostgreSQL: conditions on columns, and the user's own SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.sql import SQL, Composable, Placeholder

from dualenc.search.engines.postgres_connection import compose
from dualenc.search.where import Condition

LIST_FORMS = {"=": "{} = ANY({})", "!=": "{} <> ALL({})"}
"""Comparisons with several values; neither is true for a missing value."""


def where_clause(filter: str, where: Sequence[Condition]) -> tuple[Composable, dict[str, Any]]:
    """Return a WHERE clause and the values of its parameters.

    Args:
        filter: a SQL expression that was checked, or "".
        where: conditions, all of which must hold.
    """
    parts: list[Composable] = [SQL("TRUE")]
    values: dict[str, Any] = {}
    for number, (column, operator, compared) in enumerate(where):
        name = f"value{number}"
        form = LIST_FORMS.get(operator, f"{{}} {operator} {{}}")
        values[name] = list(compared) if operator in LIST_FORMS else compared[0]
        parts.append(compose(form, column, Placeholder(name)))
    if filter:
        # psycopg reads a percent sign as a parameter.
        parts.append(in_parentheses(filter.replace("%", "%%")))
    return SQL(" AND ").join(parts), values


def in_parentheses(filter: str) -> SQL:
    """Return a SQL expression in parentheses."""
    # The newline ends a line comment, which would otherwise hide the closing parenthesis.
    return SQL(f"({filter}\n)")
