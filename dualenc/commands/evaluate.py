"""`dualenc evaluate …`: what models are worth. Each command checks its numbers and calls a task of the evaluation."""

from __future__ import annotations

import math

from dualenc.commands.checks import MAX_ITEMS, MAX_SEED, MAX_WORKERS, check_range
from dualenc.errors import DualencError
from dualenc.evaluation.options import (
    ColumnOptions,
    CompareOptions,
    CorruptionOptions,
    EngineOptions,
    ImageOptions,
    ObjectivesOptions,
    OutputOptions,
    ProbeOptions,
    RankingOptions,
    RetrievalOptions,
    ZeroShotOptions,
)

MAX_SAMPLES = 10_000_000
MAX_EPOCHS = 1 << 20


def retrieval(
    model: str,
    data: str,
    *more: str,
    options: RetrievalOptions,
    columns: ColumnOptions,
    ranking: RankingOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Evaluate a query-document model, or an adapter of vectors, on BEIR folders or pairs of texts.

    Of pairs, left texts are the queries and all right texts the corpus; equal texts count once.

    Writes metrics.json, report.html and, for each data set, run.trec and per_query.ndjson. Embeddings are kept
    below OUT, so that an interrupted evaluation resumes where it stopped. With --rerank, the hybrid ranking is reranked
    if there is one, else the engine's, else the model's.

    Args:
        model: model folder or name.
        data: BEIR folder: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv, or embeddings in their place; or pairs: a table
            of two columns (csv, tsv, jsonl, parquet, a folder of them, a hub name).
        more: further folders or tables; the table of results then has a mean row.
    """
    check_range(1, MAX_ITEMS, depth=options.depth, batch_size=options.batch_size, rerank_top=ranking.rerank_top)
    check_range(0, 1, weight=ranking.weight)
    from dualenc.evaluation.tasks.retrieval import evaluate

    evaluate(model, [data, *more], options, columns, ranking, engine, output)


def image_text(
    model: str,
    data: str,
    *,
    split: str | None = None,
    columns: ColumnOptions,
    batch_size: int = 64,
    output: OutputOptions,
) -> None:
    """Evaluate image-text retrieval both ways: recall@1, @5 and @10, with any number of captions per image.

    Writes metrics.json, report.html and a per-query log for each direction. Embeddings are kept below OUT, so that an
    interrupted evaluation resumes where it stopped.

    Args:
        model: model folder or name.
        data: images with captions: a table (parquet, jsonl, csv, a folder of them, a hub name), webdataset tars, or a
            folder of images.
        split: of a folder or hub name, by default test; of a file a slice such as train[90%:], by default all.
        batch_size: items encoded at once.
    """
    check_range(1, MAX_ITEMS, batch_size=batch_size)
    from dualenc.evaluation.tasks.image_text import evaluate

    evaluate(model, data, split, columns, batch_size, output)


def zero_shot(model: str, data: str, *, options: ZeroShotOptions, output: OutputOptions) -> None:
    """Evaluate zero-shot classification: each image gets the class whose prompts are nearest.

    Writes metrics.json, report.html and a per-query log. Embeddings are kept below OUT, so that an interrupted
    evaluation resumes where it stopped.

    Args:
        model: model folder or name.
        data: labelled images: a table (parquet, a folder of them, a hub name), or a folder with one folder per class.
    """
    check_range(1, MAX_ITEMS, batch_size=options.batch_size)
    from dualenc.evaluation.tasks.zero_shot import evaluate

    evaluate(model, data, options, output)


def probe(model: str, data: str, *, images: ImageOptions, options: ProbeOptions, output: OutputOptions) -> None:
    """Probe the frozen image features of a model: linear, nearest neighbours, few-shot.

    Writes metrics.json and report.html. Features are kept below OUT: an interrupted evaluation resumes with them.

    Args:
        model: model folder or name, of kind image or image-text.
        data: images with labels: parquet or other table, hub name, or a folder of class folders.
    """
    check_range(1, MAX_ITEMS, batch_size=options.batch_size, sgd_epochs=options.sgd_epochs)
    _check_images(images)
    for value in options.l2 or ():
        check_range(1e-30, 1e30, l2=value)
    from dualenc.evaluation.tasks.probe import evaluate

    evaluate(model, data, images, options, output)


def corrupted(
    model: str, data: str, *, images: ImageOptions, options: CorruptionOptions, output: OutputOptions
) -> None:
    """Find the other view of an image among its own corrupted versions, and among all images.

    With --train, also the accuracy of a linear probe under every corruption. Writes metrics.json and report.html.
    Finished images are kept below OUT: an interrupted evaluation resumes there.

    Args:
        model: model folder or name, of kind image or image-text.
        data: clean images, corrupted on the fly; or a CIFAR-C or Tiny-ImageNet-C folder.
    """
    _check_images(images)
    for value in (options.severity, *(options.severities or ())):
        check_range(1, 5, severity=value)
    from dualenc.evaluation.tasks.corrupted import evaluate

    evaluate(model, data, images, options, output)


def _check_images(images: ImageOptions) -> None:
    check_range(1, math.inf, limit=images.limit, train_limit=images.train_limit)
    check_range(0, MAX_WORKERS, num_workers=images.num_workers)
    check_range(0, MAX_SEED, seed=images.seed)


def objectives(
    model: str, data: str, *, options: ObjectivesOptions, columns: ColumnOptions, output: OutputOptions
) -> None:
    """Measure how far the gradient of each objective is from that of the global loss, on your model and pairs.

    Writes metrics.json and report.html. Pairs are embedded once and do not change; gradients are those with respect
    to the embeddings, and the pairs that are embedded are the whole corpus. Each objective makes six independent runs,
    until the standard error of its bias is below 0.02, or to the limit of epochs. Under `accelerate launch` the
    processes share the objectives. Interrupted, or with further objectives, it measures only those that it has not
    measured yet.

    Args:
        model: model folder or name.
        data: pairs, as `train` reads them; for models of kind image, images, of which two augmentations are a pair.
    """
    check_range(2, MAX_ITEMS, batch_size=options.batch_size)
    check_range(options.batch_size, math.inf, pairs=options.pairs)
    check_range(1e-3, 1e4, temperature=options.temperature)
    check_range(0, MAX_EPOCHS, warm_up=options.warm_up)
    check_range(1, MAX_EPOCHS, max_epochs=options.max_epochs)
    check_range(0, MAX_SEED, seed=options.seed)
    from dualenc.evaluation.tasks.objectives import evaluate

    evaluate(model, data, options, columns, output)


def compare(run_a: str, run_b: str, *, options: CompareOptions) -> None:
    """Compare two runs by the paired bootstrap over queries: difference, confidence interval, p-value.

    Args:
        run_a: output folder of `dualenc evaluate …`, a per-query log (.ndjson), or a TREC run file (needs qrels).
        run_b: the same for the run to compare with it.
    """
    check_range(1, MAX_SAMPLES, samples=options.samples)
    check_range(0, MAX_SEED, seed=options.seed)
    if not 0 < options.confidence < 1:
        raise DualencError(f"--confidence is {options.confidence}; it must lie between 0 and 1")
    from dualenc.evaluation.tasks.compare import compare_folders

    compare_folders(run_a, run_b, options)
