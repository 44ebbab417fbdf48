"""The vectors to index as a stream of float32 blocks, so that a database larger than memory is never copied whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dualenc.embeddings import Embeddings
from dualenc.errors import DualencError
from dualenc.index.factory import Metric

UNIT_TOLERANCE = 1e-6
"""Vectors whose squared length differs from one by less are taken as normalised."""
STORED_TOLERANCE = 0.02
"""How far the squared length of stored unit vectors may be from one: half precision rounds each number by 5e-4."""


class Database:
    """N vectors as the metric wants them: float32, finite, of unit norm for "cosine".

    Args:
        embeddings: the vectors; those that say `normalized` in their meta are checked and taken as they are.
        metric: "cosine" or "ip".
    """

    def __init__(self, embeddings: Embeddings, metric: Metric) -> None:
        self.embeddings = embeddings
        self.is_trusted = bool(embeddings.meta.get("normalized"))
        self.metric = metric

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Some vectors, (n, D), in the order of `rows`.

        Raises:
            DualencError: a vector is not finite, or not of length one though it should be.
        """
        return self._ready(self.embeddings.vectors[rows], rows)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in order, a block at a time.

        Raises:
            DualencError: a vector is not finite, or not of length one though it should be.
        """
        start = 0
        for block in self.embeddings.blocks():
            yield self._ready(block, range(start, start + len(block)))
            start += len(block)

    def sample(self, count: int, seed: int) -> np.ndarray:
        """Numbers of `count` rows drawn without replacement, ascending."""
        return np.sort(np.random.default_rng(seed).choice(len(self), min(count, len(self)), replace=False))

    def _ready(self, block: np.ndarray, rows: range | np.ndarray) -> np.ndarray:
        block = np.ascontiguousarray(block, dtype=np.float32)

        def name(i: int) -> str:
            return repr(self.embeddings.ids[rows[i]])

        if not self.is_trusted:
            return ready(block, self.metric, name)
        squares = _squares(block, name)
        wrong = (np.abs(squares - 1) > STORED_TOLERANCE) & (squares > 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            length = f"{np.sqrt(squares[row]):.3g}"
            raise DualencError(f"the vector of {name(row)} has length {length} instead of 1; embed the data again")
        return block


def ready(vectors: np.ndarray, metric: Metric, name: Callable[[int], str] = "row {}".format) -> np.ndarray:
    """Float32 vectors (n, D), checked to be finite, and scaled to length one for "cosine"; zero stays zero.

    Args:
        vectors: (n, D) float32; returned as they are where nothing is to do.
        metric: "cosine" or "ip".
        name: what to call a row in an error.

    Raises:
        DualencError: a vector is not finite.
    """
    squares = _squares(vectors, name)
    if metric == "ip" or (np.abs(squares - 1) < UNIT_TOLERANCE).all():
        return vectors
    return vectors / np.sqrt(np.where(squares == 0, 1, squares))[:, None]


def _squares(vectors: np.ndarray, name: Callable[[int], str]) -> np.ndarray:
    """Squared lengths (n,) of vectors (n, D), all of them finite."""
    # One pass: a square is finite exactly if no number of the row is NaN or infinite (or beyond 1e19).
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)
    if not np.isfinite(squares).all():
        row = int(np.flatnonzero(~np.isfinite(squares))[0])
        raise DualencError(f"the vector of {name(row)} is not finite; embed it again or leave it out")
    return squares
