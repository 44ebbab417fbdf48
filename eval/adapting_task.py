"""Vectors, training pairs and judgements of `adapting.py`, and its measure of quality."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.data import PairDataset
from dualenc.data.corpus import RetrievalSet
from dualenc.data.readers.clicks import split_by_documents
from dualenc.data.store.vector_shards import Embeddings
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.retrieval import retrieve

HELD_OUT = 0.1
MAX_HELD_OUT = 500
"""Share of the training pairs that is held out, and the number of queries of a kind at most."""

Qrels = dict[str, dict[str, int]]


class Task:
    """What is trained on and measured.

    Args:
        data, vectors: folders of all tasks.
        name: of the task.
        pairs: a random part of so many training pairs is all that there is.
        seed: of that part; held-out queries are always drawn with the same seed.
        hold_known: hold out queries for documents of training, too.

    Attributes:
        documents, queries: (N, D) and (Q, D) unit vectors.
        pairs: (P, 2) rows of a query and of a document, to train on.
        positives: (Q, K) rows of the documents that are in a training pair of each query, padded
            with -1.
        new, known, test: judgements of held-out queries whose documents are in no training pair, of
            held-out queries whose documents are in some, and of test queries.
    """

    def __init__(
        self,
        data: Path,
        vectors: Path,
        name: str,
        pairs: int | None = None,
        seed: int = 0,
        hold_known: bool = False,
    ) -> None:
        documents = Embeddings.open(vectors / name / "corpus")
        queries = Embeddings.open(vectors / name / "queries")
        self.name = name
        self.document_ids = list(documents.ids)
        self.query_ids = list(queries.ids)
        self.documents = unit(documents.vectors)
        self.queries = unit(queries.vectors)
        train, self.test = read_judgements(data / name / "qrels")
        listed = [
            (query, own)
            for query, grades in train.items()
            for own, grade in grades.items()
            if grade > 0
        ]
        query_names, document_names = zip(*listed, strict=True)
        all_pairs = np.stack(
            [queries.rows_of(query_names), documents.rows_of(document_names)], axis=1
        )
        all_pairs = all_pairs[(all_pairs >= 0).all(axis=1)]
        if pairs is not None:
            all_pairs = all_pairs[np.random.default_rng(seed).permutation(len(all_pairs))[:pairs]]
        train_pairs, new, known = divided(all_pairs, self.queries.numpy(), self.documents.numpy())
        self.pairs = train_pairs if hold_known else np.concatenate([train_pairs, known])
        self.new = self._judgements(new)
        self.known = self._judgements(known) if hold_known else {}
        self.positives = torch.full(
            (len(self.queries), int(np.bincount(self.pairs[:, 0]).max())), -1
        )
        filled = [0] * len(self.queries)
        for query, document in self.pairs.tolist():
            self.positives[query, filled[query]] = document
            filled[query] += 1
        self.trained = {self.document_ids[row] for row in self.pairs[:, 1].tolist()}
        self.listed = {self.document_ids[row] for row in all_pairs[:, 1].tolist()}

    def _judgements(self, pairs: np.ndarray) -> Qrels:
        """Of pairs (P, 2)."""
        qrels: Qrels = {}
        for query, document in pairs.tolist():
            qrels.setdefault(self.query_ids[query], {})[self.document_ids[document]] = 1
        return qrels

    def quality(self, encode: Callable[[Tensor], Tensor], qrels: Qrels) -> dict[str, float]:
        """nDCG@10 of each judged query, of which `encode` maps the vectors (n, D)."""
        rows = [row for row, name in enumerate(self.query_ids) if name in qrels]
        with torch.no_grad():
            embeddings = encode(self.queries[rows]).numpy()
        return self.quality_of(
            [self.query_ids[row] for row in rows], embeddings, self.documents.numpy(), qrels
        )

    def quality_of(
        self, names: Sequence[str], queries: np.ndarray, documents: np.ndarray, qrels: Qrels
    ) -> dict[str, float]:
        """The same from embeddings (n, D) of queries and (N, D) of all documents."""
        run = retrieve(names, queries, self.document_ids, documents, depth=10, qrels=qrels)
        return {
            query: scores["ndcg@10"] for query, scores in score_queries(qrels, run, (10,)).items()
        }

    def grouped(self, per_query: dict[str, float]) -> dict[str, float]:
        """Mean over all test queries, over the seen ones and the new ones, and their numbers."""
        relevant = {
            query: {own for own, grade in self.test[query].items() if grade > 0}
            for query in per_query
        }
        groups = {
            "all": list(per_query.values()),
            "seen": [value for query, value in per_query.items() if relevant[query] & self.trained],
            "new": [
                value for query, value in per_query.items() if not relevant[query] & self.listed
            ],
        }
        means = {
            name: round(statistics.mean(values), 4) for name, values in groups.items() if values
        }
        return means | {f"{name} queries": len(values) for name, values in groups.items()}

    def texts(self, collection: RetrievalSet) -> tuple[list[str], np.ndarray]:
        """Texts of the queries that are in training pairs, and the number of each pair's one."""
        used, left_id = np.unique(self.pairs[:, 0], return_inverse=True)
        text_of = dict(zip(collection.queries.ids, collection.queries.items, strict=True))
        return [text_of[self.query_ids[row]] for row in used.tolist()], left_id

    def text_pairs(self, collection: RetrievalSet) -> PairDataset:
        """The training pairs as texts, with no other documents."""
        queries, left_id = self.texts(collection)
        used, right_id = np.unique(self.pairs[:, 1], return_inverse=True)
        text_of = dict(zip(collection.corpus.ids, collection.corpus.items, strict=True))
        return PairDataset(
            queries, [text_of[self.document_ids[row]] for row in used.tolist()], left_id, right_id
        )


def read_judgements(folder: Path) -> tuple[Qrels, Qrels]:
    """Of training and test queries; where there is no train.tsv, of two random halves of the test
    queries."""
    test = read_qrels(folder / "test.tsv")
    if (folder / "train.tsv").exists():
        return read_qrels(folder / "train.tsv"), test
    order = np.random.default_rng(0).permutation(sorted(test)).tolist()
    middle = len(order) // 2
    return {query: test[query] for query in order[:middle]}, {
        query: test[query] for query in order[middle:]
    }


def read_qrels(file: Path) -> Qrels:
    """Grades by query and document of a BEIR file."""
    qrels: Qrels = {}
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        query, document, grade = line.split("\t")
        qrels.setdefault(query, {})[document] = int(grade)
    return qrels


def divided(pairs: np.ndarray, queries: np.ndarray, documents: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs (P, 2) to train on, and of held-out queries with documents in none or in some of
    these."""
    items = PairDataset(
        queries, documents, *pairs.T, left_modality="vector", right_modality="vector"
    )
    parts = split_by_documents(items, share=HELD_OUT, most=MAX_HELD_OUT)
    for part in (parts.train, parts.new, parts.known):
        left, right = (
            (np.zeros(0, np.int64),) * 2 if part is None else (part.left_id, part.right_id)
        )
        yield np.stack([left, right], axis=1)


def unit(vectors: Any) -> Tensor:
    """Rows of embeddings as float32 of length one."""
    return normalize(torch.from_numpy(np.array(vectors[:], dtype=np.float32)), dim=-1)
