"""Checks for filters that arrive over HTTP: from strangers, not from the user of the command line."""

from __future__ import annotations

import re

from dualenc.errors import DualencError

MAX_FILTER_CHARACTERS = 2000
_SQL_TOKEN = re.compile(r"\s+|'(?:[^']|'')*'|`\w+`|\w+(?:\.\d+)?|[<>!]=|<>|[=<>(),-]")
_SQL_CALL = re.compile(r"(?!(?:and|or|not|in)\b)\b\w+\s*\(|`\s*\(", re.IGNORECASE)


def check_length(filter: str) -> None:
    """Refuse a filter that is too long."""
    if len(filter) > MAX_FILTER_CHARACTERS:
        raise DualencError(f"the filter has {len(filter):,} characters; at most {MAX_FILTER_CHARACTERS:,} are allowed")


def check_sql(filter: str) -> None:
    """Refuse SQL that does more than compare columns with literals.

    LanceDB evaluates SQL functions, too: `length(repeat(id, 100000000)) > 3` over a thousand rows makes it allocate
    389 GB and abort the process, which no `except` catches.

    Raises:
        DualencError: a function call, arithmetic, or a character that comparisons do not need.
    """
    check_length(filter)
    if _SQL_TOKEN.sub("", filter) or _SQL_CALL.search(re.sub(r"'(?:[^']|'')*'", "''", filter)):
        raise DualencError("the filter may compare columns with literals, by =, <, IN, LIKE, IS NULL, AND, OR and NOT")
