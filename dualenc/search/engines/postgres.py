"""PostgreSQL with pgvector: push embeddings to a table, and search it with SQL conditions.

The comment of the table contains the fingerprint of the embeddings. A push of other embeddings
fills a second table, whose comment names the table that it will replace, and renames it once it is
complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.sql import SQL, Composable, Composed, Identifier

from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, first_line
from dualenc.io.provenance import META, Provenance
from dualenc.io.reading import check_fields
from dualenc.io.terminal import printable
from dualenc.search.engines.engine import RESUME, Engine, IndexKind, Rows, Settings, State
from dualenc.search.engines.migration_record import FINISHED, REVERSIBLE, SWITCHED
from dualenc.search.engines.postgres_connection import PostgresConnection, compose
from dualenc.search.engines.postgres_filters import in_parentheses, where_clause
from dualenc.search.engines.postgres_indexes import REBUILT_SHARE, replace_indexes, vector_indexes
from dualenc.search.engines.postgres_locks import is_migrating
from dualenc.search.engines.postgres_migrations import read_migrations, remove_migrations
from dualenc.search.engines.postgres_names import check_name, parse_name, written_name
from dualenc.search.engines.postgres_rows import copy_rows
from dualenc.search.engines.postgres_settings import (
    MAX_EF_SEARCH,
    OPTIONS,
    default_settings,
    ladder,
    set_settings,
)
from dualenc.search.engines.postgres_swap import (
    abandoned_tables,
    check_droppable,
    drop_abandoned,
    replace_table,
)
from dualenc.search.engines.postgres_table import (
    PostgresTable,
    find_schema,
    parse_comment,
)
from dualenc.search.engines.postgres_url import connection_of, without_secrets
from dualenc.search.engines.postgres_vectors import MAX_DIM, VALUE_TYPES, VectorColumn
from dualenc.search.engines.postgres_version import UPDATE, hnsw_problem
from dualenc.search.engines.pushed_folder import AGAIN, ENTRIES, read_pushed
from dualenc.search.where import Condition, Kind
from dualenc.types import StrPath

logger = logging.getLogger("dualenc.search")


class PostgresIndex(Engine):
    """A PostgreSQL table with a pgvector column, searched by vectors.

    An advisory lock lets one push at a time change it.

        engine, sent = push_embeddings(embeddings, "postgresql://me@localhost/db", "papers")
        hits = engine.search(vectors, k=5, filter="year >= 2020 AND lang = 'en'")

    Args:
        provenance: see `Engine`, with the `type` of the vectors and the kind of `index`.
        target: URL of the database with a password; by default the recorded one, which has none.
        replaces: whether a push may replace other embeddings.

    Raises:
        DualencError: a name is invalid, or the database cannot be reached.
    """

    batch_rows = 4096
    name_bytes = 40

    def __init__(
        self, provenance: Provenance, target: str | None = None, *, replaces: bool = False
    ) -> None:
        super().__init__(provenance, replaces=replaces)
        schema = provenance.schema
        self.location = f"{provenance.target} {written_name(schema, self.name)!r}"
        for name in filter(None, (schema, self.name)):
            check_name(name)
        self.database = PostgresConnection(target or provenance.target, self.location)
        self._describe(self.provenance)
        with self.database.one_line_errors():
            schema = schema or find_schema(self.database, self.name)
        self.table = PostgresTable(self.database, schema, self.name)

    def _describe(self, provenance: Provenance) -> None:
        """Take over what is recorded of the columns and the index."""
        self.provenance = provenance
        self.dim = provenance.dim
        self.items_checksum = provenance.fingerprint
        self.column_kinds = cast("dict[str, Kind]", provenance.columns)
        self.has_snippets = provenance.has_snippets
        self.index: IndexKind = provenance.index or "none"
        self.setting_of_option = OPTIONS.get(self.index, {})
        self.stored_kinds = self.column_kinds
        if self.has_snippets:
            self.stored_kinds = {"text": "text", **self.column_kinds}
        self.vector_column = VectorColumn(
            self.database,
            name="embedding",
            stored=provenance.type,
            dim=self.dim,
            metric=provenance.metric,
            is_indexed=self.index != "none",
        )
        self.id = compose("{}", "id")
        self.id_type = "text"
        self.text = compose("{}", "text")
        self.shown_text = self.text

    @property
    def filled_table(self) -> PostgresTable:
        """Table that a push fills."""
        return self.table._replace(name=self.filled)

    @classmethod
    def new(
        cls, embeddings: Embeddings, provenance: Provenance, index: IndexKind, *, replaces: bool
    ) -> Self:
        if "embedding" in provenance.columns:
            raise DualencError(
                "column 'embedding' is reserved for the vectors", fix="rename it and embed again"
            )
        if index != "none" and embeddings.dim > MAX_DIM["halfvec"]:
            raise DualencError(
                f"pgvector indexes up to {MAX_DIM['halfvec']} dimensions",
                fix=f"embed with --dim {MAX_DIM['halfvec']}, or push with --index none",
            )
        for name in embeddings.ids:
            if "\0" in name:
                raise DualencError(
                    f"id '{printable(name)[:80]}' has a NUL, which PostgreSQL cannot store",
                    fix="rename it and embed again",
                )
        # Store the precision of the embeddings: half the space for float16.
        kind = "halfvec" if embeddings.vectors.dtype == np.float16 else "vector"
        own = {"type": kind, "index": index, "settings": default_settings(index, len(embeddings))}
        target = provenance.target
        place = parse_name(provenance.collection) | {"target": without_secrets(target)}
        return cls(provenance.updated(**place, **own), target, replaces=replaces)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self.database.one_line_errors(RESUME), self.database.connection.transaction():
            # Waiting for the lock, and building an index, may exceed a statement timeout.
            self.database.run("SELECT set_config('statement_timeout', '0', true)")
            self.table.lock_pushes()
            yield

    def state_of(self, name: str) -> State | None:
        """Return the comment of a table, `fingerprint` and kind of `index`; None if missing."""
        with self.database.one_line_errors():
            query = self._state_query(self.table._replace(name=name))
            return self._fetch_state(self.database.connection.execute(query))

    def _state_query(self, table: PostgresTable) -> Composed:
        """Return the query for the state of a table, which finds no row if it is missing."""
        return table.comment_query()

    def _fetch_state(self, cursor: psycopg.Cursor[Any]) -> State | None:
        """Return the state that the query has found."""
        row = cursor.fetchone()
        if row is None:
            return None
        state = parse_comment(row[0])
        if state is None:
            raise self.not_ours()
        return state

    def create(self, embeddings: Embeddings) -> None:
        self._check_schema()
        if self.replaces:
            check_droppable(self.table)
            drop_abandoned(self.table)
        version = self.database.load_extension()
        if not version:
            self.database.run("CREATE EXTENSION vector")
            version = self.database.load_extension()
        self._check_version(version)
        if self.filled == self.name:
            # Of a table of this name that somebody has dropped.
            remove_migrations(self.table)
        self.filled_table.create(self.vector_column, self.stored_kinds)
        self._write_state({"rows": 0, "index": None, "for": self.name})

    def _check_version(self, version: str) -> None:
        """Raise for a pgvector that is too old; warn of one that may corrupt the index."""
        # Iterative scans, without which filters leave too few results, came with 0.8.
        if tuple(map(int, version.split(".")[:2])) < (0, 8):
            raise DualencError(
                f"has pgvector {version}, and 0.8 is needed", fix="update it", where=self.location
            )
        problem = hnsw_problem(version)
        if problem and self.index == "hnsw":
            logger.warning("%s: %s; %s", self.location, problem, UPDATE)

    def _check_schema(self) -> None:
        """Raise if the schema does not exist; earlier versions took the dot as part of the name."""
        schema = self.table.schema
        query = "SELECT FROM pg_namespace WHERE nspname = %s"
        if self.database.run(query, values=[schema]).fetchone() is None:
            literal = written_name("", f"{schema}.{self.name}")
            raise DualencError(
                f"schema {schema!r} does not exist",
                fix=f"create it, or write --table '{literal}' for a dot in the name",
                where=self.location,
            )

    def _write_state(self, state: State) -> None:
        self.filled_table.write_state({**state, "fingerprint": self.items_checksum})

    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        query = "SELECT id FROM {} WHERE id = ANY(%s)"
        return {name for (name,) in self.filled_table.run(query, values=[list(ids)])}

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        copy_rows(self.filled_table, self.vector_column, self.stored_kinds, batch)
        # Counted in the same transaction, for `build_index` to decide whether it is outdated.
        state = self.state_of(self.filled) or {}
        counts = {name: state.get(name, 0) + len(batch) for name in ("rows", "added")}
        self._write_state({**state, **counts})

    def count_rows(self) -> int:
        [(count,)] = self.filled_table.run("SELECT count(*) FROM {}")
        return int(count)

    def remove_others(self, ids: Sequence[str]) -> None:
        kept = set(ids)
        # Compared here, because a statement with all ids that stay would be large.
        stored = self.filled_table.run("SELECT id FROM {}")
        others = [name for (name,) in stored if name not in kept]
        self.filled_table.run("DELETE FROM {} WHERE id = ANY(%s)", values=[others])

    def build_index(self, state: State) -> None:
        """Build the index, and collect statistics for the planner."""
        is_built = state["index"] == self.index
        if self.index != "none":
            # The state says what a push has built, not what somebody has dropped since.
            is_built &= self.index in vector_indexes(self.filled_table).values()
        if is_built and self.filled == self.name and not state.get("added"):
            return
        if not is_built or state.get("added", 0) > REBUILT_SHARE * len(self):
            replace_indexes(self.filled_table, self.vector_column, self.index, len(self))
            state = {**state, "index": self.index, "added": 0}
        self.filled_table.run("ANALYZE {}")
        # Without "for", so that no later push drops the table as abandoned.
        self._write_state({name: value for name, value in state.items() if name != "for"})

    def swap(self) -> None:
        replace_table(self.table, self.filled_table)
        remove_migrations(self.table)

    def _check_opened(self, folder: StrPath) -> None:
        super()._check_opened(folder)
        with self.database.one_line_errors():
            self._check_version(self.database.load_extension())
            if self.provenance.live:
                self.count_vectors()

    def count_vectors(self) -> None:
        """Record how many rows have a vector now."""
        [(count,)] = self.table.run("SELECT count({1}) FROM {0}", self.vector_column.name)
        self.record(count=int(count))

    def hold_snapshot(self) -> None:
        # Whatever is read until the connection is closed is as of now, also while clients write.
        with self.database.one_line_errors():
            self.database.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def checksum(self) -> str:
        if not self.provenance.live:
            return super().checksum()
        # Summed, so that the order of the rows does not matter.
        query = """
            SELECT count(*), sum(('x' || left(md5({}::text || md5({}({}))), 15))::bit(60)::bigint)
            FROM {}
        """
        column = self.vector_column
        send = Identifier(self.database.extension, f"{column.stored}_send")
        statement = compose(query, self.id, send, column.name, self.table.sql)
        [[row]] = self._read(statement, [None], None)
        return digest_of(self.items_checksum, *map(str, row))

    def count_missing(self) -> int:
        query = """
            SELECT count(*) FROM {} WHERE {} IS NULL AND btrim({}, E' \\t\\r\\n') <> ''
        """
        if not self.has_snippets:
            return 0
        statement = compose(query, self.table.sql, self.vector_column.name, self.text)
        [[(count,)]] = self._read(statement, [None], None)
        return int(count)

    def leftovers(self) -> list[str]:
        with self.database.one_line_errors():
            return abandoned_tables(self.table)

    def migration(self) -> tuple[bool, str]:
        with self.database.one_line_errors():
            record = read_migrations(self.table, is_reader=True).get(self.vector_column.name)
            if record is None or record.state == FINISHED:
                return super().migration()
            if record.state == SWITCHED:
                old = record.notes["old_model"]
                return False, f"{record.new_model} has replaced {old}; {REVERSIBLE}"
            if is_migrating(self.table):
                return False, "`dualenc migrate` is running"
        # The names of indexes are recorded by the switch.
        if "indexes" in record.notes:
            return False, f"one to {record.new_model} was rolled back; its vectors are kept"
        return True, f"half migrated to {record.new_model}; the same `dualenc migrate` resumes"

    def _identity(self, recorded: Provenance) -> list[Any]:
        reached = recorded.updated(target=connection_of(recorded.target))
        return [*super()._identity(reached), recorded.schema]

    @classmethod
    def read(cls, folder: StrPath) -> Provenance:
        recorded = read_pushed(folder, [*ENTRIES, "type", "index", "settings"])
        path = Path(folder) / META
        settings = recorded.settings
        expected = default_settings(recorded.index or "none", recorded.count)
        if recorded.type not in VALUE_TYPES or not set(settings) <= set(expected):
            raise DualencError("type, index or settings are unknown", fix=AGAIN, where=path)
        check_fields(settings, {name: type(value) for name, value in expected.items()}, path)
        return recorded

    def condition(
        self, filter: str, where: Sequence[Condition]
    ) -> tuple[Composable, dict[str, Any]]:
        """Return the WHERE clause and the values of its parameters."""
        if filter:
            self.check_filter(filter)
        return where_clause(filter, where)

    def check_filter(self, filter: str) -> None:
        """Raise a `DualencError` for a filter that is not a single SQL expression.

        It must parse both bare and in parentheses, so it cannot break out of the WHERE clause. It
        is still SQL and may read whatever the database user may read.
        """
        for condition in (SQL(f"{filter}\n"), in_parentheses(filter)):
            statement = compose("EXPLAIN SELECT FROM {} WHERE {}", self.table.sql, condition)
            try:
                self._read(statement, [None], {})
            except DualencError as error:
                if not isinstance(error.__cause__, (psycopg.ProgrammingError, psycopg.DataError)):
                    raise
                raise DualencError(
                    f"the filter is not a SQL condition ({first_line(error.__cause__)})",
                    fix="write for example \"year >= 2020 AND lang = 'en'\"",
                ) from None

    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        clause, values = condition
        names = ["id", *self.stored_kinds]
        shown = {"id": compose("{}::text", self.id), "text": self.shown_text}
        columns = SQL(", ").join(shown.get(name, Identifier(name)) for name in names)
        query = "SELECT {0}, {1} FROM {2} WHERE {3} ORDER BY {0} LIMIT %(k)s"
        statement = compose(query, self.vector_column.distance, columns, self.table.sql, clause)
        parameters = [{**values, "query": str(vector.tolist()), "k": k} for vector in vectors]
        # An HNSW scan considers ef_search candidates, so fewer than k cannot fill the results.
        if settings is not None and "ef_search" in settings:
            settings["ef_search"] = min(max(settings["ef_search"], k), MAX_EF_SEARCH)
        similarity = self.vector_column.similarity
        for rows in self._read(statement, parameters, settings):
            scored = []
            for distance, *row in rows:
                # Rows that others added may lack a vector and thus a distance.
                if distance is not None:
                    scored.append((similarity(distance), dict(zip(names, row))))
            # An iterative scan in relaxed order returns rows only roughly sorted.
            yield sorted(scored, key=lambda row: -row[0])

    def _read(
        self, statement: Composed, parameters: Sequence[Any], settings: Settings | None
    ) -> list[list[Any]]:
        """Execute a statement with several sets of parameters in a transaction that only reads."""

        def read() -> list[list[Any]]:
            self._begin(settings)
            execute = self.database.connection.execute
            # Binary results use the extended protocol, which rejects a second statement and thus
            # SQL injection by ";".
            return [execute(statement, values, binary=True).fetchall() for values in parameters]

        return self.database.read(read)

    def _begin(self, settings: Settings | None) -> None:
        """Begin a read-only transaction; raise if the table holds other embeddings."""
        # The weakest lock: it only keeps a push from dropping or renaming the table until the
        # transaction ends. The comment is read under it.
        session = compose(
            "SET TRANSACTION READ ONLY; {}; LOCK TABLE {} IN ACCESS SHARE MODE; {}",
            set_settings(self.index, settings),
            self.table.sql,
            self._state_query(self.table),
        )
        try:
            cursor = self.database.connection.execute(session)
        except psycopg.errors.UndefinedTable:
            self.check_state(None)
        # Sent in one round trip; only the last statement returns a row.
        while cursor.nextset():
            pass
        self.check_state(self._fetch_state(cursor))

    def ladder(self) -> Iterator[Settings]:
        return ladder(self.index, dict(self.provenance.settings))

    def texts_by_id(self) -> dict[str, str]:
        # Rows that others have added may lack a vector, and cannot be searched.
        query = "SELECT {}::text, {} FROM {} WHERE {} IS NOT NULL"
        text = self.text if self.has_snippets else SQL("NULL")
        statement = compose(query, self.id, text, self.table.sql, self.vector_column.name)
        connection = self.database.connection
        with self.database.one_line_errors(), connection.transaction():
            self._begin(None)
            # A named cursor stays on the server, so that rows arrive in batches.
            with connection.cursor("dualenc_rows") as cursor:
                cursor.itersize = self.batch_rows
                return {name: text or "" for name, text in cursor.execute(statement)}

    def vectors_by_id(self, ids: Sequence[str]) -> Mapping[str, Any]:
        query = "SELECT {0}::text, {1} FROM {2} WHERE {0} = ANY(%s::text[]::{3}[])"
        names = (self.id, self.vector_column.name, self.table.sql, SQL(self.id_type))
        [rows] = self._read(compose(query, *names), [[list(ids)]], {})
        # Rows that others added may lack a vector.
        return {name: self.vector_column.decode(stored) for name, stored in rows if stored}

    def close(self) -> None:
        self.database.connection.close()
