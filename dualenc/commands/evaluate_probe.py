"""Probes: the frozen image features of a model, by nearest neighbours and a linear classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualenc import distributed
from dualenc.commands.labelled_images import (
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
    require_other_images,
)
from dualenc.commands.output import Evaluation
from dualenc.data.labels import align_labels
from dualenc.data.readers.detect import default_split
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.evaluation.report_page import Table

if TYPE_CHECKING:
    from dualenc.commands.evaluate import ImageOptions
    from dualenc.commands.options import OutputOptions

NEIGHBOURS = 20


def evaluate_probe(
    model: str, data: str, images: ImageOptions, batch_size: int, output: OutputOptions
) -> None:
    """Fit the probes on training images, and test them."""
    split = images.split or default_split(data)
    source = images.train or data
    require_other_images(source, images.train_split, data, split)
    evaluation = Evaluation("probe", model, data, output)
    column, seed = images.label_column, images.seed
    train = open_images(source, images.train_split, column, limit=images.train_limit, seed=seed)
    test = open_images(data, split, column, limit=images.limit, seed=seed)
    train_labels = require_labels(train, f"{source} ({images.train_split})", for_training=True)
    test_labels = require_labels(test, f"{data} ({split})")
    # The class numbers are those of the training images.
    test_labels = align_labels(
        test_labels, test.class_names, train.class_names, f"{data} ({split})"
    )
    tower = open_image_tower(evaluation)
    settings: dict[str, Any] = {"batch_size": batch_size, "num_workers": images.num_workers}
    train_features, train_labels = labelled_features(
        evaluation, "train", tower, train, train_labels, **settings
    )
    test_features, test_labels = labelled_features(
        evaluation, "test", tower, test, test_labels, **settings
    )
    if distributed.is_main():
        vectors = (train_features, train_labels, test_features)
        k = min(NEIGHBOURS, len(train_labels))
        linear = linear_probe(train_features, train_labels, seed=images.seed)
        predictions = {
            "1-NN": knn_predict(*vectors, k=1, device=evaluation.device),
            f"{k}-NN, weighted": knn_predict(*vectors, k=k, device=evaluation.device),
            "linear, L-BFGS": linear.classifier.predict(test_features),
        }
        rows: list[dict[str, object]] = []
        for name, predicted in predictions.items():
            rows.append({"probe": name, "accuracy": accuracy(predicted, test_labels)})
        rows[-1]["note"] = f"l2={linear.l2:g}"
        accuracies = {str(row["probe"]): {"accuracy": row["accuracy"]} for row in rows}
        facts: dict[str, object] = {"model": model, "data": data, "split": split, "train": source}
        facts |= {"train_split": images.train_split}
        facts |= {"train_images": len(train_labels), "test_images": len(test_labels)}
        evaluation.conclude(
            "Probes", data, facts, {"accuracy": accuracies}, [Table("Probes", rows)]
        )
    distributed.barrier()
