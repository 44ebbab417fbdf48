"""Training crops are pure functions of image and seed, and leave the program's random state alone."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from dualenc.encoders.image_prepare import ImagePrepare, Normalized, Seeded, seeded

TO_PIXELS = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002


def test_seeding_is_local() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    expected = [draw(), draw()]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    found = [draw()]
    with seeded(2**63 - 1):
        first = draw()
    with seeded(2**63 - 1):
        assert draw() == first
    with seeded(1):
        assert all(a != b for a, b in zip(draw(), first))
    found.append(draw())
    assert found == expected


@pytest.fixture
def prepare() -> ImagePrepare:
    crops = v2.Compose([v2.RandomResizedCrop(8), TO_PIXELS])
    return ImagePrepare(v2.Compose([v2.Resize((8, 8)), TO_PIXELS]), Seeded(crops))


def test_views_do_not_depend_on_company_or_worker(prepare: ImagePrepare, images: list[Image.Image]) -> None:
    together = prepare(images, seeds=[5, 6, 7])["image"]
    assert together.shape == (3, 3, 8, 8)
    elsewhere = pickle.loads(pickle.dumps(prepare))
    assert torch.equal(elsewhere(images[1:2], seeds=[6])["image"], together[1:2])
    assert not torch.equal(prepare(images, seeds=[5, 8, 7])["image"][1], together[1])


def test_evaluation_takes_no_seed(prepare: ImagePrepare, images: list[Image.Image]) -> None:
    assert torch.equal(prepare(images)["image"], prepare(images)["image"])
    with pytest.raises(ValueError, match="shorter"):
        prepare(images, seeds=[1])


class Plain:
    """An augmentation that changes nothing."""

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        return TO_PIXELS(image)


def test_normalisation_follows_the_augmentation() -> None:
    image = Image.new("RGB", (2, 2), (255, 51, 0))
    pixels = Normalized(Plain(), mean=(0.5, 0.0, 0.0), std=(0.5, 0.2, 1.0))(image, 0)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, 1.0, 0.0]))


def test_grey_models_get_grey_pixels() -> None:
    image = Image.new("RGB", (2, 2), (255, 51, 0))
    trained = Normalized(Plain(), mean=(0.0,), std=(1.0,))
    batch = ImagePrepare(TO_PIXELS, trained, grey=True)
    luma = (0.299 * 255 + 0.587 * 51) / 255
    for pixels in (batch([image])["image"], batch([image], seeds=[0])["image"]):
        assert pixels.shape == (1, 1, 2, 2)
        assert pixels[0, 0, 0, 0].item() == pytest.approx(luma, abs=0.003)
