"""Image decoding: upright, three channels, 8 bits; what cannot be decoded is a bad sample."""

from __future__ import annotations

import io
import re
import warnings
from contextlib import suppress
from functools import cache
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from dualenc.errors import BadSample, DualencError, first_line
from dualenc.io.reading import open_regular
from dualenc.types import StrPath

MAX_BYTES = 256 << 20
"""Larger image files are not read."""
MAX_PIXELS = 89_478_485
"""Images with more pixels are not decoded (a quarter of a GB in memory), unless
`PIL.Image.MAX_IMAGE_PIXELS` is set."""

_ORIENTATION = 0x0112  # EXIF tag
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's other plugins start programs (EPS), or do not report the true size (ICO)."""
_COMMON_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode the contents of an image file to an upright RGB image; errors name the file by
    `where`."""
    formats = _formats()
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data):,} bytes are more than {MAX_BYTES:,}")
        with warnings.catch_warnings():
            # Counted below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data), formats=formats)
        max_pixels = Image.MAX_IMAGE_PIXELS or MAX_PIXELS
        if image.width * image.height > max_pixels:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {max_pixels:,}")
        return _to_rgb(_upright(image))
    except UnidentifiedImageError:
        reason = f"it is no image of a known format: {', '.join(formats)}"
    except Exception as error:  # Pillow's plugins raise many kinds on broken files
        # In one line, without the address of the buffer that Pillow read from.
        reason = re.sub(r"<_io\.[^>]*>", "it", first_line(error))
    raise BadSample(f"{where}: image cannot be decoded ({reason}); replace or remove it")


def has_image_format(data: bytes) -> bool:
    """True if the contents of a file begin as one of the formats that are decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError:
        return False
    except Exception:  # Pillow's plugins raise many kinds on broken files
        return True
    return True


def _upright(image: Image.Image) -> Image.Image:
    """The image as it is, or turned as its EXIF data says."""
    return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB; a `ValueError` for pixels without a range that could be scaled
    to 8 bits."""
    # Pillow clips these modes to 0 ... 255. Of "I" only PNG and PPM are known to mean 16 bits.
    has_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if has_16_bits or image.mode.startswith("I;16"):
        integers = image.convert("I")
        image = integers.point(lambda value: value * (1 / 257) + 0.5).convert("L")
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels (mode {image.mode}) have no range of brightness; save it with 8 or 16 bits"
        )
    return image.convert("RGB")


def rgb_item(item: Any, where: str) -> Any:
    """A raw item as towers take it: images upright and as RGB, texts and vectors unchanged."""
    if not isinstance(item, Image.Image):
        return item
    try:
        item.load()  # of a file that was opened, the pixels may be read only now
        upright = _upright(item)
        return upright if upright.mode == "RGB" else _to_rgb(upright)
    except (ValueError, OSError) as error:
        raise BadSample(f"{where}: image cannot be used ({error})") from None


@cache
def image_suffixes() -> tuple[str, ...]:
    """The suffixes of the files that are decoded, in lower case, common ones first."""
    registered = Image.registered_extensions()
    names = {name for name, kind in registered.items() if kind in _FORMATS}
    return (*_COMMON_SUFFIXES, *sorted(names.difference(_COMMON_SUFFIXES)))


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def has_image(path: StrPath) -> bool:
    """True if a file begins as an image that can be decoded, whatever its name."""
    with (
        suppress(OSError, DualencError, ValueError),
        open_regular(path) as stream,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        Image.open(stream, formats=_formats())
        return True
    return False


def open_image(path: StrPath) -> Image.Image:
    """Read an image file as an upright RGB image."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadSample(
            f"{path}: image cannot be read ({error.strerror or error}); check the path"
        ) from None
    except (DualencError, ValueError) as error:
        raise BadSample(f"{path}: image cannot be read ({error}); check the path") from None
    return decode_image(data, str(path))
