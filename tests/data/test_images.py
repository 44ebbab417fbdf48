from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from dualenc.data import ImageViews, open_image
from dualenc.data.readers.images import ImageFiles, find_images
from dualenc.data.store.identity import item_identity
from dualenc.data.views import SimCLR
from dualenc.errors import BadSample, DualencError
from dualenc.io.decoding import decode_image, rgb_item
from tests.helpers.make import encoded, picture

GRADIENT = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16"])
def test_every_mode_becomes_rgb_in_files_and_in_memory(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(GRADIENT) if mode == "I;16" else picture(90).convert(mode)
    image.save(tmp_path / "x.tif")
    expected = ImageFiles(tmp_path, ["x.tif"])[0]
    assert (expected.mode, expected.size) == ("RGB", (8, 8))
    view = SimCLR(8)(ImageViews([image])[0].left, seed=0)
    assert torch.equal(view, SimCLR(8)(expected, seed=0))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_16_bit_grey_keeps_its_shades(kind: str) -> None:
    image = np.asarray(decode_image(encoded(Image.fromarray(GRADIENT), kind), "x"))
    assert image.tolist() == np.repeat(np.rint(GRADIENT / 257)[:, :, None], 3, axis=2).tolist()


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
    opened = rgb_item(Image.open(io.BytesIO(buffer.getvalue())), "x")
    assert np.array_equal(np.asarray(opened), np.asarray(image)), (
        "an image that the caller has opened"
    )
    assert rgb_item(image, "x") is image, "neither turned nor converted twice"


def test_a_truncated_image_that_the_caller_has_opened_is_a_bad_sample() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    image = Image.open(io.BytesIO(encoded(Image.fromarray(noise), "JPEG")[:-2000]))
    assert item_identity([image], 0, read=True) == b"unreadable"
    with pytest.raises(BadSample, match="row 3: image cannot be used"):
        rgb_item(image, "row 3")


def with_side(side: int) -> bytes:
    """A PNG whose header names that many pixels a side."""
    header = encoded(picture(1)).replace(struct.pack(">II", 8, 8), struct.pack(">II", side, side))
    return header[:29] + struct.pack(">I", zlib.crc32(header[12:29])) + header[33:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image of a known format"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
            "not an image of a known format",
        ),
        (encoded(picture(1, (99, 99)), "JPEG")[:400], ""),
        (encoded(Image.fromarray(GRADIENT.astype(np.int32)), "TIFF"), "an unknown range"),
        (with_side(int((1.5 * 89_478_485) ** 0.5)), "pixels"),  # Pillow warns
        (with_side(int((3 * 89_478_485) ** 0.5)), "pixels"),  # Pillow refuses
    ],
)
@pytest.mark.parametrize("bound", [Image.MAX_IMAGE_PIXELS, None])
def test_what_does_not_decode_is_a_bad_sample_in_one_line(
    monkeypatch: pytest.MonkeyPatch, data: bytes, reason: str, bound: int | None
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", bound)
    with pytest.raises(BadSample, match=reason) as error:
        decode_image(data, "shards/1.tar: 17")
    assert str(error.value).startswith("shards/1.tar: 17: image cannot be decoded (")
    assert "BytesIO" not in str(error.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "image cannot be read .No such file"),
        ("pipe", "not a file"),
        ("large", "bytes are more than"),
    ],
)
def test_files_that_cannot_be_opened(tmp_path: Path, what: str, message: str) -> None:
    path = tmp_path / "x.png"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "large":
        path.write_bytes(encoded(picture(1)))
        os.truncate(path, 10 << 30)  # ten GB of nothing behind a small image
    with pytest.raises(BadSample, match=rf"x\.png: .*{message}"):
        open_image(path)


def test_find_images_sorts_whole_trees_and_leaves_hidden_files(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="no image in this folder"):
        find_images(tmp_path)
    with pytest.raises(DualencError, match="no such folder"):
        find_images(tmp_path / "nowhere")
    for name in ("b/2.JPG", "b/1.png", "a.webp", ".hidden.png", ".cache/x.png", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert find_images(tmp_path) == ["a.webp", "b/1.png", "b/2.JPG"]


def test_links_between_folders_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    picture(1).save(tmp_path / "b" / "1.png")
    for i in range(12):  # each of them doubles the number of paths
        (tmp_path / "a" / f"again{i}").symlink_to(tmp_path)
        (tmp_path / "a" / f"other{i}").symlink_to(tmp_path / "b")
        (tmp_path / "b" / f"again{i}").symlink_to(tmp_path / "a")
    assert find_images(tmp_path) == ["b/1.png"], "by its own folder"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "class").symlink_to(tmp_path / "b")
    assert find_images(elsewhere) == ["class/1.png"], "a link to a class folder is followed"
