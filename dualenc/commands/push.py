"""`dualenc push`: embeddings into a vector search engine, or into Parquet files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

from dualenc.commands.checks import MAX_ITEMS, check_range
from dualenc.errors import DualencError
from dualenc.files import check_writable, locked, removed_if_refused
from dualenc.terminal import printable

FINISHED = {"lancedb": "*.lance/data/*", "qdrant": "collection/*/storage.sqlite"}
"""Files of an embedded engine with vectors to resume from."""
MAX_EMBEDDED_POINTS = 20_000
"""Qdrant's authors advise a server beyond that many."""


def push(
    embeddings: str,
    target: str,
    *,
    to: Literal["qdrant", "lancedb", "parquet"],
    out: str | None = None,
    collection: str | None = None,
    metric: Literal["cosine", "ip"] | None = None,
    quantization: Literal["none", "scalar", "binary"] = "none",
    replace: bool = False,
    batch_size: int | None = None,
    recall_queries: int = 200,
) -> None:
    """Send embeddings to a vector search engine, or export them to Parquet files for others.

    The same command resumes an interrupted push, and sends only what is missing. OUT remembers where the
    vectors are, for `dualenc search OUT …` and `dualenc evaluate retrieval … --engine OUT`. The key of a Qdrant server
    comes from the environment variable QDRANT_API_KEY.

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: of Qdrant the URL of a server, or a folder for its embedded mode, whose files can run code: name only
            a new one, or one that you trust; of LanceDB a folder, or a URL such as s3://bucket/folder; of Parquet a
            folder.
        to: the engine, or parquet for files with id, vector, text and columns.
        out: folder to write, with where the vectors are; by default EMBEDDINGS-engine.
        collection: name of the collection or table; by default that of the folder of embeddings.
        metric: cosine, or ip for the inner product; by default cosine for embeddings of length one, ip for others.
        quantization: compress the vectors that the engine searches to a byte (scalar) or a bit (binary) per number; the
            best are scored again with the vectors themselves, which are stored in the precision of the embeddings.
        replace: first remove a collection that holds other embeddings.
        batch_size: vectors sent at once; by default what suits the engine.
        recall_queries: how many of the vectors to measure recall@10 with; 0 measures nothing.
    """
    check_range(1, MAX_ITEMS, batch_size=batch_size)
    check_range(0, MAX_ITEMS, recall_queries=recall_queries)
    if not target:
        raise DualencError("TARGET is empty; name a folder or a URL")
    if to == "parquet":
        if quantization != "none" or any(value is not None for value in (out, collection, metric, batch_size)):
            raise DualencError("--to parquet writes the vectors as they are; leave the options out")
        _export(embeddings, target, replace)
        return
    folder = Path(out or f"{embeddings.rstrip('/')}-engine")
    settings: dict[str, Any] = {"metric": metric, "quantization": quantization, "replace": replace}
    settings |= {"batch_size": batch_size, "recall_queries": recall_queries, "progress": True}
    _push(embeddings, target, to, folder, collection, settings)


def _export(embeddings: str, target: str, replace: bool) -> None:
    from dualenc.data.embeddings import Embeddings
    from dualenc.search.engines.parquet import export_parquet

    opened = Embeddings.open(embeddings)
    with locked(target, wait=False, option="folder"):
        written, files = export_parquet(opened, target, replace=replace)
    print(printable(f"{len(opened):,} vectors of dimension {opened.dim}: {files} files, {written} new → {target}"))


def _push(
    embeddings: str, target: str, to: str, folder: Path, collection: str | None, settings: dict[str, Any]
) -> None:
    from dualenc.data.embeddings import Embeddings
    from dualenc.search.engines.connection import is_server
    from dualenc.search.engines.index import check_engine_target, open_engine
    from dualenc.search.engines.index import push as push_embeddings

    if folder.resolve() == Path(target).resolve():
        raise DualencError(f"{folder}: TARGET and --out are the same folder; name another --out")
    check_engine_target(folder)
    check_writable(folder)
    source = Path(embeddings).resolve()
    name = collection or re.sub(r"[^A-Za-z0-9_-]+", "-", source.name).strip("-_") or "embeddings"
    opened = Embeddings.open(embeddings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(folder, wait=False))
        if "://" not in target:
            table = f"{os.path.abspath(os.path.expanduser(target))}.{name}"
            stack.enter_context(locked(table, wait=False, option="--collection"))
            # A refusal before any vector has arrived leaves no empty database behind.
            stack.enter_context(removed_if_refused(target, FINISHED[to]))
        engine = open_engine(to, target, name)
        index, sent = push_embeddings(opened, engine, **settings)
        engine.close()
        index.meta["embeddings"] = str(source)
        index.save(folder)
    about = index.about
    stored_as = f"{about.metric}, {about.dtype}, quantization {about.quantization}"
    vectors = f"{about.count:,} vectors of dimension {about.dim} ({stored_as})"
    print(printable(f"{vectors} → {to} {engine.place}; {sent:,} sent"))
    if "recall_at_10" in index.meta:
        queries = f"{index.meta['recall_queries']} queries"
        print(f"recall@10 against exact search: {index.meta['recall_at_10']:.4f} ({queries})")
    is_embedded = to == "qdrant" and not is_server(target)
    if is_embedded and about.count > MAX_EMBEDDED_POINTS:
        warning = "Qdrant's embedded mode compares a query with all of them; a server or LanceDB has an index"
        print(f"note: {about.count:,} vectors, and {warning}", file=sys.stderr)
    store = f" --qdrant-path {target}" if is_embedded else ""
    print(printable(f'next: dualenc search {folder} "…"{store}'))
