"""Vectors as items: rows of a matrix, the faults that vectors may have, and .npy files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.vector_shards import Array
from dualenc.errors import DualencError, explain

_BLOCK = 1 << 14  # rows that are checked together

Faults = dict[str, tuple[np.ndarray, str]]
"""Why values cannot be used: by reason, which of them (n,) bool, and how to fix it."""


class VectorItems:
    """The rows of a matrix (N, D) as items (D,) float32, read from the file when they are requested."""

    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array(self.matrix[int(index)], dtype=np.float32)

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """The numbers as float32, always read: nothing is known of a vector without them."""
        return [row.tobytes() for row in np.asarray(self.matrix[rows], dtype=np.float32)]


def matrix_faults(matrix: Array) -> Faults:
    """Which rows of a matrix (n, D) are not finite or zero."""
    squares = np.zeros(len(matrix))
    for start in range(0, len(matrix), _BLOCK):
        block = np.asarray(matrix[start : start + _BLOCK], dtype=np.float64)
        squares[start : start + _BLOCK] = np.einsum("nd,nd->n", block, block)
    return {
        "vector that is not finite": (~np.isfinite(squares), "embed it again or remove it"),
        "vector of zeros": (squares == 0, "it has no direction; remove it"),
    }


def usable(faults: Faults, count: int) -> np.ndarray:
    """Which of so many values have no fault, (count,) bool."""
    result = np.ones(count, dtype=bool)
    for bad, _ in faults.values():
        result &= ~bad
    return result


def load_npy(path: Path) -> np.ndarray:
    """Map a .npy file of shape (N, D) into memory, one vector (D,) as (1, D); pickled objects are never loaded."""
    if not path.is_file():
        raise DualencError(f"{path}: no such file; give a .npy file of shape (N, D)")
    with explain(f"{path}: no readable .npy file", "write it with numpy.save"):
        matrix: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or not matrix.size or matrix.dtype.kind not in "fiu":
        contents = f"{matrix.dtype} of shape {matrix.shape}"
        raise DualencError(f"{path}: holds {contents}, where numbers of shape (N, D) are needed")
    return matrix
