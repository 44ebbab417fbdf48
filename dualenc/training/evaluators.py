"""Evaluators: what measures a model during training, on top of the pure functions of
`dualenc.evaluation`.

`evaluation.probe` is imported where it is called: it brings scikit-learn, 1.6 seconds of the start
of every training.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus, held_out, used_items
from dualenc.data.item_lists import Picked
from dualenc.data.labels import align_labels, rows_with_label
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.beir import read_beir
from dualenc.data.readers.table_pairs import ImageViews
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError, nearest
from dualenc.evaluation.image_text_retrieval import both_ways_recall, match_captions, ranks_of_pairs
from dualenc.evaluation.metrics import METRICS, Scores, mean_scores, score_queries
from dualenc.evaluation.retrieval import HEADLINES, report_self_matches, retrieve
from dualenc.search.embed.encode import embed
from dualenc.types import Modality, Side


class Evaluator(ABC):
    """Measures a model in evaluation mode; any callable with a `primary` can be one.

    Attributes:
        primary: name of the metric, higher is better, by which the best weights are chosen.
        data: name of the data, and its split.
        modalities: "text" or "image" by side, of what is embedded; empty when it takes any model.
    """

    primary: str
    data: tuple[str, str | None] = ("held-out data", None)
    modalities: Mapping[Side, Modality] = MappingProxyType({})
    batch_size: int = 64
    _moment: str = ""
    _stopped: Callable[[], bool] | None = None
    _reported: frozenset[str] = frozenset()

    def describe(self, moment: str) -> None:
        """Show progress bars that begin with this, such as "before training"; "" shows none."""
        self._moment = moment

    def stop_when(self, stopped: Callable[[], bool] | None) -> None:
        """Raise EmbeddingStopped between two batches of an evaluation once this is true."""
        self._stopped = stopped

    @abstractmethod
    def __call__(self, model: DualEncoder) -> dict[str, float]:
        """Metrics by name. All ranks call it together; the main process's result counts."""

    def embed(
        self, model: DualEncoder, side: Side, corpus: Corpus, what: str, **named: Any
    ) -> Embeddings:
        """Embed a corpus in memory, every rank a share; all get the whole. `what` describes a bar.

        Items that cannot be read are left out, and reported once.
        """
        progress = f"{self._moment}: embed {what}" if self._moment else False
        options: dict[str, Any] = {"batch_size": self.batch_size, "stopped": self._stopped, **named}
        found = embed(model.tower(side), corpus, progress=progress, **options)
        if found.meta["skipped"] and what not in self._reported:
            self._reported |= {what}
            bad_rows = BadRows(what)
            first = found.meta["first_skipped"][0]["reason"]
            bad_rows.add(
                f"{corpus.modality} that cannot be read", first, count=found.meta["skipped"]
            )
            bad_rows.report()
        return found


def check_settings(
    evaluator: str,
    batch_size: int,
    primary: str = "",
    metrics: Sequence[str] = ("",),
) -> None:
    """Raise for an evaluator's settings that would fail after embedding everything."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DualencError(f"{evaluator}: batch_size is {batch_size!r}; give at least 1")
    if primary not in metrics:
        problem = f"{evaluator}: primary is {primary!r}{nearest(str(primary), metrics)}"
        raise DualencError(f"{problem}; choose one of {', '.join(metrics)}")


def headline_scores(per_query: Mapping[str, Scores], primary: str) -> Scores:
    """The means of the metrics that an evaluation in training shows, the primary one among them."""
    means = mean_scores(per_query)
    return {name: means[name] for name in (*HEADLINES, primary) if name in means}


def evaluated_data(evaluator: object) -> tuple[str, str | None]:
    """What an evaluator measures on, and its split; any callable may be one."""
    data: tuple[str, str | None] = getattr(evaluator, "data", Evaluator.data)
    return data


class RetrievalEvaluator(Evaluator):
    """Retrieval of right items by left items: nDCG@10, recall@10 and @100, MRR@10, MAP@100.

    Args:
        path: BEIR folder; or give pairs.
        split: its judgements, qrels/SPLIT.tsv.
        pairs: held-out pairs; all right items of their data are the corpus, at most 100,000 of
            them.
        batch_size: items encoded at once.
        primary: the metric to keep the best weights by: ndcg, recall, mrr, map, precision or hit at
            1, 3, 5, 10 or 100.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        split: str = "test",
        pairs: PairDataset | None = None,
        batch_size: int = 64,
        primary: str = "ndcg@10",
    ) -> None:
        # Before the data is read, and long before the first evaluation.
        check_settings("RetrievalEvaluator", batch_size, primary, METRICS)
        if path is not None and pairs is None:
            self.name = Path(path).resolve().name
            self.collection = read_beir(str(path), split)
        elif path is None and pairs is not None:
            self.name = "held-out pairs"
            self.collection = held_out(pairs)
        else:
            raise DualencError(
                "RetrievalEvaluator: give either path, a BEIR folder, or held-out pairs"
            )
        report_self_matches(self.name, self.collection, keep_self_matches=False)
        documents = f"{len(self.collection.corpus):,} documents"
        self.data = (
            (self.name, split) if pairs is None else (f"{self.name} among {documents}", None)
        )
        self.modalities = {
            "left": self.collection.queries.modality,
            "right": self.collection.corpus.modality,
        }
        self.batch_size = batch_size
        self.primary = primary

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        collection = self.collection
        queries = self.embed(model, "left", collection.queries, f"queries of {self.name}")
        documents = self.embed(model, "right", collection.corpus, f"documents of {self.name}")
        device = next(model.parameters()).device
        vectors = (queries.ids, queries.vectors, documents.ids, documents.vectors)
        # An unjudged document with the id of the query is a copy of it, and is left out.
        run = retrieve(*vectors, qrels=collection.qrels, device=device)
        return headline_scores(score_queries(collection.qrels, run), self.primary)


_ONE_RANK = np.ones(1, np.int64)
RECALLS = tuple(both_ways_recall({"image_to_text": _ONE_RANK, "text_to_image": _ONE_RANK}))
"""Metrics of `ImageTextEvaluator`."""


class ImageTextEvaluator(Evaluator):
    """Recall@1, @5 and @10 of captions by images and of images by captions.

    Args:
        pairs: held-out (image, text) pairs; captions with the same left id are of the same image.
        batch_size: items encoded at once.
        primary: the metric to keep the best weights by.
    """

    data = ("held-out pairs", None)

    def __init__(
        self, pairs: PairDataset, *, batch_size: int = 64, primary: str = "mean_recall"
    ) -> None:
        check_settings("ImageTextEvaluator", batch_size, primary, RECALLS)
        pairs = pairs.relevant()
        self.images, image_rows = used_items(pairs, "left")
        self.texts, text_rows = used_items(pairs, "right")
        # Of all images and texts, by their rows; `__call__` leaves out those that cannot be read.
        self._match = partial(match_captions, image_rows, text_rows)
        self.captions = self._match(range(len(self.images)), range(len(self.texts))).captions
        self.batch_size = batch_size
        self.primary = primary
        self.modalities = {"left": self.images.modality, "right": self.texts.modality}

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        images = self.embed(model, "left", self.images, "held-out images")
        texts = self.embed(model, "right", self.texts, "their captions")
        image_rows, text_rows = (
            rows_of(self.images.ids, images.ids),
            rows_of(self.texts.ids, texts.ids),
        )
        found = self._match(image_rows.tolist(), text_rows.tolist())
        return both_ways_recall(ranks_of_pairs(images.vectors, texts.vectors, found))


class KNNEvaluator(Evaluator):
    """Accuracy of a nearest-neighbour vote on the backbone's features (Wu et al. 2018).

    Args:
        train: labelled images that vote.
        test: labelled images to classify.
        k: neighbours that vote.
        temperature: τ of a vote's weight exp(s/τ).
        batch_size: images encoded at once.
    """

    primary = "knn_accuracy"
    data = ("held-out images", None)
    modalities = MappingProxyType({"left": "image"})

    def __init__(
        self,
        train: ImageViews,
        test: ImageViews,
        *,
        k: int = 20,
        temperature: float = 0.07,
        batch_size: int = 256,
    ) -> None:
        check_settings("KNNEvaluator", batch_size)
        if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
            raise DualencError(f"KNNEvaluator: temperature is {temperature!r}; it must be above 0")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise DualencError(f"KNNEvaluator: k is {k!r}; give at least 1")
        self.corpora: list[Corpus] = []
        self.labels: list[np.ndarray] = []
        for name, images in (("train", train), ("test", test)):
            if images.labels is None:
                problem = "has no labels; name its label column or sort images into folders"
                raise DualencError(f"KNNEvaluator: {name} {problem}")
            rows = rows_with_label(images.labels, f"KNNEvaluator: {name}")
            ids = [str(row) for row in rows]
            self.corpora.append(Corpus(ids, Picked(images.left_items, rows), "image"))
            own = align_labels(
                images.labels[rows], images.class_names, train.class_names, f"KNNEvaluator: {name}"
            )
            self.labels.append(own)
        if k > len(self.labels[0]):
            problem = f"KNNEvaluator: k is {k}, and {len(self.labels[0])} training images vote"
            raise DualencError(f"{problem}; choose k from 1 to that")
        self.k = k
        self.temperature = temperature
        self.batch_size = batch_size

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        from dualenc.evaluation.probe import accuracy, knn_predict

        features, labels = [], []
        names = ("images that vote", "held-out images")
        for corpus, own_labels, what in zip(self.corpora, self.labels, names, strict=True):
            embedded = self.embed(model, "left", corpus, what, output="features")
            features.append(embedded.vectors)
            labels.append(own_labels[rows_of(corpus.ids, embedded.ids)])
        device = next(model.parameters()).device
        votes = features[0], labels[0]
        predicted = knn_predict(
            *votes, features[1], k=self.k, temperature=self.temperature, device=device
        )
        return {"knn_accuracy": accuracy(predicted, labels[1])}
