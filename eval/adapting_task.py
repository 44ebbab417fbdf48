"""Vectors, training pairs and queries of `adapting.py`, and its measure of quality."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from frame import Outcome
from torch.nn.functional import normalize
from toys import write_beir

from dualenc.data import PairDataset
from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus
from dualenc.data.ragged import Ragged
from dualenc.data.readers.beir import read_judged_queries, relevant_pairs
from dualenc.data.readers.clicks import split_by_documents
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, VectorEncoder
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator

GROUPS = ("all", "seen", "new")
HELD_OUT, MAX_HELD_OUT = 0.1, 500
"""Share of the training pairs to hold out, and maximum number of queries of a kind."""
BATCH = 32
"""Batch size of the exact loss."""


class Task:
    """What is trained on and measured.

    All pairs are trained on, or a number `pairs` of them drawn by `seed`; with `hold_known`,
    queries of documents in training are held out, too.

    Attributes:
        queries, documents: (Q, D) and (N, D) unit vectors; Q queries have training pairs.
        pairs: (P, 2) rows of a query and of a document, to train on.
        positives: (Q, K) rows of each query's documents in these pairs, padded with -1.
        held_out: held-out queries, "new" without and "known" with their documents in training.
        test: the test queries.
    """

    def __init__(
        self, data: Path, vectors: Path, name: str, hold_known: bool = False, **subset: int
    ) -> None:
        self.name = name
        self.index = Embeddings.open(vectors / name / "corpus")
        embedded = Embeddings.open(vectors / name / "queries")
        queries = Corpus(embedded.ids, unit(embedded), "vector")
        train, test = read_judgments(data / name, self.index.ids)
        self.test = IndexEvaluator(queries, test, self.index).among(list(test))
        used, *columns, _ = relevant_pairs(queries, train, self.index.ids)
        listed = np.stack(columns, axis=1)
        if subset:
            order = np.random.default_rng(subset["seed"]).permutation(len(listed))
            listed = listed[order[: subset["pairs"]]]
        self.query_ids = used.ids
        self.queries = torch.from_numpy(np.stack([used.items[row] for row in range(len(used))]))
        self.documents = torch.from_numpy(unit(self.index))
        modalities = {"left_modality": "vector", "right_modality": "vector"}
        items = PairDataset(self.queries.numpy(), self.documents.numpy(), *listed.T, **modalities)
        parts = split_by_documents(items, HELD_OUT, MAX_HELD_OUT)
        self.held_out = {"new": IndexEvaluator.of_pairs(parts.new, self.index)}
        trained = [parts.train, parts.known] if parts.known else [parts.train]
        if parts.known and hold_known:
            self.held_out["known"] = IndexEvaluator.of_pairs(trained.pop(), self.index)
        own_pairs = [np.stack([part.left_id, part.right_id], axis=1) for part in trained]
        self.pairs = np.concatenate(own_pairs)
        by_query = Ragged.from_pairs(*self.pairs.T, len(self.queries))
        self.positives = torch.from_numpy(by_query.padded(np.arange(len(self.queries))))
        self.trained = {self.index.ids[row] for row in self.pairs[:, 1].tolist()}
        self.listed = {self.index.ids[row] for row in listed[:, 1].tolist()}

    def new_map(self, tower: str = "dense") -> VectorEncoder:
        """Return a map of queries that changes nothing yet."""
        return VectorEncoder(self.queries.shape[1], tower=tower, right_tower="identity")

    def steps(self, epochs: float) -> int:
        """Return the number of steps of the exact loss."""
        return round(epochs * len(self.pairs) / BATCH)

    def scores(self, model: DualEncoder | None = None) -> list[float]:
        """Return nDCG@10 of each test query, by default of their vectors as they are."""
        return scores_of(model or self.new_map(), self.test)

    def grouped(self, scores: Sequence[float]) -> Outcome:
        """Return means over all, seen and new test queries, from (Q,) scores; and the numbers."""
        per_query = dict(zip(self.test.qrels, scores, strict=True))
        seen, _ = divide_by_training(self.test.qrels, self.trained)
        _, new = divide_by_training(self.test.qrels, self.listed)
        groups = dict(zip(GROUPS, (per_query, seen, new), strict=True))
        means = {
            name: round(statistics.mean(per_query[query] for query in group), 4)
            for name, group in groups.items()
            if group
        }
        return means | {f"{name} queries": len(group) for name, group in groups.items()}


def unit(embedded: Embeddings) -> np.ndarray:
    """Return embeddings as float32 of length one."""
    vectors = torch.from_numpy(np.array(embedded.vectors[:], dtype=np.float32))
    return normalize(vectors, dim=-1).numpy()


def read_judgments(folder: Path, documents: Sequence[str]) -> list[dict[str, dict[str, int]]]:
    """Return those of training and test; without train.tsv, of two random halves of the test."""
    splits = [part for part in ("train", "test") if (folder / "qrels" / f"{part}.tsv").exists()]
    found = [read_judged_queries(folder, part, documents, BadRows(folder))[1] for part in splits]
    if len(found) == 2:
        return found
    order = np.random.default_rng(0).permutation(sorted(found[0])).tolist()
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    return [{query: found[0][query] for query in half} for half in halves]


def scores_of(model: DualEncoder, evaluator: IndexEvaluator) -> list[float]:
    """Return nDCG@10 of each query."""
    return [scores[evaluator.primary] for scores in evaluator.per_query(model).values()]


def write_task(
    folder: Path, documents: np.ndarray, queries: np.ndarray, splits: dict[str, np.ndarray]
) -> Task:
    """Write vectors (N, D) and (Q, D) and the pairs (P, 2) of each split, and open them."""
    texts = {"queries": {}, "corpus": {}}
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
    return Task(folder / "data", folder / "vectors", "toy")
