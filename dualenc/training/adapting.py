"""Adapting queries to an index: what is trained, evaluation among the index's vectors, and
interpolated weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dualenc.data.corpus import Corpus, used_items
from dualenc.data.item_lists import VectorItems
from dualenc.data.pairs import PairDataset
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import IndexEncoder, interpolate, with_map
from dualenc.encoders.load import load_model
from dualenc.encoders.text import TextEncoder
from dualenc.encoders.vector import TowerKind, VectorEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import METRICS, Qrels, Scores, paired_bootstrap, score_queries
from dualenc.evaluation.retrieval import retrieve
from dualenc.search.embed.encode import embed
from dualenc.search.searcher import check_encoder, recorded_model
from dualenc.training.evaluators import Evaluator, check_settings, headline_scores

Trained = Literal["perceptron", "linear", "lora", "all"]
"""What is trained: a map of query vectors, adapters of the text model, or all of it."""
TOWERS: dict[Trained, TowerKind] = {"perceptron": "dense", "linear": "linear"}
"""The maps, as kinds of `VectorTower`."""
LORA_RANK = 16
PRIMARY = "ndcg@10"
SHARES = tuple(round(step / 10, 1) for step in range(11))
"""Shares of the original weights at which an adapted model is measured."""


class QuerySide:
    """Queries of an index: its text model, and what is trained of it.

    A map is trained on query vectors, which the text model, or another one, made once; the text
    model itself on texts.

    Args:
        documents: of the index, see `dualenc.search.documents.open_documents`.
        modality: of the queries, "text" or "vector".
        trained: what is trained.
        source: the index, for errors.
        model: the index's model; by default the one that it records.
        work: folder for query vectors.
        device: to compute on.

    Raises:
        DualencError: no model, one that did not make the index, or queries that cannot be trained
            so.
    """

    def __init__(
        self,
        documents: Embeddings,
        modality: str,
        trained: Trained,
        *,
        source: str,
        model: str | None,
        work: Path,
        device: torch.device,
    ) -> None:
        self.documents = documents
        self.modality = modality
        self.trained = trained
        self.source = source
        self.work = work
        self.device = device
        self.name = model
        self.text: TextEncoder | None = None
        if modality == "text":
            self.text = self._open_text_model()
        elif trained not in TOWERS:
            raise DualencError(
                f"queries are vectors, and {trained} trains a text model; train a perceptron"
            )

    def _open_text_model(self) -> TextEncoder:
        self.name = self.name or recorded_model(self.documents.meta, Path(self.source))
        model = load_model(self.name, self.device)
        if not isinstance(model, TextEncoder):
            raise DualencError(
                f"{self.name}: is of kind {model.kind}; only text models can be adapted"
            )
        check_encoder(model, self.documents.meta, self.documents.dim, self.source)
        return model

    def inputs(self, queries: Corpus, name: str) -> Corpus:
        """Queries as the trained model takes them: texts, or for a map the text model's vectors,
        embedded once."""
        if queries.modality != self.modality:
            problem = f"{name} are of kind {queries.modality}, and the queries to train on {self.modality}"
            raise DualencError(f"{problem}; give both as one of them")
        if self.text is None or self.trained not in TOWERS:
            return queries
        dim = self.documents.dim if self.documents.dim < self.text.dim else None
        folder = self.work / name
        embedded = embed(
            self.text.left, queries, folder, dim=dim, on_error="raise", progress=f"embed {name}"
        )
        return Corpus(embedded.ids, VectorItems(embedded.vectors), "vector")

    def pairs(self, pairs: PairDataset) -> PairDataset:
        """Pairs of queries as the trained model takes them."""
        queries = Corpus(
            [str(row) for row in range(pairs.num_left)], pairs.left_items, pairs.left_modality
        )
        inputs = self.inputs(queries, "queries")
        return PairDataset(
            inputs.items,
            pairs.right_items,
            pairs.left_id,
            pairs.right_id,
            left_modality=inputs.modality,
            right_modality="vector",
        )

    def new_model(self, input_dim: int | None) -> DualEncoder:
        """The model before training, of query vectors (input_dim,) or of texts."""
        if self.trained in TOWERS:
            dim = self.documents.dim
            model = VectorEncoder(
                input_dim or dim,
                tower=TOWERS[self.trained],
                right_tower="identity",
                right_input_dim=dim,
            )
            return model.to(self.device)
        assert self.text is not None
        text = self.text
        if self.trained == "lora":
            text = TextEncoder(self.name, lora_rank=LORA_RANK)
        return IndexEncoder(copy.deepcopy(text), self.documents.meta).to(self.device)

    def finished(self, trained: DualEncoder, ids: Sequence[str]) -> IndexEncoder:
        """The trained model as one of queries over the index, with the ids of the documents of its
        pairs."""
        model = trained
        if self.text is not None and isinstance(trained, VectorEncoder):
            model = with_map(self.text, trained.left)
        if not isinstance(model, IndexEncoder):
            model = IndexEncoder(model, self.documents.meta)
        model.trained_ids = list(ids)
        return model


class IndexEvaluator(Evaluator):
    """Retrieval among vectors that are there: queries are embedded by the model's left tower,
    documents are not.

    Args:
        queries: with ids.
        qrels: grades by query and document id.
        documents: N unit vectors with ids.
        batch_size: queries encoded at once.
        primary: as of `RetrievalEvaluator`.
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
        """The evaluator of held-out pairs whose right ids are rows of the documents."""
        queries, rows = used_items(pairs, "left")
        qrels: dict[str, dict[str, int]] = {query: {} for query in queries.ids}
        for row, document in zip(rows.tolist(), pairs.right_id.tolist(), strict=True):
            qrels[queries.ids[row]][documents.ids[document]] = 1
        return cls(queries, qrels, documents, **options)

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        return headline_scores(self.per_query(model), self.primary)

    def per_query(self, model: DualEncoder) -> dict[str, Scores]:
        """Every metric of each query."""
        queries = self.embed(model, "left", self.queries, "queries")
        device = next(model.parameters()).device
        run = retrieve(
            queries.ids,
            queries.vectors,
            self.documents.ids,
            self.documents.vectors,
            qrels=self.qrels,
            device=device,
        )
        return score_queries(self.qrels, run)

    def among(self, query_ids: Sequence[str]) -> IndexEvaluator:
        """An evaluator of these queries alone."""
        rows = np.flatnonzero(np.isin(self.queries.ids, list(query_ids)))
        qrels = {name: self.qrels[name] for name in query_ids}
        return IndexEvaluator(
            self.queries.take(rows),
            qrels,
            self.documents,
            batch_size=self.batch_size,
            primary=self.primary,
        )


class Interpolated(NamedTuple):
    """A model with a share `keep` of its original weights: the scores (Q,) of each task's
    queries."""

    keep: float
    scores: dict[str, np.ndarray]


def score_interpolations(
    original: DualEncoder,
    adapted: DualEncoder,
    tasks: Mapping[str, IndexEvaluator],
    shares: Sequence[float] = SHARES,
) -> list[Interpolated]:
    """Measure the models between an adapted one and the original (Wortsman et al. 2022,
    arXiv:2109.01903).

    Args:
        original, adapted: of the same architecture; neither is changed.
        tasks: what is measured, by name.
        shares: of the original weights.
    """
    model = copy.deepcopy(adapted)
    points = []
    for keep in shares:
        model.load_state_dict(interpolate(original, adapted, keep))
        scores = {}
        for name, evaluator in tasks.items():
            per_query = evaluator.per_query(model)
            scores[name] = np.array([metrics[evaluator.primary] for metrics in per_query.values()])
        points.append(Interpolated(keep, scores))
    return points


def best_share(points: Sequence[Interpolated], unharmed: str, tasks: Sequence[str]) -> float:
    """Choose the share of the original weights with the best mean score over the queries of tasks.

    Only shares whose mean on the task `unharmed` is at least that of the original qualify; the
    largest of equals wins. Without that task nothing shows that the adapted weights do no harm,
    so the original stays: the share is 1.

    Args:
        points: the scores at each share.
        unharmed: a name in `tasks`.
        tasks: names of the tasks that decide.
    """
    if unharmed not in tasks:
        return 1.0
    original = max(points, key=lambda point: point.keep)
    least = original.scores[unharmed].mean()
    allowed = [point for point in points if point.scores[unharmed].mean() >= least]

    def quality(point: Interpolated) -> tuple[float, float]:
        scores = np.concatenate([point.scores[task] for task in tasks])
        return round(float(scores.mean()), 6), point.keep

    return max(allowed, key=quality).keep


def harmless_share(points: Sequence[Interpolated], task: str) -> float:
    """The smallest share of the original weights that loses nothing on a task against all of them:
    from it on, the paired 95 % interval of the difference reaches 0."""
    original = max(points, key=lambda point: point.keep)
    harmless = original.keep
    for point in sorted(points, key=lambda point: -point.keep):
        if paired_bootstrap(original.scores[task], point.scores[task]).high < 0:
            break
        harmless = point.keep
    return harmless
