"""`dualenc evaluate probe`: the frozen image features of a model, by nearest neighbours and linear classifiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from PIL import Image

from dualenc import distributed
from dualenc.commands.evaluation import (
    HIGHEST_SEED,
    MOST_ITEMS,
    MOST_WORKERS,
    AugmentedPrepare,
    Labelled,
    align_labels,
    begin,
    check_range,
    conclude,
    display_name,
    encoder_of,
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import effective_rank, label_similarities, uniformity
from dualenc.evaluation.corrupted import CLEAN, CleanImages, ImageVersions, encode_versions
from dualenc.evaluation.corruptions import stable_seed
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
from dualenc.evaluation.report import Figure, Table

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Tower

Row = dict[str, object]
Source = tuple[str, str, int | None]
"""Data, split and the number of images to take."""

NEIGHBOURS, TEMPERATURE = 20, 0.07
SHOTS, DRAWS = (1, 5, 10), 5
SGD_BATCH = 256


def probe(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "test",
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
        out: folder to write; by default evaluations/probe/MODEL-DATA.
        split: which split is tested.
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
    check_range(1, MOST_ITEMS, batch_size=batch_size, sgd_epochs=sgd_epochs)
    check_range(1, math.inf, limit=limit, train_limit=train_limit)
    check_range(0, MOST_WORKERS, num_workers=num_workers)
    check_range(0, HIGHEST_SEED, seed=seed)
    for value in l2 or ():
        check_range(1e-30, 1e30, l2=value)
    target, device_to_use = begin("probe", model, data, out, device)
    sources = {"train": (train or data, train_split, train_limit), "test": (data, split, limit)}
    opened = _open(sources, label_column)
    for count in shots or ():
        draw_per_class(opened["train"][1], count, np.random.default_rng(seed))
    tower = open_image_tower(model, device_to_use)
    fitted, tested = (
        labelled_features(tower, *opened[part], target / "features" / part, batch_size, num_workers)
        for part in ("train", "test")
    )
    if distributed.is_main():
        rows = _fit_all(fitted, tested, l2, shots, seed)
        if sgd != "no":
            rows.append(_sgd(tower, fitted, tested, sgd == "images", sgd_epochs, seed, num_workers))
        facts: Row = {"model": model, "data": data, "split": split, "train": train or data, "train_split": train_split}
        facts |= {"train_images": len(fitted.labels), "test_images": len(tested.labels)}
        shape, figures = _shape(tested)
        named = {str(row["probe"]): {key: value for key, value in row.items() if key != "probe"} for row in rows}
        heights = {"accuracy": {str(row["probe"]): float(str(row["accuracy"])) for row in rows}}
        conclude(
            target,
            f"Probes: {display_name(model)} on {data}",
            {"task": "probe", **facts, "accuracy": named, "features": shape},
            facts,
            [Table("Probes", rows), Table("Features of the test images", [shape])],
            figures=[Figure("Accuracy by probe", plots.bars(heights, ylabel="accuracy")), *figures],
        )
    distributed.barrier()


def _open(sources: dict[str, Source], label_column: str | None) -> dict[str, tuple[Corpus, np.ndarray]]:
    """Images and labels of both parts, in the class numbers of the training images."""
    images = {
        part: open_images(data, split, label_column=label_column, limit=limit)
        for part, (data, split, limit) in sources.items()
    }
    names = {part: f"{data} ({split})" for part, (data, split, _) in sources.items()}
    labels = {part: require_labels(images[part], names[part]) for part in images}
    if len(np.unique(labels["train"])) < 2:
        raise DualencError(f"{names['train']}: all images are of one class; a probe needs two or more")
    labels["test"] = align_labels(
        labels["test"], images["test"].class_names, images["train"].class_names, names["test"]
    )  # fmt: skip
    return {part: (images[part], labels[part]) for part in images}


def _fit_all(train: Labelled, test: Labelled, l2: list[float] | None, shots: list[int] | None, seed: int) -> list[Row]:
    """Accuracy of the probes that need features alone."""
    data = (train.features, train.labels, test.features)
    k = min(NEIGHBOURS, len(train.labels))
    votes = {"1-NN": knn_predict(*data, k=1), f"{k}-NN, weighted": knn_predict(*data, k=k, temperature=TEMPERATURE)}
    rows: list[Row] = [
        {"probe": name, "accuracy": accuracy(found, test.labels), "sd": None} for name, found in votes.items()
    ]
    linear = linear_probe(*data, test.labels, l2=l2 or L2_SWEEP, seed=seed)
    rows.append({"probe": "linear, L-BFGS", "accuracy": linear.accuracy, "note": f"l2={linear.l2:g}"})
    if shots is None:
        smallest = int(np.unique(train.labels, return_counts=True)[1].min())
        shots = [count for count in SHOTS if count <= smallest]
    for count, (mean, deviation) in few_shot(*data, test.labels, shots=shots, draws=DRAWS, seed=seed).items():
        rows.append({"probe": f"{count}-shot, linear", "accuracy": mean, "sd": deviation, "note": f"{DRAWS} draws"})
    return rows


def _sgd(
    tower: Tower, train: Labelled, test: Labelled, on_images: bool, epochs: int, seed: int, num_workers: int
) -> Row:
    """A linear layer trained by SGD, as papers on self-supervised learning report it."""
    if on_images:
        batches = _augmented_batches(tower, train, seed, num_workers)
    else:
        batches = feature_batches(train.features, train.labels, batch_size=SGD_BATCH, seed=seed)
    classifier = sgd_probe(
        batches,
        train.features.shape[1],
        int(train.labels.max()) + 1,
        steps_per_epoch=-(-len(train.labels) // SGD_BATCH),
        epochs=epochs,
        device=next(tower.parameters()).device,
    )
    found = accuracy(predict(classifier, test.features), test.labels)
    what = "crops and flips" if on_images else "fixed features"
    return {"probe": "linear, SGD", "accuracy": found, "note": f"{epochs} epochs, {what}"}


def _augmented_batches(tower: Tower, train: Labelled, seed: int, num_workers: int) -> Callable[[int], Batches]:
    """Features of freshly augmented training images for each epoch."""
    encode = encoder_of(tower, "features")
    prepare = AugmentedPrepare(tower.prepare, crop_and_flip)

    def batches(epoch: int) -> Batches:
        order = np.random.default_rng((seed, epoch)).permutation(len(train.labels))
        images = CleanImages(train.items)
        versions = ImageVersions(images, [CLEAN], prepare, views=1, seed=stable_seed(seed, epoch))
        stream = encode_versions(
            versions, encode, indices=order.tolist(), num_workers=num_workers, images_at_once=SGD_BATCH
        )
        for block in stream:
            yield torch.from_numpy(block.features[:, 0, 0]), torch.from_numpy(train.labels[block.indices])

    return batches


def crop_and_flip(image: Image.Image, seed: int) -> Image.Image:
    """A random crop, brought back to the image's size, and a random flip: the augmentation of the SGD probe."""
    import random

    from dualenc.data.views import crop_box

    draw = random.Random(seed).random
    top, left, height, width = crop_box(image.height, image.width, 0.08, draw)
    box = (left, top, left + width, top + height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < 0.5 else view


def _shape(test: Labelled) -> tuple[Row, list[Figure]]:
    """How the features of the test images lie, and the cosines within and between classes."""
    shape: Row = {"effective_rank": effective_rank(test.features), "uniformity": uniformity(test.features)}
    if len(np.unique(test.labels)) < 2:
        return shape, []
    similar = label_similarities(test.features, test.labels)
    shape |= {
        "same_label_cosine": similar.positive_mean,
        "different_label_cosine": similar.negative_mean,
        "overlap": similar.overlap,
    }
    plot = plots.similarities(similar, "same label", "different label")
    return shape, [Figure(f"Cosine of pairs of test images; overlap {similar.overlap:.3f}", plot)]
