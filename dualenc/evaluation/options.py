"""Options of the evaluations; this file is imported for `--help`, and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Augmentation = Literal["simclr", "model"]


@dataclass(frozen=True)
class OutputOptions:
    """Where an evaluation computes and writes.

    Args:
        out: folder to write; by default evaluations/TASK/MODEL-DATA-HASH.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """

    out: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class ColumnOptions:
    """The columns of a table of pairs.

    Args:
        left_column: of a table of pairs, with queries or images, where it has no usual name.
        right_column: of a table of pairs, with documents or captions (one, or a list in each row), where it has no
            usual name.
        left_modality: of the left column; by default as its values look.
        right_modality: of the right column; by default as its values look.
        quotes: whether " encloses fields; by default of csv files, and of tsv files whose header is in quotes.
    """

    left_column: str | None = None
    right_column: str | None = None
    left_modality: Literal["text", "image", "vector"] | None = None
    right_modality: Literal["text", "image", "vector"] | None = None
    quotes: bool | None = None


@dataclass(frozen=True)
class RankingOptions:
    """What else than the vectors decides the order of results.

    Args:
        hybrid: fuse with BM25: by reciprocal ranks (rrf) or weighted scores (weighted).
        weight: with hybrid, of the vectors, from 0 to 1; BM25 has the rest.
        rerank: folder or name of a sentence-transformers CrossEncoder that scores the best results again, by their
            texts; its scores then count.
        rerank_top: how many of the best it scores; the others are left out.
    """

    hybrid: Literal["rrf", "weighted"] | None = None
    weight: float = 0.5
    rerank: str | None = None
    rerank_top: int = 100


@dataclass(frozen=True)
class RetrievalOptions:
    """Retrieval by a query-document model, and what to compare it with.

    Args:
        split: which judgements of a BEIR folder, or which split of a folder of tables or a hub name, by default test;
            of one table a slice such as train[90%:], by default all.
        bm25: evaluate BM25 as well as the model; --hybrid does so, too.
        depth: documents to retrieve for each query.
        titles: put a document's title in front of its text.
        keep_self_matches: keep an unjudged document whose id is the query's; by default it is removed as its copy.
        batch_size: texts encoded at once.
    """

    split: str | None = None
    bm25: bool = False
    depth: int = 100
    titles: bool = True
    keep_self_matches: bool = False
    batch_size: int = 32


@dataclass(frozen=True)
class EngineOptions:
    """A search engine to ask beside exact search.

    Args:
        engine: folder that `dualenc push` wrote for the documents: ask that engine, too, and compare with exact search.
        qdrant_path: the folder of Qdrant's embedded mode, if ENGINE was pushed there; its files can run code, so name
            only one that you trust.
        where: search only documents that meet this: year>=2020, lang=en,de, lang!=en, author="Doe, Jane"; may be
            repeated. Judgements of others, and queries without a relevant document among them, are left out. The
            columns are fields of corpus.jsonl or what embeddings have kept (`--columns`).
        filter: the same with an engine, as Qdrant's JSON: {"must": [{"key": "year", "range": {"gte": 2020}}]}.
    """

    engine: str | None = None
    qdrant_path: str | None = None
    where: Sequence[str] | None = None
    filter: str = ""


@dataclass(frozen=True)
class ZeroShotOptions:
    """The classes of images, and their prompts.

    Args:
        split: of a folder of tables or a hub name, by default test; of a file a slice such as train[90%:], by default
            all.
        label_column: of a table, class numbers or names; by default `label`.
        quotes: whether " encloses fields; by default of csv files, and of tsv files whose header is in quotes.
        class_names: text file with the name of each class on a line; by default the names that the data brings.
        templates: text file with prompt templates, one on a line, {} for the class; by default a set of eight.
        batch_size: items encoded at once.
    """

    split: str | None = None
    label_column: str | None = None
    quotes: bool | None = None
    class_names: str | None = None
    templates: str | None = None
    batch_size: int = 64


@dataclass(frozen=True)
class ImageOptions:
    """Labelled images to test, and to train probes on.

    Args:
        split: which split is tested, by default test; of a file a slice such as train[90%:], by default all.
        train: images to train a probe on; by default (`probe`) another split of the same data, or (`corrupted`) none.
        train_split: which split is trained on.
        label_column: of a table; by default `label`.
        quotes: whether " encloses fields; by default of csv files, and of tsv files whose header is in quotes.
        limit: test so many images, chosen at random.
        train_limit: train on so many images, chosen at random.
        seed: of everything random.
        num_workers: processes that decode, corrupt and augment images.
    """

    split: str | None = None
    train: str | None = None
    train_split: str = "train"
    label_column: str | None = None
    quotes: bool | None = None
    limit: int | None = None
    train_limit: int | None = None
    seed: int = 0
    num_workers: int = 2


@dataclass(frozen=True)
class ProbeOptions:
    """The probes of image features.

    Args:
        l2: penalties to try in the linear probe, chosen on a tenth of the training images; by default 1e-6 to 0.1.
        shots: images of each class in the few-shot probes; by default 1, 5, 10, as far as there are so many.
        sgd: also train a linear probe by SGD (lr 0.3, momentum 0.9, cosine to zero): on features computed once, or
            on images cropped and flipped anew in every epoch, as papers do.
        sgd_epochs: epochs of it.
        batch_size: images encoded at once.
    """

    l2: list[float] | None = None
    shots: list[int] | None = None
    sgd: Literal["no", "features", "images"] = "no"
    sgd_epochs: int = 100
    batch_size: int = 256


@dataclass(frozen=True)
class CorruptionOptions:
    """Corruptions of images, and what is measured under them.

    Args:
        clean: with a CIFAR-C or Tiny-ImageNet-C folder: the images without corruption.
        corruptions: their names; by default all 19, or all that the folder has.
        severity: of the corruptions in retrieval, 1 to 5.
        severities: of the corruptions in the robustness table; by default 1 to 5.
        baseline: metrics.json of another model's evaluation, to divide the corruption errors by.
        augmentation: SimCLR's, or the training augmentation that the model folder knows.
    """

    clean: str | None = None
    corruptions: list[str] | None = None
    severity: int = 1
    severities: list[int] | None = None
    baseline: str | None = None
    augmentation: Augmentation = "simclr"


@dataclass(frozen=True)
class ObjectivesOptions:
    """The objectives to measure, and how long.

    Args:
        split: of the data.
        batch_size: B, pairs in a batch.
        temperature: τ; by default what the model was trained with, if it or its run's checkpoints record it, or 0.07.
        objectives: some of InfoNCE, DCL, SogCLR, SogCLR-0.1 (γ = 0.1), ISogCLR, GlobalCache, NegativeCache, EMC2, ISIR,
            HCL, SACLR, SigLIP; by default all.
        pairs: the most pairs that are embedded, chosen at random and always the same; a multiple of the batch size.
        warm_up: epochs of each run before anything counts, in which averages and chains settle.
        max_epochs: the most epochs of a run after that.
        seed: of the order of the pairs, of the objectives' draws, and of augmentations.
    """

    split: str = "train"
    batch_size: int = 32
    temperature: float | None = None
    objectives: list[str] | None = None
    pairs: int = 2000
    warm_up: int = 10
    max_epochs: int = 64
    seed: int = 0


@dataclass(frozen=True)
class CompareOptions:
    """The comparison of two runs.

    Args:
        qrels: judgements of TREC run files, in BEIR's or TREC's format.
        metrics: names separated by commas; by default the usual ones among those that both runs have.
        samples: number of bootstrap resamples.
        confidence: share of the resamples inside the interval.
        seed: of the resampling.
        out: folder for comparison.json and report.html; by default the table is only printed.
    """

    qrels: str | None = None
    metrics: str | None = None
    samples: int = 10_000
    confidence: float = 0.95
    seed: int = 0
    out: str | None = None
