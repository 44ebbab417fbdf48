"""`dualenc evaluate probe`: the frozen image features of a model, by nearest neighbours and linear classifiers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

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
    check_weights,
    conclude,
    display_name,
    encoder_of,
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
)
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import effective_rank, label_similarities, uniformity
from dualenc.evaluation.corrupted import CLEAN, ImageVersions, encode_versions
from dualenc.evaluation.corruptions import CleanImages
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
from dualenc.seeds import derive_seed

if TYPE_CHECKING:
    from dualenc.encoders import Tower

Row = dict[str, object]

NEIGHBOURS, TEMPERATURE = 20, 0.07
SHOTS, DRAWS = (1, 5, 10), 5
SGD_BATCH = 256


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
        out: folder to write; by default evaluations/probe/MODEL-DATA.
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
    check_range(1, MOST_ITEMS, batch_size=batch_size, sgd_epochs=sgd_epochs)
    check_range(1, math.inf, limit=limit, train_limit=train_limit)
    check_range(0, MOST_WORKERS, num_workers=num_workers)
    check_range(0, HIGHEST_SEED, seed=seed)
    for value in l2 or ():
        check_range(1e-30, 1e30, l2=value)
    from dualenc.data.sources import usual_split

    split = split or usual_split(data, "test")
    target, device_to_use = begin("probe", model, data, out, device)
    sources = {"train": (train or data, train_split, train_limit), "test": (data, split, limit)}
    images, labels = {}, {}
    for part, (place, of, most) in sources.items():
        images[part] = open_images(place, of, label_column=label_column, limit=most)
        labels[part] = require_labels(images[part], f"{place} ({of})", for_training=part == "train")
    # The class numbers are those of the training images.
    names = images["test"].class_names, images["train"].class_names
    labels["test"] = align_labels(labels["test"], *names, f"{data} ({split})")
    for count in shots or ():
        draw_per_class(labels["train"], count, np.random.default_rng(seed))
    tower = open_image_tower(model, device_to_use)
    weights = check_weights(target, model, tower)
    fitted, tested = (
        labelled_features(tower, images[part], labels[part], target / "features" / part, batch_size, num_workers)
        for part in ("train", "test")
    )
    if distributed.is_main():
        rows = _fit_features(fitted, tested, l2, shots, seed, device_to_use)
        if sgd != "no":
            rows.append(_sgd(tower, fitted, tested, sgd == "images", sgd_epochs, seed, num_workers))
        named = {str(row["probe"]): {key: value for key, value in row.items() if key != "probe"} for row in rows}
        heights = {"accuracy": {str(row["probe"]): float(str(row["accuracy"])) for row in rows}}
        figures = [Figure("Accuracy by probe", plots.bars(heights, ylabel="accuracy"))]
        shape: Row = {"effective_rank": effective_rank(tested.features), "uniformity": uniformity(tested.features)}
        if len(np.unique(tested.labels)) > 1:
            similar = label_similarities(tested.features, tested.labels)
            shape |= {"same_label_cosine": similar.positive_mean, "different_label_cosine": similar.negative_mean}
            shape |= {"overlap": similar.overlap}
            plot = plots.similarities(similar, "same label", "different label")
            figures.append(Figure(f"Cosine of pairs of test images; overlap {similar.overlap:.3f}", plot))
        facts: Row = {"model": model, "data": data, "split": split, "train": train or data, "train_split": train_split}
        facts |= {"train_images": len(fitted.labels), "test_images": len(tested.labels)}
        conclude(
            target,
            "probe",
            f"Probes: {display_name(model)} on {data}",
            facts,
            {"accuracy": named, "features": shape},
            [Table("Probes", rows), Table("Features of the test images", [shape])],
            weights=weights,
            figures=figures,
        )
    distributed.barrier()


def _fit_features(
    train: Labelled, test: Labelled, l2: list[float] | None, shots: list[int] | None, seed: int, device: torch.device
) -> list[Row]:
    """Accuracy of the probes that features alone settle."""
    data = (train.features, train.labels, test.features)
    k = min(NEIGHBOURS, len(train.labels))
    weighted = knn_predict(*data, k=k, temperature=TEMPERATURE, device=device)
    votes = {"1-NN": knn_predict(*data, k=1, device=device), f"{k}-NN, weighted": weighted}
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
    encode = encoder_of(tower, "features")
    prepare = AugmentedPrepare(tower.prepare, crop_and_flip)

    def augmented(epoch: int) -> Batches:
        """Features of the training images, augmented anew in each epoch."""
        order = np.random.default_rng((seed, epoch)).permutation(len(train.labels)).tolist()
        versions = ImageVersions(
            CleanImages(train.items), [CLEAN], prepare, views=1, seed=derive_seed(seed, epoch, bits=32)
        )
        how: dict[str, Any] = {"indices": order, "num_workers": num_workers, "batch_size": SGD_BATCH}
        for block in encode_versions(versions, encode, **how):
            yield torch.from_numpy(block.features[:, 0, 0]), torch.from_numpy(train.labels[block.indices])

    classifier = sgd_probe(
        augmented if on_images else feature_batches(train.features, train.labels, batch_size=SGD_BATCH, seed=seed),
        train.features.shape[1],
        int(train.labels.max()) + 1,
        steps_per_epoch=-(-len(train.labels) // SGD_BATCH),
        epochs=epochs,
        device=next(tower.parameters()).device,
    )
    found = accuracy(predict(classifier, test.features), test.labels)
    what = "crops and flips" if on_images else "fixed features"
    return {"probe": "linear, SGD", "accuracy": found, "note": f"{epochs} epochs, {what}"}


def crop_and_flip(image: Image.Image, seed: int) -> Image.Image:
    """A random crop, brought back to the image's size, and a random flip: the augmentation of the SGD probe."""
    import random

    from dualenc.data.views import crop_box

    draw = random.Random(seed).random
    top, left, height, width = crop_box(image.height, image.width, 0.08, draw)
    box = (left, top, left + width, top + height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < 0.5 else view
