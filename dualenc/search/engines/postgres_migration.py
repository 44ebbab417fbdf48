"""A second column of vectors: filled while clients write, then exchanged with the first.

For a column `embedding`, a migration adds `embedding_new` and `embedding_checksum`, the checksum of
the text that the new vector belongs to. A row is pending while the checksum differs from that of
its text, so whatever clients insert or change meanwhile becomes pending by itself. A partial index
holds the pending rows. The exchange renames `embedding` to `embedding_old` and `embedding_new` to
`embedding`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from dualenc.errors import DualencError
from dualenc.search.engines.migration_record import FILLING, FINISHED, SWITCHED, Migration
from dualenc.search.engines.postgres_columns import TableColumns, check_unread, read_columns
from dualenc.search.engines.postgres_connection import compose
from dualenc.search.engines.postgres_filters import where_clause
from dualenc.search.engines.postgres_index_copies import (
    build,
    create_statement,
    indexes_of,
    is_valid,
    suffixed,
)
from dualenc.search.engines.postgres_locks import exclusively
from dualenc.search.engines.postgres_migrations import (
    create_records,
    remove_migration,
    write_migration,
)
from dualenc.search.engines.postgres_names import MAX_NAME_BYTES
from dualenc.search.engines.postgres_table import PostgresTable
from dualenc.search.where import Condition


class PendingRow(NamedTuple):
    """A row without a vector of its text.

    Attributes:
        id: its id, as text.
        text: its text; None for NULL.
        checksum: checksum of the text.
    """

    id: str
    text: str | None
    checksum: str


Vectors = Sequence[np.ndarray | None]
"""(n,) vectors (D,); None for a row that has none."""


class TableMigration:
    """The migration of a table to vectors of another model.

        migration = TableMigration(table, columns, dim=384)
        migration.start(record)
        while rows := migration.pending(limit=100):
            migration.store(rows, embed(rows))
        migration.build_indexes()
        migration.switch(embed, limit=100)

    Args:
        table: the table.
        columns: its columns; `vector` is that of the searched vectors.
        dim: D, the dimension of the new model.
        where: conditions on the rows to fill, all of which must hold.

    Raises:
        DualencError: the name of the column is too long.
    """

    def __init__(
        self,
        table: PostgresTable,
        columns: TableColumns,
        dim: int,
        where: Sequence[Condition] = (),
    ) -> None:
        self.table = table
        self.columns = columns
        self.dim = dim
        name = columns.vector.name
        self.new, self.old, self.checksum = own_columns(name)
        if len(self.checksum.encode()) > MAX_NAME_BYTES:
            raise DualencError(
                f"column {name!r} has no room for a suffix",
                fix=f"rename it to at most {MAX_NAME_BYTES - 9} bytes",
                where=table.database.location,
            )
        key = hashlib.sha256(f"{table.quoted} {name}".encode()).hexdigest()[:16]
        self.pending_index = f"dualenc_pending_{key}"
        self.condition, self.values = where_clause("", where)

    @property
    def vector_type(self) -> Composed:
        """Type of the new vectors."""
        kind = self.table.database.type(self.columns.vector.type)
        return compose("{}({})", kind, Literal(self.dim))

    @property
    def _text_checksum(self) -> Composed:
        return compose("coalesce(md5({}), '')", self.columns.text.name)

    @property
    def _is_pending(self) -> Composed:
        # Repeated exactly by each query, or PostgreSQL would not use the partial index.
        return compose("{} IS DISTINCT FROM {}", self.checksum, self._text_checksum)

    def _id_type(self) -> SQL:
        return SQL(self.columns.id.type)

    def start(self, record: Migration) -> None:
        """Add the columns and the record, unless they exist, and the index of pending rows."""
        names = {column.name for column in read_columns(self.table)}
        if self.new not in names:
            exclusively(self.table, lambda: self._add_columns(record))
        statement = compose(
            "CREATE INDEX CONCURRENTLY {} ON {} ({}) WHERE {}",
            self.pending_index,
            self.table.sql,
            self.columns.id.name,
            self._is_pending,
        )
        build(self.table, self.pending_index, statement)
        # The planner expects most rows to be pending, and would compute all checksums again, even
        # while readers wait for the switch.
        self.table.database.run("SET enable_seqscan = off; SET jit = off")

    def check_names(self) -> None:
        """Raise if columns of the names that a migration adds exist without a record."""
        taken = {column.name for column in read_columns(self.table)}
        taken &= {self.new, self.old, self.checksum}
        if taken:
            raise DualencError(
                f"has a column {sorted(taken)[0]!r}, which no recorded migration has added",
                fix="rename or drop it",
                where=self.table.database.location,
            )

    def _add_columns(self, record: Migration) -> None:
        create_records(self.table)
        add = "ALTER TABLE {} ADD COLUMN {} {}"
        self.table.run(add, self.new, self.vector_type)
        self.table.run(add, self.checksum, SQL("text"))
        self._copy_grants()
        self._write_state(migrates=record.new_model)
        write_migration(self.table, self.columns.vector.name, record)

    def _write_state(self, **changes: str | None) -> None:
        """Change entries of the state of a pushed table, None removes them; others have none."""
        state = self.table.read_state()
        if state is not None:
            changed = {**state, **changes}
            self.table.write_state({name: v for name, v in changed.items() if v is not None})

    def _copy_grants(self) -> None:
        """Grant to the new column what was granted on the old column alone."""
        query = """
            SELECT privilege_type, is_grantable,
            CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END
            FROM pg_attribute, aclexplode(attacl) WHERE attrelid = %s::regclass AND attnum = %s
        """
        values = [self.table.quoted, self.columns.vector.number]
        for privilege, is_grantable, role in self.table.database.run(query, values=values):
            option = SQL("WITH GRANT OPTION" if is_grantable else "")
            grant = "GRANT {1} ({2}) ON {0} TO {3} {4}"
            # `regrole` has quoted the role already, and PUBLIC must not be quoted.
            self.table.run(grant, SQL(privilege), Identifier(self.new), SQL(role), option)

    def pending(
        self,
        limit: int,
        after: str | None = None,
        ids: Sequence[str] | None = None,
        *,
        is_switched: bool = False,
    ) -> list[PendingRow]:
        """Return pending rows in the order of their ids.

        Args:
            limit: maximum number of rows.
            after: only rows with higher ids.
            ids: only rows with these ids.
            is_switched: return rows with a text and without a vector in the searched column.
        """
        query = """
            SELECT {id}::text, {text}, {checksum} FROM {table} WHERE {pending} AND {where}
            AND {range} ORDER BY {id} LIMIT %(limit)s
        """
        range_: Composable = SQL("TRUE")
        if ids is not None:
            range_ = compose("{} = ANY(%(ids)s::text[]::{}[])", self._id, self._id_type())
        elif after is not None:
            range_ = compose("{} > %(after)s::{}", self._id, self._id_type())
        values = {**self.values, "limit": limit, "after": after, "ids": ids}
        parts = {"pending": self._is_missing} if is_switched else {}
        return [PendingRow(*row) for row in self._run(query, values, range=range_, **parts)]

    @property
    def _is_missing(self) -> Composed:
        return compose(
            "{} IS NULL AND {} IS NOT NULL", self.columns.vector.name, self.columns.text.name
        )

    @property
    def _id(self) -> str:
        return self.columns.id.name

    def _run(self, query: str, values: Any = None, **parts: Composable) -> list[Any]:
        """Execute a query that names its parts, and return its rows."""
        statement = SQL(query).format(**{**self._names(), **parts})
        cursor = self.table.database.connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []

    def _names(self) -> dict[str, Composable]:
        """Return the parts of every query."""
        return {
            "id": Identifier(self._id),
            "text": Identifier(self.columns.text.name),
            "checksum": self._text_checksum,
            "stored": Identifier(self.checksum),
            "new": Identifier(self.new),
            "vector": Identifier(self.columns.vector.name),
            "table": self.table.sql,
            "pending": self._is_pending,
            "where": self.condition,
        }

    def count_pending(self) -> int:
        """Return the number of pending rows."""
        query = "SELECT count(*) FROM {table} WHERE {pending} AND {where}"
        [(count,)] = self._run(query, self.values)
        return int(count)

    def store(
        self, rows: Sequence[PendingRow], vectors: Vectors, *, is_switched: bool = False
    ) -> int:
        """Store the vectors of rows whose texts have not changed since they were read.

        Rows that another transaction has locked stay pending.

        Args:
            rows: n rows that `pending` returned.
            vectors: (n,) their vectors.
            is_switched: fill the searched column, of rows that have no vector there.

        Returns:
            The number of rows stored.
        """
        # Waiting for a row while others are locked could end in a deadlock with a client.
        lock = """
            SELECT {id}::text FROM {table} WHERE {id} = ANY(%(ids)s::text[]::{type}[])
            FOR NO KEY UPDATE SKIP LOCKED
        """
        update = """
            WITH given AS (
                SELECT * FROM unnest(%(ids)s::text[], %(vectors)s::text[], %(checksums)s::text[])
                AS g(id, vector, checksum)
            ), stored AS (
                UPDATE {table} SET {set} FROM given WHERE {table}.{id} = given.id::{type}
                AND coalesce(md5({table}.{text}), '') = given.checksum RETURNING 1
            ) SELECT count(*) FROM stored
        """
        set_ = "{new} = given.vector::{vector_type}, {stored} = given.checksum"
        if is_switched:
            # What a client has stored meanwhile is its own.
            set_ = "{vector} = coalesce({table}.{vector}, given.vector::{vector_type})"
        parts: dict[str, Composable] = {
            "type": self._id_type(),
            "vector_type": self.vector_type,
        }
        parts["set"] = SQL(set_).format(**self._names(), vector_type=self.vector_type)
        with self.table.database.connection.transaction():
            locked = self._run(lock, {"ids": [row.id for row in rows]}, **parts)
            own = {id for (id,) in locked}
            kept = [(row, vector) for row, vector in zip(rows, vectors) if row.id in own]
            if not kept:
                return 0
            values = {
                "ids": [row.id for row, _ in kept],
                "vectors": [None if v is None else str(v.tolist()) for _, v in kept],
                "checksums": [row.checksum for row, _ in kept],
            }
            [(count,)] = self._run(update, values, **parts)
        return int(count)

    def build_indexes(self) -> None:
        """Build the indexes of the old column over the new one, without locking writers out."""
        for index in indexes_of(self.table, self.columns.vector):
            kind = self.columns.vector.type
            statement = create_statement(self.table, index, self.new, kind, self.dim)
            build(self.table, suffixed(index.name, "_new"), statement)
        self.table.run("ANALYZE {}")

    def switch(
        self, embed: Callable[[Sequence[PendingRow]], Vectors], limit: int, record: Migration
    ) -> bool:
        """Exchange the columns in one transaction, unless rows are pending or an index is missing.

        Args:
            embed: embed the rows that have become pending at the last moment.
            limit: maximum number of these rows; readers wait while they are embedded.
            record: what to record.

        Returns:
            Whether the columns were exchanged.
        """

        def change() -> bool:
            rows = self.pending(limit + 1)
            if len(rows) > limit:
                return False
            if rows:
                self.store(rows, embed(rows))
            if self.count_pending():
                return False
            # Somebody may have made views or indexes since the start.
            check_unread(self.table, self.columns.vector)
            names = [index.name for index in indexes_of(self.table, self.columns.vector)]
            if not all(is_valid(self.table, suffixed(name, "_new")) for name in names):
                return False
            self._rename(self.columns.vector.name, self.old)
            self._rename(self.new, self.columns.vector.name)
            self._rename_indexes(names, "", "_old")
            self._rename_indexes(names, "_new", "")
            # Clients write the new vectors alone from now on.
            self.table.run("ALTER TABLE {} ALTER {} DROP NOT NULL", self.old)
            notes = {**record.notes, "indexes": names}
            self._record(record._replace(state=SWITCHED, model=record.new_model, notes=notes))
            self._write_state(fingerprint=record.notes.get("new_fingerprint"))
            return True

        return exclusively(self.table, change)

    def _record(self, record: Migration) -> None:
        write_migration(self.table, self.columns.vector.name, record)

    def _rename(self, old: str, new: str) -> None:
        self.table.run("ALTER TABLE {} RENAME COLUMN {} TO {}", old, new)

    def _rename_indexes(self, names: Sequence[str], old: str, new: str) -> None:
        """Replace the suffixes of the names of indexes; an index that is gone is left out."""
        for name in names:
            present = Identifier(self.table.schema, suffixed(name, old) if old else name)
            renamed = Identifier(suffixed(name, new) if new else name)
            rename = "ALTER INDEX IF EXISTS {} RENAME TO {}"
            self.table.database.run(rename, present, renamed)

    def switch_back(self, record: Migration) -> int:
        """Exchange the columns again; both stay.

        Returns:
            The number of rows without a vector of the old model. Those whose texts were written
            since the switch are among them.
        """

        def change() -> int:
            names = [str(name) for name in record.notes.get("indexes", ())]
            self._rename(self.columns.vector.name, self.new)
            self._rename(self.old, self.columns.vector.name)
            # What a killed `finish` has left: clients write the old vectors alone from now on.
            self.table.run("ALTER TABLE {} DROP CONSTRAINT IF EXISTS {}", self._constraint)
            self.table.run("ALTER TABLE {} ALTER {} DROP NOT NULL", self.new)
            self._rename_indexes(names, "", "_new")
            self._rename_indexes(names, "_old", "")
            # Their old vectors are of other texts. A row that was not filled has no checksum, and
            # its old vector is as it was before.
            self._run("UPDATE {table} SET {vector} = NULL WHERE {pending} AND {stored} IS NOT NULL")
            missing = self.count_missing(self.columns.vector.name)
            old_model = str(record.notes.get("old_model"))
            self._record(record._replace(state=FILLING, model=old_model))
            self._write_state(fingerprint=record.notes.get("old_fingerprint"))
            return missing

        missing = exclusively(self.table, change)
        if record.notes.get("is_required"):
            self._require_vectors()
        return missing

    @property
    def _constraint(self) -> str:
        return f"{self.pending_index}_required"

    def _require_vectors(self) -> bool:
        """Let the searched column be NOT NULL unless it has a NULL; return whether it is."""
        column = self.columns.vector.name
        constraint = self._constraint
        drop = "ALTER TABLE {} DROP CONSTRAINT IF EXISTS {}"
        # A constraint that is validated lets readers and writers go on during the scan, and spares
        # SET NOT NULL its own scan under an exclusive lock.
        add = "ALTER TABLE {} ADD CONSTRAINT {} CHECK ({} IS NOT NULL) NOT VALID"

        def begin() -> None:
            self.table.run(drop, constraint)
            self.table.run(add, constraint, column)

        def end() -> None:
            self.table.run("ALTER TABLE {} ALTER {} SET NOT NULL", column)
            self.table.run(drop, constraint)

        if self.count_missing(column):
            return False
        exclusively(self.table, begin)
        try:
            self.table.run("ALTER TABLE {} VALIDATE CONSTRAINT {}", constraint)
        except psycopg.errors.CheckViolation:
            exclusively(self.table, lambda: self.table.run(drop, constraint))
            return False
        exclusively(self.table, end)
        return True

    def discard(self) -> None:
        """Drop the new column, the checksums and the record; the old column stays."""

        def change() -> None:
            for name in (self.new, self.checksum):
                self.table.run("ALTER TABLE {} DROP COLUMN IF EXISTS {}", name)
            remove_migration(self.table, self.columns.vector.name)
            self._write_state(migrates=None)

        exclusively(self.table, change)

    def finish(self, record: Migration) -> bool:
        """Drop the old column and the checksums, with their indexes.

        Returns:
            Whether the column is NOT NULL if the old one was.
        """

        def change() -> None:
            for name in (self.old, self.checksum):
                self.table.run("ALTER TABLE {} DROP COLUMN IF EXISTS {}", name)
            self._record(record._replace(state=FINISHED))
            self._write_state(migrates=None)

        is_kept = not record.notes.get("is_required") or self._require_vectors()
        exclusively(self.table, change)
        return is_kept

    def count_missing(self, column: str) -> int:
        """Return the number of rows without a vector in a column."""
        query = "SELECT count(*) FROM {table} WHERE {column} IS NULL"
        [(count,)] = self._run(query, column=Identifier(column))
        return int(count)


def own_columns(vector: str) -> tuple[str, str, str]:
    """Return the names of new vectors, old vectors and checksums beside a column of vectors."""
    return f"{vector}_new", f"{vector}_old", f"{vector}_checksum"
