"""Self-supervised training on all of CIFAR-10: objectives at a small batch, on one GPU.

    python eval/claims/cifar.py run CIFAR10 --batch_size 64 --epochs 12 \
        --objectives "[InfoNCE,SogCLR,EMC2,ISIR,GlobalCache]"
    python eval/claims/cifar.py report

All train the same ResNet-18 with the stem for small images from the same start, and are measured by
20 neighbors after every epoch. Images stay on the device and are augmented there, a batch at a
time: on 16 cores, workers that decode and augment would be slower than the network. Crops are
bilinear and without antialiasing, and colors change in one order, which differs from
`dualenc.data.views.SimCLR`. Of --processes that share a GPU, seconds are no measure.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualenc.data import TableViews
from dualenc.encoders import DualEncoder, ImageEncoder
from dualenc.encoders.dual import Prepare
from dualenc.evaluation.probe import accuracy, knn_predict
from dualenc.evaluation.report_page import Table, print_table
from dualenc.training import Evaluator
from dualenc.types import Inputs

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from augmented import numbered
from frame import RESULTS, Outcome, Settings, Store, command_line, scaled_rate, train
from rows import objective_of

FOUND = RESULTS / "cifar.jsonl"
LUMA = (0.299, 0.587, 0.114)
YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


class Numbers(Prepare):
    """Numbers of images in place of pixels."""

    modality = "vector"

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        return {"image": torch.as_tensor(np.array(items)).reshape(-1).long()}


def encoder_of(images: Tensor) -> ImageEncoder:
    """Return a ResNet-18 that takes numbers of images (N, 3, 32, 32), uint8, and augments them."""
    model = ImageEncoder("resnet18", image_size=images.shape[-1])

    def to_pixels(backbone: Any, numbers: tuple[Tensor]) -> Tensor:
        nonlocal images
        images = images.to(numbers[0].device)
        pixels = images[numbers[0]].float() / 255
        if backbone.training:
            with torch.autocast(pixels.device.type, enabled=False):
                pixels = simclr_views(pixels)
        return ((pixels - 0.5) / 0.25).contiguous(memory_format=torch.channels_last)

    tower: Any = model.left
    tower.backbone.register_forward_pre_hook(to_pixels)
    tower.prepare, tower.modality = Numbers(), "vector"
    return model


def simclr_views(images: Tensor, strength: float = 0.5, min_area: float = 0.08) -> Tensor:
    """Return a random view of each image (B, 3, H, W) in [0, 1] (Chen et al. 2020)."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(len(images), device=images.device).uniform_(low, high)

    area = uniform(min_area, 1.0)
    ratio = uniform(math.log(3 / 4), math.log(4 / 3)).exp()
    width = (area * ratio).sqrt().clamp(max=1.0)
    height = (area / ratio).sqrt().clamp(max=1.0)
    flip = uniform(0, 1).lt(0.5).float() * 2 - 1
    grid = torch.zeros(len(images), 2, 3, device=images.device)
    grid[:, 0, 0], grid[:, 1, 1] = width * flip, height
    grid[:, 0, 2] = uniform(-1, 1) * (1 - width)
    grid[:, 1, 2] = uniform(-1, 1) * (1 - height)
    places = F.affine_grid(grid, list(images.shape), align_corners=False)
    views = jittered(F.grid_sample(images, places, align_corners=False), strength, uniform)
    is_gray = uniform(0, 1).lt(0.2)[:, None, None, None]
    return torch.where(is_gray, luma(views).expand_as(views), views)


def jittered(views: Tensor, strength: float, uniform: Callable[..., Tensor]) -> Tensor:
    """Change brightness, contrast, saturation and hue of eight in ten views."""
    bounds = 1 - 0.8 * strength, 1 + 0.8 * strength
    brightness, contrast, saturation = (uniform(*bounds)[:, None, None, None] for _ in range(3))
    changed = (views * brightness).clamp(0, 1)
    changed = luma(changed).mean(dim=(2, 3), keepdim=True).lerp(changed, contrast).clamp(0, 1)
    changed = luma(changed).lerp(changed, saturation).clamp(0, 1)
    # Hue turns the two color components of YIQ.
    to_yiq = torch.tensor(YIQ).to(views)
    angle = uniform(-0.2 * strength, 0.2 * strength) * 2 * math.pi
    turn = torch.eye(3, device=views.device).repeat(len(views), 1, 1)
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = -angle.sin(), angle.sin()
    changed = torch.einsum("bij,bjhw->bihw", to_yiq.inverse() @ turn @ to_yiq, changed).clamp(0, 1)
    return torch.where(uniform(0, 1).lt(0.8)[:, None, None, None], changed, views)


def luma(views: Tensor) -> Tensor:
    """Return the brightness (B, 1, H, W)."""
    return torch.einsum("c,bchw->bhw", torch.tensor(LUMA).to(views), views)[:, None]


class Curve(Evaluator):
    """Accuracy of 20 neighbors among the training images' features, at every evaluation."""

    primary = "20-NN"

    def __init__(self, labels: np.ndarray, test_labels: np.ndarray) -> None:
        self.labels, self.test_labels = labels, test_labels
        self.values: list[float] = []

    @torch.no_grad()
    def __call__(self, model: DualEncoder) -> dict[str, float]:
        device = next(model.parameters()).device
        numbers = torch.arange(len(self.labels) + len(self.test_labels), device=device)
        parts = [model.left.features({"image": own}) for own in numbers.split(1000)]
        features = torch.cat(parts).cpu().numpy()
        known, tested = np.split(features, [len(self.labels)])
        found = knn_predict(known, self.labels, tested, device=device)
        self.values.append(round(accuracy(found, self.test_labels), 4))
        return {self.primary: self.values[-1]}


@cache
def open_images(folder: Path, part: str) -> tuple[Tensor, np.ndarray]:
    """Return pixels (N, 3, 32, 32) of a table's images, and their classes (N,)."""
    views = TableViews(folder / f"{part}.parquet")
    pixels = np.stack([np.asarray(views.left_items[row]) for row in range(len(views))])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), np.asarray(views.labels)


def train_once(settings: Settings, folder: Path) -> Outcome:
    """Train, and return the accuracy after every epoch."""
    parts = [open_images(folder, part) for part in ("train", "test")]
    pixels, labels = zip(*[(own[: settings["images"]] for own in part) for part in parts])
    count, batch_size, seed = len(labels[0]), settings["batch_size"], settings["seed"]
    torch.manual_seed(seed)
    model = encoder_of(torch.cat(pixels))
    shared = {"num_left": count, "num_right": count, "temperature": settings["temperature"]}
    objective = objective_of(settings["objective"])(seed=seed, views=True, **shared)
    curve = Curve(*labels)
    schedule = {name: settings[name] for name in ("batch_size", "epochs", "seed")}
    schedule |= {"evaluate_every": count // batch_size, "mixed_precision": "auto"}
    rate = scaled_rate(1e-3 * settings["rate"], batch_size)
    schedule |= {"learning_rate": rate, "weight_decay": 1e-4}
    begun = time.perf_counter()
    train(model, numbered(count), objective, evaluator=curve, **schedule)
    seconds = round(time.perf_counter() - begun, 1)
    return {"20-NN": curve.values[-1], "curve": curve.values, "seconds": seconds}


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
    results: Path = FOUND,
) -> None:
    """Train each objective with each seed.

    Args:
        folder: folder with train.parquet and test.parquet of labeled images of 32×32 pixels.
        objectives: names of `rows.OBJECTIVES`.
        batch_size, epochs, temperature: B, passes over the images, and τ of all.
        rate: factor of the learning rate.
        seeds: number of seeds.
        images: train and measure on the first ones only, to try the script.
        processes: trainings at once.
        results: file of finished runs.
    """
    for part in ("train", "test"):
        open_images(folder, part)  # processes inherit them
    common = {"batch_size": batch_size, "epochs": epochs, "temperature": temperature}
    common |= {"rate": rate, "images": images}
    wanted = [
        {"objective": name, "seed": seed, **common} for seed in range(seeds) for name in objectives
    ]
    Store(results).get(wanted, partial(train_once, folder=folder), processes)
    report(results)


def report(results: Path = FOUND) -> None:
    """Print all runs."""
    rows = []
    for each in sorted(Store(results).runs, key=lambda each: -each.outcome["20-NN"]):
        outcome = {name: value for name, value in each.outcome.items() if name != "curve"}
        rows.append({**each.settings, **outcome, "device": each.origin["device"]})
    print_table(Table("CIFAR-10, 20-NN accuracy", rows))


def check(folder: Path) -> None:
    """Train on images whose class is their hue, which neighbors find."""
    results = folder / "cifar.jsonl"
    images = toys.images(folder / "toy", size=32)
    run(images, ["GlobalCache"], batch_size=12, epochs=1, results=results)
    for each in Store(results).runs:
        assert len(each.outcome["curve"]) == 2
        assert each.outcome["20-NN"] >= 0.5


if __name__ == "__main__":
    command_line(run, report, check=check)
