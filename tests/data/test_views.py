from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from dualenc.data.views import SimCLR, gaussian_blur
from dualenc.errors import DualencError

SEEDS = st.integers(0, 2**63 - 1)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(8, 70), SEEDS)
def test_a_view_has_the_size_asked_for_and_pixels_in_the_unit_interval(
    h: int, w: int, size: int, seed: int
) -> None:
    view = SimCLR(size, blur=0.5)(noise(h, w), seed)
    assert (view.shape, view.dtype) == ((3, size, size), torch.float32)
    assert 0 <= view.min() <= view.max() <= 1 + 1e-6


@given(SEEDS, SEEDS)
def test_a_view_depends_on_image_and_seed_and_on_nothing_else(seed: int, other: int) -> None:
    image, augment = noise(40, 50), SimCLR(32, blur=1.0)
    first = augment(image, seed)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    augment(image, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    torch.manual_seed(other % 2**32)
    random.seed(other)
    assert torch.equal(SimCLR(32, blur=1.0)(image, seed), first)


def reference(size: int, strength: float, blur: float) -> v2.Compose:
    """SimCLR's augmentation by torchvision's own random transforms."""
    colour = v2.ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    kernel = max(size // 20 * 2 + 1, 3)
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([colour], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomApply([v2.GaussianBlur(kernel, (0.1, 2.0))], p=blur),
        ]
    )


def statistics(views: torch.Tensor) -> torch.Tensor:
    """Per view (n, 3, H, W): brightness, contrast, colourfulness, roughness, left-right balance;
    (n, 5)."""
    grey, half = views.mean(1), views.shape[-1] // 2
    rough = (
        views.diff(dim=-1).abs().mean((1, 2, 3)) + views.diff(dim=-2).abs().mean((1, 2, 3))
    ) / 2
    balance = grey[..., :half].mean((1, 2)) - grey[..., half:].mean((1, 2))
    columns = [grey.mean((1, 2)), grey.flatten(1).std(1), views.std(1).mean((1, 2)), rough, balance]
    return torch.stack(columns, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strength", "blur"), [(32, 0.5, 0.0), (48, 1.0, 0.5)])
def test_the_law_of_views_is_that_of_torchvisions_transforms(
    size: int, strength: float, blur: float
) -> None:
    ramp = np.linspace(0, 255, 60)
    pixels = np.stack(
        [ramp[None] + 0 * ramp[:, None], ramp[:, None] + 0 * ramp, np.full((60, 60), 90.0)], axis=-1
    )
    image = Image.fromarray(pixels.astype(np.uint8))
    torch.manual_seed(0)
    theirs = reference(size, strength, blur)
    n = 800
    a = statistics(torch.stack([SimCLR(size, strength, blur)(image, i) for i in range(n)]))
    b = statistics(torch.stack([theirs(image) for _ in range(n)]))
    for moment in (lambda x: x, lambda x: (x - b.mean(0)) ** 2):
        x, y = moment(a), moment(b)
        error = ((x.var(0) + y.var(0)) / n).sqrt()
        assert ((x.mean(0) - y.mean(0)).abs() < 4 * error).all()


@given(st.integers(8, 64), st.integers(8, 64), st.floats(0.1, 2.0), st.sampled_from([3, 5, 7, 11]))
def test_blur_equals_torchvisions(height: int, width: int, sigma: float, kernel: int) -> None:
    pixels = torch.rand(3, height, width, generator=torch.Generator().manual_seed(height * width))
    expected = v2.functional.gaussian_blur(pixels, [kernel, kernel], [sigma, sigma])
    torch.testing.assert_close(gaussian_blur(pixels, sigma, kernel), expected, atol=1e-5, rtol=1e-5)


def test_the_numbers_of_a_seed_stay_the_same() -> None:
    """A view is what torchvision makes with the numbers that were recorded of this seed."""
    f = v2.functional
    image = noise(40, 50)
    view = f.resized_crop(image, 7, 1, 30, 25, [48, 48], InterpolationMode.BICUBIC)
    view = f.adjust_brightness(view, 0.6463991398197654)
    view = f.adjust_contrast(view, 1.005948586551536)
    view = f.adjust_saturation(view, 0.6299965267535879)
    view = f.adjust_hue(view, -0.013270863267522826)
    pixels = f.pil_to_tensor(f.rgb_to_grayscale(view, 3)).float() / 255
    blurred = f.gaussian_blur(pixels, [5, 5], [1.2921231225706198] * 2)
    torch.testing.assert_close(SimCLR(48, blur=1.0)(image, 7), blurred, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"size": 4}, {"strength": 3.0}, {"blur": 1.5}, {"min_area": 0.0}]
)
def test_arguments_out_of_range_are_told(wrong: dict) -> None:
    with pytest.raises(DualencError, match="is out of range; give size >= 8"):
        SimCLR(**wrong)
