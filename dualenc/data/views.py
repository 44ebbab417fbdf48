"""SimCLR's random views: pure functions of image and seed, run per image in a data loader.

The operations are torchvision.transforms.v2's functional ones; random numbers come from a generator seeded for each
call, so no global state is read or changed and a view does not depend on workers, order or restarts. v2's own random
classes draw from torch's global generator; seeded and restored around each call, they take 1.9× as long per image at 32
pixels (1.6 against 0.9 ms) and 1.8× at 224 (12.8 against 7.1 ms, most of it the blur).
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


class SimCLR:
    """SimCLR's augmentation (Chen et al. 2020, arXiv:2002.05709, appendix A): crop, flip, colour jitter, grey, blur.

    Args:
        size: height and width of the view in pixels.
        strength: of the colour jitter, s in the paper; by default 0.5 up to 64 pixels (its CIFAR-10 setting, appendix
            B.9) and 1.0 above.
        blur: probability of a Gaussian blur with a kernel of a tenth of the size; by default 0 up to 32 pixels and
            0.5 above.
        min_area: smallest share of the image's area that a crop keeps.

    Raises:
        DualencError: an argument out of its range.
    """

    def __init__(
        self, size: int = 32, strength: float | None = None, blur: float | None = None, min_area: float = 0.08
    ) -> None:
        self.size = size
        self.strength = (0.5 if size <= 64 else 1.0) if strength is None else strength
        self.blur = (0.0 if size <= 32 else 0.5) if blur is None else blur
        self.min_area = min_area
        if size < 8 or not 0 <= self.strength <= 2.5 or not 0 <= self.blur <= 1 or not 0 < min_area <= 1:
            raise DualencError(
                f"SimCLR: size={size}, strength={strength}, blur={blur}, min_area={min_area} is out of range; give "
                "size >= 8, strength in [0, 2.5], blur in [0, 1] and min_area in (0, 1]"
            )

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        """A random view of an RGB image: pixels (3, size, size) in [0, 1], float32."""
        draw = random.Random(seed).random
        top, left, height, width = crop_box(image.height, image.width, self.min_area, draw)
        size = [self.size, self.size]
        view = F.resized_crop(image, top, left, height, width, size, InterpolationMode.BICUBIC)
        if draw() < 0.5:
            view = F.horizontal_flip(view)
        if draw() < 0.8:
            view = jitter(view, self.strength, draw)
        if draw() < 0.2:
            view = F.rgb_to_grayscale(view, 3)
        pixels = F.pil_to_tensor(view).float().div_(255)
        if draw() < self.blur:
            pixels = gaussian_blur(pixels, sigma=0.1 + 1.9 * draw(), kernel=max(self.size // 20 * 2 + 1, 3))
        return pixels


def crop_box(height: int, width: int, min_area: float, draw: Callable[[], float]) -> tuple[int, int, int, int]:
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
            return int(draw() * (height - h + 1)), int(draw() * (width - w + 1)), h, w
    # No box fitted, as in very long images: the largest central one of an allowed ratio.
    w = min(width, round(height * 4 / 3))
    h = min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def jitter(image: Image.Image, strength: float, draw: Callable[[], float]) -> Image.Image:
    """Change brightness, contrast, saturation and hue in random order, by up to 0.8, 0.8, 0.8 and 0.2 × strength."""
    reach = 0.8 * strength
    factors = [max(0.0, 1 - reach) + draw() * (1 + reach - max(0.0, 1 - reach)) for _ in range(3)]
    hue = 0.2 * strength * (2 * draw() - 1)
    changes = [
        lambda view: F.adjust_brightness(view, factors[0]),
        lambda view: F.adjust_contrast(view, factors[1]),
        lambda view: F.adjust_saturation(view, factors[2]),
        lambda view: F.adjust_hue(view, hue),
    ]
    for change in sorted(changes, key=lambda _: draw()):
        image = change(image)
    return image


def gaussian_blur(pixels: Tensor, sigma: float, kernel: int) -> Tensor:
    """Gaussian blur of (..., H, W) with reflected borders, as one matrix product per axis.

    `sigma` is in pixels, `kernel` the odd length of the kernel, at most 2·min(H, W) − 1. The same numbers as
    torchvision's `gaussian_blur`, whose two-dimensional convolution is six times slower at 224 pixels.
    """
    offsets = torch.arange(kernel) - kernel // 2
    weights = torch.softmax(-0.5 * (offsets / sigma) ** 2, dim=0)
    matrices = []
    for length in pixels.shape[-2:]:
        # Row `i` holds the weights of all positions in the blurred value at `i`, reflected at the borders.
        source = (torch.arange(length)[:, None] + offsets).abs()
        source = torch.where(source >= length, 2 * (length - 1) - source, source)
        matrices.append(torch.zeros(length, length).scatter_add_(1, source, weights.expand(length, kernel)))
    return matrices[0] @ pixels @ matrices[1].T
