"""The vectors to index as a stream of float32 blocks, so that a database larger than memory is never copied whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dualenc.embeddings import Embeddings
from dualenc.errors import DualencError
from dualenc.index.factory import Metric

UNIT_TOLERANCE = 1e-6
"""Vectors whose squared length differs from one by less are taken as normalised."""


class Database:
    """N vectors as the metric wants them: float32, finite, of unit norm for "cosine".

    Args:
        embeddings: the vectors; those that say `normalized` in their meta are taken as they are.
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
            DualencError: a vector is not finite.
        """
        return self._ready(self.embeddings.vectors[rows], rows)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in order, a block at a time.

        Raises:
            DualencError: a vector is not finite.
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
        return block if self.is_trusted else ready(block, self.metric, lambda i: repr(self.embeddings.ids[rows[i]]))


def ready(vectors: np.ndarray, metric: Metric, name: Callable[[int], str] = "row {}".format) -> np.ndarray:
    """Float32 vectors (n, D), checked to be finite, and scaled to length one for "cosine"; zero stays zero.

    Args:
        vectors: (n, D) float32; returned as they are where nothing is to do.
        metric: "cosine" or "ip".
        name: what to call a row in an error.

    Raises:
        DualencError: a vector is not finite.
    """
    # One pass: a square is finite exactly if no number of the row is NaN or infinite (or beyond 1e19).
    squares = np.einsum("nd,nd->n", vectors, vectors)
    if not np.isfinite(squares).all():
        row = int(np.flatnonzero(~np.isfinite(squares))[0])
        raise DualencError(f"the vector of {name(row)} is not finite; embed it again or leave it out")
    if metric == "ip" or (np.abs(squares - 1) < UNIT_TOLERANCE).all():
        return vectors
    return vectors / np.sqrt(np.where(squares == 0, 1, squares))[:, None]
