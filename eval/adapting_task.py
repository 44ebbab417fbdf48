"""Vectors, training pairs and queries of `adapting.py`, and its measure of quality."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from frame import Outcome
from toys import write_beir

from dualenc.data import PairDataset
from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus
from dualenc.data.document_splits import split_by_documents
from dualenc.data.item_lists import VectorItems
from dualenc.data.readers.beir import read_judged_queries, relevant_pairs
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.encoders.vector import TowerKind
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adapting import Interpolated

GROUPS = ("all", "seen", "new")
HELD_OUT, MAX_HELD_OUT = 0.1, 500
"""Share of the training pairs to hold out, and maximum number of queries of a kind."""


@dataclass
class Task:
    """What is trained on and measured.

    Attributes:
        index: N documents.
        pairs: pairs of query vectors and documents to train on; right ids are rows of the index.
        held_out: held-out queries, "new" without and "known" with their documents in training.
        test: the test queries.
        listed: ids of the documents in any pair, held out or not.
    """

    name: str
    index: Embeddings
    pairs: PairDataset
    held_out: dict[str, IndexEvaluator]
    test: IndexEvaluator
    listed: set[str]

    def new_map(self, tower: TowerKind = "dense") -> VectorEncoder:
        """Return a map of queries that changes nothing yet."""
        return VectorEncoder(self.index.dim, tower=tower, right_tower="identity")

    def scores(self, model: DualEncoder | None = None) -> list[float]:
        """Return nDCG@10 of each test query, by default of their vectors as they are."""
        return scores_of(model or self.new_map(), self.test)

    def grouped(self, scores: Sequence[float]) -> Outcome:
        """Return means over all, seen and new test queries, from (Q,) scores; and the numbers."""
        per_query = dict(zip(self.test.qrels, scores, strict=True))
        seen, _ = divide_by_training(self.test.qrels, ids_of(self.pairs, self.index))
        _, new = divide_by_training(self.test.qrels, self.listed)
        groups = dict(zip(GROUPS, (per_query, seen, new), strict=True))
        means = {
            name: round(statistics.mean(per_query[query] for query in group), 4)
            for name, group in groups.items()
            if group
        }
        return means | {f"{name} queries": len(group) for name, group in groups.items()}


def open_task(
    data: Path,
    vectors: Path,
    name: str,
    observe: Callable[[PairDataset], PairDataset] = lambda pairs: pairs,
) -> Task:
    """Open vectors and judgments, and hold queries of both kinds out, as `dualenc adapt` does.

    Args:
        data: folder of BEIR folders.
        vectors: folder of what `dualenc embed` made of their sides.
        name: name of the folder in both.
        observe: what is seen of the relevant pairs, such as a part of them, or simulated clicks.
    """
    index = Embeddings.open(vectors / name / "corpus")
    embedded = Embeddings.open(vectors / name / "queries")
    queries = Corpus(embedded.ids, VectorItems(embedded.vectors), "vector")
    train, test = (
        read_judged_queries(data / name, part, index.ids, BadRows(data / name))[1]
        for part in ("train", "test")
    )
    used, *ids, _ = relevant_pairs(queries, train, index.ids)
    modalities = {"left_modality": "vector", "right_modality": "vector"}
    pairs = observe(PairDataset(used.items, VectorItems(index.vectors), *ids, **modalities))
    parts = split_by_documents(pairs, HELD_OUT, MAX_HELD_OUT)
    held_out = {
        kind: IndexEvaluator.of_pairs(part, index)
        for kind, part in (("new", parts.new), ("known", parts.known))
        if part is not None
    }
    tested = IndexEvaluator(queries, test, index).among(list(test))
    return Task(name, index, parts.train, held_out, tested, ids_of(pairs, index))


def best_share(points: Sequence[Interpolated], unharmed: str, tasks: Sequence[str]) -> float:
    """Choose the share of the original weights with the best mean score over all queries.

    Only shares whose mean on the task `unharmed` is at least that of the original qualify; the
    largest of equal shares wins. Without that task, nothing shows that adapting does no harm, and
    the result is the original: 1.

    Args:
        points: scores at each share.
        unharmed: name of the task that must not get worse.
        tasks: names of the tasks that decide.
    """
    if unharmed not in tasks:
        return 1.0
    # New documents decide what is allowed: most documents of an index are in no click.
    original = max(points, key=lambda point: point.keep)
    least = original.scores[unharmed].mean()
    allowed = [point for point in points if point.scores[unharmed].mean() >= least]

    def quality(point: Interpolated) -> tuple[float, float]:
        scores = np.concatenate([point.scores[task] for task in tasks])
        # Round, so that differences by summation order do not beat a larger share.
        return round(float(scores.mean()), 6), point.keep

    return max(allowed, key=quality).keep


def ids_of(pairs: PairDataset, index: Embeddings) -> set[str]:
    """Return the ids of the documents in pairs."""
    return {index.ids[row] for row in pairs.right_id.tolist()}


def scores_of(model: DualEncoder, evaluator: IndexEvaluator) -> list[float]:
    """Return nDCG@10 of each query."""
    return [scores[evaluator.primary] for scores in evaluator.per_query(model).values()]


def write_task(
    folder: Path, documents: np.ndarray, queries: np.ndarray, splits: dict[str, np.ndarray]
) -> Task:
    """Write vectors (N, D) and (Q, D) and the pairs (P, 2) of each split, and open them."""
    texts = {}
    identity = VectorEncoder(documents.shape[1], tower="identity").left
    for side, rows in (("queries", queries), ("corpus", documents)):
        texts[side] = {f"{side[0]}{row}": str(row) for row in range(len(rows))}
        vectors = Corpus(list(texts[side]), rows.astype(np.float32), "vector")
        embed(identity, vectors, folder / "vectors" / "toy" / side, progress=False)
    judged = {
        split: [f"q{query}\tc{document}" for query, document in pairs.tolist()]
        for split, pairs in splits.items()
    }
    write_beir(folder / "data" / "toy", **texts, judged=judged)
    return open_task(folder / "data", folder / "vectors", "toy")
