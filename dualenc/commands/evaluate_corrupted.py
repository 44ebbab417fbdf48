"""Corruptions: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
from dualenc.commands.labelled_images import (
    labelled_features,
    open_image_tower,
    open_images,
    random_rows,
    require_labels,
    require_other_images,
)
from dualenc.commands.output import Evaluation
from dualenc.data.labels import align_labels
from dualenc.data.readers.detect import default_split
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import (
    CLEAN,
    Condition,
    ImageVersions,
    SimCLRPrepare,
    corruption_errors,
    encoder_of,
    measure_versions,
    nearest_images,
    nearest_versions,
    read_baseline,
    robustness_rows,
    summarise,
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

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

    from dualenc.commands.evaluate import CorruptionOptions, ImageOptions
    from dualenc.commands.options import OutputOptions
    from dualenc.encoders import Tower

TRAIN_BATCH = 256
ValueOf = Callable[[list[int], np.ndarray], np.ndarray]


def evaluate_corrupted(
    model: str, data: str, images: ImageOptions, options: CorruptionOptions, output: OutputOptions
) -> None:
    """Evaluate retrieval among versions and images, and with training images the robustness of a
    linear probe."""
    split = images.split or default_split(data)
    if images.train is not None:
        require_other_images(images.train, images.train_split, data, split)
    elif images.train_limit is not None or images.train_split != type(images).train_split:
        raise DualencError("--train-split and --train-limit are for --train; name the images")
    evaluation = Evaluation("corrupted", model, data, output)
    source, clean = _open_versions(data, split, images, options)
    baseline = _open_baseline(options.baseline, images.train, source)
    if images.train is not None:
        training = open_images(
            images.train,
            images.train_split,
            images.label_column,
            limit=images.train_limit,
            seed=images.seed,
        )
        labels = require_labels(
            training, f"{images.train} ({images.train_split})", for_training=True
        )
        # Classes that the training images lack are an error before hours of encoding.
        tested_labels = _tested_labels(source, training.class_names)
    tower = open_image_tower(evaluation)
    names = source.corruptions
    conditions = [(name, options.severity) for name in names]
    nearest = _measure(
        tower,
        source,
        conditions,
        images,
        lambda _, views: nearest_versions(views),
        "corrupted retrieval",
        views=2,
    )
    found = {"images": len(nearest), "severity": options.severity, **summarise(nearest, names)}
    metrics: dict[str, Any] = {"corrupted": found}
    retrieval = [_retrieval_row(f"among {len(names)} versions of the image", found)]
    by_corruption = [{"corruption": name, "top-1": found[f"top1/{name}"]} for name in names]
    tables = [Table("By corruption", by_corruption)]
    if clean is not None:
        views = _measure(
            tower, clean, [CLEAN], images, lambda _, views: views[:, :, 0], "clean images", views=2
        )
        metrics["plain"] = {"images": len(views), **summarise(nearest_images(views))}
        retrieval.append(_retrieval_row("among all images, not corrupted", metrics["plain"]))
    if images.train is not None:
        settings = {"batch_size": TRAIN_BATCH, "num_workers": images.num_workers}
        features, labels = labelled_features(
            evaluation, "train", tower, training, labels, **settings
        )
        # Processes may fit slightly different ones, and their results are put together.
        classifier = distributed.from_main(
            lambda: linear_probe(features, labels, seed=images.seed).classifier
        )
        is_right = _comparison(classifier, tested_labels)
        conditions = [(name, severity) for name in names for severity in SEVERITIES]
        correct = _measure(tower, source, conditions, images, is_right, "robustness")
        errors = 1 - correct.reshape(len(correct), len(names), len(SEVERITIES)).mean(axis=0)
        robustness: dict[str, Any] = {"images": len(correct)}
        if clean is not None:
            correct = _measure(tower, clean, [CLEAN], images, is_right, "clean images")
            robustness["clean_accuracy"] = float(correct.mean())
        tables += _add_errors(robustness, dict(zip(names, errors)), baseline)
        metrics["robustness"] = robustness
    if distributed.is_main():
        facts: dict[str, object] = {
            "model": model,
            "data": data,
            "split": split,
            "seed": images.seed,
        }
        facts |= {} if options.baseline is None else {"baseline": options.baseline}
        tables = [Table("Retrieval of the other view", retrieval), *tables]
        evaluation.conclude("Corrupted images", data, facts, metrics, tables)
    distributed.barrier()


def _open_baseline(
    path: str | None,
    train: str | None,
    source: CorruptedImages,
) -> dict[str, float] | None:
    """Read a baseline's errors; a corruption that it lacks is an error before hours of encoding."""
    if path is None:
        return None
    if train is None:
        problem = "--baseline is for the errors of a linear probe"
        raise DualencError(f"{problem}; name images to train it: --train")
    baseline = read_baseline(path)
    corruption_errors({name: [0.0] for name in source.corruptions}, baseline)
    return baseline


def _add_errors(
    robustness: dict[str, Any], errors: dict[str, np.ndarray], baseline: dict[str, float] | None
) -> list[Table]:
    """Add the errors (5,) by corruption, and their means, to the results; returns the tables."""
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
    summary = Table("Robustness of a linear probe", [dict(robustness)])
    severities = [str(severity) for severity in SEVERITIES]
    robustness["errors"] = {name: dict(zip(severities, own)) for name, own in by_name.items()}
    if relative:
        robustness["corruption_errors"] = relative
    return [summary, Table("Accuracy by corruption and severity", rows)]


def _open_versions(
    data: str, split: str, images: ImageOptions, options: CorruptionOptions
) -> tuple[CorruptedImages, CleanImages | None]:
    """The corrupted images, and the clean ones if they are at hand."""
    corruptions = options.corruptions or []
    source: CorruptedImages
    clean = None
    if is_corrupted_folder(data):
        source = read_corrupted(data, corruptions)
    else:
        corpus = open_images(data, split, images.label_column)
        clean = CleanImages(corpus.items, corpus.labels, corpus.class_names)
        source = GeneratedCorruptions(clean, corruptions or ALL, seed=images.seed)
    if len(set(source.corruptions)) < max(2, len(source.corruptions)):
        # A version alone can only find itself.
        raise DualencError(
            f"--corruptions {','.join(source.corruptions)}: give two or more different ones"
        )
    return source, clean


def _retrieval_row(task: str, found: dict[str, float]) -> dict[str, object]:
    return {"task": task, "images": found["images"], "top-1": found["top1"]}


def _measure(
    tower: Tower,
    source: CorruptedImages,
    conditions: Sequence[Condition],
    images: ImageOptions,
    value_of: ValueOf,
    what: str,
    *,
    views: int = 0,
) -> np.ndarray:
    """(n, …) what `value_of` makes of image numbers (m,) and embeddings (m, V, C, D) of V views of
    their versions.

    Without views it gets the features (m, 1, C, D) of the versions as they are.
    """
    prepare = SimCLRPrepare(tower.prepare) if views else tower.prepare
    versions = ImageVersions(source, conditions, prepare, views=views, seed=images.seed)
    return measure_versions(
        versions,
        encoder_of(tower, "embedding" if views else "features"),
        value_of,
        random_rows(len(versions), images.limit, images.seed).tolist(),
        num_workers=images.num_workers,
        what=what,
    )


def _comparison(classifier: Pipeline, labels: np.ndarray) -> ValueOf:
    """A function that says (m, C) whether a classifier is right about each image under each
    condition."""

    def compare(rows: list[int], features: np.ndarray) -> np.ndarray:
        predicted = classifier.predict(features.reshape(-1, features.shape[-1]))
        return predicted.reshape(len(rows), -1) == labels[rows][:, None]

    return compare


def _tested_labels(source: CorruptedImages, class_names: Sequence[str] | None) -> np.ndarray:
    """(N,) labels of the images to test, in the class numbers of the training images."""
    if source.labels is None:
        raise DualencError(
            "the images to test have no labels, which the robustness table needs; give a label column"
        )
    return align_labels(source.labels, source.class_names, class_names, "the images to test")
