"""An engine in an evaluation: what it finds, how much of the exact result that is, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.encoders import Tower
    from dualenc.search import Embeddings
    from dualenc.search.engines import Condition, EngineIndex, Hit

RECALL_AT = (10, 100)


class AskedEngine:
    """A collection that an evaluation asks beside exact search over the embeddings that were pushed there.

    Attributes:
        system: its name in tables.
        embeddings: the documents that meet the conditions, which exact search looks at.
        measured: a table row of recall and times, once `run` has been called.
    """

    def __init__(self, index: EngineIndex, embeddings: Embeddings, where: Sequence[Condition]) -> None:
        from dualenc.search.engines.push import embeddings_that_meet

        self.index, self.pushed, self.where = index, embeddings, where
        self.system = f"{index.engine.kind} {index.engine.collection}"
        self.embeddings = embeddings_that_meet(embeddings, where)
        self.measured: dict[str, Any] = {}

    def run(self, queries: Embeddings, depth: int) -> dict[str, dict[str, float]]:
        """The best documents of each query by the engine, asked one query at a time as a service is."""
        vectors = np.asarray(queries.vectors, dtype=np.float32)
        found: list[list[Hit]] = []
        seconds = []
        for vector in vectors:
            begin = time.perf_counter()
            found += self.index.search(vector, max(depth, max(RECALL_AT) + 1), self.where, payload=False)
            seconds.append(time.perf_counter() - begin)
        about = self.index.about
        self.measured = {"engine": self.system, "metric": about.metric, "quantization": about.quantization}
        self.measured |= {"documents": len(self.embeddings), "queries": len(vectors)}
        for k in RECALL_AT:
            share = self.index.recall(self.pushed, vectors, k, where=self.where, found=found)
            self.measured[f"recall@{k} of exact"] = share
        p50, p95 = np.percentile(seconds, [50, 95]) * 1000
        self.measured |= {"ms per query (p50)": round(p50, 2), "ms (p95)": round(p95, 2)}
        return {name: {hit.id: hit.score for hit in hits[:depth]} for name, hits in zip(queries.ids, found)}


def ask_engine(
    folder: str, words: Sequence[str], documents: Tower, ids: Sequence[str], qdrant_path: str | None = None
) -> AskedEngine:
    """Open the engine that a folder remembers, with the embeddings that were pushed there.

    Args:
        folder: that `dualenc push` wrote.
        words: conditions on its columns.
        documents: the side of the model that encodes documents.
        ids: of the documents of the evaluation.
        qdrant_path: the store of an embedded Qdrant, see `EngineIndex.open`.

    Raises:
        DualencError: the collection was made by another model or of other documents, or the embeddings are gone.
    """
    from dualenc.search import Embeddings
    from dualenc.search.embed import tower_checksum
    from dualenc.search.engines import EngineIndex, parse_conditions
    from dualenc.search.engines.push import fingerprint_of

    index = EngineIndex.open(folder, qdrant_path)
    if index.meta.get("model_checksum") != tower_checksum(documents) or index.meta.get("side") != "right":
        raise DualencError(f"{folder}: was pushed from embeddings of another model; embed the documents and push again")
    pushed = Path(str(index.meta.get("embeddings", "")))
    beside = Path(folder).resolve().parent / pushed.name
    if not pushed.is_dir() and not beside.is_dir():
        raise DualencError(f"{folder}: the embeddings {pushed}, for exact search, are gone; embed and push again")
    embeddings = Embeddings.open(pushed if pushed.is_dir() else beside)
    if fingerprint_of(embeddings) != index.about.fingerprint:
        raise DualencError(f"{folder}: the embeddings have changed since they were pushed; push again with --replace")
    if unknown := set(embeddings.ids) ^ set(ids):
        raise DualencError(
            f"{folder}: holds other documents than the data, first {min(unknown)!r}; embed and push again"
        )
    return AskedEngine(index, embeddings, parse_conditions(words, index.about.columns))
