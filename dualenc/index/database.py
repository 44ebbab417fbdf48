"""The vectors to index as a stream of float32 blocks, so that a database larger than memory is never copied whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dualenc.embeddings import Embeddings
from dualenc.errors import DualencError
from dualenc.index.factory import Metric


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
        """Some vectors, (n, D), in the order of `rows`."""
        return self._ready(self.embeddings.vectors[rows], 0)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in order, a block at a time.

        Raises:
            DualencError: a vector is not finite.
        """
        start = 0
        for block in self.embeddings.blocks():
            yield self._ready(block, start)
            start += len(block)

    def sample(self, count: int, seed: int) -> np.ndarray:
        """Numbers of `count` rows drawn without replacement, ascending."""
        return np.sort(np.random.default_rng(seed).choice(len(self), min(count, len(self)), replace=False))

    def _ready(self, block: np.ndarray, start: int) -> np.ndarray:
        block = np.ascontiguousarray(block, dtype=np.float32)
        if self.is_trusted:
            return block
        check_finite(block, self.embeddings.ids[start:] if start else self.embeddings.ids)
        return normalized(block) if self.metric == "cosine" else block


def normalized(vectors: np.ndarray) -> np.ndarray:
    """A copy of (n, D) float32 vectors scaled to length one; a zero vector stays zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms == 0, 1, norms)


def check_finite(vectors: np.ndarray, names: list[str] | None = None) -> None:
    """Insist that (n, D) vectors are finite.

    Raises:
        DualencError: naming the first that is not.
    """
    if np.isfinite(vectors.sum(dtype=np.float64)):
        return
    row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
    where = f"row {row}" if names is None else f"{names[row]!r}"
    raise DualencError(f"the vector of {where} is not finite; embed it again or leave it out")
