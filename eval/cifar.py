"""Self-supervised training on all of CIFAR-10: objectives at a small batch, on one GPU, by their
nearest neighbours.

    python eval/cifar.py run FOLDER --objectives "[InfoNCE,SogCLR,EMC2,ISIR,GlobalCache]"
    --batch_size 64 --epochs 12 python eval/cifar.py report

FOLDER has train.parquet and test.parquet of images of 32×32 pixels with labels. All train the same
ResNet-18 with the stem for small images from the same start. Images stay on the device and are
augmented there, a batch at a time: on 16 cores, workers that decode and augment would be slower
than the network. Crops are bilinear and without antialiasing, and colours change in one order,
which differs from `dualenc.data.views.SimCLR`.

One line per run is added to --results, with the accuracy of 20 neighbours after every epoch; a run
that is there already is not made again. --processes runs at once share the GPU, so that seconds are
no measure of an objective.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison_table import Runs, in_processes
from small_batch import OBJECTIVES
from torch import Tensor
from torch.nn import functional as F

from dualenc.data import PairDataset, TableViews
from dualenc.encoders import DualEncoder, ImageEncoder
from dualenc.encoders.dual import Prepare, Tower
from dualenc.encoders.image import ProjectedTower
from dualenc.evaluation.probe import accuracy, knn_predict
from dualenc.evaluation.report_page import Table, print_table
from dualenc.training import Evaluator, Trainer
from dualenc.types import Inputs

RESULTS = Path("eval/results/cifar.jsonl")
SIZE = 32
RATE = 1e-3
"""At a batch of 32; it grows with the square root of the batch."""


class Numbers(Prepare):
    """Numbers of images, (B, 1) as vectors, and whether they are to be augmented."""

    modality = "vector"

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        numbers = torch.as_tensor(np.array(items)).reshape(-1).long()
        return {"number": numbers, "augment": torch.full((len(numbers),), seeds is not None)}


class OnDevice(Tower):
    """A tower of images that takes their numbers; `images` are (N, 3, 32, 32) uint8."""

    modality = "vector"

    def __init__(self, inner: ProjectedTower, images: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.images = images
        self.prepare = Numbers()
        self.dim = inner.dim
        self.feature_dim = inner.feature_dim

    def pixels(self, inputs: Inputs) -> Tensor:
        """(B, 3, 32, 32) of the images with these numbers."""
        # Not a buffer: optimizers, averages and folders are of weights.
        self.images = self.images.to(inputs["number"].device)
        pixels = self.images[inputs["number"]].float() / 255
        if bool(inputs["augment"][0]):
            with torch.autocast(pixels.device.type, enabled=False):
                pixels = simclr_views(pixels)
        return ((pixels - 0.5) / 0.25).contiguous(memory_format=torch.channels_last)

    def forward(self, inputs: Inputs) -> Tensor:
        return self.inner({"image": self.pixels(inputs)})

    def features(self, inputs: Inputs) -> Tensor:
        return self.inner.features({"image": self.pixels(inputs)})


class OnDeviceEncoder(DualEncoder):
    """An `ImageEncoder` whose images are on the device, by number; its folder is the encoder's."""

    def __init__(self, images: Tensor) -> None:
        self.__dict__["whole"] = ImageEncoder("resnet18", image_size=SIZE)
        tower = OnDevice(self.__dict__["whole"].left, images)
        super().__init__(tower, tower, kind="image", views=True)

    def write(self, folder: Path) -> None:
        self.__dict__["whole"].write(folder)


def simclr_views(images: Tensor, strength: float = 0.5, min_area: float = 0.08) -> Tensor:
    """A random view of each image (B, 3, H, W) in [0, 1]: crop, flip, colours, grey (Chen et al.
    2020)."""
    count = len(images)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(count, device=images.device).uniform_(low, high)

    area = uniform(min_area, 1.0)
    ratio = uniform(math.log(3 / 4), math.log(4 / 3)).exp()
    width = (area * ratio).sqrt().clamp(max=1.0)
    height = (area / ratio).sqrt().clamp(max=1.0)
    flip = uniform(0, 1).lt(0.5).float() * 2 - 1
    grid = torch.zeros(count, 2, 3, device=images.device)
    grid[:, 0, 0] = width * flip
    grid[:, 1, 1] = height
    grid[:, 0, 2] = uniform(-1, 1) * (1 - width)
    grid[:, 1, 2] = uniform(-1, 1) * (1 - height)
    views = F.grid_sample(
        images, F.affine_grid(grid, list(images.shape), align_corners=False), align_corners=False
    )
    return _grey(_jitter(views, strength, uniform), uniform(0, 1).lt(0.2))


def _jitter(views: Tensor, strength: float, uniform: Any) -> Tensor:
    """Brightness, contrast, saturation and hue of eight in ten views."""
    spread = 0.8 * strength
    brightness, contrast, saturation = (
        uniform(1 - spread, 1 + spread)[:, None, None, None] for _ in range(3)
    )
    changed = (views * brightness).clamp(0, 1)
    changed = (_luma(changed).mean(dim=(2, 3), keepdim=True).lerp(changed, contrast)).clamp(0, 1)
    changed = _luma(changed).lerp(changed, saturation).clamp(0, 1)
    # Hue turns the two colour components of YIQ.
    to_yiq = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
    to_yiq = to_yiq.to(views)
    angle = uniform(-0.2 * strength, 0.2 * strength) * 2 * math.pi
    turn = torch.eye(3, device=views.device).repeat(len(views), 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2] = -angle.sin()
    turn[:, 2, 1] = angle.sin()
    changed = torch.einsum("bij,bjhw->bihw", to_yiq.inverse() @ turn @ to_yiq, changed).clamp(0, 1)
    return torch.where(uniform(0, 1).lt(0.8)[:, None, None, None], changed, views)


def _grey(views: Tensor, chosen: Tensor) -> Tensor:
    """Those of the views (B, 3, H, W) that are `chosen` (B,) without colour."""
    return torch.where(chosen[:, None, None, None], _luma(views).expand_as(views), views)


def _luma(views: Tensor) -> Tensor:
    """(B, 1, H, W)."""
    weights = torch.tensor([0.299, 0.587, 0.114]).to(views)
    return torch.einsum("c,bchw->bhw", weights, views)[:, None]


class Curve(Evaluator):
    """Accuracy of 20 neighbours among the training images' features, at every evaluation."""

    primary = "20-NN"

    def __init__(self, test_images: Tensor, labels: np.ndarray, test_labels: np.ndarray) -> None:
        self.test_images = test_images
        self.labels = labels
        self.test_labels = test_labels
        self.values: list[float] = []

    @torch.no_grad()
    def __call__(self, model: DualEncoder) -> dict[str, float]:
        tower: Any = model.left
        device = next(tower.parameters()).device
        features = []
        for images in (tower.images, self.test_images):
            every = OnDevice(tower.inner, images)
            parts = []
            for numbers in torch.arange(len(images), device=device).split(1000):
                parts.append(
                    every.features({"number": numbers, "augment": torch.zeros_like(numbers)})
                )
            features.append(torch.cat(parts).cpu().numpy())
        found = knn_predict(features[0], self.labels, features[1], device=device)
        self.values.append(round(accuracy(found, self.test_labels), 4))
        return {self.primary: self.values[-1]}


@cache
def open_images(file: Path) -> tuple[Tensor, np.ndarray]:
    """(N, 3, 32, 32) pixels of a table's images, and their classes (N,)."""
    views = TableViews(file)
    pixels = np.stack([np.asarray(views.left_items[row]) for row in range(len(views))])
    assert views.labels is not None
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), views.labels


def train(settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train once; what came out, as it is kept."""
    torch.set_num_threads(1)
    images, labels = open_images(folder / "train.parquet")
    test_images, test_labels = open_images(folder / "test.parquet")
    count = settings["images"] or len(images)
    torch.manual_seed(settings["seed"])
    model = OnDeviceEncoder(images[:count])
    numbers = np.arange(count, dtype=np.float32)[:, None]
    pairs = PairDataset(numbers, numbers, left_modality="vector", right_modality="vector")
    pairs.views = True
    batch_size = settings["batch_size"]
    criterion = OBJECTIVES[settings["objective"]](
        temperature=settings["temperature"],
        seed=settings["seed"],
        num_left=count,
        num_right=count,
        views=True,
    )
    curve = Curve(test_images[:count], labels[:count], test_labels[:count])
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            output=output,
            batch_size=batch_size,
            epochs=settings["epochs"],
            evaluate_every=count // batch_size,
            learning_rate=RATE * settings["rate"] * math.sqrt(batch_size / 32),
            weight_decay=1e-4,
            mixed_precision="auto",
            keep_best=False,
            save_every=None,
            seed=settings["seed"],
            progress=False,
            deterministic=False,
        )
        trainer.fit(model, pairs, criterion, evaluator=curve)
    outcome: dict[str, Any] = {"20-NN": curve.values[-1], "curve": curve.values}
    outcome["seconds"] = round(time.perf_counter() - begun, 1)
    outcome["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return settings, outcome


def run(
    folder: Path,
    objectives: Sequence[str] = ("InfoNCE", "SogCLR", "EMC2", "ISIR", "GlobalCache"),
    batch_size: int = 64,
    epochs: int = 12,
    temperature: float = 0.2,
    rate: float = 1.0,
    seeds: int = 1,
    images: int | None = None,
    processes: int = 1,
    results: Path = RESULTS,
) -> None:
    """Train each objective with each seed.

    Args:
        folder: with train.parquet and test.parquet.
        objectives: names of `small_batch.OBJECTIVES`.
        batch_size, epochs, temperature: B, passes over the images, and τ of all.
        rate: factor of the learning rate.
        seeds: how many.
        images: train and measure on the first so many, to try the script.
        processes: trainings at once.
        results: where finished runs are kept.
    """
    compute = in_processes(partial(train, folder=folder), processes)
    for part in ("train", "test"):
        open_images(folder / f"{part}.parquet")  # processes inherit them
    common = {
        "batch_size": batch_size,
        "epochs": epochs,
        "temperature": temperature,
        "rate": rate,
        "images": images,
    }
    wanted = [
        {"objective": name, "seed": seed, **common} for seed in range(seeds) for name in objectives
    ]
    Runs(results).get(wanted, compute)
    report(results)


def report(results: Path = RESULTS) -> None:
    """Print all runs."""
    rows = []
    for one in Runs(results).found.values():
        rows.append(
            {
                **one["settings"],
                "20-NN": one["20-NN"],
                "seconds": one["seconds"],
                "device": one["device"],
            }
        )
    print_table(Table("CIFAR-10, 20-NN accuracy", sorted(rows, key=lambda row: -row["20-NN"])))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, report])
