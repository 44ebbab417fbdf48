"""Probes: the frozen image features of a model, by nearest neighbours and linear classifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
from dualenc.data.detect import default_split
from dualenc.evaluation import plots
from dualenc.evaluation.geometry import effective_rank, label_similarities, uniformity
from dualenc.evaluation.image_probes import Row, fit_features, train_by_sgd
from dualenc.evaluation.images import (
    Labelled,
    align_labels,
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
)
from dualenc.evaluation.output import Evaluation, display_name
from dualenc.evaluation.probe import draw_per_class
from dualenc.evaluation.report import Figure, Table

if TYPE_CHECKING:
    from dualenc.evaluation.options import ImageOptions, OutputOptions, ProbeOptions


def evaluate(model: str, data: str, given: ImageOptions, options: ProbeOptions, output: OutputOptions) -> None:
    """Fit the probes on training images, and test them."""
    split = given.split or default_split(data, "test")
    source = given.train or data
    evaluation = Evaluation("probe", model, data, output)
    columns: dict[str, Any] = {"label_column": given.label_column, "quotes": given.quotes}
    images = {
        "train": open_images(source, given.train_split, limit=given.train_limit, **columns),
        "test": open_images(data, split, limit=given.limit, **columns),
    }
    labels = {
        "train": require_labels(images["train"], f"{source} ({given.train_split})", for_training=True),
        "test": require_labels(images["test"], f"{data} ({split})"),
    }
    # The class numbers are those of the training images.
    class_names = images["test"].class_names, images["train"].class_names
    labels["test"] = align_labels(labels["test"], *class_names, f"{data} ({split})")
    for count in options.shots or ():
        draw_per_class(labels["train"], count, np.random.default_rng(given.seed))
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    folder = evaluation.folder / "features"
    fitted, tested = (
        labelled_features(tower, images[part], labels[part], folder / part, options.batch_size, given.num_workers)
        for part in ("train", "test")
    )
    if distributed.is_main():
        rows = fit_features(fitted, tested, options.l2, options.shots, given.seed, evaluation.device)
        if options.sgd != "no":
            rows.append(train_by_sgd(tower, fitted, tested, options, given.seed, given.num_workers))
        facts: Row = {"model": model, "data": data, "split": split, "train": source, "train_split": given.train_split}
        facts |= {"train_images": len(fitted.labels), "test_images": len(tested.labels)}
        _report(evaluation, facts, rows, tested)
    distributed.barrier()


def _report(evaluation: Evaluation, facts: Row, rows: list[Row], tested: Labelled) -> None:
    """The accuracy of the probes, and measures of the features themselves."""
    accuracies = {str(row["probe"]): {key: value for key, value in row.items() if key != "probe"} for row in rows}
    heights = {"accuracy": {str(row["probe"]): float(str(row["accuracy"])) for row in rows}}
    figures = [Figure("Accuracy by probe", plots.bars(heights, ylabel="accuracy"))]
    shape: Row = {"effective_rank": effective_rank(tested.features), "uniformity": uniformity(tested.features)}
    if len(np.unique(tested.labels)) > 1:
        similar = label_similarities(tested.features, tested.labels)
        shape |= {"same_label_cosine": similar.positive_mean, "different_label_cosine": similar.negative_mean}
        shape |= {"overlap": similar.overlap}
    evaluation.conclude(
        f"Probes: {display_name(evaluation.model)} on {facts['data']}",
        facts,
        {"accuracy": accuracies, "features": shape},
        [Table("Probes", rows), Table("Features of the test images", [shape])],
        figures=figures,
    )
