"""Push embeddings to PostgreSQL or Qdrant by URL, and open what a folder records."""

from __future__ import annotations

import importlib
import logging
import os
import re
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dualenc.data.store.items import check_ids
from dualenc.data.store.metadata import check_column_names
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.provenance import SOURCE_ENTRIES, Provenance
from dualenc.search.engines.engine import REPLACED, Engine, IndexKind
from dualenc.search.engines.pushed_folder import AGAIN, embeddings_fingerprint, read_pushed
from dualenc.search.index.database import Database
from dualenc.search.where import column_kinds
from dualenc.types import Metric

logger = logging.getLogger("dualenc.search")

_POSTGRES = re.compile(r"postgres(?:ql)?(?:\+\w+)?://")


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
    """Send the rows that a table or collection lacks, and have the engine index them.

    Each batch first asks which of its ids are stored, so an interrupted push resumes, and rows that
    somebody deleted are sent again. Other embeddings are replaced in one step, after all new ones
    are stored beside them.

        source = Embeddings.open("emb")
        engine, sent = push_embeddings(source, "postgresql://me@localhost/db", "docs")

    Args:
        embeddings: N vectors; their columns become columns, and float16 stays half precision.
        target: URL of a PostgreSQL database, whose password may come from PGPASSWORD or ~/.pgpass,
            or of a Qdrant server, whose key is in the environment variable QDRANT_API_KEY.
        name: name of the collection or table: `papers` (in the first schema of the search path),
            `schema.papers`, or `"a.b"` for a name with a dot.
        metric: "cosine" or "ip"; by default cosine if the embeddings are normalized.
        index: kind of pgvector's index; "none" searches all rows exactly.
        replace: replace other embeddings in the table or collection, and remove their rows.
        progress: show a bar.

    Returns:
        The engine, and the number of rows sent.

    Raises:
        DualencError: an argument is invalid, the engine refuses, or the collection holds other
            embeddings.
    """
    _check_arguments(embeddings, target, name)
    provenance = _describe(embeddings, metric).updated(target=target, collection=name)
    engine = _engine_class(target).new(embeddings, provenance, index, replaces=replace)
    database = Database(embeddings, provenance.metric)
    with engine.transaction() as state:
        if state is None:
            engine.create(embeddings)
    sent = _send_missing(engine, embeddings, database, progress)
    with engine.transaction() as state:
        state = engine.check_state(state, REPLACED, AGAIN)
        others = engine.count_rows() - len(embeddings)
        if others > 0 and replace:
            engine.remove_others(embeddings.ids)
        elif others > 0:
            message = "%s: has rows that are not from these embeddings: %s; --replace removes them"
            logger.warning(message, engine.location, f"{others:,}")
        engine.finish(state)
    return engine, sent


def _send_missing(
    engine: Engine, embeddings: Embeddings, database: Database, progress: bool
) -> int:
    """Store the rows that are not stored yet, batch by batch; return their number."""
    sent = 0
    start = 0
    with tqdm(
        total=len(embeddings), desc="push", unit=" vectors", unit_scale=True, disable=not progress
    ) as bar:
        for batch in embeddings.record_batches(engine.batch_rows):
            ids = batch.column("id").to_pylist()
            # A transaction per batch: an interrupted push loses at most one of them.
            with engine.transaction() as state:
                engine.check_state(state, REPLACED, AGAIN)
                stored = engine.stored_ids(ids)
                missing = np.flatnonzero([name not in stored for name in ids])
                if len(missing):
                    engine.add(batch.take(missing), database.rows(start + missing))
            sent += len(missing)
            start += len(batch)
            bar.update(len(batch))
    return sent


def _check_arguments(embeddings: object, target: object, name: object) -> None:
    """Raise unless embeddings, target and name have the right types."""
    if not isinstance(embeddings, Embeddings):
        kind = type(embeddings).__name__
        raise DualencError(
            f"push_embeddings: embeddings is {kind}", fix="give Embeddings.open(FOLDER)"
        )
    for argument, value in (("target", target), ("name", name)):
        if not isinstance(value, str) or not value:
            raise DualencError(
                f"push_embeddings: {argument} is {value!r}",
                fix="give the URL of an engine and the name of a table",
            )


def _describe(embeddings: Embeddings, metric: Metric | None) -> Provenance:
    """Return the record of the embeddings."""
    check_ids(embeddings.ids)
    if embeddings.columns is not None:
        check_column_names(embeddings.columns.column_names)
    metric = metric or ("cosine" if embeddings.provenance.normalized else "ip")
    return embeddings.provenance.only(SOURCE_ENTRIES).updated(
        fingerprint=embeddings_fingerprint(embeddings, metric),
        count=len(embeddings),
        dim=embeddings.dim,
        metric=metric,
        columns=column_kinds(embeddings.columns),
        has_snippets=embeddings.snippets is not None,
    )


def open_engine(folder: str | os.PathLike[str]) -> Engine:
    """Open the table or collection that a folder written by `dualenc push` records.

    Raises:
        DualencError: the folder is not one, or the engine cannot be reached or holds other vectors.
    """
    recorded = read_pushed(folder)
    return _engine_class(recorded.target, is_foreign=bool(recorded.names)).open(folder)


def is_postgres(target: str) -> bool:
    """Return True for the URL of a PostgreSQL database, also in SQLAlchemy's form."""
    return isinstance(target, str) and bool(_POSTGRES.match(target))


def _engine_class(target: str, *, is_foreign: bool = False) -> Any:
    """Import the class of an engine, whose client is an optional dependency."""
    name, engine, extra = "postgres", "PostgresIndex", "postgres"
    if is_foreign:
        name, engine = "postgres_foreign", "ForeignTable"
    elif not is_postgres(target):
        name, engine, extra = "qdrant", "QdrantIndex", "qdrant"
    try:
        module = importlib.import_module(f"dualenc.search.engines.{name}")
    except ImportError as error:
        raise DualencError(str(error), fix=f"pip install 'dualenc[{extra}]'") from None
    return getattr(module, engine)
