"""Data fingerprints: checksums of item contents, to refuse resuming on changed data.

They do not depend on workers, processes or the location of the data. Sets up to a size are
identified by their contents alone. For larger ones a sample of the contents is read, and sizes and
modification times of all files count too, so copy them with their times (`cp -p`, `rsync -t`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dualenc.errors import BadSample
from dualenc.io.reading import open_regular
from dualenc.types import Items, Modality

MAX_TEXTS = 1 << 21
"""Sets of more texts are sampled."""
MAX_IMAGES = 1 << 16
"""Sets of more images are sampled."""
SAMPLED_TEXTS = 1 << 18
SAMPLED_IMAGES = 1 << 12

_TEXT_BLOCK = 1 << 14
_IMAGE_BLOCK = 1 << 8  # items whose contents are in memory at the same time
_MAX_BYTES = 1 << 26  # larger files are identified by size and time


def items_identity(items: Items, modality: Modality = "text") -> str:
    """Return a checksum of N raw items in their order, in hexadecimal.

    Vectors, and up to 2,097,152 texts or 65,536 images, are read in full. Of more items a fixed
    random sample (262,144 texts, 4,096 images) is read; the others count by the length of a text,
    or the size and time of a file. A collection may have a method `item_identity(row, read) ->
    bytes` that identifies an item without decoding it.
    """
    is_image = modality == "image"
    max_read = MAX_IMAGES if is_image else MAX_TEXTS
    block = _IMAGE_BLOCK if is_image else _TEXT_BLOCK
    all_rows = np.arange(len(items))
    # Each pass adds some rows, with or without reading their contents.
    passes = [(all_rows, True)]
    if len(items) > max_read and modality != "vector":
        # A fixed seed, so that every process and every run reads the same sample.
        size = SAMPLED_IMAGES if is_image else SAMPLED_TEXTS
        draws = np.random.default_rng(0).integers(len(items), size=size)
        passes = [(all_rows, False), (np.unique(draws), True)]
    digest = hashlib.blake2b(f"{len(items)} {modality}".encode(), digest_size=16)
    for rows, read in passes:
        for start in range(0, len(rows), block):
            _add(digest, identities(items, rows[start : start + block], read))
    return digest.hexdigest()


def identities(items: Items, rows: np.ndarray, read: bool) -> list[bytes]:
    """Return the identity of each item of some rows (n,): contents (`read`), or cheap metadata."""
    return [item_identity(items, row, read) for row in rows.tolist()]


def item_identity(items: Items, row: int, read: bool) -> bytes:
    """Return the identity of one item."""
    if hasattr(items, "item_identity"):
        return items.item_identity(row, read)
    try:
        return contents(items[row]) if read else b""
    except (BadSample, OSError):
        return b"unreadable"


def file_identity(path: Path, read: bool = True) -> bytes:
    """Return size and contents of a file, or size and time if it is not read or exceeds 64 MiB."""
    try:
        with open_regular(path) as stream:
            status = path.stat()
            if not read or status.st_size > _MAX_BYTES:
                return f"{status.st_size} {status.st_mtime_ns}".encode()
            digest = hashlib.blake2b(stream.read(), digest_size=16)
            return f"{status.st_size} {digest.hexdigest()}".encode()
    except (OSError, ValueError):
        return b"unreadable"


def digest_of(*parts: str | bytes | np.ndarray | Iterable[str] | None) -> str:
    """Return a checksum of strings, bytes, arrays and lists of strings; None is skipped."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if part is None:
            continue
        values: Iterable[Any] = [part] if isinstance(part, (str, bytes)) else part
        if isinstance(part, np.ndarray):
            # The same bytes may be an array of another type or shape.
            values = [f"{part.dtype.str}{part.shape}", part]
        _add(digest, [contents(value) for value in values])
    return digest.hexdigest()


def plain_values(part: object) -> dict[str, str | int | float]:
    """Return the settings of an object: its attributes that are texts or numbers."""
    return {
        name: value for name, value in vars(part).items() if isinstance(value, str | int | float)
    }


def _add(digest: hashlib.blake2b, values: Sequence[bytes]) -> None:
    """Add values, preceded by their lengths so that different lists cannot collide."""
    digest.update(np.array([len(values), *map(len, values)], dtype="<i8").tobytes())
    digest.update(b"".join(values))


def contents(item: Any) -> bytes:
    """Return a text, vector, image or bytes as bytes, equal for equal items."""
    if isinstance(item, Image.Image):
        # The same pixels may be an image of another mode or size.
        return f"{item.mode} {item.size} ".encode() + item.tobytes()
    if isinstance(item, np.ndarray):
        return item.tobytes()
    return item if isinstance(item, bytes) else str(item).encode(errors="surrogatepass")
