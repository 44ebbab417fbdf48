"""Small folders in the published layouts are read as they were written; damage is one line."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.corruptions import CifarC, TinyImageNetC, is_corrupted_folder, read_corrupted

NAMES = ("gaussian_noise", "fog", "saturate")


@pytest.fixture
def cifar_c(tmp_path: Path) -> Path:
    """Four images; pixel value of image i of corruption c at severity s is 100c + 10s + i."""
    for number, name in enumerate(NAMES):
        values = np.array([100 * number + 10 * severity + image for severity in range(1, 6) for image in range(4)])
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
                Image.new("L", (64, 64), 100 * number + 10 * severity + position).save(file, format="PNG")
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


def test_a_chosen_few_in_the_chosen_order(cifar_c: Path) -> None:
    assert read_corrupted(cifar_c, ["saturate", "fog"]).corruptions == ("saturate", "fog")


def test_workers_get_paths_not_pixels(cifar_c: Path) -> None:
    packed = pickle.dumps(CifarC(cifar_c))
    assert len(packed) < 2000
    assert np.asarray(pickle.loads(packed).image(1, "fog", 2)).max() == 121


def test_the_layouts_are_recognised(cifar_c: Path, tmp_path: Path) -> None:
    assert is_corrupted_folder(cifar_c)
    assert not is_corrupted_folder(tmp_path / "nowhere")
    (tmp_path / "weather" / "fog").mkdir(parents=True)
    assert not is_corrupted_folder(tmp_path / "weather"), "a class of clean images, not a corruption"
    with pytest.raises(DualencError, match="is it CIFAR-C or Tiny-ImageNet-C"):
        read_corrupted(tmp_path / "nowhere")


def test_an_index_out_of_range_is_not_another_severity(cifar_c: Path) -> None:
    with pytest.raises(IndexError):
        read_corrupted(cifar_c).image(4, "fog", 1)


def shorten(folder: Path) -> None:
    np.save(folder / "fog.npy", np.zeros((15, 32, 32, 3), np.uint8))


def truncate(folder: Path) -> None:
    data = (folder / "fog.npy").read_bytes()
    (folder / "fog.npy").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (shorten, "fog.npy: 15 images but labels.npy has 20"),
        (truncate, "fog.npy: not a whole .npy file"),
        (lambda folder: (folder / "labels.npy").unlink(), "labels.npy: no such file"),
        (lambda folder: np.save(folder / "labels.npy", np.zeros(18, int)), "18 labels; five equal blocks"),
        (lambda folder: np.save(folder / "labels.npy", np.arange(20)), "blocks of the severities differ"),
        (lambda folder: np.save(folder / "fog.npy", np.zeros((20, 32, 32, 3))), "fog.npy: float64 of shape"),
    ],
)
def test_damage_to_cifar_c_is_one_line(cifar_c: Path, damage, line: str) -> None:
    damage(cifar_c)
    with pytest.raises(DualencError, match=line) as error:
        CifarC(cifar_c)
    assert "\n" not in str(error.value)


def test_damage_to_tiny_imagenet_c_is_one_line(tiny_c: Path) -> None:
    broken = tiny_c / "fog" / "4" / "n01" / "a.JPEG"
    broken.write_bytes(b"not an image")
    with pytest.raises(BadSample, match=r"fog/4/n01/a.JPEG: image cannot be decoded"):
        TinyImageNetC(tiny_c).image(0, "fog", 4)
    broken.unlink()
    with pytest.raises(DualencError, match=r"fog/4: 2 images, 3 in gaussian_noise/1; n01/a.JPEG is in one only"):
        TinyImageNetC(tiny_c)


def test_a_corruption_that_is_not_there_is_one_line(cifar_c: Path) -> None:
    with pytest.raises(
        DualencError, match=r"snow.npy: no such file or folder; there are gaussian_noise, fog, saturate"
    ):
        CifarC(cifar_c, ["snow"])
    with pytest.raises(DualencError, match="did you mean snow"):
        CifarC(cifar_c, ["snoww"])
