"""`dualenc push`: embeddings into a vector search engine, or into Parquet files."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Literal

from dualenc.errors import DualencError
from dualenc.files import removed_if_refused
from dualenc.terminal import printable

FINISHED = {"lancedb": "*.lance/data/*", "qdrant": "collection/*/storage.sqlite"}
"""Of an embedded engine, files with vectors to resume from."""


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

    The same command again sends what is missing after an interruption, and nothing else. OUT remembers where the
    vectors are, for `dualenc search OUT …` and `dualenc evaluate retrieval … --engine OUT`. The key of a Qdrant server
    comes from the environment variable QDRANT_API_KEY.

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: of Qdrant the URL of a server, or a folder for its embedded mode, whose files can run code: name only
            a new one, or one that you trust; of LanceDB a folder, or a URL such as s3://bucket/folder; of Parquet a
            folder.
        to: the engine, or parquet for files with id, vector, snippet and columns.
        out: folder to write, with where the vectors are; by default EMBEDDINGS-engine.
        collection: name of the collection or table; by default that of the folder of embeddings.
        metric: cosine, or ip for the inner product; by default cosine for embeddings of length one, ip for others.
        quantization: compress the vectors that the engine searches to a byte (scalar) or a bit (binary) per number; the
            best are scored again with the vectors themselves, which are stored in the precision of the embeddings.
        replace: remove a collection that holds other embeddings first.
        batch_size: vectors sent at once; by default what suits the engine.
        recall_queries: how many of the vectors to measure recall@10 with; 0 measures nothing.
    """
    from dualenc.commands.checks import MAX_ITEMS, check_range, check_writable
    from dualenc.search.embeddings import Embeddings
    from dualenc.search.engines.parquet import export_parquet
    from dualenc.search.engines.push import check_engine_target, open_engine
    from dualenc.search.engines.push import push as push_embeddings
    from dualenc.search.engines.qdrant import is_server

    check_range(1, MAX_ITEMS, batch_size=batch_size)
    check_range(0, MAX_ITEMS, recall_queries=recall_queries)
    if to == "parquet":
        given = {"out": out, "collection": collection, "metric": metric, "batch_size": batch_size}
        if any(value is not None for value in given.values()) or quantization != "none":
            raise DualencError("--to parquet writes the vectors as they are, a file per shard; leave the options out")
        opened = Embeddings.open(embeddings)
        written, files = export_parquet(opened, target, replace=replace)
        print(printable(f"{len(opened):,} vectors of dimension {opened.dim}: {files} files, {written} new → {target}"))
        return
    folder = Path(out or f"{embeddings.rstrip('/')}-engine")
    if folder.resolve() == Path(target).resolve():
        raise DualencError(f"{folder}: TARGET and --out are the same folder; name another --out")
    check_engine_target(folder)
    check_writable(folder)
    name = collection or re.sub(r"[^A-Za-z0-9_-]+", "-", Path(embeddings).resolve().name).strip("-_") or "embeddings"
    opened = Embeddings.open(embeddings)
    # A refusal before any vector has arrived leaves no empty database behind.
    with contextlib.nullcontext() if "://" in target else removed_if_refused(target, FINISHED[to]):
        engine = open_engine(to, target, name)
        index, sent = push_embeddings(
            opened,
            engine,
            metric=metric,
            quantization=quantization,
            replace=replace,
            batch_size=batch_size,
            recall_queries=recall_queries,
            progress=True,
        )
        engine.close()
    index.meta["embeddings"] = str(Path(embeddings).resolve())
    index.save(folder)
    about = index.about
    how = f"{about.metric}, {about.dtype}, quantization {about.quantization}"
    print(printable(f"{about.count:,} vectors of dimension {about.dim} ({how}) → {to} {engine.place}; {sent:,} sent"))
    if "recall_at_10" in index.meta:
        print(
            f"recall@10 against exact search: {index.meta['recall_at_10']:.4f} ({index.meta['recall_queries']} queries)"
        )
    _advise(to, target, about.count)
    store = f" --qdrant-path {target}" if to == "qdrant" and not is_server(target) else ""
    print(printable(f'next: dualenc search {folder} "…"{store}'))


def _advise(to: str, target: str, count: int) -> None:
    from dualenc.search.engines.qdrant import LOCAL_POINTS, is_server

    if to == "qdrant" and not is_server(target) and count > LOCAL_POINTS:
        told = f"Qdrant's embedded mode compares a query with all {count:,} vectors; a server or LanceDB has an index"
        print(f"note: {told}", file=sys.stderr)
