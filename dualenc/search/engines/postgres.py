"""PostgreSQL with pgvector: push embeddings to a table, and search it with SQL conditions.

    id text PRIMARY KEY | embedding vector(D) or halfvec(D) | text | the user's columns

The comment of the table contains the fingerprint of the embeddings. A push of other embeddings
fills a second table, whose comment names the table that it will replace, and renames it once it is
complete.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.pq import Format

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, first_line
from dualenc.io.reading import check_fields
from dualenc.io.terminal import printable
from dualenc.search.engines.engine import (
    AGAIN,
    RESUME,
    Engine,
    IndexKind,
    Rows,
    Settings,
    State,
    read_pushed,
)
from dualenc.search.engines.postgres_url import connection_of, libpq_url, without_secrets
from dualenc.search.where import Condition
from dualenc.types import check_several

logger = logging.getLogger("dualenc.search")

MAX_NAME_BYTES = 63
"""PostgreSQL truncates longer names."""
MAX_DIM = {"vector": 2000, "halfvec": 4000}
"""Largest dimensions that pgvector can index, by type."""
MAX_EF_SEARCH = 1000
VALUE_TYPES: dict[str, Any] = {"halfvec": np.dtype(">f2"), "vector": np.dtype(">f4")}
OPERATORS = {"cosine": "<=>", "ip": "<#>"}
COMMENT = "dualenc "
"""Prefix of the comment of a pushed table."""
REBUILT_SHARE = 0.1
"""Fraction of added rows from which an index is rebuilt: IVF lists were trained on the old rows."""
PASSING = ("08", "40", "53", "55", "57", "58")
"""SQLSTATE classes of temporary errors: lost connection, deadlock, full disk, lock, shutdown."""
_PART = r'(?:"(?:[^"]|"")+"|[^".][^.]*)'
_NAME = re.compile(rf"(?:(?P<schema>{_PART})\.)?(?P<table>{_PART})")
COLUMN_TYPES: dict[str, tuple[Any, str, pa.DataType]] = {
    "text": ("text", "text", pa.large_string()),
    "integer": ("bigint", "int8", pa.int64()),
    "number": ("double precision", "float8", pa.float64()),
    "truth": ("boolean", "bool", pa.bool_()),
}
"""Type of each kind of column in SQL, psycopg and Arrow."""


class PostgresIndex(Engine):
    """A PostgreSQL table with a pgvector column, searched by vectors.

    An advisory lock lets one push at a time change it.

        engine, sent = push_embeddings(embeddings, "postgresql://me@localhost/db", "papers")
        hits = engine.search(vectors, k=5, filter="year >= 2020 AND lang = 'en'")

    Args:
        meta: entries of meta.json, see `Engine`, with the `type` of the vectors and the kind of
            `index`.
        target: URL of the database with a password; by default the recorded one, which has none.

    Raises:
        DualencError: a name is invalid, or the database cannot be reached.
    """

    batch_rows = 4096

    def __init__(self, meta: dict[str, Any], target: str | None = None) -> None:
        super().__init__(meta)
        self.target = libpq_url(target or meta["target"])
        self.name: str = meta["collection"]
        self.schema: str = meta.get("schema", "")
        self.location = f"{meta['target']} {_written(self.schema, self.name)!r}"
        for name in filter(None, (self.schema, self.name)):
            # psycopg reads a percent sign as a parameter, even inside a quoted name.
            if not re.fullmatch("[^\0%]+", name) or len(name.encode()) > MAX_NAME_BYTES:
                raise DualencError(
                    f"table is {name[:80]!r}",
                    fix=f"give a name of 1 to {MAX_NAME_BYTES} bytes without %",
                )
        self.stored_kinds = {**({"text": "text"} if self.has_snippets else {}), **self.column_kinds}
        # Vectors too long for pgvector's float32 index are indexed and compared in half precision.
        is_cast = self.dim > MAX_DIM["vector"] and meta["index"] != "none"
        self.compared = "halfvec" if is_cast else meta["type"]
        self.extension = ""
        with self.one_line_errors():
            self.connection = self._connect()
            self.schema = self.schema or self._schema_in_path()
        self.table = sql.Identifier(self.schema, self.name)
        # Derived from the embeddings, so that a repeated push resumes a killed one.
        beginning = self.name.encode()[:40].decode(errors="ignore")
        self.beside = f"{beginning}-{self.items_checksum[:12]}"
        self.filled = self.name

    @classmethod
    def new(cls, embeddings: Embeddings, meta: dict[str, Any], index: IndexKind) -> Self:
        if "embedding" in meta["columns"]:
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
        place = _parse_name(meta["collection"]) | {"target": without_secrets(meta["target"])}
        return cls({**meta, **place, **own}, meta["target"])

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> dict[str, Any]:
        meta = read_pushed(folder)
        path = Path(folder) / "meta.json"
        check_fields(
            {"schema": "", **meta},
            {"type": str, "index": str, "settings": dict, "schema": str},
            path,
        )
        expected = default_settings(meta["index"], meta["count"])
        if meta["type"] not in VALUE_TYPES or not set(meta["settings"]) <= set(expected):
            raise DualencError("type, index or settings are unknown", fix=AGAIN, where=path)
        check_fields(
            meta["settings"], {name: type(value) for name, value in expected.items()}, path
        )
        return meta

    def _identity(self, meta: dict[str, Any]) -> list[Any]:
        place = {"target": connection_of(meta["target"])}
        return [*super()._identity({**meta, **place}), meta.get("schema")]

    def close(self) -> None:
        self.connection.close()

    def _connect(self) -> psycopg.Connection:
        # A pooler may switch servers between statements, where prepared statements are unknown.
        options: dict[str, Any] = {"prepare_threshold": None, "client_encoding": "utf8"}
        connection = psycopg.connect(self.target, autocommit=True, **options)
        self._load_extension(connection)
        return connection

    def _load_extension(self, connection: psycopg.Connection) -> str:
        """Find the schema of pgvector and load it; return its version, or "" if it is missing."""
        query = """
            SELECT extversion, nspname FROM pg_extension
            JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'
        """
        version, self.extension = connection.execute(query).fetchone() or ("", "")
        if version:
            # A cast loads the library, which then rejects wrong settings instead of ignoring them.
            statement = sql.SQL("SELECT '[1]'::{}").format(self._type("vector"))
            connection.execute(statement)
        return version

    def _schema_in_path(self) -> str:
        """Return the schema of the search path that has the table, or would get a new one."""
        query = """
            SELECT coalesce((
                SELECT nspname
                FROM unnest(current_schemas(false)) WITH ORDINALITY path(schema, place)
                JOIN pg_namespace n ON nspname = schema JOIN pg_class ON relnamespace = n.oid
                WHERE relname = %s ORDER BY place LIMIT 1
            ), current_schema())
        """
        row = self.connection.execute(query, [self.name]).fetchone()
        if row is None or row[0] is None:
            raise DualencError(
                "no schema of the search path exists",
                fix=f"write SCHEMA.{self.name}",
                where=self.location,
            )
        return str(row[0])

    def _type(self, name: str) -> sql.Identifier:
        """Qualify a type or operator class of pgvector, which may be outside of the search path."""
        return sql.Identifier(self.extension, name)

    @property
    def vector_type(self) -> sql.Composable:
        """SQL type in which vectors are compared."""
        return sql.SQL("{}({})").format(self._type(self.compared), sql.Literal(self.dim))

    @property
    def vector(self) -> sql.Composable:
        """SQL expression that is compared and indexed.

        A query uses the index only if it repeats the indexed expression exactly.
        """
        if self.compared == self.meta["type"]:
            return sql.Identifier("embedding")
        return sql.SQL("(embedding::{})").format(self.vector_type)

    def stored_state(self) -> State | None:
        """Return the comment of the table, `fingerprint` and kind of `index`; None if missing."""
        return self._state_of(self.name)

    def _state_of(self, name: str) -> State | None:
        with self.one_line_errors():
            cursor = self.connection.execute(self._state_query(name))
            return self._as_state(cursor.fetchone())

    def _state_query(self, name: str) -> sql.Composed:
        """Return the query for the comment of a table."""
        # `to_regclass` would be shorter, but ignores the snapshot and may find a dropped table.
        query = """
            SELECT description FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
            LEFT JOIN pg_description d
            ON objoid = c.oid AND objsubid = 0 AND classoid = 'pg_class'::regclass
            WHERE nspname = {} AND relname = {}
        """
        return sql.SQL(query).format(sql.Literal(self.schema), sql.Literal(name))

    def _as_state(self, row: tuple[Any, ...] | None) -> State | None:
        if row is None:
            return None
        state = _parse_comment(row[0])
        if state is None:
            raise DualencError(
                "was not made by `dualenc push`", fix="name another --table", where=self.location
            )
        return state

    def nearest(
        self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None
    ) -> Rows:
        clause, values = condition
        operator = sql.SQL("OPERATOR({}.{})").format(
            sql.Identifier(self.extension), sql.SQL(OPERATORS[self.meta["metric"]])
        )
        distance = sql.SQL("{} {} %(query)s::{}").format(self.vector, operator, self.vector_type)
        names = ["id", *self.stored_kinds]
        columns = sql.SQL(", ").join(map(sql.Identifier, names))
        query = """
            SELECT {distance}, {columns} FROM {table}
            WHERE {condition} ORDER BY {distance} LIMIT %(k)s
        """
        statement = sql.SQL(query).format(
            distance=distance, columns=columns, table=self.table, condition=clause
        )
        parameters = [{**values, "query": str(vector.tolist()), "k": k} for vector in vectors]
        # An HNSW scan considers ef_search candidates, so fewer than k cannot fill the results.
        if settings is not None and "ef_search" in settings:
            settings["ef_search"] = min(max(settings["ef_search"], k), MAX_EF_SEARCH)
        for rows in self._read(statement, parameters, self._session(settings)):
            # Rows that others added may lack a vector and thus a distance.
            whole = [row for row in rows if row[0] is not None]
            scored = [(self._score(row[0]), dict(zip(names, row[1:]))) for row in whole]
            # An iterative scan in relaxed order returns rows only roughly sorted.
            yield sorted(scored, key=lambda row: -row[0])

    def _score(self, distance: float) -> float:
        """Convert pgvector's distance to a similarity."""
        # pgvector's <#> is the negative inner product, because index scans only ascend.
        if self.meta["metric"] == "ip":
            return -distance
        # The cosine distance of a zero vector is NaN.
        return 0.0 if math.isnan(distance) else 1 - distance

    def setting_of_option(self) -> dict[str, str]:
        options = {"hnsw": {"ef_search": "ef_search"}, "ivfflat": {"nprobe": "probes"}}
        return options.get(self.meta["index"], {})

    def _session(self, settings: Settings | None) -> sql.Composed:
        """Return statements that begin a read-only transaction; without settings, no index is used.

        The last statement reads the comment of the table, which is locked until the transaction
        ends.
        """
        # An exact search reads the whole table, which may take longer than any useful timeout.
        timeout = "60s" if settings is not None else "0"
        values = [(sql.Identifier("statement_timeout"), timeout)]
        if settings is None:
            values.append((sql.Identifier("enable_indexscan"), "off"))
        for name, value in (settings or {}).items():
            values.append((sql.Identifier(self.meta["index"], name), value))
        statements: list[sql.Composable] = [sql.SQL("SET TRANSACTION READ ONLY")]
        for parameter, value in values:
            statements.append(sql.SQL("SET LOCAL {} = {}").format(parameter, sql.Literal(value)))
        # The weakest lock: it only keeps a push from dropping or renaming the table meanwhile.
        statements.append(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(self.table))
        statements.append(self._state_query(self.name))
        return sql.SQL("; ").join(statements)

    def _begin(self, session: sql.Composed) -> None:
        """Execute the statements of a session; raise if the table holds other embeddings."""
        try:
            cursor = self.connection.execute(session)
        except psycopg.errors.UndefinedTable:
            return self.check_current(None)
        while cursor.nextset():
            pass
        return self.check_current(self._as_state(cursor.fetchone()))

    def _read(
        self, statement: sql.Composed, parameters: Sequence[Any], session: sql.Composed
    ) -> list[list[tuple[Any, ...]]]:
        """Execute a statement with several sets of parameters; reconnect once if necessary."""
        for is_last in (False, True):
            with self.one_line_errors():
                try:
                    if self.connection.closed:
                        self.connection = self._connect()
                    with self.connection.transaction():
                        self._begin(session)
                        # Binary results use the extended protocol, which rejects a second
                        # statement and thus SQL injection by ";".
                        execute = functools.partial(self.connection.execute, statement, binary=True)
                        return [execute(values).fetchall() for values in parameters]
                except psycopg.OperationalError:
                    if is_last or not self.connection.closed:
                        raise
        raise AssertionError

    def condition(
        self, filter: str, where: Sequence[Condition]
    ) -> tuple[sql.Composable, dict[str, Any]]:
        """Return the WHERE clause and the values of its parameters."""
        parts: list[sql.Composable] = [sql.SQL("TRUE")]
        values: dict[str, Any] = {}
        for number, condition in enumerate(where):
            name = f"value{number}"
            form = {"=": "{} = ANY({})", "!=": "{} <> ALL({})"}.get(condition.operator)
            values[name] = list(condition.values)
            if form is None:
                form = f"{{}} {condition.operator} {{}}"
                values[name] = condition.values[0]
            column = sql.Identifier(condition.column)
            parts.append(sql.SQL(cast(Any, form)).format(column, sql.Placeholder(name)))
        if filter:
            self.check_filter(filter)
            # psycopg reads a percent sign as a parameter. The newline ends a line comment, which
            # would otherwise hide the closing parenthesis.
            parts.append(sql.SQL(cast(Any, "({}\n)".format(filter.replace("%", "%%")))))
        return sql.SQL(" AND ").join(parts), values

    def check_filter(self, filter: str) -> None:
        """Raise a `DualencError` for a filter that is not a single SQL expression.

        It must parse both bare and in parentheses, so it cannot break out of the WHERE clause. It
        is still SQL and may read whatever the database user may read.
        """
        for form in (f"{filter}\n", f"({filter}\n)"):
            condition = sql.SQL(cast(Any, form))
            statement = sql.SQL("EXPLAIN SELECT FROM {} WHERE {}").format(self.table, condition)
            try:
                self._read(statement, [None], self._session({}))
            except DualencError as error:
                if not isinstance(error.__cause__, (psycopg.ProgrammingError, psycopg.DataError)):
                    raise
                raise DualencError(
                    f"the filter is not a SQL condition ({first_line(error.__cause__)})",
                    fix="write for example \"year >= 2020 AND lang = 'en'\"",
                ) from None

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        check_several("ids", ids)
        statement = sql.SQL("SELECT id, embedding FROM {} WHERE id = ANY(%s)").format(self.table)
        rows = self._read(statement, [[list(ids)]], self._session({}))[0]
        kind = VALUE_TYPES[self.meta["type"]]
        vector_of = {name: np.frombuffer(stored, kind, offset=4) for name, stored in rows if stored}
        self.check_all_stored(ids, vector_of)
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def texts_by_id(self) -> dict[str, str]:
        text = sql.SQL("text" if self.has_snippets else "NULL")
        statement = sql.SQL("SELECT id, {} FROM {}").format(text, self.table)
        with self.one_line_errors(), self.connection.transaction():
            self._begin(self._session(None))
            # A named cursor stays on the server, so that rows arrive in batches.
            with self.connection.cursor("dualenc_rows") as cursor:
                cursor.itersize = self.batch_rows
                return {name: text or "" for name, text in cursor.execute(statement)}

    def ladder(self) -> Iterator[Settings]:
        kind = self.meta["index"]
        if kind == "none":
            yield {}
        elif kind == "ivfflat":
            lists = self.meta["settings"]["max_probes"]
            for step in range(lists.bit_length()):
                yield {"probes": 2**step, "iterative_scan": "relaxed_order", "max_probes": lists}
        else:
            for step, ef_search in enumerate((40, 80, 160, 320, 640, 1000)):
                limits = {"max_scan_tuples": 20_000 * 4**step, "scan_mem_multiplier": 2**step}
                yield {"ef_search": ef_search, "iterative_scan": "relaxed_order", **limits}

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self.one_line_errors(RESUME), self.connection.transaction():
            # The lock belongs to the transaction: behind a pooler, a session's would outlive its
            # client. Waiting for it, and building an index, may exceed a statement timeout.
            lock = """
                SELECT pg_advisory_xact_lock(hashtextextended(%s, 0)),
                set_config('statement_timeout', '0', true)
            """
            self.connection.execute(lock, [f"{COMMENT}{self.name}"])
            yield

    def fill(self, *, beside: bool) -> State | None:
        self.filled = self.beside if beside else self.name
        return self._state_of(self.filled)

    @property
    def filled_table(self) -> sql.Identifier:
        """Table that a push fills."""
        return sql.Identifier(self.schema, self.filled)

    def create(self, embeddings: Embeddings) -> None:
        self._check_schema()
        if self.replaces:
            self._try_to_drop()
            self._drop_abandoned()
        version = self._load_extension(self.connection)
        if not version:
            self.connection.execute("CREATE EXTENSION vector")
            version = self._load_extension(self.connection)
        if tuple(map(int, version.split(".")[:2])) < (0, 8):
            raise DualencError(
                f"has pgvector {version}, and 0.8 is needed", fix="update it", where=self.location
            )
        kind = self._type(self.meta["type"])
        vector = sql.SQL("embedding {}({}) NOT NULL").format(kind, sql.Literal(self.dim))
        # Collation C compares bytes: ids sort the same on every server.
        columns = [sql.SQL('id text COLLATE "C" PRIMARY KEY'), vector]
        for name, column_kind in self.stored_kinds.items():
            column = sql.SQL("{} {}").format(
                sql.Identifier(name), sql.SQL(COLUMN_TYPES[column_kind][0])
            )
            columns.append(column)
        statement = sql.SQL("CREATE TABLE {} ({})").format(
            self.filled_table, sql.SQL(", ").join(columns)
        )
        self.connection.execute(statement)
        self._write_state({"rows": 0, "index": None, "for": self.name})

    def _check_schema(self) -> None:
        """Raise if the schema does not exist; earlier versions took the dot as part of the name."""
        query = "SELECT FROM pg_namespace WHERE nspname = %s"
        if self.connection.execute(query, [self.schema]).fetchone() is None:
            literal = _written("", f"{self.schema}.{self.name}")
            raise DualencError(
                f"schema {self.schema!r} does not exist",
                fix=f"create it, or write --table '{literal}' for a dot in the name",
                where=self.location,
            )

    def _try_to_drop(self) -> None:
        """Drop the old table and roll back, so that a dependent view fails before rows are sent."""
        with self.connection.transaction() as attempt:
            self.connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self.table))
            raise psycopg.Rollback(attempt)

    def _drop_abandoned(self) -> None:
        """Drop tables that pushes of other embeddings left; one that is still running notices."""
        query = """
            SELECT relname, description FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
            JOIN pg_description
            ON objoid = c.oid AND objsubid = 0 AND classoid = 'pg_class'::regclass
            WHERE nspname = %s AND relkind = 'r' AND starts_with(description, %s)
        """
        for name, comment in self.connection.execute(query, [self.schema, COMMENT]).fetchall():
            state = _parse_comment(comment)
            if state is not None and state.get("for") == self.name and name != self.name:
                table = sql.Identifier(self.schema, name)
                self.connection.execute(sql.SQL("DROP TABLE {}").format(table))

    def _write_state(self, state: State) -> None:
        comment = COMMENT + json.dumps({**state, "fingerprint": self.items_checksum})
        statement = sql.SQL("COMMENT ON TABLE {} IS {}").format(
            self.filled_table, sql.Literal(comment)
        )
        self.connection.execute(statement)

    def stored_ids(self, ids: Sequence[str]) -> set[str]:
        statement = sql.SQL("SELECT id FROM {} WHERE id = ANY(%s)").format(self.filled_table)
        return {name for (name,) in self.connection.execute(statement, [list(ids)])}

    def count_rows(self) -> int:
        statement = sql.SQL("SELECT count(*) FROM {}").format(self.filled_table)
        return int(self.connection.execute(statement).fetchone()[0])  # type: ignore[index]

    def remove_others(self, ids: Sequence[str]) -> None:
        kept = set(ids)
        statement = sql.SQL("SELECT id FROM {}").format(self.filled_table)
        others = [name for (name,) in self.connection.execute(statement) if name not in kept]
        statement = sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(self.filled_table)
        self.connection.execute(statement, [others])

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray) -> None:
        kind = self.meta["type"]
        name = self._type(kind).as_string(self.connection)
        oid = self.connection.execute("SELECT %s::regtype::oid", [name]).fetchone()[0]  # type: ignore[index]
        self.connection.adapters.register_dumper(None, type("Dump", (VectorDumper,), {"oid": oid}))
        # Store the vectors unscaled: pgvector's cosine normalizes them itself.
        values = batch.column("vector").flatten().to_numpy().reshape(len(batch), self.dim)
        # pgvector's binary form: dimension and a reserved int16, then big-endian floats.
        head = struct.pack(">HH", self.dim, 0)
        fields: dict[str, Sequence[Any]] = {"id": batch.column("id").to_pylist()}
        fields["embedding"] = [head + row.tobytes() for row in values.astype(VALUE_TYPES[kind])]
        types: list[int | str] = ["text", oid]
        for name, column_kind in self.stored_kinds.items():
            column = batch.column(name).cast(COLUMN_TYPES[column_kind][2])
            if column_kind == "text":
                # PostgreSQL cannot store NUL in a text.
                column = pc.replace_substring(column, "\0", "\ufffd")
            fields[name] = column.to_pylist()
            types.append(COLUMN_TYPES[column_kind][1])
        names = sql.SQL(", ").join(map(sql.Identifier, fields))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
            self.filled_table, names
        )
        with self.connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types(types)
            for row in zip(*fields.values()):
                copy.write_row(row)
        # Counted in the same transaction, for `finish` to decide whether the index is outdated.
        state = self._state_of(self.filled) or {}
        counts = {
            "rows": state.get("rows", 0) + len(batch),
            "added": state.get("added", 0) + len(batch),
        }
        self._write_state({**state, **counts})

    def finish(self, state: State) -> None:
        """Build the index, collect statistics for the planner, and swap the tables."""
        kind = self.meta["index"]
        others = self._vector_indexes()
        is_built = state["index"] == kind and (kind == "none" or kind in others.values())
        if is_built and self.filled == self.name and not state.get("added"):
            return
        if not is_built or state.get("added", 0) > REBUILT_SHARE * len(self):
            if kind != "none":
                operators = self._type(f"{self.compared}_{self.meta['metric']}_ops")
                options = f"WITH (lists = {_lists(len(self))})" if kind == "ivfflat" else ""
                parts = (self.filled_table, sql.Identifier(kind), self.vector, operators)
                statement = sql.SQL("CREATE INDEX ON {} USING {} ({} {}) {}")
                self.connection.execute(statement.format(*parts, sql.SQL(cast(Any, options))))
            # Drop old indexes last: the lock makes readers wait until the transaction ends.
            for name in others:
                self.connection.execute(sql.SQL("DROP INDEX {}").format(sql.SQL(cast(Any, name))))
            state = {**state, "index": kind, "added": 0}
        self.connection.execute(sql.SQL("ANALYZE {}").format(self.filled_table))
        if self.filled == self.beside:
            self._swap()
        self._write_state({name: value for name, value in state.items() if name != "for"})

    def _vector_indexes(self) -> dict[str, str]:
        """Return the vector indexes by quoted name, with their kinds; "" for invalid ones."""
        query = """
            SELECT indexrelid::regclass::text, CASE WHEN indisvalid THEN amname ELSE '' END
            FROM pg_index JOIN pg_class c ON c.oid = indexrelid JOIN pg_am a ON a.oid = relam
            WHERE indrelid = %s::regclass AND amname IN ('hnsw', 'ivfflat')
        """
        return dict(
            self.connection.execute(
                query, [self.filled_table.as_string(self.connection)]
            ).fetchall()
        )

    def _swap(self) -> None:
        """Replace the old table by the filled one, and keep the grants on it."""
        old = self.table.as_string(self.connection)
        self._copy_grants(old)
        query = """
            SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indexrelid
            JOIN pg_am a ON a.oid = relam
            WHERE indrelid = to_regclass(%s) AND NOT indisprimary
            AND amname NOT IN ('hnsw', 'ivfflat')
        """
        if indexes := [name for (name,) in self.connection.execute(query, [old])]:
            problem = f"the indexes on columns of the replaced table are gone: {', '.join(indexes)}"
            logger.warning("%s: %s; create them again", self.location, problem)
        self.connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self.table))
        rename = sql.SQL("ALTER TABLE {} RENAME TO {}")
        self.connection.execute(rename.format(self.filled_table, sql.Identifier(self.name)))
        self.filled = self.name

    def _copy_grants(self, old: str) -> None:
        """Grant the privileges on a table to the filled one; the owner has them anyway."""
        query = """
            SELECT privilege_type, is_grantable,
            CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END
            FROM pg_class, aclexplode(relacl) WHERE oid = to_regclass(%s) AND grantee <> relowner
        """
        for privilege, is_grantable, role in self.connection.execute(query, [old]).fetchall():
            option = "WITH GRANT OPTION" if is_grantable else ""
            statement = sql.SQL("GRANT {} ON {} TO {} {}").format(
                sql.SQL(privilege), self.filled_table, sql.SQL(role), sql.SQL(cast(Any, option))
            )
            self.connection.execute(statement)

    @contextmanager
    def one_line_errors(self, resume: str = "") -> Iterator[None]:
        """Report errors of PostgreSQL in one line.

        Args:
            resume: how to resume after a temporary error.
        """
        try:
            yield
        except psycopg.Error as error:
            reason = first_line(error)[:300]
            remedy = ""
            # An error without a SQLSTATE comes from the client: the connection was lost.
            is_temporary = (error.sqlstate or "08")[:2] in PASSING
            if isinstance(error, psycopg.OperationalError) and is_temporary:
                remedy = resume
            if "password authentication failed" in reason or "no password supplied" in reason:
                remedy = "give the right one in the URL, in PGPASSWORD or in ~/.pgpass"
            raise DualencError(reason, fix=remedy, where=self.location) from error


def _parse_name(name: str) -> dict[str, str]:
    """Split a name into schema, if any, and table, as SQL does; capitals need no quotes."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise DualencError(
            f"table is {name[:80]!r}",
            fix="write TABLE or SCHEMA.TABLE, with double quotes around a part that has a dot",
        )
    parts = {"schema": match["schema"], "collection": match["table"]}
    names = {entry: part for entry, part in parts.items() if part}
    for entry, part in names.items():
        if part.startswith('"'):
            names[entry] = part[1:-1].replace('""', '"')
    return names


def _written(schema: str, table: str) -> str:
    """Write a name in the form that `_parse_name` reads."""
    return ".".join(quoted_name(part) for part in (schema, table) if part)


def quoted_name(name: str) -> str:
    """Return the name of a table, in quotes if it has a dot or begins with a quote."""
    if not re.search(r'^"|\.', name):
        return name
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _parse_comment(comment: str | None) -> State | None:
    """Return the state in the comment of a pushed table; None for other comments."""
    try:
        state = json.loads((comment or "").removeprefix(COMMENT))
        return state if isinstance(state["fingerprint"], str) and "index" in state else None
    except (ValueError, KeyError, TypeError):
        return None


class VectorDumper(Dumper):
    """psycopg adapter for vectors that already have pgvector's binary form.

    The type's oid differs by database, so a subclass with it is registered per connection.

        connection.adapters.register_dumper(None, type("Dump", (VectorDumper,), {"oid": oid}))
    """

    format = Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        """Return the bytes unchanged."""
        return obj


def _lists(count: int) -> int:
    """Return the number of IVF lists that pgvector's documentation recommends for N rows."""
    return max(count // 1000, 1) if count <= 1_000_000 else int(count**0.5)


def default_settings(kind: IndexKind, count: int) -> Settings:
    """Return the default search settings of an index; scans continue until k rows meet the filter.

    Args:
        kind: kind of pgvector's index.
        count: N, the number of rows.
    """
    if kind == "hnsw":
        scan = {
            "iterative_scan": "relaxed_order",
            "max_scan_tuples": 20_000,
            "scan_mem_multiplier": 1,
        }
        return {"ef_search": 100, **scan}
    if kind == "ivfflat":
        probes = max(int(_lists(count) ** 0.5), 1)
        return {"probes": probes, "iterative_scan": "relaxed_order", "max_probes": _lists(count)}
    return {}
