"""Synthetic unit vectors near centers or anywhere, and files of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.search import Embeddings
from dualenc.search.embed.writer import EmbeddingWriter

Draw = np.random.Generator


def near(points: np.ndarray, noise: float, draw: Draw) -> np.ndarray:
    """Return a float32 unit vector near each point, (N, D); components have Gaussian noise."""
    vectors = points + noise * draw.standard_normal(points.shape, dtype=points.dtype)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32, copy=False)


def around(centers: np.ndarray, count: int, noise: float, draw: Draw) -> np.ndarray:
    """Return unit vectors (count, D), each near one of the centers (C, D)."""
    return near(centers[draw.integers(len(centers), size=count)], noise, draw)


class Numbered(Sequence[str]):
    """The ids d0, d1, …, which are never all in memory."""

    def __init__(self, count: int) -> None:
        self.rows = range(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        return [f"d{i}" for i in self.rows[row]] if isinstance(row, slice) else f"d{self.rows[row]}"


def write_embeddings(
    folder: Path, count: int, dim: int, dtype: str, block: Callable[[range], np.ndarray]
) -> Embeddings:
    """Write the vectors that `block` returns for ranges of rows, like `dualenc embed`."""
    writer = EmbeddingWriter(folder, Numbered(count), dim, dtype, {"normalized": True})
    return writer.write_all(lambda number: (block(writer.ranges[number]), []))


def map_random(file: Path, count: int, dim: int, draw: Draw) -> np.ndarray:
    """Write random unit vectors (count, D) in half precision, and map the file into memory."""
    vectors = np.lib.format.open_memmap(file, "w+", np.float16, (count, dim))
    for start in range(0, count, 2**16):
        block = vectors[start : start + 2**16]
        block[:] = near(np.zeros(block.shape, np.float32), 1, draw)
    return vectors
