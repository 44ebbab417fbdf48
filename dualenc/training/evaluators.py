"""Evaluators: measure a model during training, with the pure functions of `dualenc.evaluation`.

`evaluation.probe` is imported late: it imports scikit-learn, which would delay every training by
1.6 seconds.
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
from dualenc.data.readers.image_views import ImageViews
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError, nearest
from dualenc.evaluation.image_text_retrieval import (
    both_ways_recall,
    match_captions,
    ranks_of_pairs,
    recall_of_queries,
)
from dualenc.evaluation.metrics import METRICS, Scores, mean_scores, score_queries
from dualenc.evaluation.retrieval import HEADLINES, report_self_matches, retrieve
from dualenc.search.embed.encode import embed
from dualenc.types import Modality, Side


class Evaluator(ABC):
    """Measures a model in evaluation mode. Any callable with a `primary` can serve as one.

    A subclass implements `__call__`, and may use `embed`.

    Example:
        class MeanSimilarity(Evaluator):
            primary = "similarity"

            def __call__(self, model):
                left = self.embed(model, "left", queries, "queries").vectors
                right = self.embed(model, "right", documents, "documents").vectors
                return {"similarity": float((left * right).sum(axis=1).mean())}

    Attributes:
        primary: name of the metric that selects the best weights; higher is better.
        data: name of the data, and its split or None.
        source: path of the data as the user named it, for messages; "" for pairs.
        modalities: "text" or "image" by side, for the items to embed; empty if any model fits.
        batch_size: number of items to encode at a time.
        query_scores: (Q,) primary metric of each query in the last call, whose mean the call
            returned; None if an evaluator does not keep them.
    """

    primary: str
    query_scores: Sequence[float] | None = None
    data: tuple[str, str | None] = ("held-out data", None)
    source: str = ""
    modalities: Mapping[Side, Modality] = MappingProxyType({})
    batch_size: int = 64
    _moment: str = ""
    _stopped: Callable[[], bool] | None = None
    _reported: frozenset[str] = frozenset()

    def describe(self, moment: str) -> None:
        """Label the progress bars of the next evaluation.

        Args:
            moment: start of each label, such as "before training"; "" hides the bars.
        """
        self._moment = moment

    def stop_when(self, stopped: Callable[[], bool] | None) -> None:
        """Set a condition that ends an evaluation with EmbeddingStopped.

        Args:
            stopped: function that is called between two batches, and returns True to stop; None
                for no condition.
        """
        self._stopped = stopped

    @abstractmethod
    def __call__(self, model: DualEncoder) -> dict[str, float]:
        """Return metrics by name. All ranks call it together; the main process's result counts."""

    def embed(
        self, model: DualEncoder, side: Side, corpus: Corpus, what: str, **named: Any
    ) -> Embeddings:
        """Embed a corpus in memory. Ranks share the work, and each gets all embeddings.

        Unreadable items are skipped, and reported once.

        Args:
            model: model to embed with.
            side: tower to embed with.
            corpus: items to embed.
            what: description of the items, for the progress bar and the report.
            named: further arguments of `dualenc.search.embed.encode.embed`.
        """
        # "queries of scifact" are "queries" on the bar, which has a line of 80 columns.
        progress = f"{self._moment}: {what.partition(' of ')[0]}" if self._moment else False
        options: dict[str, Any] = {"batch_size": self.batch_size, "stopped": self._stopped, **named}
        embeddings = embed(model.tower(side), corpus, progress=progress, **options)
        num_skipped = embeddings.provenance.skipped
        if num_skipped and what not in self._reported:
            self._reported |= {what}
            bad_rows = BadRows(what)
            first = embeddings.provenance.first_skipped[0]["reason"]
            bad_rows.add(f"{corpus.modality} that cannot be read", first, count=num_skipped)
            bad_rows.report()
        return embeddings


def check_settings(
    evaluator: str,
    batch_size: int,
    primary: str = "",
    metrics: Sequence[str] = ("",),
) -> None:
    """Check settings of an evaluator that would otherwise fail after everything was embedded.

    Args:
        evaluator: name of the evaluator, for the error.
        batch_size: number of items to encode at a time.
        primary: name of the primary metric.
        metrics: names of the metrics to choose from.

    Raises:
        DualencError: a setting is not valid.
    """
    # A bool is an int in Python.
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DualencError(
            f"batch_size is {batch_size!r}",
            fix="give at least 1",
            where=evaluator,
        )
    if primary not in metrics:
        raise DualencError(
            f"primary is {primary!r}{nearest(str(primary), metrics)}",
            fix=f"choose one of {', '.join(metrics)}",
            where=evaluator,
        )


def headline_scores(per_query: Mapping[str, Scores], primary: str) -> Scores:
    """Return the mean metrics that an evaluation during training reports.

    Args:
        per_query: scores by query.
        primary: name of the primary metric, which is included.
    """
    means = mean_scores(per_query)
    return {name: means[name] for name in (*HEADLINES, primary) if name in means}


def evaluated_data(evaluator: object) -> tuple[str, str | None]:
    """Return the name of an evaluator's data and its split.

    Args:
        evaluator: evaluator, or any callable, whose data gets the default name.
    """
    data: tuple[str, str | None] = getattr(evaluator, "data", Evaluator.data)
    return data


class RetrievalEvaluator(Evaluator):
    """Retrieval of right items by left items: nDCG@10, recall@10 and @100, MRR@10, MAP@100.

    The data is either a BEIR folder or held-out pairs.

    Example:
        evaluator = RetrievalEvaluator("data/scifact", split="test")
        Trainer(output="run").fit(model, pairs, objective, evaluator=evaluator)

    Args:
        path: BEIR folder.
        split: split of the BEIR folder, whose judgments are in qrels/SPLIT.tsv.
        pairs: held-out pairs. The corpus is all right items of their data, at most 100,000.
        batch_size: number of items to encode at a time.
        primary: metric that selects the best weights: ndcg, recall, mrr, map, precision or hit at
            1, 3, 5, 10 or 100.

    Raises:
        DualencError: a setting is not valid, or the data cannot be read.
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
        # Checked before the data is read, which may take minutes.
        check_settings("RetrievalEvaluator", batch_size, primary, METRICS)
        if path is not None and pairs is None:
            self.name = Path(path).resolve().name
            self.source = os.fspath(path)
            self.collection = read_beir(str(path), split)
        elif path is None and pairs is not None:
            self.name = "held-out pairs"
            self.collection = held_out(pairs)
        else:
            raise DualencError(
                "the data is missing or given twice",
                fix="give either path, a BEIR folder, or held-out pairs",
                where="RetrievalEvaluator",
            )
        report_self_matches(self.name, self.collection, keep_self_matches=False)
        self.data = (self.name, split)
        if pairs is not None:
            # The size of the corpus is part of the name: scores depend on it.
            num_documents = len(self.collection.corpus)
            self.data = (f"{self.name} among {num_documents:,} documents", None)
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
        # Removes unjudged documents that share the query's id, which are copies of it.
        run = retrieve(*vectors, qrels=collection.qrels, device=device)
        scores = score_queries(collection.qrels, run)
        self.query_scores = [of_query[self.primary] for of_query in scores.values()]
        return headline_scores(scores, self.primary)


_ONE_RANK = np.ones(1, np.int64)
RECALLS = tuple(both_ways_recall({"image_to_text": _ONE_RANK, "text_to_image": _ONE_RANK}))
"""Metrics of `ImageTextEvaluator`."""


class ImageTextEvaluator(Evaluator):
    """Image-text retrieval: recall@1, @5 and @10 in both directions, and their mean.

    An image may have several captions; any of them counts.

    Example:
        train, held_out = pairs.split(0.1)
        evaluator = ImageTextEvaluator(held_out)
        Trainer(output="run").fit(model, train, objective, evaluator=evaluator)

    Args:
        pairs: held-out (image, text) pairs; captions of one image share its left id.
        batch_size: number of items to encode at a time.
        primary: metric that selects the best weights.

    Raises:
        DualencError: a setting is not valid.
    """

    data = ("held-out pairs", None)

    def __init__(
        self, pairs: PairDataset, *, batch_size: int = 64, primary: str = "mean_recall"
    ) -> None:
        check_settings("ImageTextEvaluator", batch_size, primary, RECALLS)
        pairs = pairs.relevant()
        self.images, image_rows = used_items(pairs, "left")
        self.texts, text_rows = used_items(pairs, "right")
        # Matches by row. `__call__` leaves out images and texts that cannot be read.
        self._match = partial(match_captions, image_rows, text_rows)
        self.captions = self._match(range(len(self.images)), range(len(self.texts))).captions
        self.batch_size = batch_size
        self.primary = primary
        self.modalities = {"left": self.images.modality, "right": self.texts.modality}

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        images = self.embed(model, "left", self.images, "held-out images")
        texts = self.embed(model, "right", self.texts, "their captions")
        image_rows = rows_of(self.images.ids, images.ids)
        text_rows = rows_of(self.texts.ids, texts.ids)
        matches = self._match(image_rows.tolist(), text_rows.tolist())
        ranks = ranks_of_pairs(images.vectors, texts.vectors, matches)
        self.query_scores = recall_of_queries(ranks, self.primary)
        return both_ways_recall(ranks)


class KNNEvaluator(Evaluator):
    """Accuracy of a k-nearest-neighbor classifier on the backbone's features.

    Each neighbor votes with weight exp(s/τ) (Wu et al. 2018, arXiv:1805.01978).

    Example:
        evaluator = KNNEvaluator(labeled_train, labeled_test)
        Trainer(output="run").fit(model, views, objective, evaluator=evaluator)

    Args:
        train: labeled images that vote.
        test: labeled images to classify.
        k: number of neighbors that vote.
        temperature: temperature τ of a vote's weight, above 0.
        batch_size: number of images to encode at a time.

    Raises:
        DualencError: a setting is not valid, or labels are missing.
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
            raise DualencError(
                f"temperature is {temperature!r}",
                fix="it must be above 0",
                where="KNNEvaluator",
            )
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise DualencError(f"k is {k!r}", fix="give at least 1", where="KNNEvaluator")
        self.corpora: list[Corpus] = []
        self.labels: list[np.ndarray] = []
        for name, images in (("train", train), ("test", test)):
            if images.labels is None:
                raise DualencError(
                    f"the {name} images are unlabeled",
                    fix="name their label column or sort images into folders",
                    where="KNNEvaluator",
                )
            where = f"KNNEvaluator: {name}"
            rows = rows_with_label(images.labels, where)
            ids = [str(row) for row in rows]
            self.corpora.append(Corpus(ids, Picked(images.left_items, rows), "image"))
            # The two data sets may number their classes differently.
            aligned = align_labels(
                images.labels[rows], images.class_names, train.class_names, where
            )
            self.labels.append(aligned)
        num_train = len(self.labels[0])
        if k > num_train:
            raise DualencError(
                f"k is {k}, but only {num_train} training images vote",
                fix=f"choose k from 1 to {num_train}",
                where="KNNEvaluator",
            )
        self.k = k
        self.temperature = temperature
        self.batch_size = batch_size

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        from dualenc.evaluation.probe import accuracy, knn_predict

        features = []
        labels = []
        names = ("images that vote", "held-out images")
        for corpus, own_labels, what in zip(self.corpora, self.labels, names, strict=True):
            embedded = self.embed(model, "left", corpus, what, output="features")
            features.append(embedded.vectors)
            # Unreadable images are missing from the vectors.
            rows = rows_of(corpus.ids, embedded.ids)
            labels.append(own_labels[rows])
        predicted = knn_predict(
            features[0],
            labels[0],
            features[1],
            k=self.k,
            temperature=self.temperature,
            device=next(model.parameters()).device,
        )
        self.query_scores = (predicted == labels[1]).astype(float).tolist()
        return {"knn_accuracy": accuracy(predicted, labels[1])}
