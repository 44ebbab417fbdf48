"""SimCLR's random views: pure functions of image and seed, run per image in a data loader or per batch on a GPU.

The operations are torchvision.transforms.v2's functional ones; random numbers come from a generator seeded for each
call, so no global state is read or changed and a view does not depend on workers, order or restarts. v2's own random
classes draw from torch's global generator; seeded and restored around each call, they take 1.9× as long per image at 32
pixels (1.6 against 0.9 ms) and 1.8× at 224 (12.8 against 7.1 ms, most of it the blur).
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

BRIGHTNESS = 0
CONTRAST = 1
HUE = 3

NO_BLUR = 1e-3
"""A standard deviation in pixels so small that the blur's matrix is exactly the identity."""


class Draws(NamedTuple):
    """All random numbers of one view."""

    box: tuple[int, int, int, int]
    """Top, left, height and width of the crop in pixels."""

    flip: bool
    """Whether left and right are exchanged."""

    changes: list[tuple[int, float]]
    """Kind and factor of each change of colour in the order of application; empty without jitter."""

    grey: bool
    """Whether colours are removed."""

    sigma: float | None
    """Standard deviation of the blur in pixels; None without blur."""


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
        usual_strength = 0.5 if size <= 64 else 1.0
        usual_blur = 0.0 if size <= 32 else 0.5
        self.strength = usual_strength if strength is None else strength
        self.blur = usual_blur if blur is None else blur
        self.min_area = min_area
        if size < 8 or not 0 <= self.strength <= 2.5 or not 0 <= self.blur <= 1 or not 0 < min_area <= 1:
            raise DualencError(
                f"SimCLR: size={size}, strength={strength}, blur={blur}, min_area={min_area} is out of range; give "
                "size >= 8, strength in [0, 2.5], blur in [0, 1] and min_area in (0, 1]"
            )

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

    def batch(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """Views of n images of one size, made on their device: the same crops and changes as image by image.

        Values differ from those of `__call__` by rounding only: Pillow cuts off fractions of 1/255 after each change.
        For GPUs: on one CPU thread it takes 0.22 ms per image at 32 pixels and 22 at 224, `__call__` 0.27 and 4.4.

        Args:
            images: (n, 3, H, W) uint8, on any device.
            seeds: n integers.

        Returns:
            Pixels (n, 3, size, size) in [0, 1], float32, on the device of the images.

        Raises:
            DualencError: the images have another type or shape, or there are not as many seeds.
        """
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3 or len(images) != len(seeds):
            raise DualencError(
                f"SimCLR.batch: images are {images.dtype} {tuple(images.shape)} with {len(seeds)} seeds; give uint8 "
                "(n, 3, H, W) and n seeds"
            )
        height, width = images.shape[-2:]
        drawn = self.draw_batch(height, width, seeds)
        if images.is_cuda:
            drawn = drawn.pin_memory()
        return self.render(images, drawn.to(images.device, non_blocking=True))

    def draw_batch(self, height: int, width: int, seeds: Sequence[int]) -> Tensor:
        """What `draw` gives for n seeds, for `render`: (n, 15) float32, on the CPU."""
        rows = []
        for seed in seeds:
            draws = self.draw(height, width, seed)
            # Without jitter: four times the brightness, times 1.
            changes = draws.changes or [(BRIGHTNESS, 1.0)] * 4
            kinds = [kind for kind, _ in changes]
            factors = [factor for _, factor in changes]
            sigma = NO_BLUR if draws.sigma is None else draws.sigma
            rows.append([*draws.box, draws.flip, *kinds, *factors, draws.grey, sigma])
        return torch.tensor(rows, dtype=torch.float32).reshape(-1, 15)

    def render(self, images: Tensor, drawn: Tensor) -> Tensor:
        """The views that `draw_batch` drew: a pure function on the device, which a CUDA graph can capture.

        Args:
            images: (n, 3, H, W) uint8.
            drawn: (n, 15) float32, on the device of the images.

        Returns:
            Pixels (n, 3, size, size) in [0, 1], float32.
        """
        box, flip, kinds, factors, grey, sigma = drawn.split([4, 1, 4, 4, 1, 1], dim=1)
        top, left, height, width = box[:, :, None].unbind(1)  # (n, 1) each
        # Half precision would round the pixels to eight bits and worse.
        with torch.autocast(images.device.type, enabled=False):
            rows = resize_matrices(images.shape[-2], self.size, top, height, torch.zeros_like(flip))
            columns = resize_matrices(images.shape[-1], self.size, left, width, flip)
            pixels = multiply_axes(rows, images / 255, columns)
            for kind, factor in zip(kinds.split(1, dim=1), factors.split(1, dim=1), strict=True):
                pixels = change_colours(pixels, kind[:, :, None, None], factor[:, :, None, None])
            pixels = torch.where(grey[:, :, None, None] > 0, to_grey(pixels), pixels)
            if self.blur > 0:
                blurs = blur_matrices(self.size, sigma.squeeze(1), self.kernel)
                pixels = multiply_axes(blurs, pixels, blurs)
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


def draw_jitter(strength: float, draw: Callable[[], float]) -> list[tuple[int, float]]:
    """Changes of brightness, contrast, saturation and hue in random order, by up to 0.8, 0.8, 0.8 and 0.2 × strength.

    Each is an index into `CHANGES` and the factor, or for hue the share of the colour circle.
    """
    reach = 0.8 * strength
    factors = [max(0.0, 1 - reach) + draw() * (1 + reach - max(0.0, 1 - reach)) for _ in range(3)]
    hue = 0.2 * strength * (2 * draw() - 1)
    return sorted(enumerate([*factors, hue]), key=lambda _: draw())


def jitter(image: Image.Image, changes: Sequence[tuple[int, float]]) -> Image.Image:
    """Apply the changes that `draw_jitter` drew, in their order."""
    for kind, factor in changes:
        image = CHANGES[kind](image, factor)
    return image


def gaussian_blur(pixels: Tensor, sigma: float, kernel: int) -> Tensor:
    """Gaussian blur of (..., H, W) with reflected borders, as one matrix product per axis.

    `sigma` is in pixels, `kernel` the odd length of the kernel, at most 2·min(H, W) − 1. The same numbers as
    torchvision's `gaussian_blur`, whose two-dimensional convolution is six times slower at 224 pixels.
    """
    sigmas = torch.tensor([sigma])
    rows = blur_matrices(pixels.shape[-2], sigmas, kernel)[0]
    columns = blur_matrices(pixels.shape[-1], sigmas, kernel)[0]
    return rows @ pixels @ columns.T


def blur_matrices(length: int, sigma: Tensor, kernel: int) -> Tensor:
    """Matrices (n, length, length) that blur one axis of n samples, whose standard deviations are `sigma` (n,)."""
    offsets = torch.arange(kernel, device=sigma.device) - kernel // 2
    weights = torch.softmax(-0.5 * (offsets / sigma[:, None]) ** 2, dim=1)  # (n, kernel)
    # Row `i` holds the weights of all positions in the blurred value at `i`, reflected at the borders.
    source = (torch.arange(length, device=sigma.device)[:, None] + offsets).abs()
    source = torch.where(source >= length, 2 * (length - 1) - source, source)
    shape = (len(sigma), length, kernel)
    matrices = torch.zeros(len(sigma), length, length, device=sigma.device)
    return matrices.scatter_add_(2, source.expand(shape), weights[:, None].expand(shape))


def multiply_axes(rows: Tensor, pixels: Tensor, columns: Tensor) -> Tensor:
    """Resample pixels (n, 3, H, W) by the matrices rows (n, h, H) and columns (n, w, W): (n, 3, h, w) in [0, 1].

    As in Pillow, the horizontal axis comes first, and values saturate after each.
    """
    pixels = torch.einsum("nchw,nxw->nchx", pixels, columns).clamp_(0, 1)
    return torch.matmul(rows[:, None], pixels).clamp_(0, 1)


def resize_matrices(length: int, size: int, start: Tensor, extent: Tensor, reverse: Tensor) -> Tensor:
    """Matrices (n, size, length) that crop one axis of n images and resize it with Pillow's antialiased bicubic kernel.

    Args:
        length: pixels of the axis.
        size: pixels after resizing.
        start: (n, 1), first pixel of the crop.
        extent: (n, 1), pixels of the crop.
        reverse: (n, 1), 1 to reverse the order of the resized pixels, else 0.
    """
    pixel = torch.arange(length, device=start.device)
    position = torch.arange(size, device=start.device)
    position = torch.where(reverse > 0, size - 1 - position, position)  # (n, size)
    scale = extent / size
    centre = start + (position + 0.5) * scale  # (n, size)
    # In units of the kernel, which is as wide as four pixels of the smaller of the two images; it is 0 from 2 on.
    distance = (pixel + 0.5 - centre[:, :, None]).abs() / scale.clamp(min=1)[:, :, None]  # (n, size, length)
    distance = distance.clamp(max=2)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    inside = (pixel >= start) & (pixel < start + extent)  # (n, length)
    weights = torch.where(distance < 1, near, far) * inside[:, None]
    return weights / weights.sum(2, keepdim=True)


def change_colours(pixels: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """One of `CHANGES` for each sample of pixels (n, 3, H, W) in [0, 1]; kind and factor are (n, 1, 1, 1)."""
    grey = to_grey(pixels)
    mean = grey.mean((1, 2, 3), keepdim=True)
    # Brightness blends with black, contrast with the mean grey, saturation with each pixel's grey.
    other = torch.where(kind == CONTRAST, mean, grey * (kind != BRIGHTNESS))  # (n, 1, H, W)
    blended = torch.lerp(other, pixels, factor).clamp_(0, 1)
    return torch.where(kind == HUE, turn_hue(pixels, factor), blended)


def to_grey(pixels: Tensor) -> Tensor:
    """The luma (n, 1, H, W) of pixels (n, 3, H, W)."""
    red, green, blue = pixels.split(1, dim=1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def turn_hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of pixels (n, 3, H, W) by a share `turn` (n, 1, 1, 1) of the colour circle; V and S of HSV stay."""
    red, green, blue = pixels.split(1, dim=1)
    value = pixels.amax(1, keepdim=True)
    chroma = value - pixels.amin(1, keepdim=True)  # V·S
    # The hue in sixths of the circle, times the chroma.
    hue = torch.where(green == value, blue - red + 2 * chroma, red - green + 4 * chroma)
    hue = torch.where(red == value, green - blue, hue)
    hue = hue / torch.where(chroma > 0, chroma, 1) + 6 * turn
    # A channel falls from V to V − V·S and rises again around the circle; red, green and blue start at 5, 3 and 1.
    phase = (hue + torch.arange(5, 0, -2, device=pixels.device)[:, None, None]).remainder(6)  # (n, 3, H, W)
    return value - chroma * torch.minimum(phase, 4 - phase).clamp_(0, 1)
