"""Probe the frozen image features of a model: nearest neighbors and a linear classifier."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualenc import distributed
from dualenc.data.labels import align_labels
from dualenc.data.readers.detect import default_split
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.evaluation.report_page import Table
from dualenc.io.cpus import usable_workers
from dualenc.types import StrPath
from dualenc.workflows.evaluation_folder import EvaluationFolder, EvaluationResult, evaluation_of
from dualenc.workflows.labeled_images import (
    are_same_images,
    labeled_features,
    open_image_tower,
    open_images,
    require_labels,
    require_other_images,
    split_images,
)

NEIGHBORS = 20

LabeledFeatures = tuple[np.ndarray, np.ndarray]
"""Features (N, D) and labels (N,)."""


def evaluate_probe(
    model: str,
    data: str,
    *,
    split: str | None = None,
    train: str | None = None,
    train_split: str = "train",
    label_column: str | None = None,
    limit: int | None = None,
    train_limit: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    num_workers: int = 2,
    out: StrPath | None = None,
    device: str | None = None,
    progress: bool = True,
) -> EvaluationResult:
    """Probe the frozen image features of a model: a linear classifier, and nearest neighbors.

    Same as `dualenc evaluate probe`.

        result = dualenc.evaluate_probe("runs/simclr/model", "data/cifar10")
        result.metrics["accuracy"]["linear, L-BFGS"]["accuracy"]

    Args:
        model: model folder or name, of kind image or image-text.
        data: images with labels: a table, a hub name, or a folder of class folders.
        split: split to test; by default "test", and a random fifth of data without splits.
        train: images to train the probes on; by default another split of `data`, or its other
            images.
        train_split: split to train on.
        label_column: column of a table with the labels; by default `label`.
        limit: test on a random subset of this many images.
        train_limit: train on a random subset of this many images.
        seed: random seed of the subsets and of the validation split.
        batch_size: number of images per forward pass.
        num_workers: number of processes that decode images.
        out: folder to write; by default evaluations/probe/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.

    Returns:
        The accuracy of each probe, and the folder with all files.

    Raises:
        DualencError: if labels are missing, or the images to test are those to train on.
    """
    is_named = split is not None or train is not None
    split = split or default_split(data)
    source = train or data
    is_undivided = not is_named and are_same_images(source, train_split, data, split)
    # Before the folder is locked and the model loaded.
    if not is_undivided:
        require_other_images(source, train_split, data, split)
    with evaluation_of("probe", model, data, out, device, progress) as evaluation:
        if is_undivided:
            training, test = split_images(
                data, split, label_column, limit=limit, train_limit=train_limit, seed=seed
            )
        else:
            training = open_images(source, train_split, label_column, limit=train_limit, seed=seed)
            test = open_images(data, split, label_column, limit=limit, seed=seed)
        train_labels = require_labels(training, f"{source} ({train_split})", for_training=True)
        test_labels = require_labels(test, f"{data} ({split})")
        # Test labels are renumbered to the classes of the training images.
        test_labels = align_labels(
            test_labels, test.class_names, training.class_names, f"{data} ({split})"
        )
        # After the labels, whose mistakes show without loading a model.
        tower = open_image_tower(evaluation)
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "num_workers": usable_workers(num_workers),
        }
        trained = labeled_features(evaluation, "train", tower, training, train_labels, **settings)
        tested = labeled_features(evaluation, "test", tower, test, test_labels, **settings)
        facts: dict[str, object] = {
            "data": data,
            "split": "a random fifth" if is_undivided else split,
            "train": source,
            "train_split": "the others" if is_undivided else train_split,
            "train_images": len(trained[1]),
            "test_images": len(tested[1]),
        }
        return distributed.from_main(lambda: _conclude(evaluation, facts, trained, tested, seed))


def _conclude(
    evaluation: EvaluationFolder,
    facts: dict[str, object],
    train: LabeledFeatures,
    test: LabeledFeatures,
    seed: int,
) -> EvaluationResult:
    """Fit the probes, and write their accuracies."""
    features, labels = train
    test_features, test_labels = test
    # A small training set may have fewer images.
    k = min(NEIGHBORS, len(labels))
    linear = linear_probe(features, labels, seed=seed)
    vectors = (features, labels, test_features)
    predictions = {
        "1-NN": knn_predict(*vectors, k=1, device=evaluation.device),
        f"{k}-NN, weighted": knn_predict(*vectors, k=k, device=evaluation.device),
        "linear, L-BFGS": linear.classifier.predict(test_features),
    }
    accuracies = {
        name: {"accuracy": accuracy(predicted, test_labels)}
        for name, predicted in predictions.items()
    }
    rows: list[dict[str, object]] = [{"probe": name, **row} for name, row in accuracies.items()]
    # The penalty was chosen on a part of the training images.
    rows[-1]["note"] = f"l2={linear.l2:g}"
    return evaluation.conclude(
        "Probes", str(facts["data"]), facts, {"accuracy": accuracies}, [Table("Probes", rows)]
    )
