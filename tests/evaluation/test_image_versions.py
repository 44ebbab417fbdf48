"""The stream of versions is the slow loop's, in order, for any number of workers, and tells bad images."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualenc.errors import BadSample, DualencError
from dualenc.evaluation import corrupted as image_versions
from dualenc.evaluation.corrupted import CLEAN, CleanImages, ImageVersions, encode_versions
from dualenc.evaluation.corruptions import GeneratedCorruptions, stable_seed

CONDITIONS = [("gaussian_noise", 1), ("fog", 2), ("fog", 5)]


def pictures(count: int, size: int = 32) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(count)]


def prepare(images: list[Image.Image], seeds: list[int] | None = None) -> dict[str, Tensor]:
    """Pixels as numbers; "augmentation" multiplies by a factor drawn from the seed."""
    pixels = torch.stack([torch.from_numpy(np.asarray(image, np.float32)) for image in images])
    if seeds is not None:
        pixels *= (
            torch.tensor([np.random.default_rng(seed).uniform(0.5, 2) for seed in seeds]).float().view(-1, 1, 1, 1)
        )
    return {"pixels": pixels}


def encode(inputs: dict[str, Tensor]) -> np.ndarray:
    return inputs["pixels"].mean(dim=(1, 2)).numpy()


class WithBad:
    """Images of which some cannot be read."""

    def __init__(self, images: list[Image.Image], bad: set[int]):
        self.images, self.bad = images, bad

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Image.Image:
        if index in self.bad:
            raise BadSample(f"row {index}: cannot be decoded")
        return self.images[index]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("views", [0, 2])
def test_the_stream_is_the_slow_loop(views: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_versions, "_VERSIONS_PER_FORWARD", 2 * 3 * 2)
    source = GeneratedCorruptions(pictures(5), seed=4)
    versions = ImageVersions(source, CONDITIONS, prepare, views=views, seed=9)
    blocks = list(encode_versions(versions, encode, num_workers=workers))
    assert [index for block in blocks for index in block.indices] == list(range(5))
    assert len(blocks) > 1
    found = np.concatenate([block.features for block in blocks])
    assert found.shape == (5, max(views, 1), 3, 3)
    for index in range(5):
        for c, (name, severity) in enumerate(CONDITIONS):
            image = source.image(index, name, severity)
            for view in range(max(views, 1)):
                seeds = [stable_seed(9, index, name, severity, view)] if views else None
                assert np.allclose(found[index, view, c], encode(prepare([image], seeds))[0], rtol=1e-6)


def test_a_part_of_the_images_gives_that_part_of_the_features() -> None:
    versions = ImageVersions(CleanImages(pictures(6)), [CLEAN], prepare, views=2)
    whole = np.concatenate([block.features for block in encode_versions(versions, encode)])
    part = np.concatenate([block.features for block in encode_versions(versions, encode, indices=[1, 4])])
    assert np.array_equal(part, whole[[1, 4]])


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_images_are_left_out_and_told(workers: int) -> None:
    versions = ImageVersions(CleanImages(WithBad(pictures(4), {0, 2})), [CLEAN], prepare)
    blocks = list(encode_versions(versions, encode, num_workers=workers))
    assert [index for block in blocks for index in block.indices] == [1, 3]
    assert [bad for block in blocks for bad in block.bad] == [
        (0, "row 0: cannot be decoded"),
        (2, "row 2: cannot be decoded"),
    ]
    assert sum(len(block.features) for block in blocks) == 2


def test_nothing_but_bad_images_gives_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ImageVersions(CleanImages(WithBad(pictures(2), {0, 1})), [CLEAN], prepare)
    (block,) = encode_versions(versions, encode)
    assert (block.indices, block.features.shape, len(block.bad)) == ([], (0, 1, 1, 0), 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_small_images_are_one_line_from_any_process(workers: int) -> None:
    versions = ImageVersions(GeneratedCorruptions(pictures(2, size=28)), CONDITIONS, prepare)
    with pytest.raises(DualencError, match="image 0 is 28x28; corruptions need 32x32") as error:
        list(encode_versions(versions, encode, num_workers=workers))
    assert "\n" not in str(error.value)


def test_a_wrong_encoder_is_one_line() -> None:
    versions = ImageVersions(CleanImages(pictures(2)), [CLEAN], prepare)
    with pytest.raises(DualencError, match=r"encode gave shape \(2,\) for 2 images"):
        list(encode_versions(versions, lambda inputs: encode(inputs)[:, 0]))
