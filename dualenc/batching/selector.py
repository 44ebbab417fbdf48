"""Batch selection: the base class, the loss of batches, and random batches."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy.special import logsumexp

from dualenc.errors import DualencError

CHUNK_BYTES = 2**24  # of the batches whose losses are computed at a time


class BatchSelector(ABC):
    """Chooses the training pairs of each batch; N mod B random pairs are left out of an epoch.

    Args:
        num_pairs: N, the number of training pairs.
        batch_size: B, pairs in each (global) batch.
        seed: of all random choices; with equal embeddings, equal (seed, epoch) give equal batches.
    """

    needs_embeddings: bool = False
    uniform: bool = False
    """Whether all pairs are equally likely to share a batch."""

    def __init__(self, num_pairs: int, batch_size: int, seed: int = 0) -> None:
        check_at_least(1, num_pairs=num_pairs, batch_size=batch_size)
        check_at_least(0, seed=seed)
        if batch_size > num_pairs:
            raise DualencError(
                f"batch_size {batch_size} exceeds num_pairs {num_pairs}; choose a batch_size of at most {num_pairs}"
            )
        self.num_pairs = num_pairs
        self.batch_size = batch_size
        self.seed = seed

    @property
    def num_batches(self) -> int:
        """Batches in one epoch."""
        return self.num_pairs // self.batch_size

    @abstractmethod
    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """Choose the batches of an epoch, (num_batches, B) int64 pair indices; a pair is in a batch
        at most once.

        Args:
            epoch: ≥ 0; each epoch has its own draws.
            left: (N, D) unit-norm embeddings of the left side. Without them (in the first epoch)
                every selector returns random batches.
            right: (N, D) embeddings of the right side; by default those of the left.
        """

    def generator(self, epoch: int) -> Generator:
        """The random generator of one epoch."""
        return np.random.default_rng([self.seed, epoch])

    def random_batches(self, draw: Generator) -> ndarray:
        """(N // B, B): a random partition of the pairs."""
        number = self.num_pairs // self.batch_size
        return draw.permutation(self.num_pairs)[: number * self.batch_size].reshape(
            number, self.batch_size
        )

    def check_embeddings(self, left: ndarray, right: ndarray | None) -> tuple[ndarray, ndarray]:
        """Both sides as finite float32 (N, D)."""
        checked_left = self._checked_side("left", left)
        if right is None or right is left:
            return checked_left, checked_left
        checked_right = self._checked_side("right", right)
        if checked_left.shape != checked_right.shape:
            raise DualencError(
                f"left embeddings have shape {checked_left.shape} and right {checked_right.shape}; "
                "both towers must give vectors of one dimension"
            )
        return checked_left, checked_right

    def _checked_side(self, side: str, embeddings: ndarray) -> ndarray:
        rows = np.asarray(embeddings, dtype=np.float32)
        if rows.ndim != 2 or len(rows) != self.num_pairs:
            expected = f"({self.num_pairs}, D), one row per training pair"
            raise DualencError(f"{side} embeddings have shape {rows.shape}; expected {expected}")
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = int(finite.argmin())
            raise DualencError(
                f"{side} embeddings hold a NaN or an infinity in row {row}; has the training diverged?"
            )
        return rows


def check_at_least(lowest: float, **arguments: float) -> None:
    """Raise a `DualencError` for an argument below `lowest`."""
    for name, value in arguments.items():
        if not value >= lowest:
            raise DualencError(f"{name} is {value}; choose at least {lowest}")


def batch_losses(left: ndarray, right: ndarray, batches: ndarray, temperature: float) -> ndarray:
    """Loss of each batch, (num_batches,) float64 in nats: the `InfoNCE` objective of its pairs.

    The mean of both directions, so half of Eq. 2 in Cho et al. 2023, arXiv:2307.05906. In numpy,
    since batching imports no objective.

    Args:
        left, right: (N, D) unit-norm embeddings.
        batches: (num_batches, B) pair indices.
        temperature: τ > 0.
    """
    num_batches, batch_size = batches.shape
    per_pair = 4 * (2 * left.shape[1] + 5 * batch_size)
    step = max(1, CHUNK_BYTES // (batch_size * per_pair))
    losses = np.empty(num_batches)
    for start in range(0, num_batches, step):
        rows = batches[start : start + step]
        logits = np.matmul(left[rows], right[rows].swapaxes(1, 2))  # (chunk, B, B)
        logits /= temperature
        positives = np.diagonal(logits, axis1=1, axis2=2)
        per_anchor = [
            logsumexp(logits, axis=axis) - positives for axis in (1, 2)
        ]  # of each direction
        losses[start : start + step] = np.mean(per_anchor, axis=(0, 2), dtype=np.float64)
    return losses


class RandomBatches(BatchSelector):
    """A random partition of the pairs in each epoch (SGD without replacement).

    Source: Cho et al. 2023, arXiv:2307.05906, Algorithm 4. Arguments and errors as of
    `BatchSelector`.
    """

    uniform = True

    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """(num_batches, B) int64 pair indices of an epoch ≥ 0; embeddings are ignored."""
        return self.random_batches(self.generator(epoch))
