"""PostgreSQL with pgvector: search a table of pushed embeddings, with SQL conditions.

    id text PRIMARY KEY | embedding vector(D) or halfvec(D) | text | the user's columns

`dualenc.search.postgres_push` fills the table, whose comment identifies the embeddings.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode

import numpy as np
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from dualenc.errors import DualencError, UnknownId, first_line
from dualenc.reading import check_fields
from dualenc.search.build import as_queries
from dualenc.search.index import Hit, as_hit
from dualenc.search.pushed import AGAIN, Engine, read_pushed
from dualenc.search.where import Condition

FETCHED_ROWS = 4096
"""Rows that a server-side cursor sends at once."""
SEARCH_TIMEOUT = "60s"
MAX_NAME_BYTES = 63
"""PostgreSQL cuts longer names off."""
MAX_DIM = {"vector": 2000, "halfvec": 4000}
"""The largest vectors that pgvector indexes."""
MAX_EF_SEARCH = 1000
VALUE_TYPES: dict[str, Any] = {"halfvec": np.dtype(">f2"), "vector": np.dtype(">f4")}
OPERATORS = {"cosine": "<=>", "ip": "<#>"}
PARAMETERS: dict[str, dict[str, type]] = {
    "hnsw": {"ef_search": int, "iterative_scan": str, "max_scan_tuples": int, "scan_mem_multiplier": int},
    "ivfflat": {"probes": int, "iterative_scan": str, "max_probes": int},
    "none": {},
}
"""The search settings of each kind of index, which the folder records, with their types."""
COMMENT = "dualenc "
"""Beginning of the comment of a pushed table."""
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
        self.name: str = meta["collection"]
        # A percent sign begins a parameter of psycopg, also inside a quoted name.
        if not re.fullmatch("[^\0%]+", self.name) or len(self.name.encode()) > MAX_NAME_BYTES:
            raise DualencError(
                f"table is {self.name[:80]!r}; give a name of 1 to {MAX_NAME_BYTES} bytes without %"
            )
        self.table = sql.Identifier(self.name)
        self.location = f"{_place(self.target)} table {self.name!r}"
        self.valid_filters: set[str] = set()
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
    def open(cls, folder: str | os.PathLike[str]) -> PostgresIndex:
        """Open the table that a folder remembers; the password comes from PGPASSWORD or ~/.pgpass."""
        meta = read_pushed(folder)
        path = Path(folder) / "meta.json"
        check_fields(meta, ENTRIES, path)
        parameters = PARAMETERS.get(meta["index"])
        is_vector = meta["type"] in VALUE_TYPES
        if parameters is None or not is_vector or not set(meta["settings"]) <= set(parameters):
            raise DualencError(f"{path}: type, index or settings are unknown; {AGAIN}")
        check_fields(meta["settings"], parameters, path)
        index = cls(meta)
        state = index.stored_state()
        if state is None or state["fingerprint"] != index.items_checksum:
            problem = f"is gone, or holds other embeddings than {folder} says"
            raise DualencError(f"{index.location}: {problem}; {AGAIN}")
        if state["index"] != meta["index"]:
            problem = f"its push was not finished, or its index is not {meta['index']}"
            raise DualencError(f"{index.location}: {problem}; {AGAIN}")
        return index

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
            hits = [self._hit(row[0], dict(zip(names, row[1:]))) for row in rows]
            # An iterative scan returns the rows in nearly the right order.
            results.append(sorted(hits, key=lambda hit: -hit.score))
        return results

    def _hit(self, distance: float, columns: dict[str, Any]) -> Hit:
        """The hit of a row, whose columns include id and text."""
        score = -distance
        if self.meta["metric"] == "cosine":
            # NaN is the distance of a vector of zeros.
            score = 0.0 if math.isnan(distance) else 1 - distance
        return as_hit(columns.pop("id"), score, columns.pop("text", None), columns)

    def _search_settings(self, k: int, nprobe: int | None, ef_search: int | None) -> dict[str, Any]:
        """The settings of the index for k results, with the options of a search in place of the recorded ones."""
        kind = self.meta["index"]
        settings = dict(self.meta["settings"])
        for option, value, fitting in (("nprobe", nprobe, "ivfflat"), ("ef_search", ef_search, "hnsw")):
            if value is not None and kind != fitting:
                raise DualencError(f"{option} is {value}, but the index is of kind {kind}; leave it out")
        if nprobe is not None:
            settings["probes"] = nprobe
        if kind == "hnsw":
            settings["ef_search"] = min(max(ef_search or settings["ef_search"], k), MAX_EF_SEARCH)
        return settings

    def _session(self, settings: Mapping[str, Any], exact: bool = False) -> sql.Composed:
        """Statements that begin a transaction which only reads."""
        pairs: list[tuple[sql.Identifier, Any]] = []
        for name, value in settings.items():
            pairs.append((sql.Identifier(self.meta["index"], name), value))
        pairs.append((sql.Identifier("statement_timeout"), "0" if exact else SEARCH_TIMEOUT))
        if exact:
            pairs.append((sql.Identifier("enable_indexscan"), "off"))
        statements: list[sql.Composable] = [sql.SQL("SET TRANSACTION READ ONLY")]
        for parameter, value in pairs:
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
            condition = sql.SQL(cast(Any, form))
            statement = sql.SQL("EXPLAIN SELECT FROM {} WHERE {}").format(self.table, condition)
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
                cursor.itersize = FETCHED_ROWS
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


def without_secrets(target: str) -> str:
    """The URL of a database without passwords, which libpq marks in its list of parameters."""
    plain = {option.keyword.decode() for option in Conninfo.get_defaults() if not option.dispchar}
    parts = {name: str(value) for name, value in _parse(target).items() if name in plain}
    return f"postgresql://?{urlencode(parts, quote_via=quote)}"


def _parse(target: str) -> dict[str, Any]:
    """The connection parameters in a URL."""
    try:
        return dict(conninfo_to_dict(target))
    except psycopg.Error:
        # libpq's message may hold the password.
        example = "postgresql://user@host:5432/database"
        raise DualencError(f"TARGET is no URL of a PostgreSQL database; write {example}") from None


def _place(target: str) -> str:
    """The server and database of a URL, for messages."""
    parts = _parse(target)
    server = ":".join(str(parts[name]) for name in ("host", "port") if name in parts)
    return f"PostgreSQL at {server or 'the local socket'}, database {parts.get('dbname', 'of the user')}"
