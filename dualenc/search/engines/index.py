"""Engine index: a folder that remembers a collection, and the search in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import check_folder_target, is_folder_of, write_json
from dualenc.reading import read_json_object
from dualenc.search.build import Database, as_queries, exact_probe, share_found
from dualenc.search.embeddings import Embeddings, read_head
from dualenc.search.engines.collection import CollectionInfo
from dualenc.search.engines.lance import Lance
from dualenc.search.engines.qdrant import Qdrant
from dualenc.search.engines.targets import check_target, is_server
from dualenc.search.hits import Hit
from dualenc.search.index import check_kept

Engine = Lance | Qdrant
ENGINES: dict[str, type[Lance] | type[Qdrant]] = {"qdrant": Qdrant, "lancedb": Lance}
FORMAT = "dualenc engine"
FORMAT_VERSION = 2
"""Version 1 kept texts in a column "snippet"."""
AGAIN = "run `dualenc push` again"


def open_engine(kind: str, target: str, collection: str) -> Engine:
    """Connect to an engine.

    Args:
        kind: "qdrant" or "lancedb".
        target: URL or path.
        collection: a name in it, which need not exist.

    Raises:
        DualencError: a name that not every engine takes, the engine's package is missing, or the target is unusable.
    """
    return ENGINES[kind](check_target(kind, target, collection), collection)


def is_engine(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder remembers a collection, by its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_engine_target(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not new, not empty, and remembers no collection."""
    check_folder_target(folder, is_engine, "collection that dualenc pushed")


def read_engine_meta(folder: str | os.PathLike[str]) -> tuple[CollectionInfo, dict[str, Any]]:
    """The description of a remembered collection and all entries of meta.json; nothing is opened.

    Raises:
        DualencError: no such folder, or its meta.json cannot be read.
    """
    folder = Path(folder)
    versions = (FORMAT_VERSION, FORMAT_VERSION)
    read_head(folder, FORMAT, versions, "was not written by `dualenc push`; push embeddings first", AGAIN)
    meta = read_json_object(folder / "meta.json", {"engine": str, "target": str, "collection": str})
    if meta["engine"] not in ENGINES:
        raise DualencError(f"{folder}: names the unknown engine {meta['engine'][:40]!r}; {AGAIN}")
    check_kept(folder / "meta.json", meta, AGAIN)
    return CollectionInfo.from_dict(meta, str(folder / "meta.json")), meta


class EngineIndex:
    """A collection searched by vectors: what `push` returns, and `EngineIndex.open` finds again.

    Attributes:
        engine: the connection to the collection.
        about: its description.
        meta: entries of meta.json: `engine`, `target`, `collection`, `model`, `side`, `recall_at_10`, …
    """

    def __init__(self, engine: Engine, about: CollectionInfo, meta: Mapping[str, Any]) -> None:
        self.engine = engine
        self.about = about
        self.meta = dict(meta)

    def __len__(self) -> int:
        return self.about.count

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a meta.json with the place and the description of the collection; no keys.

        Raises:
            DualencError: the folder holds something else.
        """
        check_engine_target(folder)
        write_json(Path(folder) / "meta.json", {"format": FORMAT, "version": FORMAT_VERSION, **self.meta})

    @classmethod
    def open(cls, folder: str | os.PathLike[str], qdrant_path: str | None = None) -> EngineIndex:
        """Open the collection that a folder remembers.

        Args:
            folder: that `dualenc push` wrote.
            qdrant_path: the store of Qdrant's embedded mode, if that is the engine. The client unpickles its points,
                which can run code, so the path is the caller's to name and never taken from the folder.

        Raises:
            DualencError: no such folder, the engine does not answer or its package is missing, the collection has
                changed, or an embedded Qdrant that the caller does not name.
        """
        about, meta = read_engine_meta(folder)
        target = meta["target"]
        is_embedded = meta["engine"] == "qdrant" and not is_server(target)
        if qdrant_path is not None and not is_embedded:
            raise DualencError(f"{folder}: names no embedded Qdrant; leave --qdrant-path out")
        if is_embedded:
            if qdrant_path is None:
                raise DualencError(
                    f"{folder}: names an embedded Qdrant, whose files can run code; if you trust them, say where they "
                    "are with --qdrant-path, or push to LanceDB"
                )
            target = qdrant_path
        engine = open_engine(meta["engine"], target, meta["collection"])
        found = engine.info()
        if found is None:
            raise DualencError(f"{engine.place}: does not exist; {AGAIN}")
        if found != about:
            raise DualencError(f"{engine.place}: holds other embeddings than {folder} was written for; {AGAIN}")
        return cls(engine, about, meta)

    def search(self, queries: np.ndarray, k: int = 10, filter: str = "", **options: Any) -> list[list[Hit]]:
        """The nearest items of each query, best first; fewer than k where fewer match the filter.

        Args:
            queries: (Q, D), or one query (D,).
            k: how many items.
            filter: in the engine's own language: SQL for LanceDB, JSON for Qdrant.
            options: `with_columns`, `nprobe` and `ef_search`, as the engine's `query` takes them.

        Raises:
            DualencError: another dimension than the collection's, queries that are not finite, k below 1, or an
                engine that does not answer.
        """
        if k < 1:
            raise DualencError(f"k is {k}; ask for at least 1 result")
        vectors = as_queries(queries, self.about.dim, self.about.metric)
        return [self.engine.query(self.about, vector, k, filter, **options) for vector in vectors]

    def recall(
        self,
        embeddings: Embeddings,
        queries: np.ndarray,
        k: int = 10,
        *,
        rows: np.ndarray | None = None,
        filter: str = "",
        found: Sequence[Sequence[Hit]] | None = None,
    ) -> float | None:
        """The share of the k nearest items by exact search that the engine finds, too.

        Args:
            embeddings: what was pushed; with a filter, only those that match it.
            queries: (Q, D).
            k: neighbours to look for.
            rows: (Q,) row of each query among the embeddings, which is not to find itself; None: they are others.
            filter: what the engine filters by.
            found: (Q,) at least k + 1 results per query, if the engine was already asked.

        Returns:
            None if there is nothing to find.
        """
        if rows is None:
            rows = np.full(len(queries), -1)
        if not len(embeddings):
            return None
        # Half precision leaves unit vectors a little off, and engines scale them again: so does this exact search.
        rescaled = Embeddings(embeddings.ids, embeddings.vectors, {**embeddings.meta, "normalized": False})
        database = Database(rescaled, self.about.metric)
        probe = exact_probe(database, as_queries(queries, self.about.dim, self.about.metric), rows, k)
        if probe is None:
            return None
        if found is None:
            found = self.search(probe.queries, probe.k + 1, filter, with_columns=False)
        row_of = {name: row for row, name in enumerate(embeddings.ids)}
        found_rows = np.full((len(found), probe.k + 1), -1)
        for number, hits in enumerate(found):
            kept = [row_of.get(hit.id, -1) for hit in hits[: probe.k + 1]]
            found_rows[number, : len(kept)] = kept
        return share_found(found_rows, database, probe)


def embeddings_that_match(index: EngineIndex, embeddings: Embeddings, filter: str) -> Embeddings:
    """The embeddings whose ids the engine finds by a filter, in memory."""
    if not filter:
        return embeddings
    rows = np.sort(embeddings.rows_of(index.engine.ids(filter)))
    return Embeddings([embeddings.ids[row] for row in rows.tolist()], embeddings.vectors[rows], embeddings.meta)
