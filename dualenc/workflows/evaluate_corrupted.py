"""Evaluate corrupted images: retrieval among versions and images, and robustness of a probe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.data.labels import align_labels
from dualenc.data.readers.detect import default_split
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import (
    CLEAN,
    Condition,
    EncodeInputs,
    ImageVersions,
    SimCLRPrepare,
    corruption_errors,
    encoder_of,
    estimate_seconds,
    measure_versions,
    nearest_images,
    nearest_versions,
    read_baseline,
    robustness_rows,
    summarize_nearest,
)
from dualenc.evaluation.corruptions import (
    ALL,
    SEVERITIES,
    CleanImages,
    CorruptedImages,
    GeneratedCorruptions,
    is_corrupted_folder,
    read_corrupted,
)
from dualenc.evaluation.probe import linear_probe
from dualenc.evaluation.report_page import Table
from dualenc.io.cpus import usable_workers
from dualenc.types import StrPath
from dualenc.workflows.evaluation_folder import EvaluationFolder, EvaluationResult, evaluation_of
from dualenc.workflows.labeled_images import (
    labeled_features,
    open_image_tower,
    open_images,
    random_rows,
    require_labels,
    require_other_images,
)

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

    from dualenc.data import Corpus
    from dualenc.encoders import Tower

logger = logging.getLogger("dualenc.workflows")

TRAIN_BATCH = 256
TRAIN_SPLIT = "train"
ValueOf = Callable[[list[int], np.ndarray], np.ndarray]


def evaluate_corrupted(
    model: str,
    data: str,
    *,
    split: str | None = None,
    corruptions: Sequence[str] | None = None,
    severity: int = 1,
    train: str | None = None,
    train_split: str = TRAIN_SPLIT,
    baseline: str | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    train_limit: int | None = None,
    seed: int = 0,
    num_workers: int = 2,
    out: StrPath | None = None,
    device: str | None = None,
    progress: bool = True,
) -> EvaluationResult:
    """Find the other view of an image among its own corrupted versions, and among all images.

    With `train`, also measure the accuracy of a linear probe under every corruption. Same as
    `dualenc evaluate corrupted`.

        data = "data/cifar10"
        result = dualenc.evaluate_corrupted("runs/simclr/model", data, train=data)
        result.metrics["robustness"]["mean_error"]

    Args:
        model: model folder or name, of kind image or image-text.
        data: clean images, corrupted on the fly; or a CIFAR-C or Tiny-ImageNet-C folder.
        split: split to test; by default "test", and all of a single file.
        corruptions: names of two or more corruptions; by default all 19, or all in the folder.
        severity: severity of the corruptions in retrieval, 1 to 5. The robustness table has all
            five.
        train: images to train a probe on; by default none.
        train_split: split to train on.
        baseline: JSON file with the error rates of a baseline (AlexNet in the literature), for the
            mean corruption error: metrics.json of another evaluation, or {"fog": [five rates], …}.
        label_column: column of a table with the labels; by default `label`.
        limit: test on a random subset of this many images.
        train_limit: train on a random subset of this many images.
        seed: random seed of subsets, corruptions, augmentation and the validation split.
        num_workers: number of processes that decode, corrupt and augment images.
        out: folder to write; by default evaluations/corrupted/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.

    Returns:
        Accuracies of retrieval and, with `train`, of the probe, and the folder with all files.

    Raises:
        DualencError: if labels are missing, or the images to test are those to train on.
    """
    split = split or default_split(data)
    # Before the folder is locked and the model loaded.
    if train is not None:
        require_other_images(train, train_split, data, split)
    elif train_limit is not None or train_split != TRAIN_SPLIT:
        raise DualencError("--train-split and --train-limit are for --train", fix="name the images")
    with evaluation_of("corrupted", model, data, out, device, progress) as evaluation:
        source, clean = _open_versions(data, split, label_column, corruptions or (), seed)
        baseline_errors = _open_baseline(baseline, train, source)
        training = None
        if train is not None:
            images = open_images(train, train_split, label_column, limit=train_limit, seed=seed)
            training = _open_training(images, f"{train} ({train_split})", source)
        # After the labels and the baseline, whose mistakes show without loading a model.
        tower = open_image_tower(evaluation)
        measuring = _Measuring(tower, limit, seed, usable_workers(num_workers), progress)
        if distributed.is_main():
            _log_plan(measuring, source, severity, with_probe=training is not None)
        metrics, tables = _measure_retrieval(measuring, source, clean, severity)
        if training is not None:
            robustness, more_tables = _measure_robustness(
                evaluation, measuring, source, clean, training, baseline_errors
            )
            metrics["robustness"] = robustness
            tables += more_tables
        facts: dict[str, object] = {"data": data, "split": split, "seed": seed}
        if baseline is not None:
            facts["baseline"] = baseline
        return distributed.from_main(
            lambda: evaluation.conclude("Corrupted images", data, facts, metrics, tables)
        )


def _open_versions(
    data: str, split: str, label_column: str | None, corruptions: Sequence[str], seed: int
) -> tuple[CorruptedImages, CleanImages | None]:
    """Open the corrupted images, and the clean ones if they are available."""
    source: CorruptedImages
    clean = None
    # Published sets hold corrupted images only: retrieval among clean ones is then left out.
    if is_corrupted_folder(data):
        source = read_corrupted(data, corruptions)
    else:
        corpus = open_images(data, split, label_column)
        clean = CleanImages(corpus.items, corpus.labels, corpus.class_names)
        source = GeneratedCorruptions(clean, corruptions or ALL, seed=seed)
    if len(set(source.corruptions)) < max(2, len(source.corruptions)):
        # A single version can only find itself.
        raise DualencError(
            "give two or more different ones",
            where=f"--corruptions {','.join(source.corruptions)}",
        )
    return source, clean


def _open_baseline(
    path: str | None, train: str | None, source: CorruptedImages
) -> dict[str, float] | None:
    """Read a baseline's errors; a missing corruption is refused before hours of encoding."""
    if path is None:
        return None
    if train is None:
        raise DualencError(
            "--baseline is for the errors of a linear probe", fix="name images to train it: --train"
        )
    baseline = read_baseline(path)
    corruption_errors({name: [0.0] for name in source.corruptions}, baseline)
    return baseline


class _Training(NamedTuple):
    """Images to train a probe on, their labels, and the labels (N,) of the images to test."""

    images: Corpus
    labels: np.ndarray
    tested_labels: np.ndarray


def _open_training(images: Corpus, name: str, source: CorruptedImages) -> _Training:
    """Check the labels; a class that the training images lack is refused before the encoding."""
    labels = require_labels(images, name, for_training=True)
    if source.labels is None:
        raise DualencError(
            "the images to test lack labels, which the robustness table needs",
            fix="give a label column",
        )
    tested = align_labels(
        source.labels, source.class_names, images.class_names, "the images to test"
    )
    return _Training(images, labels, tested)


class _Measuring(NamedTuple):
    """Settings of every pass over the images."""

    tower: Tower
    limit: int | None
    seed: int
    num_workers: int
    progress: bool

    def values(
        self,
        source: CorruptedImages,
        conditions: Sequence[Condition],
        value_of: ValueOf,
        what: str,
        *,
        views: int = 0,
    ) -> np.ndarray:
        """Return (n, …) results of `value_of` over n images.

        Args:
            source: N images, of which `limit` are measured.
            conditions: C corruptions with severities.
            value_of: function of image numbers (m,) and embeddings (m, V, C, D) to (m, …).
            what: name of the pass in the progress bar and in errors.
            views: V augmented views of each version; 0 passes the features (m, 1, C, D) of the
                versions without augmentation.
        """
        versions, encode = self.open(source, conditions, views)
        return measure_versions(
            versions,
            encode,
            value_of,
            self.rows(source),
            num_workers=self.num_workers,
            what=what,
            progress=self.progress,
        )

    def seconds(
        self, source: CorruptedImages, conditions: Sequence[Condition], *, views: int = 0
    ) -> float | None:
        """Estimate how long `values` takes with the same arguments; None for a few images."""
        versions, encode = self.open(source, conditions, views)
        return estimate_seconds(versions, encode, self.rows(source), num_workers=self.num_workers)

    def open(
        self, source: CorruptedImages, conditions: Sequence[Condition], views: int
    ) -> tuple[ImageVersions, EncodeInputs]:
        """Return the versions of N images, and what encodes them."""
        prepare = SimCLRPrepare(self.tower.prepare) if views else self.tower.prepare
        versions = ImageVersions(source, conditions, prepare, views=views, seed=self.seed)
        return versions, encoder_of(self.tower, "embedding" if views else "features")

    def rows(self, source: CorruptedImages) -> list[int]:
        """Return the numbers of the images to measure."""
        return random_rows(len(source), self.limit, self.seed).tolist()


def _log_plan(
    measuring: _Measuring, source: CorruptedImages, severity: int, *, with_probe: bool
) -> None:
    """Log how many versions of images will be computed, and how long that will take."""
    passes = [("retrieval", _conditions(source, [severity]), 2)]
    if with_probe:
        passes.append(("robustness", _conditions(source, SEVERITIES), 0))
    num_images = len(measuring.rows(source))
    for what, conditions, views in passes:
        severities = len(conditions) // len(source.corruptions)
        factors = f"{num_images:,} images × {len(source.corruptions)} corruptions"
        factors += f" × {severities} severities" if severities > 1 else ""
        seconds = measuring.seconds(source, conditions, views=views)
        duration = "" if seconds is None else f"; takes {_about(seconds)}"
        total = num_images * len(conditions)
        logger.info("%s: %s = %s versions%s", what, factors, f"{total:,}", duration)


def _conditions(source: CorruptedImages, severities: Sequence[int]) -> list[Condition]:
    """Return all corruptions at all of some severities."""
    return [(name, severity) for name in source.corruptions for severity in severities]


def _about(seconds: float) -> str:
    """Return a duration in words, without false precision."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"about {seconds / size:.0f} {unit}"
    return "about a second" if seconds < 1.5 else f"about {seconds:.0f} seconds"


def _measure_retrieval(
    measuring: _Measuring, source: CorruptedImages, clean: CleanImages | None, severity: int
) -> tuple[dict[str, Any], list[Table]]:
    """Measure how often a view finds the other view among versions and among images."""
    names = source.corruptions
    nearest = measuring.values(
        source,
        _conditions(source, [severity]),
        lambda _, views: nearest_versions(views),
        "corrupted retrieval",
        views=2,
    )
    scores = {"images": len(nearest), "severity": severity, **summarize_nearest(nearest, names)}
    metrics: dict[str, Any] = {"corrupted": scores}
    rows = [_retrieval_row(f"among {len(names)} versions of the image", scores)]
    by_corruption = [{"corruption": name, "top-1": scores[f"top1/{name}"]} for name in names]
    if clean is not None:
        views = measuring.values(
            clean, [CLEAN], lambda _, views: views[:, :, 0], "clean images", views=2
        )
        metrics["plain"] = {"images": len(views), **summarize_nearest(nearest_images(views))}
        rows.append(_retrieval_row("among all images, not corrupted", metrics["plain"]))
    tables = [Table("Retrieval of the other view", rows), Table("By corruption", by_corruption)]
    return metrics, tables


def _retrieval_row(task: str, scores: dict[str, float]) -> dict[str, object]:
    """Return a row of the retrieval table."""
    return {"task": task, "images": scores["images"], "top-1": scores["top1"]}


def _measure_robustness(
    evaluation: EvaluationFolder,
    measuring: _Measuring,
    source: CorruptedImages,
    clean: CleanImages | None,
    training: _Training,
    baseline: dict[str, float] | None,
) -> tuple[dict[str, Any], list[Table]]:
    """Train a linear probe on clean images, and test it under every corruption and severity."""
    features, labels = labeled_features(
        evaluation,
        "train",
        measuring.tower,
        training.images,
        training.labels,
        batch_size=TRAIN_BATCH,
        num_workers=measuring.num_workers,
    )
    # Fit once: fits of several processes may differ slightly, and their results are merged.
    classifier = distributed.from_main(
        lambda: linear_probe(features, labels, seed=measuring.seed).classifier
    )
    is_right = _comparison(classifier, training.tested_labels)
    names = source.corruptions
    correct = measuring.values(source, _conditions(source, SEVERITIES), is_right, "robustness")
    # (n, K·S) hits to the mean error (K, S) of K corruptions and S severities.
    errors = 1 - correct.reshape(len(correct), len(names), len(SEVERITIES)).mean(axis=0)
    robustness: dict[str, Any] = {"images": len(correct)}
    if clean is not None:
        correct = measuring.values(clean, [CLEAN], is_right, "clean images")
        robustness["clean_accuracy"] = float(correct.mean())
    return robustness, _add_errors(robustness, dict(zip(names, errors)), baseline)


def _comparison(classifier: Pipeline, labels: np.ndarray) -> ValueOf:
    """Return a function that checks (m, C) predictions of a classifier against the labels."""

    def compare(rows: list[int], features: np.ndarray) -> np.ndarray:
        predicted = classifier.predict(features.reshape(-1, features.shape[-1]))
        return predicted.reshape(len(rows), -1) == labels[rows][:, None]

    return compare


def _add_errors(
    robustness: dict[str, Any], errors: dict[str, np.ndarray], baseline: dict[str, float] | None
) -> list[Table]:
    """Add the errors (5,) by corruption and their means to the results; return the tables."""
    rows = robustness_rows(np.stack([*errors.values()]), [*errors], SEVERITIES)
    robustness["mean_error"] = float(np.mean([*errors.values()]))
    by_name = {name: own.tolist() for name, own in errors.items()}
    relative = {}
    if baseline is not None:
        relative = corruption_errors(by_name, baseline)
        robustness["mean_corruption_error"] = float(np.mean([*relative.values()]))
        robustness["corruptions_in_it"] = len(relative)
        for row, name in zip(rows, errors):
            row["CE"] = relative.get(name, "")
        rows[-1]["CE"] = robustness["mean_corruption_error"]
    # Copied before the errors by severity are added: the summary shows only means.
    summary = Table("Robustness of a linear probe", [dict(robustness)])
    severities = [str(severity) for severity in SEVERITIES]
    robustness["errors"] = {name: dict(zip(severities, own)) for name, own in by_name.items()}
    if relative:
        robustness["corruption_errors"] = relative
    return [summary, Table("Accuracy by corruption and severity (1 to 5)", rows)]
