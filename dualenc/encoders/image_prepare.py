"""Images to tensors: one transform for evaluation, a seeded one for training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import rgb_to_grayscale

from dualenc.encoders.dual import Prepare

# jsonargparse would take a class as the result's type to be one whose making gives the result; hence Any.
Augment = Callable[[Image.Image, int], Any]
"""An RGB image and a seed to pixels (3, H, W), float32; a pure function of both."""


class ImagePrepare(Prepare):
    """Stack transformed images.

    Args:
        evaluate: RGB image to pixels (3, H, W).
        augment: the same for training, as a pure function of image and seed.
        grey: give `evaluate` grey images, of one channel.
    """

    modality = "image"

    def __init__(self, evaluate: Callable[[Image.Image], Tensor], augment: Augment, grey: bool = False) -> None:
        self.evaluate = evaluate
        self.augment = augment
        self.grey = grey

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> dict[str, Tensor]:
        if seeds is None:
            modes = [item.convert("L") if self.grey else item for item in items]
            return {"image": torch.stack([self.evaluate(item) for item in modes])}
        return {"image": torch.stack([self.augment(item, seed) for item, seed in zip(items, seeds, strict=True)])}


class Seeded:
    """Makes a transform that draws from the global generators a pure function of image and seed.

    Args:
        transform: RGB image to pixels (3, H, W), random through torch, `random` or numpy.
    """

    def __init__(self, transform: Callable[[Image.Image], Tensor]) -> None:
        self.transform = transform

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        with seeded(seed):
            return self.transform(image)


class Normalized:
    """An augmentation to pixels in [0, 1], followed by the model's own normalisation.

    Args:
        augment: image and seed to pixels (3, H, W) in [0, 1].
        mean: subtracted, one number per channel of the model; pixels are made grey for a single one.
        std: divided by, one number per channel of the model.
    """

    def __init__(self, augment: Augment, mean: Sequence[float], std: Sequence[float]) -> None:
        self.augment = augment
        self.mean = torch.tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).reshape(-1, 1, 1)

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        pixels = self.augment(image, seed)
        if len(pixels) == 3 and len(self.mean) == 1:
            pixels = rgb_to_grayscale(pixels)
        return (pixels - self.mean) / self.std


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, `random` and numpy within this context, and put them back after it."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
