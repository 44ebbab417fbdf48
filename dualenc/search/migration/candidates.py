"""Search with a new model before its vectors exist: it ranks the candidates of the old model.

The old model finds candidates over its own vectors, and the new model scores them. What it has not
embedded yet is embedded now and kept for the migration (`VectorCache`), which embeds it no more. If
the old model is gone, queries of the new one, mapped into the old space, find the candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.data import Corpus
from dualenc.data.item_lists import Picked
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import read_shard
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import BadSample, DualencError
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.index.open import Hit, Index, rows_in
from dualenc.search.migration.maps import LinearMap
from dualenc.search.migration.migration_folder import (
    TO_OLD,
    cache_path,
    new_shards,
    work_folder,
)
from dualenc.search.migration.stand_in import stand_in
from dualenc.search.migration.vector_cache import VectorCache
from dualenc.search.query_vectors import modality_of, query_towers, query_vector
from dualenc.search.recorded_data import check_readable, open_recorded
from dualenc.search.texts import TextStore, has_texts
from dualenc.types import Items, StrPath

logger = logging.getLogger("dualenc.search")

NUM_CANDIDATES = 200
"""Number of documents that the old model finds for each query."""
_EMBEDDED_AT_ONCE = 64
"""Number of documents between two writes, so that a killed search loses little."""


class CandidateSearch:
    """Search with the new model of a migration among the candidates of the old one.

    `Searcher.open` creates it. After the migration it goes on with the old candidates; open the
    index again to search the new vectors.

        candidates = CandidateSearch("index", plan, Index.open("index"), load_model(plan["name"]))
        candidates.search("how do I resume?", old_vector, k=10)

    Args:
        folder: the index.
        plan: the plan of its migration.
        index: the open index of N documents, with the old vectors.
        encoder: the new model.

    Attributes:
        stand_in: model that finds candidates in place of the old one, which is gone; else None.

    Raises:
        DualencError: the model has other weights than that of the plan, no texts are stored, or the
            images are gone.
    """

    def __init__(
        self, folder: StrPath, plan: Mapping[str, Any], index: Index, encoder: DualEncoder
    ) -> None:
        side = index.provenance.side or "right"
        tower = encoder.tower(side)
        if tower_checksum(tower) != plan.get("model"):
            raise DualencError(
                "has other weights than when its vectors were made",
                fix="end the migration by --rollback --discard, and migrate again",
                where=plan.get("name"),
            )
        self.index = index
        self.tower = tower
        work = work_folder(folder)
        self.towers = query_towers(encoder, side)
        self.items = _open_items(work, plan, index)
        cache = VectorCache(cache_path(folder, plan), tower.dim)
        self.vectors = NewVectors(work, index.ids, cache)
        self.stand_in: DualEncoder | None = None
        if (work / TO_OLD).is_file():
            to_old = LinearMap.load(work / TO_OLD)
            self.stand_in = stand_in(encoder, to_old)
        self._unusable: set[int] = set()

    def search(
        self,
        item: Any,
        old_vector: np.ndarray,
        k: int,
        allowed_rows: np.ndarray | None = None,
        **settings: Any,
    ) -> list[Hit]:
        """Return the best k candidates of a query by the new model, best first.

        Args:
            item: the query, a text or an image.
            old_vector: (E,) its vector by the old model, or by `stand_in`.
            k: number of results.
            allowed_rows: (N,) bool, the rows that may be returned; None for all.
            settings: `nprobe` and `ef_search` of `Index.search_rows`.
        """
        query = query_vector(item, self.towers[modality_of(item)], self.tower.dim)
        depth = min(max(NUM_CANDIDATES, k), len(self.index))
        found = self.index.search_rows(old_vector, depth, allowed_rows=allowed_rows, **settings)[1]
        rows = found[0][found[0] >= 0]
        self._embed_missing(rows)
        vectors = self.vectors.get(rows)
        rows = np.array([row for row in rows.tolist() if row in vectors], np.int64)
        if not len(rows):
            return []
        scores = np.stack([vectors[row] for row in rows.tolist()]) @ query
        order = np.argsort(-scores, kind="stable")[:k]
        return [self.index.hit(int(rows[place]), float(scores[place])) for place in order]

    def _embed_missing(self, rows: np.ndarray) -> None:
        """Embed documents (n,) that have no new vector yet, and keep their vectors."""
        missing = [row for row in self.vectors.missing(rows) if row not in self._unusable]
        for start in range(0, len(missing), _EMBEDDED_AT_ONCE):
            chunk = missing[start : start + _EMBEDDED_AT_ONCE]
            try:
                self._embed(chunk)
            except BadSample:
                # One document must not keep all others from being found.
                for row in chunk:
                    self._embed_or_skip(row)

    def _embed(self, rows: Sequence[int]) -> None:
        ids = [self.index.ids[row] for row in rows]
        corpus = Corpus(ids, Picked(self.items, np.asarray(rows)), self.tower.modality)
        embedded = embed(self.tower, corpus, progress=False, on_error="raise")
        self.vectors.add(rows, np.asarray(embedded.vectors, np.float32))

    def _embed_or_skip(self, row: int) -> None:
        """Embed a document; leave it out of all results if the new model cannot embed it."""
        try:
            self._embed([row])
        except BadSample as error:
            self._unusable.add(row)
            logger.warning("left out of all results: %s", error)


def _open_items(work: Path, plan: Mapping[str, Any], index: Index) -> Items:
    """Open the documents of an index in its order: stored texts, or images where the plan says."""
    about = index.provenance
    if about.modality == "image":
        corpus = open_recorded(about.updated(data=str(plan.get("data") or "")), work)
        images = corpus.take(rows_in(corpus, index, work))
        check_readable(images)
        return images.items
    # The old index may store its texts; otherwise the migration has stored them.
    place = work / "old" if has_texts(work / "old") else work
    return TextStore(place, index.items_checksum).texts


class NewVectors:
    """Vectors of the new model in a work folder, by row of the index.

    They come from the shards that the migration has finished so far, and from the cache.

        vectors = NewVectors(work, index.ids, cache)
        vectors.add(vectors.missing(rows), new_vectors)

    Args:
        work: the work folder.
        ids: (N,) ids of the documents.
        cache: what searches have embedded.
    """

    def __init__(self, work: Path, ids: Sequence[str], cache: VectorCache) -> None:
        self.work = work
        self.ids = ids
        self.cache = cache
        self._shards: dict[Path, np.ndarray] = {}
        # (N,) the shard of each row, -1 without any, and the row in it.
        self._shard_of = np.full(len(ids), -1, np.int32)
        self._row_in_shard = np.zeros(len(ids), np.int32)
        # Vectors that were embedded here, as long as the cache cannot store them.
        self._unstored: dict[int, np.ndarray] = {}

    def get(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """Return the vectors (D,) of those rows (n,) that have one."""
        vectors = {row: self._unstored[row] for row in rows.tolist() if row in self._unstored}
        shards = list(self._shards.values())
        for row in rows[self._shard_of[rows] >= 0].tolist():
            vectors[row] = shards[self._shard_of[row]][self._row_in_shard[row]]
        others = [row for row in rows.tolist() if row not in vectors]
        cached = self.cache.get([self.ids[row] for row in others])
        return vectors | {row: cached[self.ids[row]] for row in others if self.ids[row] in cached}

    def missing(self, rows: np.ndarray) -> list[int]:
        """Return those rows (n,) that have no vector yet."""
        known = self.get(rows)
        if len(known) < len(rows):
            # The migration may have finished other shards.
            self._open_shards()
            known = self.get(rows)
        return [row for row in rows.tolist() if row not in known]

    def add(self, rows: Sequence[int], vectors: np.ndarray) -> None:
        """Store the vectors (n, D) of rows, for other processes and the migration, too."""
        names = [self.ids[row] for row in rows]
        self.cache.put(names, vectors)
        stored = self.cache.get(names)
        for row, name, vector in zip(rows, names, vectors, strict=True):
            if name not in stored:
                self._unstored[row] = vector

    def _open_shards(self) -> None:
        """Map the shards that are finished since the last call; skip corrupt ones."""
        for path in new_shards(self.work):
            if path in self._shards:
                continue
            # A migration that ends now removes its shards.
            with suppress(DualencError, OSError):
                batch, vectors = read_shard(path, self.cache.dim, "float32")
                rows = rows_of(self.ids, batch.column("id").to_pylist())
                places = np.flatnonzero(rows >= 0)
                self._shard_of[rows[places]] = len(self._shards)
                self._row_in_shard[rows[places]] = places
                self._shards[path] = vectors
