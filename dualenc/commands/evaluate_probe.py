"""Probes: the frozen image features of a model, by nearest neighbours and linear classifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dualenc import distributed
from dualenc.commands.labelled_images import (
    Labelled,
    align_labels,
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
)
from dualenc.commands.output import Evaluation, short_name
from dualenc.data.detect import default_split
from dualenc.evaluation.geometry import effective_rank, label_similarities, uniformity
from dualenc.evaluation.probe import (
    L2_SWEEP,
    accuracy,
    draw_per_class,
    few_shot,
    knn_predict,
    linear_probe,
)
from dualenc.evaluation.report import Table

if TYPE_CHECKING:
    from dualenc.commands.evaluate import ImageOptions, ProbeOptions
    from dualenc.commands.options import OutputOptions

NEIGHBOURS = 20
TEMPERATURE = 0.07
SHOTS = (1, 5, 10)
DRAWS = 5

Row = dict[str, object]


def evaluate_probe(
    model: str, data: str, images: ImageOptions, options: ProbeOptions, output: OutputOptions
) -> None:
    """Fit the probes on training images, and test them."""
    split = images.split or default_split(data, "test")
    source = images.train or data
    evaluation = Evaluation("probe", model, data, output)
    train = open_images(source, images.train_split, images, limit=images.train_limit)
    test = open_images(data, split, images, limit=images.limit)
    train_labels = require_labels(train, f"{source} ({images.train_split})", for_training=True)
    test_labels = require_labels(test, f"{data} ({split})")
    # The class numbers are those of the training images.
    test_labels = align_labels(test_labels, test.class_names, train.class_names, f"{data} ({split})")
    for count in options.shots or ():
        draw_per_class(train_labels, count, np.random.default_rng(images.seed))
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    folder = evaluation.folder / "features"
    settings = (options.batch_size, images.num_workers)
    fitted = labelled_features(tower, train, train_labels, folder / "train", *settings)
    tested = labelled_features(tower, test, test_labels, folder / "test", *settings)
    if distributed.is_main():
        rows = _fit_features(fitted, tested, options, images.seed, evaluation.device)
        facts: Row = {
            "model": model,
            "data": data,
            "split": split,
            "train": source,
            "train_split": images.train_split,
        }
        facts |= {"train_images": len(fitted.labels), "test_images": len(tested.labels)}
        _write_results(evaluation, facts, rows, tested)
    distributed.barrier()


def _fit_features(
    train: Labelled, test: Labelled, options: ProbeOptions, seed: int, device: torch.device
) -> list[Row]:
    """Accuracy of the probes that need only features."""
    data = (train.features, train.labels, test.features)
    k = min(NEIGHBOURS, len(train.labels))
    nearest = knn_predict(*data, k=1, device=device)
    weighted = knn_predict(*data, k=k, temperature=TEMPERATURE, device=device)
    rows: list[Row] = [
        {"probe": "1-NN", "accuracy": accuracy(nearest, test.labels), "sd": None},
        {"probe": f"{k}-NN, weighted", "accuracy": accuracy(weighted, test.labels), "sd": None},
    ]
    linear = linear_probe(*data, test.labels, l2=options.l2 or L2_SWEEP, seed=seed)
    rows.append({"probe": "linear, L-BFGS", "accuracy": linear.accuracy, "note": f"l2={linear.l2:g}"})
    shots = options.shots
    if shots is None:
        smallest = int(np.unique(train.labels, return_counts=True)[1].min())
        shots = [count for count in SHOTS if count <= smallest]
    for count, (mean, deviation) in few_shot(
        *data, test.labels, shots=shots, draws=DRAWS, seed=seed
    ).items():
        rows.append(
            {"probe": f"{count}-shot, linear", "accuracy": mean, "sd": deviation, "note": f"{DRAWS} draws"}
        )
    return rows


def _write_results(evaluation: Evaluation, facts: Row, rows: list[Row], tested: Labelled) -> None:
    """Write the accuracy of the probes, and measures of the features themselves."""
    accuracies = {}
    for row in rows:
        accuracies[str(row["probe"])] = {key: value for key, value in row.items() if key != "probe"}
    shape: Row = {
        "effective_rank": effective_rank(tested.features),
        "uniformity": uniformity(tested.features),
    }
    if len(np.unique(tested.labels)) > 1:
        similar = label_similarities(tested.features, tested.labels)
        shape |= {
            "same_label_cosine": similar.positive_mean,
            "different_label_cosine": similar.negative_mean,
        }
        shape |= {"overlap": similar.overlap}
    evaluation.conclude(
        f"Probes: {short_name(evaluation.model)} on {facts['data']}",
        facts,
        {"accuracy": accuracies, "features": shape},
        [Table("Probes", rows), Table("Features of the test images", [shape])],
    )
