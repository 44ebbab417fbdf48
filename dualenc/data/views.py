"""SimCLR's random views: pure functions of image and seed.

The operations are the functional ones of torchvision.transforms.v2. Random numbers come from a
generator seeded for each call: no global state is read or changed, and a view does not depend on
workers, order or restarts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from dualenc.errors import DualencError

Draw = Callable[[], float]
"""Draws a uniform random number in [0, 1)."""


MAX_RATIO = 4 / 3
"""Largest aspect ratio of a crop; the smallest is its inverse."""


class SimCLR:
    """SimCLR's augmentation: crop, flip, color jitter, grayscale, blur.

    Source: Chen et al. 2020, arXiv:2002.05709, appendix A. Views are a pure function of image and
    seed.

        SimCLR(size=32)(image, seed=0).shape  # (3, 32, 32)

    Args:
        size: height and width of the view in pixels.
        strength: strength of the color jitter, s in the paper; by default 0.5 up to 64 pixels (its
            CIFAR-10 setting, appendix B.9) and 1.0 above.
        blur: probability of a Gaussian blur with a kernel of a tenth of the size; by default 0 up
            to 32 pixels and 0.5 above.
        min_area: smallest share of the image's area that a crop keeps.

    Raises:
        DualencError: an argument is out of range.
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
        if (
            size < 8
            or not 0 <= self.strength <= 2.5
            or not 0 <= self.blur <= 1
            or not 0 < min_area <= 1
        ):
            raise DualencError(
                f"size={size}, strength={strength}, blur={blur}, min_area={min_area} is out of "
                "range",
                fix="give size >= 8, strength in [0, 2.5], blur in [0, 1] and min_area in (0, 1]",
                where="SimCLR",
            )

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        """Return a random view of an RGB image: pixels (3, size, size) in [0, 1], float32."""
        # Keep the order of the draws: a seed must give the same view in every version.
        draw = random.Random(seed).random
        box = crop_box(image.height, image.width, self.min_area, draw)
        view = F.resized_crop(image, *box, [self.size, self.size], InterpolationMode.BICUBIC)
        if draw() < 0.5:
            view = F.horizontal_flip(view)
        if draw() < 0.8:
            view = jitter(view, self.strength, draw)
        if draw() < 0.2:
            view = F.rgb_to_grayscale(view, 3)
        pixels = F.pil_to_tensor(view).float().div_(255)
        if draw() < self.blur:
            sigma = 0.1 + 1.9 * draw()
            # The odd number nearest to a tenth of the size, at least 3.
            pixels = gaussian_blur(pixels, sigma, max(self.size // 20 * 2 + 1, 3))
        return pixels

    def image(self, image: Image.Image, seed: int) -> Image.Image:
        """Return the same view as an image, for preprocessing that takes images."""
        # (3, H, W) in [0, 1] to (H, W, 3) bytes.
        pixels = self(image, seed).permute(1, 2, 0) * 255
        return Image.fromarray(pixels.round().clamp(0, 255).to(torch.uint8).numpy())


def crop_box(height: int, width: int, min_area: float, draw: Draw) -> tuple[int, int, int, int]:
    """Return top, left, height and width in pixels of a random crop (Inception's).

    The crop covers `min_area` to all of the image's area, with an aspect ratio from 3/4 to 4/3.
    """
    for _ in range(10):
        share = min_area + (1 - min_area) * draw()
        area = height * width * share
        # Log-uniform, so that wide and tall crops are equally likely.
        log_ratio = (2 * draw() - 1) * math.log(MAX_RATIO)
        ratio = math.exp(log_ratio)
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(draw() * (height - crop_height + 1))
            left = int(draw() * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    # No crop fits in very long images: take the largest central one with an allowed ratio.
    crop_width = min(width, round(height * MAX_RATIO))
    crop_height = min(height, round(width * MAX_RATIO))
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return top, left, crop_height, crop_width


def jitter(image: Image.Image, strength: float, draw: Draw) -> Image.Image:
    """Change brightness, contrast, saturation and hue at random, in random order."""
    # As in torchvision's ColorJitter(0.8 s, 0.8 s, 0.8 s, 0.2 s): factors are uniform in
    # [1 - 0.8 s, 1 + 0.8 s] without negative ones, the hue shift in [-0.2 s, 0.2 s].
    lowest = max(0.0, 1 - 0.8 * strength)
    width = 1 + 0.8 * strength - lowest
    factors = [lowest + draw() * width for _ in range(3)]
    hue_shift = 0.2 * strength * (2 * draw() - 1)
    operations = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    changes = zip(operations, [*factors, hue_shift])
    # Sorting by random keys shuffles with the same generator.
    for change, factor in sorted(changes, key=lambda _: draw()):
        image = change(image, factor)
    return image


def gaussian_blur(pixels: Tensor, sigma: float, kernel: int) -> Tensor:
    """Blur (..., H, W) like torchvision, with one matrix product per axis.

    This is 6 times faster at 224 pixels.
    """
    rows = blur_matrix(pixels.shape[-2], sigma, kernel)
    columns = blur_matrix(pixels.shape[-1], sigma, kernel)
    return rows @ pixels @ columns.T


def blur_matrix(length: int, sigma: float, kernel: int) -> Tensor:
    """Return the matrix (length, length) that blurs one axis, reflected at the borders.

    Args:
        length: size of the axis in pixels.
        sigma: standard deviation in pixels.
        kernel: odd number of pixels under the Gaussian.
    """
    offsets = torch.arange(kernel) - kernel // 2
    # A softmax of log densities is the Gaussian, normalized.
    log_density = -0.5 * (offsets / torch.tensor(sigma)) ** 2
    weights = torch.softmax(log_density, dim=0)
    # Row i holds the weight of each position in the blurred value at position i. Positions beyond
    # a border are reflected, without repeating the border.
    source = (torch.arange(length)[:, None] + offsets).abs()
    is_beyond = source >= length
    source = torch.where(is_beyond, 2 * (length - 1) - source, source)
    matrix = torch.zeros(length, length)
    return matrix.scatter_add_(1, source, weights.expand(length, kernel))
