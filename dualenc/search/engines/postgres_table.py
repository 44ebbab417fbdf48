"""A table of pushed vectors: its columns, and its state in a comment.

id text PRIMARY KEY | embedding vector(D) or halfvec(D) | text | the user's columns
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg.sql import SQL, Composed, Identifier, Literal

from dualenc.errors import DualencError
from dualenc.search.engines.engine import State
from dualenc.search.engines.postgres_connection import PostgresConnection, compose
from dualenc.search.engines.postgres_vectors import VectorColumn
from dualenc.search.where import Kinds

COMMENT = "dualenc "
"""Prefix of the comment of a pushed table."""
COLUMN_TYPES: dict[str, tuple[Any, str, pa.DataType]] = {
    "text": ("text", "text", pa.large_string()),
    "integer": ("bigint", "int8", pa.int64()),
    "number": ("double precision", "float8", pa.float64()),
    "truth": ("boolean", "bool", pa.bool_()),
}
"""Type of each kind of column in SQL, psycopg and Arrow."""


class PostgresTable(NamedTuple):
    """A table of pushed vectors, which need not exist.

    All methods run in the caller's transaction.

        table = PostgresTable(database, "public", "papers")
        table.create(vector_column, {"year": "integer"})

    Attributes:
        database: connection.
        schema: name of the schema.
        name: name of the table.
    """

    database: PostgresConnection
    schema: str
    name: str

    @property
    def sql(self) -> Identifier:
        """Quoted name with the schema."""
        return Identifier(self.schema, self.name)

    @property
    def quoted(self) -> str:
        """Text of the quoted name, for `regclass` in queries of the catalog."""
        return self.sql.as_string(self.database.connection)

    def run(self, statement: str, *parts: Any, values: Any = None) -> Any:
        """Execute a statement whose first {} is this table."""
        return self.database.run(statement, self.sql, *parts, values=values)

    def create(self, vectors: VectorColumn, kinds: Kinds) -> None:
        """Create the table, without rows or a vector index."""
        columns = [compose("{} {} NOT NULL", vectors.name, vectors.sql_type(vectors.stored))]
        for name, kind in kinds.items():
            columns.append(compose("{} {}", name, SQL(COLUMN_TYPES[kind][0])))
        # Collation C compares bytes: ids sort the same on every server.
        self.run('CREATE TABLE {} (id text COLLATE "C" PRIMARY KEY, {})', SQL(", ").join(columns))

    def comment_query(self) -> Composed:
        """Return the query for the comment of the table, which finds no row if it is missing."""
        # `to_regclass` would be shorter, but ignores the snapshot and may find a dropped table.
        query = """
            SELECT description FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
            LEFT JOIN pg_description d
            ON objoid = c.oid AND objsubid = 0 AND classoid = 'pg_class'::regclass
            WHERE nspname = {} AND relname = {}
        """
        return compose(query, Literal(self.schema), Literal(self.name))

    def read_state(self) -> State | None:
        """Return the state in the comment; None if the table is missing, or was not pushed."""
        row = self.database.connection.execute(self.comment_query()).fetchone()
        return None if row is None else parse_comment(row[0])

    def lock_pushes(self) -> None:
        """Wait until no push changes the table, and keep others away until the transaction ends."""
        # The lock belongs to the transaction: behind a pooler, a session's would outlive its
        # client.
        lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
        self.database.run(lock, values=[f"{COMMENT}{self.name}"])

    def write_state(self, state: State) -> None:
        """Write a state into the comment."""
        # A comment is part of the transaction, of a dump, and of the table when it is renamed.
        comment = COMMENT + json.dumps(state)
        self.run("COMMENT ON TABLE {} IS {}", Literal(comment))


def find_schema(database: PostgresConnection, name: str) -> str:
    """Return the schema of the search path that has a table, or would get a new one."""
    query = """
        SELECT coalesce((
            SELECT nspname
            FROM unnest(current_schemas(false)) WITH ORDINALITY path(schema, place)
            JOIN pg_namespace n ON nspname = schema JOIN pg_class ON relnamespace = n.oid
            WHERE relname = %s ORDER BY place LIMIT 1
        ), current_schema())
    """
    [(schema,)] = database.run(query, values=[name])
    if schema is None:
        raise DualencError(
            "no schema of the search path exists",
            fix=f"write SCHEMA.{name}",
            where=database.location,
        )
    return str(schema)


def parse_comment(comment: str | None) -> State | None:
    """Return the state in the comment of a pushed table; None for other comments."""
    try:
        state = json.loads((comment or "").removeprefix(COMMENT))
        return state if isinstance(state["fingerprint"], str) and "index" in state else None
    except (ValueError, KeyError, TypeError):
        return None
