"""`dualenc evaluate …`: options of each task; `dualenc.workflows.evaluate_*` do the work."""

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
from dualenc.commands.output import print_evaluation
from dualenc.commands.push import RecallOptions, print_recall


@dataclass(frozen=True)
class RetrievalOptions:
    """Retrieval by a query-document model, and what to compare it with.

    Args:
        split: split of a BEIR folder, a folder of tables or a hub name, by default test; a single
            table is tested as a whole.
        bm25: evaluate BM25 as well as the model; --hybrid implies it.
        keep_self_matches: keep an unjudged document whose id is the query's; by default it is
            removed as a copy of the query.
        batch_size: texts per forward pass.
        documents: an index, embeddings or a folder that `push` wrote, with the vectors of the
            documents of a BEIR folder, by id. No document is embedded, and only --bm25 and --hybrid
            read corpus.jsonl.
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

    In a table of pairs, left texts are the queries and all right texts the corpus; equal texts
    count once.
    Writes metrics.json, report.html and, for each data set, run.trec, per_query.ndjson and the
    embeddings, which the next evaluation of the same model reuses.

    Args:
        model: model folder or name.
        data: BEIR folder (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv, or embeddings instead of
            texts); a collection of the hub (mteb/scifact), or NanoBEIR for its thirteen; or pairs:
            a table of two columns (csv, tsv, jsonl, parquet, a folder of them, a hub name).
        more: further folders or tables; the table of results then has a mean row.
    """
    from dualenc.workflows.evaluate_retrieval import evaluate_retrieval

    result = evaluate_retrieval(
        model, [data, *more], **vars(options), **vars(columns), **vars(ranking), **vars(output)
    )
    # The table of all cutoffs is too wide for a terminal; the page has it.
    print_evaluation(result, num_tables=1, files="metrics, run files and report.html")


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
        split: split of a folder or hub name, by default test; a single file is tested as a whole.
        batch_size: items per forward pass.
    """
    from dualenc.workflows.evaluate_image_text import evaluate_image_text

    print_evaluation(
        evaluate_image_text(
            model, data, split=split, batch_size=batch_size, **vars(columns), **vars(output)
        )
    )


@dataclass(frozen=True)
class ZeroShotOptions:
    """The classes of images, and their prompts.

    Args:
        split: split of a folder of tables or a hub name, by default test; a single file is tested
            as a whole.
        label_column: column of a table with class numbers or names; by default `label`.
        class_names: text file with the name of each class on a line, in the order of the class
            numbers (folders are sorted by name), or in any order if it lists the names in the data.
            By default the names in the data.
        templates: text file with prompt templates, one on a line, {} for the class; by default a
            set of eight.
        batch_size: items per forward pass.
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
        data: labeled images: a table (parquet, a folder of them, a hub name), or a folder with one
            folder per class.
    """
    from dualenc.workflows.evaluate_zero_shot import evaluate_zero_shot

    # One table: a thousand classes would push the accuracy off the screen.
    result = evaluate_zero_shot(model, data, **vars(options), **vars(output))
    print_evaluation(result, num_tables=1)


@dataclass(frozen=True)
class ImageOptions:
    """Labeled images to test, and to train probes on.

    Args:
        split: split to test, by default test; of data without splits, `probe` tests a random fifth,
            and `corrupted` all.
        train: images to train a probe on; by default (`probe`) another split of the same data, or
            (`corrupted`) none.
        train_split: split to train on.
        label_column: column of a table with the labels; by default `label`.
        limit: test on a random subset of this many images.
        train_limit: train on a random subset of this many images.
        seed: random seed.
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
    """Probe the frozen image features of a model: a linear classifier, and nearest neighbors.

    Args:
        model: model folder or name, of kind image or image-text.
        data: images with labels: parquet or other table, hub name, or a folder of class folders.
        batch_size: images per forward pass.
    """
    from dualenc.workflows.evaluate_probe import evaluate_probe

    print_evaluation(
        evaluate_probe(model, data, batch_size=batch_size, **vars(images), **vars(output))
    )


@dataclass(frozen=True)
class CorruptionOptions:
    """Corruptions of images, and their severity.

    Args:
        corruptions: names of corruptions, separated by commas; by default all 19, or all in the
            folder.
        severity: severity of the corruptions in retrieval, 1 to 5; the robustness table has all
            five.
        baseline: JSON file with the error rates of a baseline (AlexNet in the literature), for the
            mean corruption error: metrics.json of another evaluation, or {"fog": [five rates], …}.
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

    With --train, also measure the accuracy of a linear probe under every corruption.

    Args:
        model: model folder or name, of kind image or image-text.
        data: clean images, corrupted on the fly; or a CIFAR-C or Tiny-ImageNet-C folder.
    """
    from dualenc.workflows.evaluate_corrupted import evaluate_corrupted

    print_evaluation(
        evaluate_corrupted(model, data, **vars(images), **vars(options), **vars(output))
    )


def engine(folder: str, *, options: RecallOptions) -> None:
    """Measure recall@10 and the rows returned under filters, against exact search; exit code 1
    below --recall.

    With --filters, settings that reach --recall (0.95) are chosen and written into the folder with
    the measurement; without, the recorded measurement is repeated.

    Args:
        folder: an index, or a folder that `dualenc push` wrote.
    """
    from dualenc.workflows.measure_engine import evaluate_engine

    measured = evaluate_engine(folder, **vars(options))
    print_recall(measured)
    # After the table, which shows the filters that lose results.
    measured.check()
