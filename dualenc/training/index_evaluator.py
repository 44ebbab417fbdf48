"""Retrieval evaluation over an existing index: documents are fixed vectors, queries are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dualenc.data.corpus import Corpus, used_items
from dualenc.data.pairs import PairDataset
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.evaluation.metrics import METRICS, Qrels, Scores, score_queries
from dualenc.evaluation.retrieval import retrieve
from dualenc.training.evaluators import Evaluator, check_settings, headline_scores
from dualenc.types import Vectors

PRIMARY = "ndcg@10"


class IndexEvaluator(Evaluator):
    """Retrieval among the vectors of an index.

    The left tower of the model embeds the queries; the documents are never encoded.

        evaluator = IndexEvaluator(queries, {"q1": {"d7": 1}}, open_documents("index"))
        print(evaluator(model)["ndcg@10"])

    Args:
        queries: Q queries with ids.
        qrels: grades by query id and document id.
        documents: N unit vectors with ids.
        batch_size: number of queries encoded at once.
        primary: name of the metric that decides, as in `RetrievalEvaluator`.
    """

    def __init__(
        self,
        queries: Corpus,
        qrels: Qrels,
        documents: Embeddings,
        *,
        batch_size: int = 64,
        primary: str = PRIMARY,
    ) -> None:
        check_settings("IndexEvaluator", batch_size, primary, METRICS)
        self.queries = queries
        self.qrels = qrels
        self.documents = documents
        self.batch_size = batch_size
        self.primary = primary
        self.modalities = {"left": queries.modality}

    @classmethod
    def of_pairs(cls, pairs: PairDataset, documents: Embeddings, **options: Any) -> IndexEvaluator:
        """Create an evaluator of held-out pairs.

        Args:
            pairs: queries on the left; right ids are rows of the documents.
            documents: N unit vectors with ids.
            options: further arguments of the class.
        """
        queries, rows = used_items(pairs, "left")
        qrels: dict[str, dict[str, int]] = {query: {} for query in queries.ids}
        for row, document in zip(rows.tolist(), pairs.right_id.tolist(), strict=True):
            qrels[queries.ids[row]][documents.ids[document]] = 1
        return cls(queries, qrels, documents, **options)

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        """Return the mean of each metric over the queries."""
        return headline_scores(self.per_query(model), self.primary)

    def per_query(self, model: DualEncoder) -> dict[str, Scores]:
        """Return every metric of each query."""
        return score_queries(self.qrels, self.retrieve(model))

    def retrieve(self, model: DualEncoder) -> dict[str, dict[str, float]]:
        """Return the best documents of each query with their scores, best first."""
        queries = self.embed(model, "left", self.queries, "queries")
        return self.search(queries.ids, queries.vectors, next(model.parameters()).device)

    def search(
        self, query_ids: Sequence[str], vectors: Vectors, device: str | torch.device = "cpu"
    ) -> dict[str, dict[str, float]]:
        """Return the best documents of queries whose vectors are given, best first.

        Args:
            query_ids: (Q,) ids of queries of this evaluator.
            vectors: (Q, D) their embeddings.
            device: device to search on.
        """
        return retrieve(
            query_ids,
            vectors,
            self.documents.ids,
            self.documents.vectors,
            qrels=self.qrels,
            device=device,
        )

    def among(self, query_ids: Sequence[str]) -> IndexEvaluator:
        """Return an evaluator of these queries only."""
        rows = np.flatnonzero(np.isin(self.queries.ids, list(query_ids)))
        qrels = {name: self.qrels[name] for name in query_ids}
        return IndexEvaluator(
            self.queries.take(rows),
            qrels,
            self.documents,
            batch_size=self.batch_size,
            primary=self.primary,
        )
