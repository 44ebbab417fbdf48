"""Decoding images: always upright, three channels, 8 bits; what cannot be decoded is a bad sample."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dualenc.data.identity import file_identity
from dualenc.errors import BadSample, DualencError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")

_ORIENTATION = 0x0112  # EXIF tag


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode the bytes of an image file to an upright RGB image.

    Args:
        data: a whole image file.
        where: names the image in errors.

    Raises:
        BadSample: the bytes are not a complete image of a known format.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data))
            if image.getexif().get(_ORIENTATION, 1) != 1:
                image = ImageOps.exif_transpose(image)
            return image.convert("RGB")
    except Exception as error:  # Pillow's plugins raise many kinds on broken files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadSample(f"{where}: image cannot be decoded ({reason}); replace or remove it") from None


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read an image file as an upright RGB image.

    Raises:
        BadSample: the file is missing or does not decode.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadSample(f"{path}: image cannot be read ({error.strerror}); check the path") from None
    return decode_image(data, str(path))


class ImageFiles:
    """Items that are image files: `root / name` for each name."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.root, self.names = Path(root), list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Image.Image:
        return open_image(self.root / self.names[index])

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for: name and what `file_identity` tells."""
        names = (self.names[row] for row in rows.tolist())
        return [name.encode(errors="surrogateescape") + b" " + file_identity(self.root / name, read) for name in names]


def find_images(folder: str | os.PathLike[str]) -> list[str]:
    """Names of all images in a folder and its subfolders, relative to it with forward slashes, sorted.

    Raises:
        DualencError: no such folder, or no image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DualencError(f"{folder}: no such folder; give a folder of images")
    names = []
    for parent, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        inside = Path(parent).relative_to(root)
        names += [(inside / f).as_posix() for f in files if f.lower().endswith(IMAGE_SUFFIXES) and f[0] != "."]
    if not names:
        raise DualencError(f"{folder}: no image in this folder; known are {', '.join(IMAGE_SUFFIXES)}")
    return sorted(names)
