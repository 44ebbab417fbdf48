"""Small image models and labelled images on disk, for the image evaluations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dualenc.encoders.image import ImageEncoder

HUES = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (210, 50, 40)}


def save_image_model(folder: Path, seed: int = 0, image_size: int = 32) -> ImageEncoder:
    """A tiny ResNet with random weights."""
    torch.manual_seed(seed)
    model = ImageEncoder("test_resnet", image_size=image_size, projector_dim=16)
    model.save(folder)
    return model


def picture(hue: tuple[int, int, int], seed: int) -> Image.Image:
    """Stripes of one hue in a random direction, with grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:32, :32] / 32
    stripes = np.sin(2 * np.pi * (rng.uniform(-3, 3) * x + rng.uniform(-3, 3) * y))[..., None]
    return Image.fromarray(
        np.uint8(np.clip(np.array(hue) + 40 * stripes + rng.normal(0, 6, (32, 32, 3)), 0, 255))
    )


def save_classes(folder: Path, per_class: int = 8, seed: int = 0) -> Path:
    """A folder of pictures for each hue."""
    for number, (name, hue) in enumerate(HUES.items()):
        (folder / name).mkdir(parents=True)
        for place in range(per_class):
            picture(hue, seed + 1000 * number + place).save(folder / name / f"{place:02d}.png")
    return folder


def save_splits(folder: Path, train: int = 10, test: int = 6) -> Path:
    """Class folders below `train` and below `test`."""
    save_classes(folder / "train", train, seed=0)
    save_classes(folder / "test", test, seed=500)
    return folder


def save_cifar_c(
    folder: Path, names: tuple[str, ...] = ("fog", "contrast", "snow"), images: int = 6
) -> Path:
    """The layout of CIFAR-C with pictures of the three hues; brighter by corruption and
    severity."""
    folder.mkdir()
    hues = list(HUES.values())
    clean = [np.asarray(picture(hues[image % 3], image), np.int64) for image in range(images)]
    for number, name in enumerate(names):
        shift = [4 * number + 3 * severity for severity in range(1, 6)]
        versions = [np.clip(pixels + change, 0, 255) for change in shift for pixels in clean]
        np.save(folder / f"{name}.npy", np.array(versions, np.uint8))
    np.save(folder / "labels.npy", np.tile(np.arange(images) % 3, 5))
    return folder
