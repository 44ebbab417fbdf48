"""Corruptions are pure functions of their arguments; CIFAR-C and Tiny-ImageNet-C folders."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.corruptions import (
    ALL,
    CifarC,
    TinyImageNetC,
    corrupt,
    is_corrupted_folder,
    read_corrupted,
)
from dualenc.seeds import derive_seed

SEEDED_BY_ARGUMENT = ("impulse_noise", "glass_blur")
NAMES = [
    # One for each source of randomness; the rest differ only inside the library.
    *("gaussian_noise", "impulse_noise", "glass_blur", "elastic_transform", "frost", "spatter"),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ALL),
]


def picture(size: int, seed: int = 0) -> np.ndarray:
    """A smooth image with detail: a few waves of colour and a little grain."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size
    waves = [np.sin(2 * np.pi * (a * x + b * y)) for a, b in rng.uniform(-3, 3, (3, 2))]
    return np.uint8(
        np.clip(128 + 90 * np.stack(waves, -1) + rng.normal(0, 8, (size, size, 3)), 0, 255)
    )


def test_the_names_are_those_of_the_library_in_its_order() -> None:
    from imagecorruptions import get_corruption_names

    assert list(ALL) == get_corruption_names("all")


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize("name", NAMES)
def test_the_pixels_are_those_of_the_library_under_the_same_seeds(name: str, size: int) -> None:
    import imagecorruptions

    image = picture(size)
    for severity in (1, 5):
        own = derive_seed(3, 7, name, severity, bits=32)
        np.random.seed(own)  # noqa: NPY002
        keywords = {"seed": own} if name in SEEDED_BY_ARGUMENT else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            expected = imagecorruptions.corrupt(image, severity, name, **keywords)
        ours = corrupt(image, name, severity, image_id=7, seed=3)
        assert ours.dtype == np.uint8
        assert ours.shape == image.shape
        # Where no drop falls, spatter of the library is 0/0, cast to an unspecified byte: ours is
        # the image.
        assert (ours == expected).all() or (name == "spatter" and (ours == image).all())
        assert (ours != image).any() or name == "spatter"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generators_in_any_state_make_no_difference_and_are_left_alone(name: str) -> None:
    image = picture(32)
    first = corrupt(image, name, 3, image_id=1)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert (corrupt(image, name, 3, image_id=1) == first).all()
    after = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after
    assert (image == picture(32)).all(), "the image itself was changed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gaussian_noise", "impulse_noise", "glass_blur", "elastic_transform", "fog"]
)
def test_another_image_severity_or_seed_gives_other_noise(name: str) -> None:
    image = picture(32)
    base = corrupt(image, name, 2, image_id=0, seed=0)
    assert (corrupt(image, name, 2, image_id=1, seed=0) != base).any()
    assert (corrupt(image, name, 3, image_id=0, seed=0) != base).any()
    assert (corrupt(image, name, 2, image_id=0, seed=1) != base).any()


def test_spatter_without_a_drop_leaves_the_image() -> None:
    unchanged = [
        seed
        for seed in range(40)
        if (corrupt(picture(32), "spatter", 1, seed=seed) == picture(32)).all()
    ]
    assert 0 < len(unchanged) < 40


NAMES = ("gaussian_noise", "fog", "saturate")


@pytest.fixture
def cifar_c(tmp_path: Path) -> Path:
    """Four images; pixel value of image i of corruption c at severity s is 100c + 10s + i."""
    for number, name in enumerate(NAMES):
        values = np.array(
            [100 * number + 10 * severity + image for severity in range(1, 6) for image in range(4)]
        )
        pixels = np.broadcast_to(values[:, None, None, None], (20, 32, 32, 3)).astype(np.uint8)
        np.save(tmp_path / f"{name}.npy", pixels)
    np.save(tmp_path / "labels.npy", np.tile(np.array([3, 1, 4, 1], np.uint8), 5))
    return tmp_path


@pytest.fixture
def tiny_c(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES[:2]):
        for severity in range(1, 6):
            for position, image in enumerate(("n02/b.JPEG", "n01/c.JPEG", "n01/a.JPEG")):
                file = tmp_path / name / str(severity) / image
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (64, 64), 100 * number + 10 * severity + position).save(
                    file, format="PNG"
                )
    return tmp_path


def test_cifar_c_blocks_are_severities(cifar_c: Path) -> None:
    source = read_corrupted(cifar_c)
    assert isinstance(source, CifarC)
    assert source.corruptions == NAMES
    assert len(source) == 4
    assert source.labels is not None
    assert source.labels.tolist() == [3, 1, 4, 1]
    for number, name in enumerate(NAMES):
        for severity in range(1, 6):
            for image in range(4):
                pixels = np.asarray(source.image(image, name, severity))
                assert pixels.shape == (32, 32, 3)
                assert (pixels == 100 * number + 10 * severity + image).all()


def test_tiny_imagenet_c_is_read_by_class_and_name(tiny_c: Path) -> None:
    source = read_corrupted(tiny_c)
    assert isinstance(source, TinyImageNetC)
    assert source.names == ["n01/a.JPEG", "n01/c.JPEG", "n02/b.JPEG"]
    assert source.labels is not None
    assert source.labels.tolist() == [0, 0, 1]
    image = source.image(2, "fog", 4)
    assert (image.mode, image.size, image.getpixel((5, 5))) == ("RGB", (64, 64), (140, 140, 140))


def test_workers_get_paths_not_pixels(cifar_c: Path) -> None:
    packed = pickle.dumps(CifarC(cifar_c))
    assert len(packed) < 2000
    assert np.asarray(pickle.loads(packed).image(1, "fog", 2)).max() == 121


def test_the_layouts_are_recognised(cifar_c: Path, tmp_path: Path) -> None:
    assert is_corrupted_folder(cifar_c)
    assert not is_corrupted_folder(tmp_path / "nowhere")
    (tmp_path / "weather" / "fog").mkdir(parents=True)
    assert not is_corrupted_folder(tmp_path / "weather"), (
        "a class of clean images, not a corruption"
    )
    with pytest.raises(DualencError, match="is it CIFAR-C or Tiny-ImageNet-C"):
        read_corrupted(tmp_path / "nowhere")


DAMAGE = [
    (
        lambda folder: np.save(folder / "fog.npy", np.zeros((15, 32, 32, 3), np.uint8)),
        r"uint8 of shape \(15, 32, 32, 3\)",
    ),
    (
        lambda folder: (folder / "fog.npy").write_bytes(b"\x93NUMPY"),
        "fog.npy: not a complete .npy file",
    ),
    (lambda folder: (folder / "labels.npy").unlink(), "labels.npy: no such file"),
    (
        lambda folder: np.save(folder / "labels.npy", np.arange(20)),
        "20 labels are not five equal blocks",
    ),
    (
        lambda folder: np.save(folder / "fog.npy", np.zeros((20, 32, 32, 3))),
        "fog.npy: is float64 of shape",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damage_to_cifar_c_is_told(
    cifar_c: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(cifar_c)
    with pytest.raises(DualencError, match=message):
        CifarC(cifar_c)


def test_damage_to_tiny_imagenet_c_is_told(tiny_c: Path) -> None:
    broken = tiny_c / "fog" / "4" / "n01" / "a.JPEG"
    broken.write_bytes(b"not an image")
    with pytest.raises(BadSample, match=r"fog/4/n01/a.JPEG: image cannot be decoded"):
        TinyImageNetC(tiny_c).image(0, "fog", 4)
    broken.unlink()
    with pytest.raises(BadSample, match=r"fog/4/n01/a.JPEG: image cannot be read"):
        TinyImageNetC(tiny_c).image(0, "fog", 4)
