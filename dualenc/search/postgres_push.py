"""Push embeddings to a table of PostgreSQL.

The comment of the table holds the fingerprint of the embeddings and the number of stored rows. It changes in the
transaction that stores the rows, so that a push resumes behind the last row that the server has committed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.pq import Format
from tqdm.auto import tqdm

from dualenc.data.items import check_ids
from dualenc.data.metadata import check_column_names
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.build import Database
from dualenc.search.postgres import COMMENT, MAX_DIM, VALUE_TYPES, PostgresIndex, without_secrets
from dualenc.search.pushed import AGAIN, default_metric, describe
from dualenc.types import Metric

IndexKind = Literal["hnsw", "ivfflat", "none"]
BATCH_ROWS = 4096
"""Rows of a transaction; a broken push resumes at one."""
COLUMN_TYPES = {
    "text": ("text", "text", pa.large_string()),
    "integer": ("bigint", "int8", pa.int64()),
    "number": ("double precision", "float8", pa.float64()),
    "truth": ("boolean", "bool", pa.bool_()),
}
"""The type of each kind of column in SQL, in psycopg and in Arrow."""


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
        _build_index(pushed, _checked(pushed, state))
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
                    stored = _checked(index, state)["rows"]
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


def _checked(index: PostgresIndex, state: dict[str, Any] | None) -> dict[str, Any]:
    """The state of the table, which must still be of these embeddings."""
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
        columns.append(sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(COLUMN_TYPES[kind][0])))  # type: ignore[arg-type]
    statement = sql.SQL("CREATE TABLE {} ({})").format(index.table, sql.SQL(", ").join(columns))
    index.connection.execute(statement)
    _write_state(index, {"rows": 0, "index": None})


def _write_state(index: PostgresIndex, state: dict[str, Any]) -> None:
    """Write the table's comment; inside `exclusive`."""
    comment = COMMENT + json.dumps({"fingerprint": index.items_checksum, **state})
    statement = sql.SQL("COMMENT ON TABLE {} IS {}").format(index.table, sql.Literal(comment))
    index.connection.execute(statement)


class VectorDumper(Dumper):
    """Dumper for vectors that are in pgvector's binary form already."""

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
        column = batch.column(name).cast(COLUMN_TYPES[column_kind][2])
        if column_kind == "text":
            # PostgreSQL has no texts with NUL.
            column = pc.replace_substring(column, "\0", "\ufffd")
        fields[name] = column.to_pylist()
        types.append(COLUMN_TYPES[column_kind][1])
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
    """Default search settings of an index over N rows: the scan continues until k rows meet the filter."""
    if kind == "hnsw":
        scan = {"iterative_scan": "relaxed_order", "max_scan_tuples": 20_000, "scan_mem_multiplier": 1}
        return {"ef_search": 100, **scan}
    if kind == "ivfflat":
        probes = max(int(_lists(count) ** 0.5), 1)
        return {"probes": probes, "iterative_scan": "relaxed_order", "max_probes": _lists(count)}
    return {}
