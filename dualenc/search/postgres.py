"""PostgreSQL with pgvector: push embeddings to a table, and search it with SQL conditions.

    id text PRIMARY KEY | embedding vector(D) or halfvec(D) | text | the user's columns

The comment of the table holds the fingerprint of the embeddings and the number of stored rows. It changes in the
transaction that stores the rows, so that a push resumes behind the last row that the server has committed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import quote, urlencode

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, Format

from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError, first_line
from dualenc.reading import check_fields
from dualenc.search.pushed import AGAIN, Engine, IndexKind, Rows, Settings, read_pushed
from dualenc.search.where import Condition

MAX_NAME_BYTES = 63
"""PostgreSQL cuts longer names off."""
MAX_DIM = {"vector": 2000, "halfvec": 4000}
"""The largest vectors that pgvector indexes."""
MAX_EF_SEARCH = 1000
VALUE_TYPES: dict[str, Any] = {"halfvec": np.dtype(">f2"), "vector": np.dtype(">f4")}
OPERATORS = {"cosine": "<=>", "ip": "<#>"}
COMMENT = "dualenc "
"""Beginning of the comment of a pushed table."""
COLUMN_TYPES: dict[str, tuple[Any, str, pa.DataType]] = {
    "text": ("text", "text", pa.large_string()),
    "integer": ("bigint", "int8", pa.int64()),
    "number": ("double precision", "float8", pa.float64()),
    "truth": ("boolean", "bool", pa.bool_()),
}
"""The type of each kind of column in SQL, in psycopg and in Arrow."""


class PostgresIndex(Engine):
    """A table that one push at a time changes.

    Args:
        meta: see `Engine`, with the `type` of the vectors and the kind of `index`.
        target: URL of the database with a password; by default the one of the meta, which has none.
    """

    batch_rows = 4096

    def __init__(self, meta: dict[str, Any], target: str | None = None) -> None:
        super().__init__(meta)
        self.target: str = target or meta["target"]
        self.name: str = meta["collection"]
        # A percent sign begins a parameter of psycopg, also inside a quoted name.
        if not re.fullmatch("[^\0%]+", self.name) or len(self.name.encode()) > MAX_NAME_BYTES:
            remedy = f"give a name of 1 to {MAX_NAME_BYTES} bytes without %"
            raise DualencError(f"table is {self.name[:80]!r}; {remedy}")
        self.table = sql.Identifier(self.name)
        self.stored_kinds = {**({"text": "text"} if self.has_snippets else {}), **self.column_kinds}
        # Vectors too long for an index are indexed, and compared, in half precision.
        is_cast = self.dim > MAX_DIM["vector"] and meta["index"] != "none"
        self.compared = "halfvec" if is_cast else meta["type"]
        self.vector_type = sql.SQL("{}({})").format(sql.Identifier(self.compared), sql.Literal(self.dim))
        self.vector: sql.Composable = sql.Identifier("embedding")
        if self.compared != meta["type"]:
            self.vector = sql.SQL("(embedding::{})").format(self.vector_type)
        with self.one_line_errors():
            self.connection = self._connect()

    @classmethod
    def new(cls, embeddings: Embeddings, meta: dict[str, Any], index: IndexKind) -> Self:
        if "embedding" in meta["columns"]:
            raise DualencError("column 'embedding' is the one of the vectors; rename it and embed again")
        if index != "none" and embeddings.dim > MAX_DIM["halfvec"]:
            remedy = f"embed with --dim {MAX_DIM['halfvec']}, or push with --index none"
            raise DualencError(f"pgvector indexes up to {MAX_DIM['halfvec']} dimensions; {remedy}")
        # Vectors stay as they are.
        kind = "halfvec" if embeddings.vectors.dtype == np.float16 else "vector"
        own = {"type": kind, "index": index, "settings": default_settings(index, len(embeddings))}
        return cls({**meta, "target": without_secrets(meta["target"]), **own}, meta["target"])

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        meta = read_pushed(folder)
        path = Path(folder) / "meta.json"
        check_fields(meta, {"type": str, "index": str, "settings": dict}, path)
        expected = default_settings(meta["index"], meta["count"])
        if meta["type"] not in VALUE_TYPES or not set(meta["settings"]) <= set(expected):
            raise DualencError(f"{path}: type, index or settings are unknown; {AGAIN}")
        check_fields(meta["settings"], {name: type(value) for name, value in expected.items()}, path)
        return super().open(folder)

    def close(self) -> None:
        self.connection.close()

    def _connect(self) -> psycopg.Connection:
        # Prepared statements get lost behind a pooler.
        options: dict[str, Any] = {"prepare_threshold": None, "client_encoding": "utf8"}
        connection = psycopg.connect(self.target, autocommit=True, **options)
        if connection.execute("SELECT to_regtype('vector')").fetchone() != (None,):
            # Loads pgvector, which then refuses wrong settings in place of ignoring them.
            connection.execute("SELECT '[1]'::vector")
        return connection

    def stored_state(self) -> dict[str, Any] | None:
        """The comment of the table: `fingerprint`, `rows` and kind of `index`; None without a table."""
        query = "SELECT to_regclass(%s), obj_description(to_regclass(%s), 'pg_class')"
        with self.one_line_errors():
            quoted = self.table.as_string(self.connection)
            name, comment = self.connection.execute(query, [quoted, quoted]).fetchone() or (None, None)
        if name is None:
            return None
        try:
            state = json.loads(comment.removeprefix(COMMENT))
            return {entry: state[entry] for entry in ("fingerprint", "rows", "index")}
        except (AttributeError, ValueError, KeyError, TypeError):
            problem = "holds no embeddings that dualenc pushed"
            raise DualencError(f"{self.location}: {problem}; name another --table") from None

    def nearest(self, vectors: np.ndarray, k: int, condition: Any, settings: Settings | None) -> Rows:
        clause, values = condition
        operator = sql.SQL(OPERATORS[self.meta["metric"]])
        distance = sql.SQL("{} {} %(query)s::{}").format(self.vector, operator, self.vector_type)
        names = ["id", *self.stored_kinds]
        columns = sql.SQL(", ").join(map(sql.Identifier, names))
        statement = sql.SQL(
            "SELECT {distance}, {columns} FROM {table} WHERE {condition} ORDER BY {distance} LIMIT %(k)s"
        ).format(distance=distance, columns=columns, table=self.table, condition=clause)
        parameters = [{**values, "query": str(vector.tolist()), "k": k} for vector in vectors]
        if settings is not None and "ef_search" in settings:
            settings["ef_search"] = min(max(settings["ef_search"], k), MAX_EF_SEARCH)
        for rows in self._read(statement, parameters, self._session(settings)):
            scored = [(self._score(row[0]), dict(zip(names, row[1:]))) for row in rows]
            # An iterative scan returns the rows in nearly the right order.
            yield sorted(scored, key=lambda row: -row[0])

    def _score(self, distance: float) -> float:
        """The similarity at a distance, which is NaN of a vector of zeros by cosine."""
        if self.meta["metric"] == "ip":
            return -distance
        return 0.0 if math.isnan(distance) else 1 - distance

    def setting_of_option(self) -> dict[str, str]:
        options = {"hnsw": {"ef_search": "ef_search"}, "ivfflat": {"nprobe": "probes"}}
        return options.get(self.meta["index"], {})

    def _session(self, settings: Settings | None) -> sql.Composed:
        """Statements that begin a transaction which only reads; without settings it uses no index of vectors."""
        timeout = "60s" if settings is not None else "0"
        values = [(sql.Identifier("statement_timeout"), timeout)]
        if settings is None:
            values.append((sql.Identifier("enable_indexscan"), "off"))
        for name, value in (settings or {}).items():
            values.append((sql.Identifier(self.meta["index"], name), value))
        statements: list[sql.Composable] = [sql.SQL("SET TRANSACTION READ ONLY")]
        for parameter, value in values:
            statements.append(sql.SQL("SET LOCAL {} = {}").format(parameter, sql.Literal(value)))
        return sql.SQL("; ").join(statements)

    def _read(
        self, statement: sql.Composed, parameters: Sequence[Any], session: sql.Composed
    ) -> list[list[tuple[Any, ...]]]:
        """The rows of a statement for each of several parameters, over a new connection if the last one is lost."""
        for is_last in (False, True):
            with self.one_line_errors():
                try:
                    if self.connection.closed:
                        self.connection = self._connect()
                    with self.connection.transaction():
                        self.connection.execute(session)
                        # Results in binary take the protocol that refuses a second statement.
                        execute = functools.partial(self.connection.execute, statement, binary=True)
                        return [execute(values).fetchall() for values in parameters]
                except psycopg.OperationalError:
                    if is_last or not self.connection.closed:
                        raise
        raise AssertionError

    def condition(self, filter: str, where: Sequence[Condition]) -> tuple[sql.Composable, dict[str, Any]]:
        """The WHERE clause, and the values of its parameters."""
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
            # A percent sign would begin a parameter; a line comment must end before the parenthesis.
            parts.append(sql.SQL(cast(Any, "({}\n)".format(filter.replace("%", "%%")))))
        return sql.SQL(" AND ").join(parts), values

    def check_filter(self, filter: str) -> None:
        """Refuse a text that is not one SQL expression.

        As it must parse bare and in parentheses, it cannot end the clause that it stands in. It is still SQL: it may
        read whatever the user of the connection may read.
        """
        for form in (f"{filter}\n", f"({filter}\n)"):
            condition = sql.SQL(cast(Any, form))
            statement = sql.SQL("EXPLAIN SELECT FROM {} WHERE {}").format(self.table, condition)
            try:
                self._read(statement, [None], self._session({}))
            except DualencError as error:
                if not isinstance(error.__cause__, (psycopg.ProgrammingError, psycopg.DataError)):
                    raise
                reason = f"the filter is no SQL condition ({first_line(error.__cause__)})"
                raise DualencError(f"{reason}, such as \"year >= 2020 AND lang = 'en'\"") from None

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        statement = sql.SQL("SELECT id, embedding FROM {} WHERE id = ANY(%s)").format(self.table)
        rows = self._read(statement, [[list(ids)]], self._session({}))[0]
        kind = VALUE_TYPES[self.meta["type"]]
        vector_of = {name: np.frombuffer(stored, kind, offset=4) for name, stored in rows}
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def texts_by_id(self) -> dict[str, str]:
        text = sql.SQL("text" if self.has_snippets else "NULL")
        statement = sql.SQL("SELECT id, {} FROM {}").format(text, self.table)
        with self.one_line_errors(), self.connection.transaction():
            self.connection.execute(self._session(None))
            # A cursor of the server: the rows arrive in parts.
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
    def transaction(self) -> Iterator[dict[str, Any] | None]:
        with self.one_line_errors("the same command again resumes"), self.connection.transaction():
            # The transaction's own lock: a session's would outlive a client behind a pooler.
            lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0)), set_config('statement_timeout', '0', true)"
            self.connection.execute(lock, [f"{COMMENT}{self.name}"])
            yield self.stored_state()

    def create(self, embeddings: Embeddings) -> None:
        self.connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self.table))
        version = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        if self.connection.execute(version).fetchone() is None:
            self.connection.execute("CREATE EXTENSION vector")
        installed = str(self.connection.execute(version).fetchone()[0])  # type: ignore[index]
        if tuple(map(int, installed.split(".")[:2])) < (0, 8):
            raise DualencError(f"{self.location}: has pgvector {installed}, and 0.8 is needed; update it")
        kind = sql.Identifier(self.meta["type"])
        vector = sql.SQL("embedding {}({}) NOT NULL").format(kind, sql.Literal(self.dim))
        columns = [sql.SQL('id text COLLATE "C" PRIMARY KEY'), vector]
        for name, column_kind in self.stored_kinds.items():
            column = sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(COLUMN_TYPES[column_kind][0]))
            columns.append(column)
        statement = sql.SQL("CREATE TABLE {} ({})").format(self.table, sql.SQL(", ").join(columns))
        self.connection.execute(statement)
        self._write_state({"rows": 0, "index": None})

    def _write_state(self, state: dict[str, Any]) -> None:
        comment = COMMENT + json.dumps({"fingerprint": self.items_checksum, **state})
        statement = sql.SQL("COMMENT ON TABLE {} IS {}").format(self.table, sql.Literal(comment))
        self.connection.execute(statement)

    def add(self, batch: pa.RecordBatch, vectors: np.ndarray, stop: int) -> None:
        kind = self.meta["type"]
        oid = self.connection.execute("SELECT %s::regtype::oid", [kind]).fetchone()[0]  # type: ignore[index]
        self.connection.adapters.register_dumper(None, type("Dump", (VectorDumper,), {"oid": oid}))
        values = batch.column("vector").flatten().to_numpy().reshape(len(batch), self.dim)
        head = struct.pack(">HH", self.dim, 0)
        fields: dict[str, Sequence[Any]] = {"id": batch.column("id").to_pylist()}
        fields["embedding"] = [head + row.tobytes() for row in values.astype(VALUE_TYPES[kind])]
        types: list[int | str] = ["text", oid]
        for name, column_kind in self.stored_kinds.items():
            column = batch.column(name).cast(COLUMN_TYPES[column_kind][2])
            if column_kind == "text":
                # PostgreSQL has no texts with NUL.
                column = pc.replace_substring(column, "\0", "\ufffd")
            fields[name] = column.to_pylist()
            types.append(COLUMN_TYPES[column_kind][1])
        names = sql.SQL(", ").join(map(sql.Identifier, fields))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(self.table, names)
        with self.connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types(types)
            for row in zip(*fields.values()):
                copy.write_row(row)
        self._write_state({"rows": stop, "index": None})

    def finish(self, state: dict[str, Any]) -> None:
        """Build the index, in place of one of another kind, and give the planner its statistics."""
        kind = self.meta["index"]
        if state["index"] == kind:
            return
        query = "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = %s::regclass"
        query += " AND pg_get_indexdef(indexrelid) ~ ' USING (hnsw|ivfflat) '"
        for (name,) in self.connection.execute(query, [self.table.as_string(self.connection)]).fetchall():
            self.connection.execute(sql.SQL("DROP INDEX {}").format(sql.SQL(name)))
        if kind != "none":
            operators = f"{self.compared}_{self.meta['metric']}_ops"
            options = f"WITH (lists = {_lists(len(self))})" if kind == "ivfflat" else ""
            parts = (self.table, sql.Identifier(kind), self.vector, sql.Identifier(operators))
            statement = sql.SQL("CREATE INDEX ON {} USING {} ({} {}) {}")
            self.connection.execute(statement.format(*parts, sql.SQL(cast(Any, options))))
        self.connection.execute(sql.SQL("ANALYZE {}").format(self.table))
        self._write_state({"rows": state["rows"], "index": kind})

    @contextmanager
    def one_line_errors(self, remedy: str = "") -> Iterator[None]:
        """Turn errors of PostgreSQL into one line."""
        try:
            yield
        except psycopg.Error as error:
            reason = first_line(error)[:300]
            if "password" in reason:
                remedy = "set PGPASSWORD, or add a line to ~/.pgpass"
            raise DualencError(f"{self.location}: {reason}{remedy and f'; {remedy}'}") from error


def without_secrets(target: str) -> str:
    """The URL of a database without passwords, which libpq marks in its list of parameters."""
    try:
        parameters = conninfo_to_dict(target)
    except psycopg.Error:
        # libpq's message may hold the password.
        example = "postgresql://user@host:5432/database"
        raise DualencError(f"TARGET is no URL of a PostgreSQL database; write {example}") from None
    plain = {option.keyword.decode() for option in Conninfo.get_defaults() if not option.dispchar}
    parts = {name: str(value) for name, value in parameters.items() if name in plain}
    return f"postgresql://?{urlencode(parts, quote_via=quote)}"


class VectorDumper(Dumper):
    """Dumper for vectors that are in pgvector's binary form already."""

    format = Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        return obj


def _lists(count: int) -> int:
    """The number of lists that pgvector's documentation advises for N rows."""
    return max(count // 1000, 1) if count <= 1_000_000 else int(count**0.5)


def default_settings(kind: IndexKind, count: int) -> Settings:
    """Default search settings of an index over N rows: the scan continues until k rows meet the filter."""
    if kind == "hnsw":
        scan = {"iterative_scan": "relaxed_order", "max_scan_tuples": 20_000, "scan_mem_multiplier": 1}
        return {"ef_search": 100, **scan}
    if kind == "ivfflat":
        probes = max(int(_lists(count) ** 0.5), 1)
        return {"probes": probes, "iterative_scan": "relaxed_order", "max_probes": _lists(count)}
    return {}
