"""Image decoding: upright, RGB, 8 bits. An image that cannot be decoded is a `BadSample`."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import suppress
from functools import cache
from typing import IO, Any

from PIL import Image, ImageOps, UnidentifiedImageError

from dualenc.errors import BadSample, DualencError, first_line
from dualenc.io.reading import open_regular
from dualenc.types import StrPath

MAX_BYTES = 256 << 20
"""Maximum size of an image file; larger ones are not read."""
MAX_PIXELS = 89_478_485
"""Maximum number of pixels (a quarter of a GB in memory), unless `PIL.Image.MAX_IMAGE_PIXELS` is
set."""

_ORIENTATION = 0x0112  # EXIF tag
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded. Pillow's other plugins start programs (EPS) or misreport the size
(ICO)."""
_COMMON_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode the contents of an image file to an upright RGB image.

    Args:
        data: contents of the file.
        where: name of the file, for errors.

    Raises:
        BadSample: the image cannot be decoded, or is too large.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data):,} bytes are more than {MAX_BYTES:,}")
        image = _open(io.BytesIO(data))
        max_pixels = Image.MAX_IMAGE_PIXELS or MAX_PIXELS
        if image.width * image.height > max_pixels:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {max_pixels:,}")
        # A copy does not refer to the file any more. Without metadata, `rgb_item` need not look for
        # an orientation again.
        decoded = _upright_rgb(image).copy()
        decoded.info = {}
        return decoded
    except UnidentifiedImageError:
        reason = f"it is not an image of a known format: {', '.join(_formats())}"
    except Exception as error:  # Pillow's plugins raise many kinds on broken files
        # Without the address of the buffer that Pillow read from.
        reason = re.sub(r"<_io\.[^>]*>", "it", first_line(error))
    raise BadSample(f"image cannot be decoded ({reason})", fix="replace or remove it", where=where)


def has_image_format(data: bytes) -> bool:
    """Return True if file contents begin like one of the supported formats."""
    try:
        _open(io.BytesIO(data))
    except UnidentifiedImageError:
        return False
    except Exception:  # Pillow's plugins raise many kinds on broken files
        return True
    return True


def _open(stream: IO[bytes]) -> Image.Image:
    """Read the header of an image of a supported format; callers check the number of pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(stream, formats=_formats())


def _upright_rgb(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF orientation says, and convert it to RGB with 8 bits.

    Raise a `ValueError` if the range of its pixels is unknown.
    """
    image.load()  # a lazily opened file is read here
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    # Pillow would clip these modes to 0 … 255. "I" reliably means 16 bits in PNG and PPM only.
    has_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if has_16_bits or image.mode.startswith("I;16"):
        integers = image.convert("I")
        # 65,535 / 257 = 255; adding 0.5 rounds, because the conversion to "L" truncates.
        image = integers.point(lambda value: value * (1 / 257) + 0.5).convert("L")
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels (mode {image.mode}) have an unknown range; save it with 8 or 16 bits"
        )
    # Converted to its own mode, an image would be copied.
    return image if image.mode == "RGB" else image.convert("RGB")


def rgb_item(item: Any, where: str) -> Any:
    """Return a raw item in the form towers take: images upright and RGB, others unchanged."""
    if not isinstance(item, Image.Image):
        return item
    if type(item) is Image.Image and item.mode == "RGB" and not item.info:
        return item  # already decoded
    try:
        return _upright_rgb(item)
    except (ValueError, OSError) as error:
        raise BadSample(f"image cannot be used ({error})", where=where) from None


@cache
def image_suffixes() -> tuple[str, ...]:
    """Return the suffixes of supported files in lower case, common ones first."""
    registered = Image.registered_extensions()
    names = {name for name, kind in registered.items() if kind in _FORMATS}
    return (*_COMMON_SUFFIXES, *sorted(names.difference(_COMMON_SUFFIXES)))


@cache
def _formats() -> tuple[str, ...]:
    """Return the supported formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def has_image(path: StrPath) -> bool:
    """Return True if a file begins like a supported image, whatever its name."""
    with suppress(OSError, DualencError, ValueError), open_regular(path) as stream:
        _open(stream)
        return True
    return False


def open_image(path: StrPath) -> Image.Image:
    """Read an image file as an upright RGB image."""
    try:
        with open_regular(path) as stream:
            # One byte more than allowed: `decode_image` then refuses the file as too large.
            data = stream.read(MAX_BYTES + 1)
    except (OSError, DualencError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadSample(
            f"image cannot be read ({reason})", fix="check the path", where=path
        ) from None
    return decode_image(data, str(path))
