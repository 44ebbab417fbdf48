"""`dualenc evaluate …`: options of each task; the files `evaluate_*.py` do the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter, validators
from cyclopts.types import PositiveInt, UInt32

from dualenc.commands.options import (
    COMMAS,
    BatchSize,
    ColumnOptions,
    OutputOptions,
    RankingOptions,
    Workers,
)
from dualenc.commands.push import RecallOptions, evaluate_engine


@dataclass(frozen=True)
class RetrievalOptions:
    """Retrieval by a query-document model, and what to compare it with.

    Args:
        split: of a BEIR folder, a folder of tables or a hub name, by default test; one table is
            tested as a whole.
        bm25: evaluate BM25 as well as the model; --hybrid does so, too.
        keep_self_matches: keep an unjudged document whose id is the query's; by default it is
            removed as its copy.
        batch_size: texts encoded at once.
        documents: an index, embeddings or what `push` wrote, whose vectors are the documents of a
            BEIR folder, by their ids; none is embedded, and the folder needs no corpus.jsonl but
            for --bm25 and --hybrid.
    """

    split: str | None = None
    bm25: bool = False
    keep_self_matches: bool = False
    batch_size: BatchSize = 32
    documents: str | None = None


def retrieval(
    model: str,
    data: str,
    *more: str,
    options: RetrievalOptions,
    columns: ColumnOptions,
    ranking: RankingOptions,
    output: OutputOptions,
) -> None:
    """Evaluate a query-document model, or an adapter of vectors, on BEIR folders or pairs of texts.

    A model that was adapted to an index needs --documents INDEX, and is scored on all queries, on
    those with a relevant document that was in training, and on the others.

    Of pairs, left texts are the queries and all right texts the corpus; equal texts count once.
    Writes metrics.json, report.html and, for each data set, run.trec, per_query.ndjson and the
    embeddings, which the next evaluation of the same model uses.

    Args:
        model: model folder or name.
        data: BEIR folder: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv, or embeddings in their
            place; a collection of the hub (mteb/scifact), or NanoBEIR for its thirteen; or pairs: a
            table of two columns (csv, tsv, jsonl, parquet, a folder of them, a hub name).
        more: further folders or tables; the table of results then has a mean row.
    """
    from dualenc.commands.evaluate_retrieval import evaluate_retrieval

    evaluate_retrieval(model, [data, *more], options, columns, ranking, output)


def image_text(
    model: str,
    data: str,
    *,
    split: str | None = None,
    columns: ColumnOptions,
    batch_size: BatchSize = 64,
    output: OutputOptions,
) -> None:
    """Evaluate image-text retrieval both ways: recall@1, @5 and @10, with any number of captions
    per image.

    Args:
        model: model folder or name.
        data: images with captions: a table (parquet, jsonl, csv, a folder of them, a hub name),
            webdataset tars, or a folder of images.
        split: of a folder or hub name, by default test; one file is tested as a whole.
        batch_size: items encoded at once.
    """
    from dualenc.commands.evaluate_image_text import evaluate_image_text

    evaluate_image_text(model, data, split, columns, batch_size, output)


@dataclass(frozen=True)
class ZeroShotOptions:
    """The classes of images, and their prompts.

    Args:
        split: of a folder of tables or a hub name, by default test; one file is tested as a whole.
        label_column: of a table, class numbers or names; by default `label`.
        class_names: text file with the name of each class on a line, in the order of the class
            numbers (of folders: sorted by name), or in any order with those of the data among them;
            by default the names in the data.
        templates: text file with prompt templates, one on a line, {} for the class; by default a
            set of eight.
        batch_size: items encoded at once.
    """

    split: str | None = None
    label_column: str | None = None
    class_names: str | None = None
    templates: str | None = None
    batch_size: BatchSize = 64


def zero_shot(model: str, data: str, *, options: ZeroShotOptions, output: OutputOptions) -> None:
    """Evaluate zero-shot classification: each image gets the class whose prompts are nearest.

    Args:
        model: model folder or name.
        data: labelled images: a table (parquet, a folder of them, a hub name), or a folder with one
            folder per class.
    """
    from dualenc.commands.evaluate_zero_shot import evaluate_zero_shot

    evaluate_zero_shot(model, data, options, output)


@dataclass(frozen=True)
class ImageOptions:
    """Labelled images to test, and to train probes on.

    Args:
        split: which split is tested, by default test; one file is tested as a whole.
        train: images to train a probe on; by default (`probe`) another split of the same data, or
            (`corrupted`) none.
        train_split: which split is trained on.
        label_column: of a table; by default `label`.
        limit: test so many images, chosen at random.
        train_limit: train on so many images, chosen at random.
        seed: of everything random.
        num_workers: processes that decode, corrupt and augment images.
    """

    split: str | None = None
    train: str | None = None
    train_split: str = "train"
    label_column: str | None = None
    limit: PositiveInt | None = None
    train_limit: PositiveInt | None = None
    seed: UInt32 = 0
    num_workers: Workers = 2


def probe(
    model: str,
    data: str,
    *,
    images: ImageOptions,
    batch_size: BatchSize = 256,
    output: OutputOptions,
) -> None:
    """Probe the frozen image features of a model: a linear classifier, and nearest neighbours.

    Args:
        model: model folder or name, of kind image or image-text.
        data: images with labels: parquet or other table, hub name, or a folder of class folders.
        batch_size: images encoded at once.
    """
    from dualenc.commands.evaluate_probe import evaluate_probe

    evaluate_probe(model, data, images, batch_size, output)


@dataclass(frozen=True)
class CorruptionOptions:
    """Corruptions of images, and what is measured under them.

    Args:
        corruptions: their names; by default all 19, or all that the folder has.
        severity: of the corruptions in retrieval, 1 to 5; the robustness table has all five.
        baseline: JSON file with the error rates of a baseline, AlexNet's in the literature, for the
            mean corruption error; metrics.json of another evaluation, or {"fog": [five rates], …}.
    """

    corruptions: Annotated[list[str] | None, COMMAS] = None
    severity: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=5))] = 1
    baseline: str | None = None


def corrupted(
    model: str,
    data: str,
    *,
    images: ImageOptions,
    options: CorruptionOptions,
    output: OutputOptions,
) -> None:
    """Find the other view of an image among its own corrupted versions, and among all images.

    With --train, also the accuracy of a linear probe under every corruption.

    Args:
        model: model folder or name, of kind image or image-text.
        data: clean images, corrupted on the fly; or a CIFAR-C or Tiny-ImageNet-C folder.
    """
    from dualenc.commands.evaluate_corrupted import evaluate_corrupted

    evaluate_corrupted(model, data, images, options, output)


def engine(folder: str, *, options: RecallOptions) -> None:
    """Measure recall@10 and the rows returned under filters, by exact search; exit code 1 below
    --recall.

    With --filters, settings are chosen that reach --recall (0.95), and are written into the folder
    with what was measured; without, that measurement is repeated.

    Args:
        folder: an index, or what `dualenc push` wrote.
    """
    evaluate_engine(folder, options)
