"""Engine evaluation: what an engine finds, its recall of the exact result, and its time per query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc.data.embeddings import Embeddings
from dualenc.errors import DualencError
from dualenc.search.embed import tower_checksum
from dualenc.search.exact import exact_search
from dualenc.search.hits import Hit
from dualenc.search.qdrant import QdrantIndex, fingerprint_of

if TYPE_CHECKING:
    from dualenc.encoders import Tower

RECALL_AT = (10, 100)
TIE_TOLERANCE = 1e-5
"""Relative difference of scores that counts as a tie, as sums in another order make it."""
TINY = 1e-12


class EvaluatedEngine:
    """A collection that is evaluated beside exact search over the embeddings that were pushed to it.

    Attributes:
        system: its name in tables.
        embeddings: the documents that match the filter, for exact search.
        measured: a table row of recall and times, once `run` has been called.
    """

    def __init__(self, index: QdrantIndex, embeddings: Embeddings, filter: str = "") -> None:
        self.index = index
        self.filter = filter
        self.system = f"qdrant {index.collection}"
        self.embeddings = embeddings
        if filter:
            rows = np.sort(embeddings.rows_of(index.ids(filter)))
            names = [embeddings.ids[row] for row in rows.tolist()]
            self.embeddings = Embeddings(names, embeddings.vectors[rows], embeddings.meta)
        self.measured: dict[str, Any] = {}

    def run(self, queries: Embeddings, depth: int) -> dict[str, dict[str, float]]:
        """The best documents of each query by the engine, one query at a time as in a service."""
        vectors = np.asarray(queries.vectors, dtype=np.float32)
        results: list[list[Hit]] = []
        seconds = []
        num_results = max(depth, *RECALL_AT)
        for vector in vectors:
            begin = time.perf_counter()
            results += self.index.search(vector, num_results, self.filter)
            seconds.append(time.perf_counter() - begin)
        self.measured = {"engine": self.system, "metric": self.index.meta["metric"]}
        self.measured |= {"documents": len(self.embeddings), "queries": len(vectors)}
        for k in RECALL_AT:
            self.measured[f"recall@{k} of exact"] = self._recall(vectors, results, k)
        median, p95 = np.percentile(seconds, [50, 95]) * 1000
        self.measured |= {"ms per query (p50)": round(median, 2), "ms (p95)": round(p95, 2)}
        return {name: {hit.id: hit.score for hit in hits[:depth]} for name, hits in zip(queries.ids, results)}

    def _recall(self, queries: np.ndarray, results: list[list[Hit]], k: int) -> float | None:
        """The share of the k nearest documents that the engine finds, too; a tie with the k-th counts."""
        if not len(self.embeddings):
            return None
        documents = np.asarray(self.embeddings.vectors, np.float32)
        if self.index.meta["metric"] == "cosine":
            documents = documents / np.maximum(np.linalg.norm(documents, axis=1, keepdims=True), TINY)
        k = min(k, len(documents))
        threshold = exact_search(queries, documents, k)[0][:, -1] - TIE_TOLERANCE * np.linalg.norm(queries, axis=1)
        num_found = 0
        for query, hits, least in zip(queries, results, threshold):
            rows = self.embeddings.rows_of([hit.id for hit in hits[:k]])
            num_found += int((documents[rows] @ query >= least).sum())
        return num_found / (k * len(queries))


def open_evaluated_engine(
    folder: str, filter: str, documents: Tower, ids: Sequence[str], qdrant_path: str | None = None
) -> EvaluatedEngine:
    """Open the engine that a folder of `dualenc push` remembers, with the embeddings that were pushed there.

    Args:
        folder, qdrant_path: see `QdrantIndex.open`.
        filter: Qdrant's JSON; "" for none.
        documents: the side of the model that encodes documents.
        ids: of the documents of the evaluation.

    Raises:
        DualencError: the collection was made by another model or of other documents, or the embeddings are gone.
    """
    index = QdrantIndex.open(folder, qdrant_path)
    if index.meta.get("model_checksum") != tower_checksum(documents) or index.meta.get("side") != "right":
        raise DualencError(f"{folder}: was pushed from embeddings of another model; embed the documents and push again")
    embeddings = Embeddings.open(_pushed_embeddings(folder, index))
    if fingerprint_of(embeddings, index.meta["metric"]) != index.meta["fingerprint"]:
        raise DualencError(f"{folder}: the embeddings have changed since they were pushed; push again with --replace")
    different = set(embeddings.ids) ^ set(ids)
    if different:
        first = f"first {min(different)!r}"
        raise DualencError(f"{folder}: holds other documents than the data, {first}; embed and push again")
    return EvaluatedEngine(index, embeddings, filter)


def _pushed_embeddings(folder: str, index: QdrantIndex) -> Path:
    """The recorded folder of embeddings, or one of that name beside the engine's if both were moved together."""
    recorded = Path(str(index.meta.get("embeddings", "")))
    sibling = Path(folder).resolve().parent / recorded.name
    found = next((folder for folder in (recorded, sibling) if folder.is_dir()), None)
    if found is None:
        raise DualencError(f"{folder}: the embeddings {recorded}, for exact search, are gone; embed and push again")
    return found
