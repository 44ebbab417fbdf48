"""Vector indexes of one column, built again for another column of the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from psycopg.sql import SQL, Composed, Identifier, Literal

from dualenc.errors import DualencError
from dualenc.search.engines.postgres_columns import Column
from dualenc.search.engines.postgres_connection import compose
from dualenc.search.engines.postgres_names import MAX_NAME_BYTES
from dualenc.search.engines.postgres_table import PostgresTable
from dualenc.search.engines.postgres_vectors import MAX_DIM

_OPERATORS = re.compile(r"(vector|halfvec)_(\w+)_ops")
_CAST = re.compile(r'\(?\(?("(?:[^"]|"")+"|\w+)\)?::(?:[^()]+\.)?halfvec\(\d+\)\)?')
_OPTION = re.compile(r"(\w+)=(\w+)")


class VectorIndex(NamedTuple):
    """A vector index as the catalog describes it.

    Attributes:
        name: its name.
        kind: "hnsw" or "ivfflat".
        distance: distance of its operator class, such as "cosine".
        options: parameters, such as ("m", "16").
        predicate: condition of a partial index as PostgreSQL writes it; "" for all rows.
        compared: type in which it compares, "vector" or "halfvec".
    """

    name: str
    kind: str
    distance: str
    options: tuple[tuple[str, str], ...]
    predicate: str
    compared: str


def indexes_of(table: PostgresTable, column: Column) -> list[VectorIndex]:
    """Return the valid vector indexes of a column.

    Raises:
        DualencError: an index of the column cannot be built for another one.
    """
    found = []
    for name, index in _read_indexes(table, column):
        if index is None:
            raise DualencError(
                f"index {name!r} of the vectors cannot be built for others",
                fix="only hnsw and ivfflat indexes of the column, or of its cast to halfvec, can; "
                "drop it, and create it again after the migration",
                where=table.database.location,
            )
        found.append(index)
    return found


def indexes_of_all_rows(table: PostgresTable, column: Column) -> list[VectorIndex]:
    """Return the valid vector indexes of a column, or its cast, that hold all rows."""
    found = (index for _, index in _read_indexes(table, column))
    return [index for index in found if index is not None and not index.predicate]


def _read_indexes(table: PostgresTable, column: Column) -> Iterator[tuple[str, VectorIndex | None]]:
    """Yield the valid indexes of a column by name; None for other kinds of indexes."""
    query = """
        SELECT c.relname, amname, opcname, coalesce(c.reloptions, '{}'),
        coalesce(pg_get_expr(indpred, indrelid), ''), pg_get_indexdef(indexrelid, 1, true),
        indkey[0] = %(number)s, indnatts
        FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = relam
        JOIN pg_opclass o ON o.oid = indclass[0]
        WHERE indrelid = %(table)s::regclass AND indisvalid AND EXISTS (
            SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = indexrelid
            AND refclassid = 'pg_class'::regclass AND refobjid = indrelid
            AND refobjsubid = %(number)s
        ) ORDER BY indexrelid
    """
    values = {"table": table.quoted, "number": column.number}
    # The braces of an empty array are not parts of a statement.
    for row in table.database.connection.execute(query, values):
        name, kind, operators, options, predicate, expression, is_plain, width = row
        compares = _OPERATORS.fullmatch(operators)
        is_known = (
            kind in ("hnsw", "ivfflat")
            and width == 1
            and (is_plain or _CAST.fullmatch(expression) is not None)
            and column.name not in predicate
            and all(map(_OPTION.fullmatch, options))
        )
        if compares is None or not is_known:
            yield name, None
            continue
        pairs = tuple(tuple(option.split("=", 1)) for option in options)
        yield name, VectorIndex(name, kind, compares[2], pairs, predicate, compares[1])


def check_dim(table: PostgresTable, kind: str, dim: int, indexes: list[VectorIndex]) -> None:
    """Raise if pgvector cannot store or index vectors of a dimension."""
    limit = MAX_DIM["halfvec"] if indexes else 16_000
    if dim > limit:
        raise DualencError(
            f"pgvector takes {kind} up to {limit:,} dimensions here, and the new model has {dim:,}",
            fix="choose another model, or drop the index",
            where=table.database.location,
        )


def create_statement(
    table: PostgresTable, index: VectorIndex, column: str, kind: str, dim: int
) -> Composed:
    """Return the statement that builds the same index over another column, without locking writers.

    Args:
        table: the table.
        index: the index to copy.
        column: name of the other column.
        kind: its type, "vector" or "halfvec".
        dim: its dimension.
    """
    database = table.database
    compared = "halfvec" if dim > MAX_DIM[kind] else kind
    expression = compose("{}", column)
    if compared != kind:
        # Vectors too long for pgvector's float32 index are compared in half precision.
        expression = compose("({}::{}({}))", column, database.type(compared), Literal(dim))
    options = SQL(", ").join(compose("{} = {}", key, SQL(value)) for key, value in index.options)
    return compose(
        "CREATE INDEX CONCURRENTLY {} ON {} USING {} ({} {}) {} {}",
        suffixed(index.name, "_new"),
        table.sql,
        index.kind,
        expression,
        database.type(f"{compared}_{index.distance}_ops"),
        compose("WITH ({})", options) if index.options else SQL(""),
        # PostgreSQL's own text of the condition that the table's owner has given.
        SQL(f"WHERE {index.predicate}" if index.predicate else ""),
    )


def suffixed(name: str, suffix: str) -> str:
    """Append a suffix to a name, which is cut to PostgreSQL's limit."""
    kept = name.encode()[: MAX_NAME_BYTES - len(suffix)]
    return kept.decode(errors="ignore") + suffix


def is_valid(table: PostgresTable, name: str) -> bool | None:
    """Return True if an index of the table is built, False if its build failed, None if missing."""
    query = """
        SELECT indisvalid FROM pg_index JOIN pg_class c ON c.oid = indexrelid
        WHERE indrelid = %s::regclass AND relname = %s
    """
    row = table.database.run(query, values=[table.quoted, name]).fetchone()
    return None if row is None else bool(row[0])


def build(table: PostgresTable, name: str, statement: Composed) -> None:
    """Build an index unless it is built; drop first what a killed build has left."""
    state = is_valid(table, name)
    if state is False:
        dropped = Identifier(table.schema, name)
        table.database.run("DROP INDEX CONCURRENTLY IF EXISTS {}", dropped)
    if not state:
        table.database.connection.execute(statement)
