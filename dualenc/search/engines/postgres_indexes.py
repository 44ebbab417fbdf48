"""Vector indexes of a table: find, build and drop them."""

from __future__ import annotations

from psycopg.sql import SQL

from dualenc.search.engines.engine import IndexKind
from dualenc.search.engines.postgres_settings import num_lists
from dualenc.search.engines.postgres_table import PostgresTable
from dualenc.search.engines.postgres_vectors import VectorColumn

REBUILT_SHARE = 0.1
"""Fraction of added rows from which an index is rebuilt: IVF lists were trained on the old rows."""


def vector_indexes(table: PostgresTable) -> dict[str, str]:
    """Return the vector indexes by quoted name, with their kinds; "" for invalid ones."""
    # An index is invalid if building it without a lock (CONCURRENTLY) has failed.
    query = """
        SELECT indexrelid::regclass::text, CASE WHEN indisvalid THEN amname ELSE '' END
        FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = relam
        WHERE indrelid = %s::regclass AND amname IN ('hnsw', 'ivfflat')
    """
    return dict(table.database.run(query, values=[table.quoted]).fetchall())


def replace_indexes(
    table: PostgresTable, vectors: VectorColumn, kind: IndexKind, count: int
) -> None:
    """Build a vector index, and drop the others.

    Args:
        table: filled table; an IVF index is trained on its rows.
        vectors: column to index.
        kind: kind of index; "none" only drops.
        count: N, the number of rows.
    """
    others = vector_indexes(table)
    if kind != "none":
        options = f"WITH (lists = {num_lists(count)})" if kind == "ivfflat" else ""
        statement = "CREATE INDEX ON {} USING {} ({}) {}"
        table.run(statement, kind, vectors.indexed, SQL(options))
    # Drop old indexes last: the lock makes readers wait until the transaction ends.
    for name in others:
        table.database.run("DROP INDEX {}", SQL(name))
