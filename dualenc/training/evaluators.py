"""Evaluators: what measures a model during training, on top of the pure functions of `dualenc.evaluation`.

`evaluation.probe` is imported where it is called: it brings scikit-learn, 1.6 seconds of the start of every training.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dualenc.data.beir import read_beir
from dualenc.data.corpus import Corpus, RetrievalSet, held_out, used_items
from dualenc.data.item_lists import Picked
from dualenc.data.labels import rows_with_label
from dualenc.data.pairs import PairDataset
from dualenc.data.table_pairs import ImageViews
from dualenc.data.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.image_text import both_ways_ranks, both_ways_recall
from dualenc.evaluation.metrics import CUTOFFS
from dualenc.evaluation.query_scores import QueryScores, joined, query_scores
from dualenc.evaluation.retrieval import HEADLINES, Result, report_self_matches, retrieve
from dualenc.search.embed import embed
from dualenc.search.where import named_columns, rows_that_meet
from dualenc.types import Modality, OnError, Output, Side


class Evaluator(ABC):
    """Measures a model in evaluation mode; any callable with a `primary` can be one.

    Attributes:
        primary: name of the metric, higher is better, by which the best weights are kept.
        metric_names: names that `primary` may have, so that a wrong one is reported before any work; empty where
            they are known only after an evaluation.
        data: name of the data, and its split.
        modalities: "text" or "image" by side, of what is embedded; empty when it takes any model.
        query_scores: scores of single queries at the latest call, for reports; None without any.
        shows_progress: whether a call takes `progress`, such as "before training", with which its bars begin.
    """

    primary: str
    query_scores: QueryScores | None = None
    metric_names: tuple[str, ...] = ()
    data: tuple[str, str | None] = ("held-out data", None)
    modalities: Mapping[Side, Modality] = MappingProxyType({})
    shows_progress: bool = False

    @abstractmethod
    def __call__(self, model: DualEncoder) -> dict[str, float]:
        """Metrics by name. All ranks call it together; the main process's result counts."""


class RetrievalEvaluator(Evaluator):
    """Retrieval of right items by left items: nDCG@10, recall@10 and @100, MRR@10, MAP@100.

    Of several BEIR folders each metric is the mean over them; the primary one is also told of each, as
    "FOLDER/ndcg@10".

    Args:
        path: BEIR folder, or a list of them; or give pairs.
        split: its judgements, qrels/SPLIT.tsv.
        pairs: held-out pairs; the right items that they bring are the corpus.
        titles: put a document's title in front of its text.
        where: with path, search only documents that meet these conditions, such as year>=2020: fields of corpus.jsonl.
            Judgements of others, and queries without a relevant document among them, are left out.
        max_queries: measure on the first so many queries of each folder only.
        max_documents: search only so many documents of each folder: all that are judged for a query that is measured,
            and a random sample of the others, the same in every run. That is quick (50 queries and 5,000 documents are
            about the size of NanoBEIR's collections), but scores are higher than on the whole corpus.
        keep_self_matches: keep an unjudged document whose id is the query's; by default it is removed as its copy.
        batch_size: items encoded at once.
        primary: the metric to keep the best weights by: ndcg, recall, mrr, map, precision or hit at 1, 3, 5, 10 or 100.

    Attributes:
        collections: what is measured on, by the names of the folders.

    Raises:
        DualencError: neither or both of path and pairs are given, two folders of one name, or unreadable data.
    """

    shows_progress = True

    def __init__(
        self,
        # The list comes first: a recipe's value becomes the first type that takes it, and a text is made of anything.
        path: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = None,
        *,
        split: str = "test",
        pairs: PairDataset | None = None,
        titles: bool = True,
        where: Sequence[str] = (),
        max_queries: int | None = None,
        max_documents: int | None = None,
        keep_self_matches: bool = False,
        batch_size: int = 64,
        primary: str = "ndcg@10",
    ) -> None:
        if (path is None) == (pairs is None):
            raise DualencError("RetrievalEvaluator: give either path, a BEIR folder, or held-out pairs")
        for name, value in (("max_queries", max_queries), ("max_documents", max_documents)):
            if value is not None and value < 1:
                raise DualencError(f"RetrievalEvaluator: {name} is {value}; it must be at least 1")
        whole: dict[str, RetrievalSet] = {}
        if pairs is not None:
            if where:
                raise DualencError(
                    "RetrievalEvaluator: where is for fields of a BEIR folder; give path in place of pairs"
                )
            whole["held-out pairs"] = held_out(pairs)
        else:
            whole = _read_folders(path, split, titles, where)
        self.collections: dict[str, RetrievalSet] = {}
        names = []
        for name, collection in whole.items():
            # The corpus stays whole unless a sample is asked for: fewer documents would make retrieval easier.
            self.collections[name], limits = _limited(collection, max_queries, max_documents)
            report_self_matches(name, self.collections[name], keep_self_matches)
            condition = f" where {' and '.join(where)}" if where else ""
            names.append(f"{name}{condition}{limits}")
        mean = f"mean of {len(names)}: " if len(names) > 1 else ""
        self.data = (mean + ", ".join(names), split if pairs is None else None)
        self.modalities = self._shared_modalities()
        self.keep_self_matches = keep_self_matches
        self.batch_size = batch_size
        self.primary = primary
        kinds = ("ndcg", "recall", "mrr", "map", "precision", "hit")
        self.metric_names = tuple(f"{kind}@{k}" for k in CUTOFFS for kind in kinds)

    def _shared_modalities(self) -> dict[Side, Modality]:
        by_folder: list[dict[Side, Modality]] = [
            {"left": each.queries.modality, "right": each.corpus.modality} for each in self.collections.values()
        ]
        if any(modalities != by_folder[0] for modalities in by_folder):
            raise DualencError(
                "RetrievalEvaluator: some folders hold texts and others vectors; give folders of one kind"
            )
        return by_folder[0]

    def __call__(self, model: DualEncoder, progress: str = "") -> dict[str, float]:
        means: dict[str, Mapping[str, float]] = {}
        by_query: dict[str, QueryScores] = {}
        for name in self.collections:
            result, texts = self._measure(model, name, progress)
            means[name] = result.means
            if self.primary in result.means:
                scores = {query: metrics[self.primary] for query, metrics in result.per_query.items()}
                by_query[name] = query_scores(self.primary, scores, texts)
        shown = [metric for metric in dict.fromkeys((*HEADLINES, self.primary)) if metric in next(iter(means.values()))]
        metrics = {metric: float(np.mean([found[metric] for found in means.values()])) for metric in shown}
        if len(means) == 1:
            self.query_scores = next(iter(by_query.values()), None)
            return metrics
        self.query_scores = joined(by_query) if by_query else None
        if self.primary in shown:
            metrics |= {f"{name}/{self.primary}": found[self.primary] for name, found in means.items()}
        return metrics

    def _measure(self, model: DualEncoder, name: str, progress: str) -> tuple[Result, Mapping[str, str]]:
        """The scores on one collection, and the texts of its queries."""
        collection = self.collections[name]
        bars = [_bar(progress, f"{what} of {name}") for what in ("queries", "documents")]
        queries = embed_side(model, "left", collection.queries, self.batch_size, progress=bars[0])
        documents = embed_side(model, "right", collection.corpus, self.batch_size, progress=bars[1])
        device = next(model.parameters()).device
        keep = self.keep_self_matches
        qrels = None if keep else collection.qrels
        run = retrieve(queries.ids, queries.vectors, documents.ids, documents.vectors, qrels=qrels, device=device)
        result = Result("model", name, run, collection.qrels, len(documents.ids), keep_self_matches=keep)
        return result, TextsOf(collection.queries, queries.ids)


def _read_folders(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    split: str,
    titles: bool,
    where: Sequence[str],
) -> dict[str, RetrievalSet]:
    """BEIR folders by their names, restricted to the documents that meet the conditions."""
    collections: dict[str, RetrievalSet] = {}
    folders = [path] if isinstance(path, (str, os.PathLike)) else list(path or ())
    if not folders:
        raise DualencError("RetrievalEvaluator: path is an empty list; name at least one BEIR folder")
    for folder in folders:
        name = Path(folder).resolve().name
        if name in collections:
            raise DualencError(f"RetrievalEvaluator: two folders are named {name}; rename one")
        collection = read_beir(str(folder), split, titles=titles, columns=named_columns(where))
        if where:
            collection = collection.among(rows_that_meet(where, collection.corpus.columns))
        collections[name] = collection
    return collections


def _limited(whole: RetrievalSet, max_queries: int | None, max_documents: int | None) -> tuple[RetrievalSet, str]:
    """A collection of at most that size, and what to add to its name."""
    collection = whole
    limits = []
    if max_queries is not None:
        collection = collection.first_queries(max_queries)
        limits.append(f"first {max_queries} queries")
    if max_documents is not None and max_documents < len(whole.corpus):
        collection = collection.sampled(max_documents)
        limits.append(f"a sample of {len(collection.corpus):,} of {len(whole.corpus):,} documents")
    return collection, f" ({', '.join(limits)})" if limits else ""


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
    data = ("held-out pairs", None)
    shows_progress = True

    def __init__(self, pairs: PairDataset, *, batch_size: int = 64, primary: str = "mean_recall") -> None:
        self.images, left_rows = used_items(pairs, "left")
        self.texts, right_rows = used_items(pairs, "right")
        self.captions: list[list[int]] = [[] for _ in range(len(self.images))]
        for image, text in sorted(set(zip(left_rows.tolist(), right_rows.tolist(), strict=True))):
            self.captions[image].append(text)
        self.batch_size = batch_size
        self.primary = primary
        self.modalities = {"left": self.images.modality, "right": self.texts.modality}

    def __call__(self, model: DualEncoder, progress: str = "") -> dict[str, float]:
        bars = [_bar(progress, what) for what in ("held-out images", "their captions")]
        images = embed_side(model, "left", self.images, self.batch_size, on_error="raise", progress=bars[0])
        texts = embed_side(model, "right", self.texts, self.batch_size, on_error="raise", progress=bars[1])
        ranks = both_ways_ranks(images.vectors, texts.vectors, self.captions)
        scores = {name: 1 / float(rank) for name, rank in zip(self.texts.ids, ranks["text_to_image"], strict=True)}
        self.query_scores = query_scores("1/rank of the image", scores, TextsOf(self.texts, self.texts.ids))
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
    data = ("held-out images", None)
    shows_progress = True
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
        self.corpora: list[Corpus] = []
        self.labels: list[np.ndarray] = []
        for name, images in (("train", train), ("test", test)):
            if images.labels is None:
                raise DualencError(
                    f"KNNEvaluator: {name} has no labels; name its label column or sort images into folders"
                )
            rows = rows_with_label(images.labels, f"KNNEvaluator: {name}")
            self.corpora.append(Corpus([str(row) for row in rows], Picked(images.left_items, rows), "image"))
            self.labels.append(images.labels[rows])
        self.k = k
        self.temperature = temperature
        self.batch_size = batch_size

    def __call__(self, model: DualEncoder, progress: str = "") -> dict[str, float]:
        from dualenc.evaluation.probe import accuracy, knn_predict

        train, test = (
            embed_side(
                model,
                "left",
                corpus,
                self.batch_size,
                output="features",
                on_error="raise",
                progress=_bar(progress, what),
            ).vectors
            for corpus, what in zip(self.corpora, ("images that vote", "held-out images"), strict=True)
        )
        device = next(model.parameters()).device
        predicted = knn_predict(train, self.labels[0], test, k=self.k, temperature=self.temperature, device=device)
        return {"knn_accuracy": accuracy(predicted, self.labels[1])}


class TextsOf(Mapping[str, str]):
    """The texts of a corpus by id; empty for images and vectors.

    Args:
        corpus: read item by item, on access.
        ids: of the items that could be read.
    """

    def __init__(self, corpus: Corpus, ids: Sequence[str]) -> None:
        # Only texts can be shown in a report.
        readable = set(ids) if corpus.modality == "text" else set()
        self.corpus = corpus
        self.row_of = {name: row for row, name in enumerate(corpus.ids) if name in readable}

    def __getitem__(self, name: str) -> str:
        return str(self.corpus.items[self.row_of[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.row_of)

    def __len__(self) -> int:
        return len(self.row_of)


def _bar(progress: str, items: str) -> str:
    return f"{progress}: embed {items}" if progress else ""


def embed_side(
    model: DualEncoder,
    side: Side,
    corpus: Corpus,
    batch_size: int,
    output: Output = "embedding",
    on_error: OnError = "skip",
    progress: str = "",
) -> Embeddings:
    """Embed a corpus in memory, every rank a share; all get the whole. `progress` describes a bar; "" shows none."""
    tower = model.tower(side)
    shown = progress or False
    return embed(tower, corpus, batch_size=batch_size, output=output, on_error=on_error, progress=shown)
