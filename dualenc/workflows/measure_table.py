"""Measure a new model on a sample of rows in an engine, and order rows by past queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dualenc.data import Corpus
from dualenc.data.readers.beir import has_test_judgements
from dualenc.data.readers.sources import open_corpus
from dualenc.encoders import DualEncoder, Tower, load_model
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.metrics import Qrels
from dualenc.search.embed.encode import embed
from dualenc.search.engines.migration_record import SampledRow
from dualenc.search.migration.maps import NEIGHBORS
from dualenc.search.migration.stages import sample_size
from dualenc.types import Vectors
from dualenc.workflows.migration_documents import MAX_JUDGED, MAX_QUERIES, open_judged
from dualenc.workflows.text_vectors import text_vectors

MIN_ROWS = 2
"""Fewer rows have no neighbors to compare."""


class Rows(Protocol):
    """Rows of a table or collection, before their migration is switched.

    Attributes:
        distance: how their vectors are compared: "cosine", "ip" or another.
        dim: dimension of the old vectors; −1 if it is unknown.
    """

    distance: str
    dim: int

    def count(self) -> int:
        """Return the number of rows."""

    def ids(self) -> list[str]:
        """Return the ids of all rows."""

    def draw(self, size: int, others: Sequence[str]) -> list[SampledRow]:
        """Return a sample of rows with text and vector, and those with other ids."""

    def nearest(self, vectors: Vectors, count: int) -> list[list[str]]:
        """Return the ids of the nearest rows of vectors (Q, D) of the old model."""


class TableSample:
    """A sample of the rows of a table, with the vectors of both models.

    Args:
        rows: the rows.
        encoder: the new model.
        old_model: name of the old model, for judged queries; None if it is unknown.
        data: BEIR folder with judgements of the rows; None compares results.
        batch_size: texts per forward pass.
        progress: show progress bars.

    Raises:
        DualencError: judgements are given without the old model, or none fits the rows.
    """

    def __init__(
        self,
        rows: Rows,
        encoder: DualEncoder,
        old_model: str | None,
        data: str | None,
        batch_size: int,
        progress: bool,
    ) -> None:
        self.rows = rows
        self.encoder = encoder
        self.old_model = old_model
        self.batch_size = batch_size
        self.progress = progress
        self.judged: tuple[Corpus, Qrels] | None = None
        if data is not None:
            self.judged = self._open_judged(Path(data))
        if self.judged is not None and old_model is None:
            raise DualencError(
                "judged queries need the model of the old vectors", fix="name it: --old-model"
            )

    def _open_judged(self, folder: Path) -> tuple[Corpus, Qrels]:
        """Return test queries with judgements of rows of the table."""
        if not has_test_judgements(folder):
            raise DualencError(
                "has no test judgements (qrels/test.tsv)",
                fix="name a BEIR folder, or leave --data out",
                where=folder,
            )
        judged = open_judged(folder, self.rows.ids(), ["text"])
        if judged is None:
            raise DualencError(
                "none of its judgements is of a row of the table",
                fix="name a BEIR folder whose document ids are those of --id",
                where=folder,
            )
        return judged

    def measure(self) -> dict[str, Any]:
        """Return `facts` and `systems` of the report."""
        count = self.rows.count()
        ids, texts, old = self._drawn(count)
        shown = "embed the sample" if self.progress else False
        found = text_vectors(self.encoder.right, texts, self.batch_size, shown)
        kept = [row for row, vector in enumerate(found) if not isinstance(vector, str)]
        facts = {"rows": count, "sample": len(kept), "old model": self.old_model or "unknown"}
        if len(kept) < MIN_ROWS:
            # Nothing can be compared, and filling takes no time.
            return {"facts": facts, "systems": []}
        new = np.array([found[row] for row in kept])
        if self.judged is not None:
            systems = self._judged_systems(old[kept], new)
            names = [ids[row] for row in kept]
            scores = measures.judged_scores(systems, self.judged[0].ids, names, self.judged[1])
            facts |= {"queries": len(self.judged[0]), "relevant are": "judged rows"}
        else:
            rows = np.arange(len(kept))[:MAX_JUDGED]
            systems = {measures.OLD: (old[kept][rows], old[kept]), measures.NEW: (new[rows], new)}
            scores = measures.neighbour_scores(systems, rows)
            facts |= {"queries": len(rows), "relevant are": "the new model's neighbours of rows"}
        return {"facts": facts, "systems": measures.summarize(scores)}

    def _drawn(self, count: int) -> tuple[list[str], list[str], Vectors]:
        """Return ids, texts and old vectors of the sample, and of the judged rows."""
        judged = self.judged[1].values() if self.judged is not None else ()
        others = {name for grades in judged for name in grades}
        drawn = self.rows.draw(sample_size(count), sorted(others))
        vectors: Vectors = np.array([row.vector for row in drawn], np.float32)
        if self.rows.distance != "ip" and len(vectors):
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.where(lengths == 0, 1, lengths)
        return [row.id for row in drawn], [row.text for row in drawn], vectors

    def _judged_systems(self, old: np.ndarray, new: np.ndarray) -> dict[str, measures.System]:
        """Return the queries and rows of both models."""
        assert self.judged is not None
        queries = self.judged[0]
        encoder = _load_old(str(self.old_model), self.encoder, old.shape[1])
        old_queries = _embed(encoder.left, queries, self.batch_size, self.progress)
        new_queries = _embed(self.encoder.left, queries, self.batch_size, self.progress)
        return {measures.OLD: (old_queries, old), measures.NEW: (new_queries, new)}


def most_retrieved(
    rows: Rows,
    encoder: DualEncoder,
    old_model: str | None,
    queries: str | None,
    batch_size: int,
    progress: bool,
) -> list[str]:
    """Return the ids that past queries find, the most often found first.

    Args:
        rows: the rows.
        encoder: the new model, whose device is used.
        old_model: name of the old model, which embeds the queries.
        queries: table of past queries; None returns no ids.
        batch_size: texts per forward pass.
        progress: show a progress bar.

    Raises:
        DualencError: the old model is unknown, or its vectors have another dimension.
    """
    if queries is None:
        return []
    if old_model is None:
        raise DualencError(
            "past queries are searched with the model of the old vectors",
            fix="name it: --old-model",
        )
    texts = open_corpus(queries, part="queries", modality="text")
    chosen = np.random.default_rng(0).permutation(len(texts))[:MAX_QUERIES]
    old = _load_old(old_model, encoder, rows.dim)
    vectors = _embed(old.left, texts.take(np.sort(chosen)), batch_size, progress)
    counts = Counter(id for found in rows.nearest(vectors, NEIGHBORS) for id in found)
    return [id for id, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _load_old(name: str, encoder: DualEncoder, dim: int) -> DualEncoder:
    """Load the old model, and raise unless its vectors have this dimension."""
    loaded = load_model(name, str(next(encoder.parameters()).device))
    if dim > 0 and loaded.left.dim != dim:
        raise DualencError(
            f"has vectors of dimension {loaded.left.dim}, and the rows {dim}",
            fix="name the model of the old vectors by --old-model",
            where=name,
        )
    return loaded


def _embed(tower: Tower, queries: Corpus, batch_size: int, progress: bool) -> np.ndarray:
    """Return the vectors (Q, D) of queries."""
    shown = "embed queries" if progress else False
    options: dict[str, Any] = {"on_error": "raise", "progress": shown}
    return np.asarray(embed(tower, queries, None, batch_size=batch_size, **options).vectors)
