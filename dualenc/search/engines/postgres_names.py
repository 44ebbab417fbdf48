"""Names of PostgreSQL tables as users write them: TABLE or SCHEMA.TABLE, in quotes if need be."""

from __future__ import annotations

import re

from dualenc.errors import DualencError

MAX_NAME_BYTES = 63
"""PostgreSQL truncates longer names."""
_PART = r'(?:"(?:[^"]|"")+"|[^".][^.]*)'
_NAME = re.compile(rf"(?:(?P<schema>{_PART})\.)?(?P<collection>{_PART})")


def parse_name(name: str) -> dict[str, str]:
    """Split a name into schema, if any, and table, as SQL does; capitals need no quotes.

    Args:
        name: name as typed.

    Returns:
        The entries `schema` and `collection` of meta.json.

    Raises:
        DualencError: there are more than two parts, or quotes that do not match.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise DualencError(
            f"table is {name[:80]!r}",
            fix="write TABLE or SCHEMA.TABLE, with double quotes around a part that has a dot",
        )
    names = {entry: part for entry, part in match.groupdict().items() if part}
    for entry, part in names.items():
        if part.startswith('"'):
            names[entry] = part[1:-1].replace('""', '"')
    return names


def check_name(name: str) -> None:
    """Raise if PostgreSQL or its client cannot handle the name of a table or schema."""
    # psycopg reads a percent sign as a parameter, even inside a quoted name.
    if not re.fullmatch("[^\0%]+", name) or len(name.encode()) > MAX_NAME_BYTES:
        raise DualencError(
            f"table is {name[:80]!r}",
            fix=f"give a name of 1 to {MAX_NAME_BYTES} bytes without %",
        )


def written_name(schema: str, table: str) -> str:
    """Write a name in the form that `parse_name` reads; the schema may be ""."""
    parts = []
    for part in filter(None, (schema, table)):
        # Only a dot, or a quote at the beginning, would be read differently.
        is_plain = not re.search(r'^"|\.', part)
        doubled = part.replace('"', '""')
        parts.append(part if is_plain else f'"{doubled}"')
    return ".".join(parts)
