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
from dualenc.search.engines.index import EngineIndex, fingerprint_of
from dualenc.search.hits import Hit

if TYPE_CHECKING:
    from dualenc.encoders import Tower

RECALL_AT = (10, 100)


class EvaluatedEngine:
    """A collection that is evaluated beside exact search over the embeddings that were pushed to it.

    Attributes:
        system: its name in tables.
        embeddings: the documents that match the filter, for exact search.
        measured: a table row of recall and times, once `run` has been called.
    """

    def __init__(self, index: EngineIndex, embeddings: Embeddings, filter: str = "") -> None:
        self.index = index
        self.filter = filter
        self.system = f"{index.engine.kind} {index.engine.collection}"
        self.embeddings = index.matching(embeddings, filter)
        self.measured: dict[str, Any] = {}

    def run(self, queries: Embeddings, depth: int) -> dict[str, dict[str, float]]:
        """The best documents of each query by the engine, one query at a time as in a service."""
        vectors = np.asarray(queries.vectors, dtype=np.float32)
        found: list[list[Hit]] = []
        seconds = []
        num_results = max(depth, max(RECALL_AT) + 1)
        for vector in vectors:
            begin = time.perf_counter()
            found += self.index.search(vector, num_results, self.filter, with_columns=False)
            seconds.append(time.perf_counter() - begin)
        about = self.index.about
        self.measured = {"engine": self.system, "metric": about.metric, "quantization": about.quantization}
        self.measured |= {"documents": len(self.embeddings), "queries": len(vectors)}
        for k in RECALL_AT:
            recall = self.index.recall(self.embeddings, vectors, k, found=found)
            self.measured[f"recall@{k} of exact"] = recall
        median, p95 = np.percentile(seconds, [50, 95]) * 1000
        self.measured |= {"ms per query (p50)": round(median, 2), "ms (p95)": round(p95, 2)}
        return {name: {hit.id: hit.score for hit in hits[:depth]} for name, hits in zip(queries.ids, found)}


def open_evaluated_engine(
    folder: str, filter: str, documents: Tower, ids: Sequence[str], qdrant_path: str | None = None
) -> EvaluatedEngine:
    """Open the engine that a folder of `dualenc push` remembers, with the embeddings that were pushed there.

    Args:
        folder, qdrant_path: see `EngineIndex.open`.
        filter: in the engine's own language; "" for none.
        documents: the side of the model that encodes documents.
        ids: of the documents of the evaluation.

    Raises:
        DualencError: the collection was made by another model or of other documents, or the embeddings are gone.
    """
    index = EngineIndex.open(folder, qdrant_path)
    if index.meta.get("model_checksum") != tower_checksum(documents) or index.meta.get("side") != "right":
        raise DualencError(f"{folder}: was pushed from embeddings of another model; embed the documents and push again")
    embeddings = Embeddings.open(_pushed_embeddings(folder, index))
    if fingerprint_of(embeddings) != index.about.fingerprint:
        raise DualencError(f"{folder}: the embeddings have changed since they were pushed; push again with --replace")
    different = set(embeddings.ids) ^ set(ids)
    if different:
        first = f"first {min(different)!r}"
        raise DualencError(f"{folder}: holds other documents than the data, {first}; embed and push again")
    return EvaluatedEngine(index, embeddings, filter)


def _pushed_embeddings(folder: str, index: EngineIndex) -> Path:
    """The recorded folder of embeddings, or one of that name beside the engine's if both were moved together."""
    recorded = Path(str(index.meta.get("embeddings", "")))
    sibling = Path(folder).resolve().parent / recorded.name
    found = next((folder for folder in (recorded, sibling) if folder.is_dir()), None)
    if found is None:
        raise DualencError(f"{folder}: the embeddings {recorded}, for exact search, are gone; embed and push again")
    return found
