"""Judged collections as vectors, for what adapts queries to them, and their measure of quality."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import frame
import numpy as np
import torch
from frame import Outcome
from tasks import vector_pairs
from toys import write_beir

from dualenc.data import PairDataset
from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus
from dualenc.data.document_splits import split_by_documents
from dualenc.data.item_lists import VectorItems
from dualenc.data.readers.beir import read_judged_queries, relevant_pairs
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.encoders.vector import TowerKind
from dualenc.evaluation.metrics import Qrels
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.objectives import Objective
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adapting import Interpolated

GROUPS = ("all", "seen", "new")
HELD_OUT, MAX_HELD_OUT = 0.1, 500
"""Share of the training pairs to hold out, and maximum number of queries of a kind."""


class Judged(NamedTuple):
    """Vectors of N documents and of queries, and judgments by part, "train" and "test"."""

    documents: Embeddings
    queries: Corpus
    qrels: dict[str, Qrels]

    def pairs(self, part: str) -> PairDataset:
        """Return the relevant pairs of a part; ids are rows of the queries and documents."""
        used, left, right, _ = relevant_pairs(self.queries, self.qrels[part], self.documents.ids)
        left = rows_of(self.queries.ids, used.ids)[left]
        return vector_pairs(self.queries.items, VectorItems(self.documents.vectors), left, right)

    def test(self) -> IndexEvaluator:
        """Return an evaluator of the test queries."""
        test = self.qrels["test"]
        return IndexEvaluator(self.queries, test, self.documents).among(list(test))


def open_judged(data: Path, vectors: Path, name: str, in_memory: bool = False) -> Judged:
    """Open the judgments of a BEIR folder, and the vectors that `dualenc embed` made of its sides.

    Args:
        data: folder of BEIR folders.
        vectors: folder of folders with `corpus` and `queries`.
        name: name of the folder in both.
        in_memory: read the vectors at once, as float32, for trainings that are short and many.
    """
    documents, queries = (Embeddings.open(vectors / name / side) for side in ("corpus", "queries"))
    if in_memory:
        documents, queries = (
            Embeddings(list(side.ids), np.array(side.vectors[:], np.float32))
            for side in (documents, queries)
        )
    folder = data / name
    qrels = {
        part: read_judged_queries(folder, part, documents.ids, BadRows(folder))[1]
        for part in ("train", "test")
        if (folder / "qrels" / f"{part}.tsv").exists()
    }
    return Judged(documents, Corpus(queries.ids, VectorItems(queries.vectors), "vector"), qrels)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (N, D) scaled to length one."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def new_map(documents: Embeddings, tower: TowerKind = "dense") -> VectorEncoder:
    """Return a map of queries that changes nothing yet."""
    return VectorEncoder(documents.dim, tower=tower, right_tower="identity")


def train_map(
    documents: Embeddings,
    pairs: PairDataset,
    objective: Objective,
    seed: int,
    tower: TowerKind = "dense",
    **settings: Any,
) -> tuple[VectorEncoder, frame.Trained]:
    """Train a map of queries; return the map before, and what was trained as by `frame.train`."""
    torch.manual_seed(seed)
    original = new_map(documents, tower)
    return original, frame.train(copy.deepcopy(original), pairs, objective, seed=seed, **settings)


def ids_of(pairs: PairDataset, documents: Embeddings) -> set[str]:
    """Return the ids of the documents in pairs."""
    return {documents.ids[row] for row in pairs.right_id.tolist()}


def scores_of(model: DualEncoder, evaluator: IndexEvaluator) -> list[float]:
    """Return nDCG@10 of each query."""
    return [scores[evaluator.primary] for scores in evaluator.per_query(model).values()]


@dataclass
class Task:
    """What `adapting.py` trains on and measures.

    Attributes:
        documents: N documents.
        pairs: pairs of query vectors and documents to train on; right ids are rows of documents.
        held_out: held-out queries, "new" without and "known" with their documents in training.
        test: the test queries.
        listed: ids of the documents in any pair, held out or not.
    """

    documents: Embeddings
    pairs: PairDataset
    held_out: dict[str, IndexEvaluator]
    test: IndexEvaluator
    listed: set[str]

    def measure(self, model: DualEncoder | None = None) -> Outcome:
        """Return mean nDCG@10 over all, seen and new test queries, and their numbers.

        Without a model, query vectors stay as they are.
        """
        scores = scores_of(model or new_map(self.documents), self.test)
        per_query = dict(zip(self.test.qrels, scores, strict=True))
        seen, _ = divide_by_training(self.test.qrels, ids_of(self.pairs, self.documents))
        _, new = divide_by_training(self.test.qrels, self.listed)
        groups = dict(zip(GROUPS, (per_query, seen, new), strict=True))
        means = {
            name: round(statistics.mean(per_query[query] for query in group), 4)
            for name, group in groups.items()
            if group
        }
        return means | {f"{name} queries": len(group) for name, group in groups.items()}


def open_task(data: Path, vectors: Path, name: str) -> Task:
    """Open a judged collection, and hold queries of both kinds out, as `dualenc adapt` does."""
    judged = open_judged(data, vectors, name)
    pairs = judged.pairs("train")
    parts = split_by_documents(pairs, HELD_OUT, MAX_HELD_OUT)
    held_out = {
        kind: IndexEvaluator.of_pairs(part, judged.documents)
        for kind, part in (("new", parts.new), ("known", parts.known))
        if part is not None
    }
    listed = ids_of(pairs, judged.documents)
    return Task(judged.documents, parts.train, held_out, judged.test(), listed)


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


def write_judged(
    folder: Path, documents: np.ndarray, queries: np.ndarray, splits: dict[str, np.ndarray]
) -> tuple[Path, Path, str]:
    """Write vectors (N, D) and (Q, D) and pairs (P, 2) by split, to open with what is returned."""
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
    return folder / "data", folder / "vectors", "toy"
