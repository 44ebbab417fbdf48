"""SimCLR's random views: pure functions of image and seed.

The operations are torchvision.transforms.v2's functional ones; random numbers come from a generator seeded for each
call, so no global state is read or changed and a view does not depend on workers, order or restarts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from dualenc.errors import DualencError

CHANGES = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
"""The colour jitter's changes; a change's kind is its index here."""


class Draws(NamedTuple):
    """The random numbers of one view.

    `box` is top, left, height and width of the crop, `changes` kind and factor of each change of colour in the order of
    application, `sigma` the standard deviation of the blur in pixels, None without blur.
    """

    box: tuple[int, int, int, int]
    flip: bool
    changes: list[tuple[int, float]]
    grey: bool
    sigma: float | None


class SimCLR:
    """SimCLR's augmentation (Chen et al. 2020, arXiv:2002.05709, appendix A): crop, flip, colour jitter, grey, blur.

    Args:
        size: height and width of the view in pixels.
        strength: of the colour jitter, s in the paper; by default 0.5 up to 64 pixels (its CIFAR-10 setting, appendix
            B.9) and 1.0 above.
        blur: probability of a Gaussian blur with a kernel of a tenth of the size; by default 0 up to 32 pixels and
            0.5 above.
        min_area: smallest share of the image's area that a crop keeps.

    """

    def __init__(
        self,
        size: int = 32,
        strength: float | None = None,
        blur: float | None = None,
        min_area: float = 0.08,
    ) -> None:
        self.size = size
        default_strength = 0.5 if size <= 64 else 1.0
        default_blur = 0.0 if size <= 32 else 0.5
        self.strength = default_strength if strength is None else strength
        self.blur = default_blur if blur is None else blur
        self.min_area = min_area
        if size < 8 or not 0 <= self.strength <= 2.5 or not 0 <= self.blur <= 1 or not 0 < min_area <= 1:
            values = f"size={size}, strength={strength}, blur={blur}, min_area={min_area}"
            fix = "give size >= 8, strength in [0, 2.5], blur in [0, 1] and min_area in (0, 1]"
            raise DualencError(f"SimCLR: {values} is out of range; {fix}")

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        """A random view of an RGB image: pixels (3, size, size) in [0, 1], float32."""
        draws = self.draw(image.height, image.width, seed)
        size = [self.size, self.size]
        view = F.resized_crop(image, *draws.box, size, InterpolationMode.BICUBIC)
        if draws.flip:
            view = F.horizontal_flip(view)
        view = jitter(view, draws.changes)
        if draws.grey:
            view = F.rgb_to_grayscale(view, 3)
        pixels = F.pil_to_tensor(view).float().div_(255)
        if draws.sigma is not None:
            pixels = gaussian_blur(pixels, draws.sigma, self.kernel)
        return pixels

    @property
    def kernel(self) -> int:
        """Length of the blur's kernel: the odd number nearest to a tenth of the size, at least 3."""
        return max(self.size // 20 * 2 + 1, 3)

    def draw(self, height: int, width: int, seed: int) -> Draws:
        """What the view of an image of `height` and `width` with this seed is made of."""
        draw = random.Random(seed).random
        # The order of these lines is part of what a seed means: stored seeds must give the same views.
        box = crop_box(height, width, self.min_area, draw)
        flip = draw() < 0.5
        changes = draw_jitter(self.strength, draw) if draw() < 0.8 else []
        grey = draw() < 0.2
        sigma = 0.1 + 1.9 * draw() if draw() < self.blur else None
        return Draws(box, flip, changes, grey, sigma)


def crop_box(
    height: int, width: int, min_area: float, draw: Callable[[], float]
) -> tuple[int, int, int, int]:
    """A random box of `min_area` to all of the image's area and an aspect ratio of 3/4 to 4/3 (Inception's crop).

    `draw` gives uniform numbers in [0, 1); the box is top, left, height and width in pixels.
    """
    for _ in range(10):
        area = height * width * (min_area + (1 - min_area) * draw())
        # Uniform in its logarithm, so that wide and tall boxes are equally likely.
        ratio = math.exp((2 * draw() - 1) * math.log(4 / 3))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(draw() * (height - h + 1))
            left = int(draw() * (width - w + 1))
            return top, left, h, w
    # No box fitted, as in very long images: the largest central one of an allowed ratio.
    w = min(width, round(height * 4 / 3))
    h = min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def draw_jitter(strength: float, draw: Callable[[], float]) -> list[tuple[int, float]]:
    """Changes of brightness, contrast, saturation and hue in random order: index into `CHANGES`, and the factor."""
    lowest = max(0.0, 1 - 0.8 * strength)
    width = 1 + 0.8 * strength - lowest
    factors = [lowest + draw() * width for _ in range(3)]
    hue = 0.2 * strength * (2 * draw() - 1)
    return sorted(enumerate([*factors, hue]), key=lambda _: draw())


def jitter(image: Image.Image, changes: Sequence[tuple[int, float]]) -> Image.Image:
    """Apply the changes that `draw_jitter` drew, in their order."""
    for kind, factor in changes:
        image = CHANGES[kind](image, factor)
    return image


def gaussian_blur(pixels: Tensor, sigma: float, kernel: int) -> Tensor:
    """torchvision's Gaussian blur of (..., H, W) as one matrix product per axis, six times faster at 224 pixels."""
    rows = blur_matrix(pixels.shape[-2], sigma, kernel)
    columns = blur_matrix(pixels.shape[-1], sigma, kernel)
    return rows @ pixels @ columns.T


def blur_matrix(length: int, sigma: float, kernel: int) -> Tensor:
    """The matrix (length, length) that blurs one axis with a standard deviation `sigma`, reflected at the borders."""
    offsets = torch.arange(kernel) - kernel // 2
    weights = torch.softmax(-0.5 * (offsets / torch.tensor(sigma)) ** 2, dim=0)
    # Row `i` holds the weights of all positions in the blurred value at `i`.
    source = (torch.arange(length)[:, None] + offsets).abs()
    source = torch.where(source >= length, 2 * (length - 1) - source, source)
    return torch.zeros(length, length).scatter_add_(1, source, weights.expand(length, kernel))
