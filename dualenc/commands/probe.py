"""`dualenc evaluate probe`: the frozen image features of a model, by nearest neighbours and linear classifiers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np

from dualenc import distributed
from dualenc.commands.checks import MAX_ITEMS, MAX_SEED, MAX_WORKERS, check_range
from dualenc.commands.evaluation import Evaluation, display_name
from dualenc.data.sources import usual_split
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import effective_rank, label_similarities, uniformity
from dualenc.evaluation.image_probes import Row, fit_features, train_by_sgd
from dualenc.evaluation.images import (
    Labelled,
    align_labels,
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
)
from dualenc.evaluation.probe import (
    draw_per_class,
)
from dualenc.evaluation.report import Figure, Table

if TYPE_CHECKING:
    pass


def probe(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str | None = None,
    train: str | None = None,
    train_split: str = "train",
    label_column: str | None = None,
    limit: int | None = None,
    train_limit: int | None = None,
    l2: list[float] | None = None,
    shots: list[int] | None = None,
    sgd: Literal["no", "features", "images"] = "no",
    sgd_epochs: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    num_workers: int = 2,
    device: str | None = None,
) -> None:
    """Probe the frozen image features of a model: linear, nearest neighbours, few-shot.

    Writes metrics.json and report.html. Features are kept below OUT: an interrupted evaluation resumes with them.

    Args:
        model: model folder or name, of kind image or image-text.
        data: images with labels: parquet or other table, hub name, or a folder of class folders.
        out: folder to write; by default evaluations/probe/MODEL-DATA-HASH.
        split: which split is tested, by default test; of a file a slice such as train[90%:], by default all.
        train: images to train probes on, if they are not a split of the same data.
        train_split: which split is trained on.
        label_column: of a table; by default `label`.
        limit: test so many images, chosen at random.
        train_limit: train on so many images, chosen at random.
        l2: penalties to try in the linear probe, chosen on a tenth of the training images; by default 1e-6 to 0.1.
        shots: images of each class in the few-shot probes; by default 1, 5, 10, as far as there are so many.
        sgd: also train a linear probe by SGD (lr 0.3, momentum 0.9, cosine to zero): on features computed once, or
            on images cropped and flipped anew in every epoch, as papers do.
        sgd_epochs: epochs of it.
        seed: of validation split, draws and SGD.
        batch_size: images encoded at once.
        num_workers: processes that decode images.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(1, MAX_ITEMS, batch_size=batch_size, sgd_epochs=sgd_epochs)
    check_range(1, math.inf, limit=limit, train_limit=train_limit)
    check_range(0, MAX_WORKERS, num_workers=num_workers)
    check_range(0, MAX_SEED, seed=seed)
    for value in l2 or ():
        check_range(1e-30, 1e30, l2=value)
    split = split or usual_split(data, "test")
    evaluation = Evaluation("probe", model, data, out, device)
    sources = {"train": (train or data, train_split, train_limit), "test": (data, split, limit)}
    images = {}
    labels = {}
    for part, (place, split_of_part, limit_of_part) in sources.items():
        images[part] = open_images(place, split_of_part, label_column=label_column, limit=limit_of_part)
        labels[part] = require_labels(images[part], f"{place} ({split_of_part})", for_training=part == "train")
    # The class numbers are those of the training images.
    class_names = images["test"].class_names, images["train"].class_names
    labels["test"] = align_labels(labels["test"], *class_names, f"{data} ({split})")
    for count in shots or ():
        draw_per_class(labels["train"], count, np.random.default_rng(seed))
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    features = evaluation.folder / "features"
    fitted, tested = (
        labelled_features(tower, images[part], labels[part], features / part, batch_size, num_workers)
        for part in ("train", "test")
    )
    if distributed.is_main():
        rows = fit_features(fitted, tested, l2, shots, seed, evaluation.device)
        if sgd != "no":
            rows.append(train_by_sgd(tower, fitted, tested, sgd == "images", sgd_epochs, seed, num_workers))
        facts: Row = {"model": model, "data": data, "split": split, "train": train or data, "train_split": train_split}
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
        plot = plots.similarities(similar, "same label", "different label")
        figures.append(Figure(f"Cosine of pairs of test images; overlap {similar.overlap:.3f}", plot))
    evaluation.conclude(
        f"Probes: {display_name(evaluation.model)} on {facts['data']}",
        facts,
        {"accuracy": accuracies, "features": shape},
        [Table("Probes", rows), Table("Features of the test images", [shape])],
        figures=figures,
    )
