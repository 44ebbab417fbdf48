from __future__ import annotations

import io
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from dualenc.data import open_image
from dualenc.data.images import ImageFiles, decode_image, find_images
from dualenc.errors import BadSample, DualencError

from .make import encoded, picture, shade_of


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "LA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = decode_image(encoded(picture(90).convert(mode), kind), "x")
    assert (image.mode, image.size) == ("RGB", (8, 8))


def test_turned_photographs_come_upright_as_datasets_decodes_them() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", exif=exif)
    other = datasets.Image().decode_example({"bytes": buffer.getvalue(), "path": None})
    image = decode_image(buffer.getvalue(), "x")
    assert image.size == (2, 3)
    assert np.array_equal(np.asarray(image), np.asarray(other.convert("RGB")))


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", encoded(picture(1, (99, 99)), "JPEG")[:400], encoded(picture(1, (99, 99)))[:150]],
    ids=["empty", "other", "cut JPEG", "cut PNG"],
)
def test_what_does_not_decode_is_a_bad_sample_told_in_one_line(data: bytes) -> None:
    with pytest.raises(BadSample) as error:
        decode_image(data, "shards/1.tar: 17")
    assert str(error.value).startswith("shards/1.tar: 17: image cannot be decoded (")
    assert "\n" not in str(error.value)


def test_a_decompression_bomb_is_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(BadSample, match="cannot be decoded"):
        decode_image(encoded(picture(1)), "x")


def test_files(tmp_path: Path) -> None:
    picture(5).save(tmp_path / "5.png")
    assert shade_of(open_image(tmp_path / "5.png")) == 5
    assert shade_of(ImageFiles(tmp_path, ["5.png"])[0]) == 5
    with pytest.raises(BadSample, match=r"6\.png: image cannot be read \(No such file"):
        open_image(tmp_path / "6.png")


def test_find_images_sorts_whole_trees_and_leaves_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.JPG", "b/1.png", "a.webp", ".hidden.png", ".cache/x.png", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert find_images(tmp_path) == ["a.webp", "b/1.png", "b/2.JPG"]


def test_folders_without_images_are_told(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="no image in this folder"):
        find_images(tmp_path)
    with pytest.raises(DualencError, match="no such folder"):
        find_images(tmp_path / "nowhere")
