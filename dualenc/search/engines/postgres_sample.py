"""Rows of a table to measure a migration with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.sql import SQL, Composable, Identifier

from dualenc.search.engines.migration_record import SampledRow, Whole
from dualenc.search.engines.postgres_connection import compose
from dualenc.search.engines.postgres_index_copies import indexes_of
from dualenc.search.engines.postgres_migration import TableMigration
from dualenc.search.engines.postgres_vectors import OPERATORS
from dualenc.types import Vectors


class PostgresSample:
    """Rows of a table with their old vectors; see `dualenc.workflows.measure_table.Rows`.

    Args:
        migration: the migration of the table.
        whole: function that returns whole texts.
    """

    def __init__(self, migration: TableMigration, whole: Whole) -> None:
        self.migration = migration
        self.whole = whole
        indexes = indexes_of(migration.table, migration.columns.vector)
        self.distance = indexes[0].distance if indexes else "cosine"
        self.dim = migration.columns.vector.dim

    def _select(self, query: str, values: Any = None, **parts: Composable) -> list[Any]:
        """Execute a query that names its parts, and return its rows."""
        columns = self.migration.columns
        known = {
            "id": Identifier(columns.id.name),
            "text": Identifier(columns.text.name),
            "vector": Identifier(columns.vector.name),
            "table": self.migration.table.sql,
            "where": self.migration.condition,
        }
        statement = SQL(query).format(**{**known, **parts})
        connection = self.migration.table.database.connection
        return connection.execute(statement, values).fetchall()

    def count(self) -> int:
        """Return the number of rows."""
        [(count,)] = self._select("SELECT count(*) FROM {table}")
        return int(count)

    def ids(self) -> list[str]:
        """Return the ids of all rows."""
        return [id for (id,) in self._select("SELECT {id}::text FROM {table}")]

    def draw(self, size: int, others: Sequence[str]) -> list[SampledRow]:
        """Return a sample of rows with text and vector, and those with other ids."""
        query = """
            SELECT {id}::text, {text}, {vector}::real[] FROM {table}
            WHERE {where} AND {vector} IS NOT NULL AND {text} IS NOT NULL
        """
        values = {**self.migration.values, "size": size}
        # An order that does not depend on how rows are stored.
        drawn = self._select(f"{query} ORDER BY md5({{id}}::text) LIMIT %(size)s", values)
        values["ids"] = sorted(set(others) - {row[0] for row in drawn})
        if values["ids"]:
            drawn += self._select(f"{query} AND {{id}}::text = ANY(%(ids)s)", values)
        return [SampledRow(id, self.whole(id, text) or "", vector) for id, text, vector in drawn]

    def nearest(self, vectors: Vectors, count: int) -> list[list[str]]:
        """Return the ids of the nearest rows of vectors (Q, D) of the old model."""
        column = self.migration.columns.vector
        database = self.migration.table.database
        statement = compose(
            "SELECT {}::text FROM {} ORDER BY {} OPERATOR({}.{}) %s::{} LIMIT %s",
            self.migration.columns.id.name,
            self.migration.table.sql,
            column.name,
            database.extension,
            SQL(OPERATORS[self.distance]),
            database.type(column.type),
        )
        found = []
        for vector in vectors:
            rows = database.connection.execute(statement, [str(vector.tolist()), count])
            found.append([id for (id,) in rows])
        return found
