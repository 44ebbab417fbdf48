"""What measures a model during training: thin glue between embedding and the pure functions of `evaluation`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualenc import distributed
from dualenc.data.beir import read_beir
from dualenc.data.columns import Picked
from dualenc.data.corpus import Corpus, RetrievalSet
from dualenc.data.pairs import PairDataset
from dualenc.data.table_pairs import ImageViews
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.seeds import random_state_kept
from dualenc.training.sharding import assembled, join_evaluated
from dualenc.types import Modality, OnError, Side

if TYPE_CHECKING:
    from dualenc.evaluation.observed import Observed
    from dualenc.objectives.base import Objective
    from dualenc.search.embeddings import Embeddings
    from dualenc.training.checkpoint import Checkpoints
    from dualenc.types import Output


class Evaluator(ABC):
    """Measures a model in evaluation mode; any callable with a `primary` will do.

    Attributes:
        primary: name of the metric, higher is better, by which the best weights are kept.
        metric_names: names that `primary` may have, so that a wrong one is told before any work; empty where they
            are known only after an evaluation.
        task: what is evaluated, one of `dualenc.encoders.card.TASKS`; "" keeps the metrics out of the card's front
            matter.
        data: name of the data, and its split.
        modalities: "text" or "image" by side, of what is embedded; empty when it takes any model.
        observed: what the latest call saw besides its metrics, for reports; None if it does not tell.
    """

    primary: str
    observed: Observed | None = None
    metric_names: tuple[str, ...] = ()
    task: str = ""
    data: tuple[str, str | None] = ("held-out data", None)
    modalities: Mapping[Side, Modality] = MappingProxyType({})

    @abstractmethod
    def __call__(self, model: DualEncoder) -> dict[str, float]:
        """Metrics by name. Every rank calls it together; what the main process returns counts."""


class RetrievalEvaluator(Evaluator):
    """Retrieval of right items by left items: nDCG@10, recall@10 and @100, MRR@10, MAP@100.

    Args:
        path: BEIR folder; or give pairs.
        split: its judgements, qrels/SPLIT.tsv.
        pairs: held-out pairs; the right items that they bring are the corpus.
        titles: put a document's title in front of its text.
        where: with path, search only documents that meet these conditions, such as year>=2020: fields of corpus.jsonl.
            Judgements of others, and queries without a relevant document among them, are left out.
        max_queries: measure on the first so many queries only.
        batch_size: items encoded at once.
        primary: the metric to keep the best weights by: ndcg, recall, mrr, map, precision or hit at 1, 3, 5, 10 or 100.

    Raises:
        DualencError: neither or both of path and pairs are given, or the data cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        split: str = "test",
        pairs: PairDataset | None = None,
        titles: bool = True,
        where: Sequence[str] = (),
        max_queries: int | None = None,
        batch_size: int = 64,
        primary: str = "ndcg@10",
    ) -> None:
        from dualenc.evaluation.metrics import CUTOFFS
        from dualenc.search.engines import named_columns, rows_that_meet

        if (path is None) == (pairs is None):
            raise DualencError("RetrievalEvaluator: give either path, a BEIR folder, or held-out pairs")
        if max_queries is not None and max_queries < 1:
            raise DualencError(f"RetrievalEvaluator: max_queries is {max_queries}; it must be at least 1")
        if pairs is None:
            whole = read_beir(str(path), split, titles=titles, columns=named_columns(where))
        elif where:
            raise DualencError("RetrievalEvaluator: where is for fields of a BEIR folder; give path in place of pairs")
        else:
            whole = held_out(pairs)
        if where:
            whole = whole.among(rows_that_meet(where, whole.corpus.columns))
        self.collection = whole
        self.task = "image-text" if "image" in (whole.queries.modality, whole.corpus.modality) else "retrieval"
        name = "held-out pairs" if path is None else Path(path).resolve().name
        name += f" where {' and '.join(where)}" if where else ""
        name += "" if max_queries is None else f" (first {max_queries} queries)"
        self.data = (name, None if path is None else split)
        if max_queries is not None:
            queries = whole.queries.take(range(min(max_queries, len(whole.queries))))
            self.collection = RetrievalSet(queries, whole.corpus, {name: whole.qrels[name] for name in queries.ids})
        self.batch_size, self.primary = batch_size, primary
        kinds = ("ndcg", "recall", "mrr", "map", "precision", "hit")
        self.metric_names = tuple(f"{kind}@{k}" for k in CUTOFFS for kind in kinds)
        self.modalities = {"left": whole.queries.modality, "right": whole.corpus.modality}

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        from dualenc.evaluation.observed import Observed, observed_pairs, observed_queries
        from dualenc.evaluation.retrieval import HEADLINES, Result, retrieve

        queries = embed_side(model, "left", self.collection.queries, self.batch_size)
        documents = embed_side(model, "right", self.collection.corpus, self.batch_size)
        device = next(model.parameters()).device
        run = retrieve(queries.ids, queries.vectors, documents.ids, documents.vectors, device=device)
        result = Result("model", "held-out", run, self.collection.qrels, len(documents.ids))
        row_of = {name: row for row, name in enumerate(documents.ids)}
        graded = (self.collection.qrels.get(name, {}) for name in queries.ids)
        positives = [[row_of[name] for name, grade in of.items() if grade > 0 and name in row_of] for of in graded]
        similarities = observed_pairs(queries.vectors, documents.vectors, positives)
        self.observed = Observed(similarities)
        if self.primary in result.means:
            scores = {query: of[self.primary] for query, of in result.per_query.items()}
            told = observed_queries(self.primary, scores, TextsOf(self.collection.queries, queries.ids))
            self.observed = Observed(similarities, **told)
        return {name: result.means[name] for name in (*HEADLINES, self.primary) if name in result.means}


class ImageTextEvaluator(Evaluator):
    """Recall@1, @5 and @10 of captions by images and of images by captions.

    Args:
        pairs: held-out (image, text) pairs; captions with the same left id are of the same image.
        batch_size: items encoded at once.
        primary: the metric to keep the best weights by.
    """

    metric_names = (
        *(f"{direction}_recall@{k}" for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)),
        "mean_recall",
    )
    task = "image-text"
    data = ("held-out pairs", None)

    def __init__(self, pairs: PairDataset, *, batch_size: int = 64, primary: str = "mean_recall") -> None:
        self.images, left_rows = _used_items(pairs, "left")
        self.texts, right_rows = _used_items(pairs, "right")
        self.captions: list[list[int]] = [[] for _ in range(len(self.images))]
        for image, text in sorted(set(zip(left_rows.tolist(), right_rows.tolist(), strict=True))):
            self.captions[image].append(text)
        self.batch_size, self.primary = batch_size, primary
        self.modalities = {"left": self.images.modality, "right": self.texts.modality}

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        from dualenc.evaluation.image_text import both_ways_ranks, both_ways_recall
        from dualenc.evaluation.observed import Observed, observed_pairs, observed_queries

        images = embed_side(model, "left", self.images, self.batch_size, on_error="raise")
        texts = embed_side(model, "right", self.texts, self.batch_size, on_error="raise")
        ranks = both_ways_ranks(images.vectors, texts.vectors, self.captions)
        of_captions = {name: 1 / float(rank) for name, rank in zip(self.texts.ids, ranks["text_to_image"], strict=True)}
        told = observed_queries("1/rank of the image", of_captions, TextsOf(self.texts, self.texts.ids))
        self.observed = Observed(observed_pairs(images.vectors, texts.vectors, self.captions), **told)
        return both_ways_recall(ranks)


class KNNEvaluator(Evaluator):
    """Accuracy of a nearest-neighbour vote on the backbone's features (Wu et al. 2018).

    Args:
        train: labelled images that vote.
        test: labelled images to classify.
        k: neighbours that vote.
        temperature: weight exp(s/τ) of a vote; null counts votes equally.
        batch_size: images encoded at once.

    Raises:
        DualencError: images without labels.
    """

    primary = "knn_accuracy"
    metric_names = ("knn_accuracy",)
    task = "nearest-neighbours"
    data = ("held-out images", None)
    modalities = MappingProxyType({"left": "image"})

    def __init__(
        self,
        train: ImageViews,
        test: ImageViews,
        *,
        k: int = 20,
        temperature: float | None = 0.07,
        batch_size: int = 256,
    ) -> None:
        self.corpora, self.labels = [], []
        for name, images in (("train", train), ("test", test)):
            if images.labels is None:
                raise DualencError(
                    f"KNNEvaluator: {name} has no labels; name its label column or sort images into folders"
                )
            self.corpora.append(Corpus([str(row) for row in range(len(images))], images.left_items, "image"))
            self.labels.append(images.labels)
        self.k, self.temperature, self.batch_size = k, temperature, batch_size

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        from dualenc.evaluation.observed import Observed, observed_labels
        from dualenc.evaluation.probe import accuracy, knn_predict

        train, test = (
            embed_side(model, "left", corpus, self.batch_size, output="features", on_error="raise").vectors
            for corpus in self.corpora
        )
        how: dict[str, Any] = {"k": self.k, "temperature": self.temperature, "device": next(model.parameters()).device}
        predicted = knn_predict(train, self.labels[0], test, **how)
        self.observed = Observed(observed_labels(test, self.labels[1]))
        return {"knn_accuracy": accuracy(predicted, self.labels[1])}


class TextsOf(Mapping[str, str]):
    """The texts of a corpus by id; nothing of one of images or vectors.

    Args:
        corpus: read item by item, when asked.
        ids: those of it that could be read.
    """

    def __init__(self, corpus: Corpus, ids: Sequence[str]) -> None:
        readable = set(ids) if corpus.modality == "text" else set()
        self.corpus, self.row_of = corpus, {name: row for row, name in enumerate(corpus.ids) if name in readable}

    def __getitem__(self, name: str) -> str:
        return str(self.corpus.items[self.row_of[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.row_of)

    def __len__(self) -> int:
        return len(self.row_of)


def embed_side(
    model: DualEncoder,
    side: Side,
    corpus: Corpus,
    batch_size: int,
    output: Output = "embedding",
    on_error: OnError = "skip",
) -> Embeddings:
    """Embed a corpus in memory, every rank a share; all get the whole."""
    from dualenc.search.embed import embed

    return embed(model.tower(side), corpus, batch_size=batch_size, output=output, on_error=on_error, progress=False)


def held_out(pairs: PairDataset) -> RetrievalSet:
    """Held-out pairs as a retrieval test: left items are the queries, the right items of all pairs the corpus."""
    queries, left_rows = _used_items(pairs, "left")
    corpus, right_rows = _used_items(pairs, "right")
    qrels: dict[str, dict[str, int]] = {name: {} for name in queries.ids}
    for left, right in zip(left_rows.tolist(), right_rows.tolist(), strict=True):
        qrels[queries.ids[left]][corpus.ids[right]] = 1
    return RetrievalSet(queries, corpus, qrels)


def _used_items(pairs: PairDataset, side: Side) -> tuple[Corpus, np.ndarray]:
    """The items of a side that a pair names, and each pair's row among them."""
    left = side == "left"
    ids, items = (pairs.left_id, pairs.left_items) if left else (pairs.right_id, pairs.right_items)
    modality = pairs.left_modality if left else pairs.right_modality
    used, rows = np.unique(ids, return_inverse=True)
    # Ids of the two sides must differ: a document with the id of the query would be taken for a copy of it.
    return Corpus([f"{side}-{item}" for item in used], Picked(items, used), modality), rows


class BestModel:
    """Evaluates, and keeps in the model folder the best weights so far, or the last ones.

    Args:
        model: what is trained.
        objective: whose temperature goes into model formats that have a place for it.
        evaluator: None when there is nothing to measure by; then the last weights are kept.
        folder: the model folder.
        keep_best: keep the weights with the best primary metric; otherwise the last.
        card: makes what the model card says of the training: `card(before, metrics, step)`.
        skeleton: of a sharded model, see `dualenc.training.sharding.shard_model`.
    """

    def __init__(
        self,
        model: DualEncoder,
        objective: Objective,
        evaluator: Evaluator | None,
        folder: Path,
        *,
        keep_best: bool,
        card: Callable[[dict[str, float], dict[str, float], int], dict[str, Any]],
        skeleton: DualEncoder | None = None,
    ) -> None:
        self.model, self.objective, self.evaluator, self.skeleton = model, objective, evaluator, skeleton
        self.folder, self.card = folder, card
        self.keep_best = keep_best and evaluator is not None
        self.before: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.best_step = -1
        self.evaluations_without_improvement = 0

    @property
    def primary(self) -> str:
        """Name of the metric that decides; "" without an evaluator."""
        return "" if self.evaluator is None else self.evaluator.primary

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure the model after so many steps; saves it if it is the best of the trained ones so far."""
        self.last = {}
        if self.evaluator is not None:
            self.model.eval()
            try:
                with random_state_kept(), torch.no_grad():
                    found = self.evaluator(self.model)
            finally:
                self.model.train()
            if self.primary not in found:
                raise DualencError(f"evaluator.primary is {self.primary!r}; choose one of {', '.join(found)}")
            self.last = distributed.broadcast_object({name: float(value) for name, value in found.items()})
        if step == 0:
            self.before = self.last
        elif self.keep_best and (not self.best or self.last[self.primary] > self.best[self.primary]):
            self.best = self.last
            self.best_step = step
            self.evaluations_without_improvement = 0
            self._save(step, self.best)
        else:
            self.evaluations_without_improvement += 1
        return self.last

    def finish(self, step: int, checkpoints: Checkpoints, say: Callable[[str], None]) -> dict[str, float]:
        """Make sure that the model folder holds what it should; all ranks call it together.

        Args:
            step: the last one, of the weights that the model has.
            checkpoints: one of them may have the best weights, if the model folder that had them is gone.
            say: where the user is told that none has.

        Returns:
            The metrics of what the folder holds.
        """
        if self.keep_best and self.best:
            if not distributed.broadcast_object(not (self.folder / "README.md").exists()):
                return self.best
            state = checkpoints.load_step(self.best_step)
            if state is not None:
                parts = (("model", self.model), ("objective", self.objective))
                latest = {name: {key: tensor.clone() for key, tensor in p.state_dict().items()} for name, p in parts}
                if "shards" in state:
                    join_evaluated(self.model, state, state["shards"])
                elif "averages" in state:  # what was measured then
                    state["model"] = state["averages"]["average"]
                for name, part in parts if "shards" not in state else parts[1:]:
                    part.load_state_dict(state[name])
                self._save(self.best_step, self.best)
                for name, part in parts:
                    part.load_state_dict(latest[name])
                return self.best
            say(f"{self.folder} is gone, and no checkpoint has the best weights, those of step {self.best_step}")
            self.best, self.best_step = {}, -1
        self._save(step, self.last)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on."""
        return {"before": self.before, "best": self.best, "last": self.last, "best_step": self.best_step} | (
            {"worse": self.evaluations_without_improvement} if self.evaluations_without_improvement else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.before, self.best, self.last = state["before"], state["best"], state["last"]
        self.best_step = state["best_step"]
        self.evaluations_without_improvement = state.get("worse", 0)

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        whole = nullcontext(self.model) if self.skeleton is None else assembled(self.model, self.skeleton)
        with whole as model:
            if distributed.is_main():
                model.eval()
                model.set_temperature(float(self.objective.temperature.detach()))
                model.set_dims(self.objective.dims or ())
                model.save(self.folder, card=self.card(self.before, metrics, step))
                self.model.train()
        distributed.barrier()
