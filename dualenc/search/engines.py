"""Push embeddings to the engine that a URL names, and open the one that a folder remembers."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dualenc.data.identity import digest_of
from dualenc.data.items import check_ids
from dualenc.data.metadata import check_column_names
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.build import Database
from dualenc.search.index import EMBEDDINGS_META
from dualenc.search.pushed import Engine, IndexKind, read_pushed
from dualenc.search.where import column_kinds
from dualenc.types import Metric


def push_embeddings(
    embeddings: Embeddings,
    target: str,
    name: str,
    *,
    metric: Metric | None = None,
    index: IndexKind = "hnsw",
    replace: bool = False,
    progress: bool = False,
) -> tuple[Engine, int]:
    """Send the rows that a table or collection does not hold yet, and have them indexed.

    Stored rows are always a prefix of the embeddings, so that a broken push resumes behind the last one.

        engine, sent = push_embeddings(Embeddings.open("emb"), "postgresql://me@localhost/db", "docs")

    Args:
        embeddings: N vectors; columns stay columns, float16 stays half precision.
        target: URL of a PostgreSQL database, whose password may come from PGPASSWORD or ~/.pgpass, or of a Qdrant
            server, whose key is in the environment variable QDRANT_API_KEY.
        name: of the table, in the first schema of the search path, or of the collection.
        metric: by default cosine for embeddings that are normalized, and ip for others.
        index: the kind of pgvector's index; "none" for exact search of all rows.
        replace: first remove a table or collection that holds other embeddings.

    Returns:
        The engine, and the number of rows sent.
    """
    meta = _describe(embeddings, metric) | {"target": target, "collection": name}
    engine = _engine_class(target).new(embeddings, meta, index)
    database = Database(embeddings, meta["metric"])
    with engine.transaction() as state:
        is_same = state is not None and state["fingerprint"] == engine.items_checksum
        if state is not None and not is_same and not replace:
            remedy = "push with --replace to remove them first, or name another --table"
            problem = "holds other embeddings, or with another metric"
            raise DualencError(f"{engine.location}: {problem}; {remedy}")
        if not is_same:
            engine.create(embeddings)
    replaced = "another process has removed or replaced it"
    sent = 0
    start = 0
    stored = 0
    with tqdm(total=len(embeddings), desc="push", unit=" vectors", disable=not progress) as bar:
        for batch in embeddings.record_batches(engine.batch_rows):
            stop = start + len(batch)
            if stop > stored:
                with engine.transaction() as state:
                    # Another push may have stored some meanwhile.
                    stored = engine.check_state(state, replaced)["rows"]
                    first = max(stored - start, 0)
                    if first < len(batch):
                        vectors = database.rows(np.arange(start + first, stop))
                        engine.add(batch.slice(first), vectors, stop)
                        stored = stop
                        sent += len(batch) - first
            start = stop
            bar.update(len(batch))
    with engine.transaction() as state:
        engine.finish(engine.check_state(state, replaced))
    return engine, sent


def _describe(embeddings: Embeddings, metric: Metric | None) -> dict[str, Any]:
    """The entries of meta.json on the embeddings."""
    check_ids(embeddings.ids)
    if embeddings.columns is not None:
        check_column_names(embeddings.columns.column_names)
    metric = metric or ("cosine" if embeddings.meta.get("normalized") else "ip")
    contents = [f"{name} {value}" for name, value in embeddings.meta.get("files", {}).items()]
    fingerprint = digest_of(metric, sorted(contents))
    if not contents:
        fingerprint = digest_of(metric, *(bytes(batch.serialize()) for batch in embeddings.record_batches()))
    return {key: embeddings.meta[key] for key in EMBEDDINGS_META if key in embeddings.meta} | {
        "fingerprint": fingerprint,
        "count": len(embeddings),
        "dim": embeddings.dim,
        "metric": metric,
        "columns": column_kinds(embeddings.columns),
        "has_snippets": embeddings.snippets is not None,
    }


def open_engine(folder: str | os.PathLike[str]) -> Engine:
    """Open the database that a folder remembers, which `dualenc push` wrote."""
    return _engine_class(read_pushed(folder)["target"]).open(folder)


def is_postgres(target: str) -> bool:
    """Whether a target is the URL of a PostgreSQL database."""
    return target.startswith(("postgresql://", "postgres://"))


def _engine_class(target: str) -> Any:
    """The class of an engine, whose client is optional."""
    name = "postgres" if is_postgres(target) else "qdrant"
    try:
        module = importlib.import_module(f"dualenc.search.{name}")
    except ImportError as error:
        raise DualencError(f"{error}; pip install 'dualenc[{name}]'") from None
    return module.PostgresIndex if is_postgres(target) else module.QdrantIndex
