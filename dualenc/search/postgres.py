"""PostgreSQL with pgvector: push embeddings to a table, remember it in a folder, and search it with SQL conditions.

    id text PRIMARY KEY | embedding vector(D) or halfvec(D) | text | the user's columns

The comment of the table holds the fingerprint of the embeddings and the number of stored rows. It changes in the
transaction that stores the rows, so that a push resumes behind the last row that the server has committed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote, urlencode

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, Format
from tqdm.auto import tqdm

from dualenc.data.items import check_ids
from dualenc.data.metadata import check_column_names
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError, UnknownId, Unsupported, first_line
from dualenc.reading import check_fields
from dualenc.search.build import Database, as_queries
from dualenc.search.index import Hit, as_hit
from dualenc.search.pushed import AGAIN, Engine, default_metric, describe, read_pushed
from dualenc.search.where import Condition
from dualenc.types import Metric

IndexKind = Literal["hnsw", "ivfflat", "none"]
BATCH_ROWS = 4096
"""Rows of a transaction; a broken push resumes at one."""
SEARCH_TIMEOUT = "60s"
MAX_NAME_BYTES = 63
"""PostgreSQL cuts longer names off."""
MAX_DIM = {"vector": 2000, "halfvec": 4000}
"""The largest vectors that pgvector indexes."""
MAX_EF_SEARCH = 1000
VALUE_TYPES = {"halfvec": np.dtype(">f2"), "vector": np.dtype(">f4")}
COLUMN_TYPES = {"text": "text", "integer": "bigint", "number": "double precision", "truth": "boolean"}
ARROW_TYPES = {
    "text": pa.large_string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "truth": pa.bool_(),
}
OPERATORS = {"cosine": "<=>", "ip": "<#>"}
PARAMETERS = {
    "hnsw": ("ef_search", "iterative_scan", "max_scan_tuples", "scan_mem_multiplier"),
    "ivfflat": ("probes", "iterative_scan", "max_probes"),
    "none": (),
}
"""The search settings of each kind of index, which the folder records."""
COMMENT = "dualenc "
FILTER_EXAMPLE = "\"year >= 2020 AND lang = 'en'\""
ENTRIES = {"type": str, "index": str, "settings": dict}


class PostgresIndex(Engine):
    """A table searched by vectors: `push_embeddings` returns it, `PostgresIndex.open` finds it again.

    Args:
        meta: what `describe` returns, with the `type` of the vectors, the kind of `index`, and its search `settings`.
        target: URL of the database with a password; by default the one of the meta, which has none.
    """

    filter_language = "SQL"
    takes_conditions = True

    def __init__(self, meta: dict[str, Any], target: str | None = None) -> None:
        super().__init__(meta)
        self.target: str = target or meta["target"]
        self.settings: dict[str, Any] = meta["settings"]
        self.name: str = meta["collection"]
        if not self.name or "\0" in self.name or len(self.name.encode()) > MAX_NAME_BYTES:
            raise DualencError(f"table is {self.name[:80]!r}; give a name of 1 to {MAX_NAME_BYTES} bytes")
        self.table = sql.Identifier(self.name)
        self.location = f"{_place(self.target)} table {self.name!r}"
        self.valid_filters: set[str] = set()
        # Vectors too long for an index are indexed, and compared, in half precision.
        self.compared = (
            "halfvec" if self.dim > MAX_DIM["vector"] and meta["index"] != "none" else meta["type"]
        )
        self.vector_type = sql.SQL("{}({})").format(sql.Identifier(self.compared), sql.Literal(self.dim))
        self.vector: sql.Composable = sql.Identifier("embedding")
        if self.compared != meta["type"]:
            self.vector = sql.SQL("(embedding::{})").format(self.vector_type)
        with self.one_line_errors():
            self.connection = self._connect()

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> PostgresIndex:
        """Open the table that a folder remembers; the password comes from PGPASSWORD or ~/.pgpass."""
        meta = read_pushed(folder)
        check_fields(meta, ENTRIES, Path(folder) / "meta.json")
        parameters = PARAMETERS.get(meta["index"], ())
        if meta["type"] not in VALUE_TYPES or not set(meta["settings"]) <= set(parameters):
            raise DualencError(f"{folder}/meta.json: type, index or settings are unknown; {AGAIN}")
        index = cls(meta)
        state = index.stored_state()
        if state is None or state["fingerprint"] != index.items_checksum:
            problem = f"is gone, or holds other embeddings than {folder} says"
            raise DualencError(f"{index.location}: {problem}; {AGAIN}")
        if state["index"] is None:
            raise DualencError(f"{index.location}: its push was not finished; {AGAIN}")
        return index

    def close(self) -> None:
        self.connection.close()

    def _connect(self) -> psycopg.Connection:
        # Prepared statements get lost behind a pooler.
        options: dict[str, Any] = {"prepare_threshold": None, "client_encoding": "utf8"}
        return psycopg.connect(self.target, autocommit=True, **options)

    def stored_state(self) -> dict[str, Any] | None:
        """The comment of the table: `fingerprint`, `rows` and kind of `index`; None without a table."""
        query = "SELECT to_regclass(%s), obj_description(to_regclass(%s), 'pg_class')"
        with self.one_line_errors():
            quoted = self.table.as_string(self.connection)
            row = self.connection.execute(query, [quoted, quoted]).fetchone()
        assert row is not None
        if row[0] is None:
            return None
        comment = row[1] or ""
        try:
            state = json.loads(comment.removeprefix(COMMENT)) if comment.startswith(COMMENT) else {}
            return {name: state[name] for name in ("fingerprint", "rows", "index")}
        except (ValueError, KeyError, TypeError):
            problem = "holds no embeddings that dualenc pushed"
            raise DualencError(f"{self.location}: {problem}; name another --table") from None

    def search(
        self,
        queries: np.ndarray,
        k: int = 10,
        filter: str = "",
        where: Sequence[Condition] = (),
        *,
        nprobe: int | None = None,
        ef_search: int | None = None,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """See `Engine.search`; with `exact` all rows that meet the filter are compared, without an index."""
        vectors = as_queries(queries, self.dim, self.meta["metric"], k)
        if filter:
            self.check_filter(filter)
        condition, values = self._condition(filter, where)
        distance = sql.SQL(OPERATORS[self.meta["metric"]])
        names = ["id", *(["text"] if self.has_snippets else []), *self.column_kinds]
        statement = sql.SQL(
            "SELECT {vector} {distance} %(query)s::{type}, {columns} FROM {table} WHERE {condition} "
            "ORDER BY {vector} {distance} %(query)s::{type} LIMIT %(k)s"
        ).format(
            vector=self.vector,
            distance=distance,
            type=self.vector_type,
            columns=sql.SQL(", ").join(map(sql.Identifier, names)),
            table=self.table,
            condition=condition,
        )
        parameters = [{**values, "query": str(vector.tolist()), "k": k} for vector in vectors]
        settings = self._session(self._search_settings(k, nprobe, ef_search), exact)
        results = []
        for rows in self._read(statement, parameters, settings):
            # An iterative scan returns the rows in nearly the right order.
            ranked = sorted(rows, key=lambda row: row[0])
            results.append([self._hit(row[0], dict(zip(names, row[1:]))) for row in ranked])
        return results

    def _hit(self, distance: float, columns: dict[str, Any]) -> Hit:
        score = 1 - distance if self.meta["metric"] == "cosine" else -distance
        return as_hit(columns.pop("id"), score, columns.pop("text", None), columns)

    def _search_settings(self, k: int, nprobe: int | None, ef_search: int | None) -> dict[str, Any]:
        kind = self.meta["index"]
        settings = dict(self.settings)
        for option, value, fitting in (("nprobe", nprobe, "ivfflat"), ("ef_search", ef_search, "hnsw")):
            if value is not None and kind != fitting:
                raise DualencError(f"{option} is {value}, but the index is of kind {kind}; leave it out")
        if nprobe is not None:
            settings["probes"] = nprobe
        if kind == "hnsw":
            settings["ef_search"] = min(max(ef_search or settings["ef_search"], k), MAX_EF_SEARCH)
        return settings

    def _session(self, settings: Mapping[str, Any], exact: bool = False) -> sql.Composable:
        """Statements that begin a transaction which only reads."""
        pairs: list[tuple[sql.Identifier, Any]] = []
        for name, value in settings.items():
            pairs.append((sql.Identifier(self.meta["index"], name), value))
        pairs.append((sql.Identifier("statement_timeout"), "0" if exact else SEARCH_TIMEOUT))
        if exact:
            pairs.append((sql.Identifier("enable_indexscan"), "off"))
        statements = [sql.SQL("SET TRANSACTION READ ONLY")]
        for name, value in pairs:
            statements.append(sql.SQL("SET LOCAL {} = {}").format(name, sql.Literal(value)))
        return sql.SQL("; ").join(statements)

    def _read(
        self, statement: sql.Composable, parameters: Sequence[Any], session: sql.Composable
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
                        return [
                            self.connection.execute(statement, values, binary=True).fetchall()
                            for values in parameters
                        ]
                except psycopg.OperationalError:
                    if is_last or not self.connection.closed:
                        raise
        raise AssertionError

    def _condition(self, filter: str, where: Sequence[Condition]) -> tuple[sql.Composable, dict[str, Any]]:
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
            # A percent sign would begin a parameter; a line comment must end before the parenthesis.
            parts.append(sql.SQL(cast(Any, "({}\n)".format(filter.replace("%", "%%")))))
        return sql.SQL(" AND ").join(parts), values

    def check_filter(self, filter: str) -> None:
        """Refuse a text that is not one SQL expression.

        As it must parse bare and in parentheses, it cannot end the clause that it stands in. It is still SQL: it may
        read whatever the user of the connection may read.
        """
        if filter in self.valid_filters:
            return
        for form in (f"{filter}\n", f"({filter}\n)"):
            statement = sql.SQL("EXPLAIN SELECT FROM {} WHERE ").format(self.table) + sql.SQL(
                cast(Any, form)
            )
            try:
                self._read(statement, [None], self._session({}))
            except DualencError as error:
                if not isinstance(error.__cause__, (psycopg.ProgrammingError, psycopg.DataError)):
                    raise
                reason = first_line(error.__cause__)
                raise DualencError(
                    f"the filter is no SQL condition ({reason}), such as {FILTER_EXAMPLE}"
                ) from None
        self.valid_filters.add(filter)

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        statement = sql.SQL("SELECT id, embedding FROM {} WHERE id = ANY(%s)").format(self.table)
        rows = self._read(statement, [[list(ids)]], self._session({}))[0]
        kind = VALUE_TYPES[self.meta["type"]]
        vector_of = {name: np.frombuffer(stored, kind, offset=4) for name, stored in rows}
        missing = [name for name in ids if name not in vector_of]
        if missing:
            raise UnknownId(f"the table has no item {missing[0][:200]!r}; give an id that it has returned")
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def texts_by_id(self) -> dict[str, str]:
        text = sql.SQL("text" if self.has_snippets else "NULL")
        statement = sql.SQL("SELECT id, {} FROM {} ORDER BY id").format(text, self.table)
        with self.one_line_errors(), self.connection.transaction():
            self.connection.execute(self._session({}, exact=True))
            # A cursor of the server: the rows arrive in parts.
            with self.connection.cursor("dualenc_rows") as cursor:
                cursor.itersize = BATCH_ROWS
                return {name: text or "" for name, text in cursor.execute(statement)}

    @contextmanager
    def exclusive(self) -> Iterator[dict[str, Any] | None]:
        """A transaction that no other push to this table shares; yields `stored_state`."""
        with self.one_line_errors("the same command again resumes"), self.connection.transaction():
            # The transaction's own lock: a session's would outlive a client behind a pooler.
            lock = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0)), set_config('statement_timeout', '0', true)"
            self.connection.execute(lock, [f"{COMMENT}{self.name}"])
            yield self.stored_state()

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


def push_embeddings(
    embeddings: Embeddings,
    target: str,
    table: str,
    *,
    metric: Metric | None = None,
    index: IndexKind = "hnsw",
    replace: bool = False,
    progress: bool = False,
) -> tuple[PostgresIndex, int]:
    """Send the rows that a table does not hold yet, and then index them; returns the index, and the number sent.

        index, sent = push_embeddings(Embeddings.open("emb"), "postgresql://me@localhost/db", "docs")

    Args:
        embeddings: N vectors; float16 becomes halfvec, float32 vector, each as it is.
        target: URL of the database; its password may come from PGPASSWORD or ~/.pgpass.
        table: its name, in the first schema of the search path.
        metric: by default cosine for embeddings that are normalized, and ip for others.
        index: the kind of pgvector's index; "none" for exact search of all rows.
        replace: first remove a table that holds other embeddings.
    """
    check_ids(embeddings.ids)
    names = [] if embeddings.columns is None else embeddings.columns.column_names
    check_column_names(names)
    if "embedding" in names:
        raise DualencError("column 'embedding' is the one of the vectors; rename it and embed again")
    if index != "none" and embeddings.dim > MAX_DIM["halfvec"]:
        remedy = f"embed with --dim {MAX_DIM['halfvec']}, or push with --index none"
        raise DualencError(f"pgvector indexes up to {MAX_DIM['halfvec']} dimensions; {remedy}")
    database = Database(embeddings, metric or default_metric(embeddings))
    meta = describe(embeddings, without_secrets(target), table, database.metric)
    meta["type"] = "halfvec" if embeddings.vectors.dtype == np.float16 else "vector"
    meta["index"] = index
    meta["settings"] = default_settings(index, len(embeddings))
    pushed = PostgresIndex(meta, target)
    with pushed.exclusive() as state:
        if state is not None and state["fingerprint"] != pushed.items_checksum:
            if not replace:
                remedy = "push with --replace to remove them first, or name another --table"
                raise DualencError(
                    f"{pushed.location}: holds other embeddings, or with another metric; {remedy}"
                )
            pushed.connection.execute(sql.SQL("DROP TABLE {}").format(pushed.table))
            state = None
        if state is None:
            _create(pushed)
    sent = _send(pushed, database, progress)
    with pushed.exclusive() as state:
        _build_index(pushed, _own(pushed, state))
    return pushed, sent


def _send(index: PostgresIndex, database: Database, progress: bool) -> int:
    """Store the rows behind the stored ones, which are always a prefix."""
    sent = 0
    start = 0
    stored = 0
    with tqdm(total=len(database), desc="push", unit=" vectors", disable=not progress) as bar:
        for batch in database.embeddings.record_batches(BATCH_ROWS):
            stop = start + len(batch)
            if stop > stored:
                with index.exclusive() as state:
                    # Another push may have stored some meanwhile.
                    stored = _own(index, state)["rows"]
                    first = min(max(stored - start, 0), len(batch))
                    if first < len(batch):
                        database.rows(np.arange(start + first, stop))
                        _copy(index, batch.slice(first))
                        stored = stop
                        _write_state(index, {"rows": stop, "index": None})
                        sent += len(batch) - first
            start = stop
            bar.update(len(batch))
    return sent


def _own(index: PostgresIndex, state: dict[str, Any] | None) -> dict[str, Any]:
    if state is None or state["fingerprint"] != index.items_checksum:
        raise DualencError(f"{index.location}: another process has removed or replaced it; {AGAIN}")
    return state


def _create(index: PostgresIndex) -> None:
    """Create the table, and the extension where it is missing; inside `exclusive`."""
    version = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    if index.connection.execute(version).fetchone() is None:
        index.connection.execute("CREATE EXTENSION vector")
    installed = str(index.connection.execute(version).fetchone()[0])  # type: ignore[index]
    if tuple(map(int, installed.split(".")[:2])) < (0, 8):
        raise DualencError(f"{index.location}: has pgvector {installed}, and 0.8 is needed; update it")
    columns = [
        sql.SQL('id text COLLATE "C" PRIMARY KEY'),
        sql.SQL("embedding {}({}) NOT NULL").format(
            sql.Identifier(index.meta["type"]), sql.Literal(index.dim)
        ),
    ]
    kinds = {"text": "text"} if index.has_snippets else {}
    for name, kind in {**kinds, **index.column_kinds}.items():
        columns.append(sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(COLUMN_TYPES[kind])))  # type: ignore[arg-type]
    statement = sql.SQL("CREATE TABLE {} ({})").format(index.table, sql.SQL(", ").join(columns))
    index.connection.execute(statement)
    _write_state(index, {"rows": 0, "index": None})


def _write_state(index: PostgresIndex, state: dict[str, Any]) -> None:
    comment = COMMENT + json.dumps({"fingerprint": index.items_checksum, **state})
    statement = sql.SQL("COMMENT ON TABLE {} IS {}").format(index.table, sql.Literal(comment))
    index.connection.execute(statement)


class VectorDumper(Dumper):
    """Passes a vector on that is in pgvector's binary form already."""

    format = Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        return obj


def _copy(index: PostgresIndex, batch: pa.RecordBatch) -> None:
    """Send n rows by COPY in binary; inside `exclusive`."""
    kind = index.meta["type"]
    oid = index.connection.execute("SELECT %s::regtype::oid", [kind]).fetchone()[0]  # type: ignore[index]
    index.connection.adapters.register_dumper(None, type("Dump", (VectorDumper,), {"oid": oid}))
    values = batch.column("vector").flatten().to_numpy().reshape(len(batch), index.dim)
    head = struct.pack(">HH", index.dim, 0)
    fields: dict[str, Sequence[Any]] = {"id": batch.column("id").to_pylist()}
    fields["embedding"] = [head + row.tobytes() for row in values.astype(VALUE_TYPES[kind])]
    types: list[int | str] = ["text", oid]
    kinds: dict[str, Any] = {"text": "text"} if index.has_snippets else {}
    for name, column_kind in {**kinds, **index.column_kinds}.items():
        fields[name] = batch.column(name).cast(ARROW_TYPES[column_kind]).to_pylist()
        types.append({"integer": "int8", "number": "float8", "truth": "bool"}.get(column_kind, "text"))
    names = sql.SQL(", ").join(map(sql.Identifier, fields))
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(index.table, names)
    with index.connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(types)
        for row in zip(*fields.values()):
            copy.write_row(row)


def _build_index(index: PostgresIndex, state: dict[str, Any]) -> None:
    """Build the index, in place of one of another kind, and give the planner its statistics; inside `exclusive`."""
    kind = index.meta["index"]
    if state["index"] == kind:
        return
    query = (
        "SELECT i.indexrelid::regclass::text FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "JOIN pg_am a ON a.oid = c.relam WHERE i.indrelid = %s::regclass AND a.amname IN ('hnsw', 'ivfflat')"
    )
    for (name,) in index.connection.execute(query, [index.table.as_string(index.connection)]).fetchall():
        index.connection.execute(sql.SQL("DROP INDEX {}").format(sql.SQL(name)))
    if kind != "none":
        operators = f"{index.compared}_{index.meta['metric']}_ops"
        options = f"WITH (lists = {_lists(len(index))})" if kind == "ivfflat" else ""
        statement = sql.SQL("CREATE INDEX ON {} USING {} ({} {}) {}").format(
            index.table,
            sql.Identifier(kind),
            index.vector,
            sql.Identifier(operators),
            sql.SQL(cast(Any, options)),
        )
        index.connection.execute(statement)
    index.connection.execute(sql.SQL("ANALYZE {}").format(index.table))
    _write_state(index, {"rows": state["rows"], "index": kind})


def _lists(count: int) -> int:
    """The number of lists that pgvector's documentation advises for N rows."""
    return max(count // 1000, 1) if count <= 1_000_000 else int(count**0.5)


def default_settings(kind: IndexKind, count: int) -> dict[str, Any]:
    """Search settings of an index over N rows that nobody measured: it looks on until k rows meet the filter."""
    if kind == "hnsw":
        scan = {"iterative_scan": "relaxed_order", "max_scan_tuples": 20_000, "scan_mem_multiplier": 1}
        return {"ef_search": 100, **scan}
    if kind == "ivfflat":
        probes = max(int(_lists(count) ** 0.5), 1)
        return {"probes": probes, "iterative_scan": "relaxed_order", "max_probes": _lists(count)}
    return {}


def without_secrets(target: str) -> str:
    """The URL of a database without passwords, by libpq's own list of what is secret."""
    plain = {option.keyword.decode() for option in Conninfo.get_defaults() if not option.dispchar}
    parts = {name: str(value) for name, value in _parse(target).items() if name in plain}
    return f"postgresql://?{urlencode(parts, quote_via=quote)}"


def _parse(target: str) -> dict[str, Any]:
    try:
        return dict(conninfo_to_dict(target))
    except psycopg.Error:
        # libpq's message may hold the password.
        example = "postgresql://user@host:5432/database"
        raise DualencError(f"TARGET is no URL of a PostgreSQL database; write {example}") from None


def _place(target: str) -> str:
    parts = _parse(target)
    server = ":".join(str(parts[name]) for name in ("host", "port") if name in parts)
    return f"PostgreSQL at {server or 'the local socket'}, database {parts.get('dbname', 'of the user')}"
