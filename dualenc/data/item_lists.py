"""Collections of items over other collections.

Each has a method `item_identity(row, read)` for `dualenc.data.store.identity`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from dualenc.data.store.identity import contents, item_identity
from dualenc.data.store.vector_shards import Array
from dualenc.errors import BadSample
from dualenc.types import Integers, Items


class Picked:
    """Some items of another collection, in the order of `positions`."""

    def __init__(self, items: Items, positions: Integers) -> None:
        self.items = items
        self.positions = np.asarray(positions, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        return self.items[int(self.positions[index])]

    def item_identity(self, row: int, read: bool) -> bytes:
        """Return the identity of the picked item."""
        return item_identity(self.items, int(self.positions[row]), read)


class VectorsById(Picked):
    """Vectors picked by id: equal vectors with different ids are different items."""

    def key(self, index: int) -> int:
        """Return the vector's position, which stands for its id."""
        return int(self.positions[index])


class Joined:
    """The concatenated items of several collections, which begin at `starts`.

    Texts are prefixed with the prompt of their collection.
    """

    def __init__(self, parts: Sequence[Items], prompts: Sequence[str] | None = None) -> None:
        self.parts = list(parts)
        self.prompts = list(prompts or [""] * len(parts))
        sizes = [len(part) for part in parts]
        self.starts = [0, *np.cumsum(sizes).tolist()]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Any:
        # `starts` also holds the end, so that an index past the end raises an IndexError below.
        number = bisect_right(self.starts, index) - 1
        item = self.parts[number][index - self.starts[number]]
        prompt = self.prompts[number]
        return prompt + item if prompt else item

    def key(self, index: int) -> Any:
        """Return the item's key in its collection."""
        number = bisect_right(self.starts, index) - 1
        return item_key(self.parts[number], index - self.starts[number])

    def item_identity(self, row: int, read: bool) -> bytes:
        """Return the item's identity, with the prompt of its collection."""
        number = bisect_right(self.starts, row) - 1
        # The prompt is part of the text that is trained on.
        own = item_identity(self.parts[number], row - self.starts[number], read)
        return self.prompts[number].encode() + own


class VectorItems:
    """The rows of a matrix (N, D) as items (D,) float32, read from the file on access."""

    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, index: int) -> np.ndarray:
        # A copy, so that an item in a batch does not keep the mapped file open.
        return np.array(self.matrix[int(index)], dtype=np.float32)

    def item_identity(self, row: int, read: bool) -> bytes:
        """Return the vector as float32 bytes; it is always read, since it lacks metadata."""
        return self[row].tobytes()


def item_key(items: Items, row: int) -> Any:
    """Return a value that is equal for equal items: the collection's `key`, or the item.

    A `key` avoids decoding the item.
    """
    return items.key(row) if hasattr(items, "key") else items[row]


def distinct_items(
    items: Items, positions: Integers, deduplicate: bool = True
) -> tuple[Picked, Integers]:
    """Find equal items by 128-bit digests of their keys (16 MB per million).

    A collection may have `key_sizes` (N,): a key of a unique size is distinct without being read.

    Args:
        items: the collection.
        positions: positions of the items to number, (n,).
        deduplicate: False to give each position its own number.

    Returns:
        The first of each distinct item, k in order of appearance; the number in [0, k) of each
        position (n,).
    """
    if not deduplicate:
        return Picked(items, positions), np.arange(len(positions))
    # 128 bits: with 64, two of a few billion items would collide by chance.
    # An item that is not read, or cannot be, gets its row as digest: it is equal to none.
    digests = np.arange(len(positions)).astype("S16")
    to_read = np.arange(len(positions))
    if hasattr(items, "key_sizes"):
        sizes = items.key_sizes[positions]
        # Reading millions of images to compare them takes hours; most have a unique file size.
        _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        to_read = np.flatnonzero(counts[inverse] > 1)
    for row in tqdm(to_read, desc="finding equal items", delay=2, leave=False):
        with suppress(BadSample):
            key = contents(item_key(items, int(positions[row])))
            digests[row] = hashlib.blake2b(key, digest_size=16).digest()
    # Arrow numbers values by first appearance, so that ids do not depend on the hash.
    # It gets Python bytes, because it would cut NumPy's fixed-length bytes at the first zero.
    number = pa.array(digests.tolist(), pa.binary()).dictionary_encode().indices.to_numpy()
    _, first = np.unique(number, return_index=True)
    return Picked(items, np.asarray(positions)[first]), number
