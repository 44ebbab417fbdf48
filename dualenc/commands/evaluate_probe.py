"""Probes: the frozen image features of a model, by nearest neighbours and linear classifiers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

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
from dualenc.data.views import crop_box
from dualenc.encoders import Tower
from dualenc.evaluation.corrupted import CLEAN, AugmentedPrepare, ImageVersions, encode_versions, encoder_of
from dualenc.evaluation.corruptions import CleanImages
from dualenc.evaluation.geometry import effective_rank, label_similarities, uniformity
from dualenc.evaluation.probe import (
    L2_SWEEP,
    Batches,
    accuracy,
    draw_per_class,
    feature_batches,
    few_shot,
    knn_predict,
    linear_probe,
    predict,
    sgd_probe,
)
from dualenc.evaluation.report import Table
from dualenc.seeds import derive_seed

if TYPE_CHECKING:
    from dualenc.commands.evaluate import ImageOptions, ProbeOptions
    from dualenc.commands.options import OutputOptions

NEIGHBOURS = 20
TEMPERATURE = 0.07
SHOTS = (1, 5, 10)
DRAWS = 5
SGD_BATCH = 256

Row = dict[str, object]


def evaluate_probe(model: str, data: str, images: ImageOptions, options: ProbeOptions, output: OutputOptions) -> None:
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
        if options.sgd != "no":
            rows.append(_train_by_sgd(tower, fitted, tested, options, images))
        facts: Row = {"model": model, "data": data, "split": split, "train": source, "train_split": images.train_split}
        facts |= {"train_images": len(fitted.labels), "test_images": len(tested.labels)}
        _write_results(evaluation, facts, rows, tested)
    distributed.barrier()


def _fit_features(train: Labelled, test: Labelled, options: ProbeOptions, seed: int, device: torch.device) -> list[Row]:
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
    for count, (mean, deviation) in few_shot(*data, test.labels, shots=shots, draws=DRAWS, seed=seed).items():
        rows.append({"probe": f"{count}-shot, linear", "accuracy": mean, "sd": deviation, "note": f"{DRAWS} draws"})
    return rows


def _train_by_sgd(tower: Tower, train: Labelled, test: Labelled, options: ProbeOptions, images: ImageOptions) -> Row:
    """A linear layer trained by SGD, as papers on self-supervised learning report it."""
    encode = encoder_of(tower, "features")
    prepare = AugmentedPrepare(tower.prepare, crop_and_flip)

    def augmented(epoch: int) -> Batches:
        """Features of the training images, augmented anew in each epoch."""
        order = np.random.default_rng((images.seed, epoch)).permutation(len(train.labels)).tolist()
        seed = derive_seed(images.seed, epoch, bits=32)
        versions = ImageVersions(CleanImages(train.items), [CLEAN], prepare, views=1, seed=seed)
        settings: dict[str, Any] = {"num_workers": images.num_workers, "batch_size": SGD_BATCH}
        for block in encode_versions(versions, encode, indices=order, **settings):
            yield torch.from_numpy(block.features[:, 0, 0]), torch.from_numpy(train.labels[block.indices])

    batches: Callable[[int], Batches] = augmented
    what = "crops and flips"
    if options.sgd == "features":
        batches = feature_batches(train.features, train.labels, batch_size=SGD_BATCH, seed=images.seed)
        what = "fixed features"
    classifier = sgd_probe(
        batches,
        train.features.shape[1],
        int(train.labels.max()) + 1,
        steps_per_epoch=-(-len(train.labels) // SGD_BATCH),
        epochs=options.sgd_epochs,
        device=next(tower.parameters()).device,
    )
    score = accuracy(predict(classifier, test.features), test.labels)
    return {"probe": "linear, SGD", "accuracy": score, "note": f"{options.sgd_epochs} epochs, {what}"}


def crop_and_flip(image: Image.Image, seed: int) -> Image.Image:
    """A random crop, brought back to the image's size, and a random flip: the augmentation of the SGD probe."""
    draw = random.Random(seed).random
    top, left, height, width = crop_box(image.height, image.width, 0.08, draw)
    box = (left, top, left + width, top + height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < 0.5 else view


def _write_results(evaluation: Evaluation, facts: Row, rows: list[Row], tested: Labelled) -> None:
    """Write the accuracy of the probes, and measures of the features themselves."""
    accuracies = {str(row["probe"]): {key: value for key, value in row.items() if key != "probe"} for row in rows}
    shape: Row = {"effective_rank": effective_rank(tested.features), "uniformity": uniformity(tested.features)}
    if len(np.unique(tested.labels)) > 1:
        similar = label_similarities(tested.features, tested.labels)
        shape |= {"same_label_cosine": similar.positive_mean, "different_label_cosine": similar.negative_mean}
        shape |= {"overlap": similar.overlap}
    evaluation.conclude(
        f"Probes: {short_name(evaluation.model)} on {facts['data']}",
        facts,
        {"accuracy": accuracies, "features": shape},
        [Table("Probes", rows), Table("Features of the test images", [shape])],
    )
