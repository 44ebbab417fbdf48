"""Probes on frozen image features: nearest neighbours, linear, few-shot, and a linear layer trained by SGD."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from dualenc.data.views import crop_box
from dualenc.encoders import Tower
from dualenc.evaluation.corrupted import CLEAN, ImageVersions, encode_versions
from dualenc.evaluation.corruptions import CleanImages
from dualenc.evaluation.images import AugmentedPrepare, Labelled, encoder_of
from dualenc.evaluation.probe import (
    L2_SWEEP,
    Batches,
    accuracy,
    feature_batches,
    few_shot,
    knn_predict,
    linear_probe,
    predict,
    sgd_probe,
)
from dualenc.seeds import derive_seed

if TYPE_CHECKING:
    from dualenc.evaluation.options import ProbeOptions

NEIGHBOURS = 20
TEMPERATURE = 0.07
SHOTS = (1, 5, 10)
DRAWS = 5
SGD_BATCH = 256

Row = dict[str, object]


def fit_features(
    train: Labelled, test: Labelled, l2: list[float] | None, shots: list[int] | None, seed: int, device: torch.device
) -> list[Row]:
    """Accuracy of the probes that need only features."""
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


def train_by_sgd(
    tower: Tower, train: Labelled, test: Labelled, options: ProbeOptions, seed: int, num_workers: int
) -> Row:
    """A linear layer trained by SGD, as papers on self-supervised learning report it."""
    on_images = options.sgd == "images"
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
        epochs=options.sgd_epochs,
        device=next(tower.parameters()).device,
    )
    found = accuracy(predict(classifier, test.features), test.labels)
    what = "crops and flips" if on_images else "fixed features"
    return {"probe": "linear, SGD", "accuracy": found, "note": f"{options.sgd_epochs} epochs, {what}"}


def crop_and_flip(image: Image.Image, seed: int) -> Image.Image:
    """A random crop, brought back to the image's size, and a random flip: the augmentation of the SGD probe."""
    draw = random.Random(seed).random
    top, left, height, width = crop_box(image.height, image.width, 0.08, draw)
    box = (left, top, left + width, top + height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < 0.5 else view
