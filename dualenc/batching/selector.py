"""Batch selection: the base class, the loss of batches, and random batches."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy.special import logsumexp

from dualenc.errors import DualencError

CHUNK_BYTES = 2**24
"""Memory of the batches whose losses `batch_losses` computes at a time."""


class BatchSelector(ABC):
    """Chooses the training pairs of each batch, once per epoch.

    A subclass implements `select`. Batches are full: N mod B random pairs sit out each epoch.

    Example:
        class SequentialBatches(BatchSelector):
            def select(self, epoch, left=None, right=None):
                used = self.num_batches * self.batch_size
                return np.arange(used).reshape(-1, self.batch_size)

        SequentialBatches(num_pairs=7, batch_size=3).select(epoch=0)  # [[0, 1, 2], [3, 4, 5]]

    Args:
        num_pairs: number of training pairs, N.
        batch_size: number of pairs in each global batch, B.
        seed: random seed; equal embeddings and equal (seed, epoch) give equal batches.

    Raises:
        DualencError: a size is below 1, the seed is negative, or B exceeds N.
    """

    needs_embeddings: bool = False
    """True if `select` uses embeddings; the trainer then collects them."""
    uniform: bool = False
    """True if all pairs are equally likely to share a batch."""

    def __init__(self, num_pairs: int, batch_size: int, seed: int = 0) -> None:
        check_at_least(1, num_pairs=num_pairs, batch_size=batch_size)
        check_at_least(0, seed=seed)
        if batch_size > num_pairs:
            raise DualencError(
                f"batch_size {batch_size} exceeds num_pairs {num_pairs}",
                fix=f"choose a batch_size of at most {num_pairs}",
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
        """Choose the batches of an epoch.

        Args:
            epoch: number of the epoch, from 0; each epoch has its own random choices.
            left: (N, D) unit-norm embeddings of the left items. Without them, as in the first
                epoch, every selector returns random batches.
            right: (N, D) unit-norm embeddings of the right items; by default the left ones.

        Returns:
            (num_batches, B) int64 pair indices. No pair occurs twice in a batch.
        """

    def generator(self, epoch: int) -> Generator:
        """Return the random generator of one epoch."""
        # A fresh generator per epoch, so that a resumed run needs no generator state.
        return np.random.default_rng([self.seed, epoch])

    def random_batches(self, draw: Generator) -> ndarray:
        """Return a random partition of the pairs, (N // B, B)."""
        order = draw.permutation(self.num_pairs)
        num_used = self.num_pairs - self.num_pairs % self.batch_size
        return order[:num_used].reshape(-1, self.batch_size)

    def check_embeddings(self, left: ndarray, right: ndarray | None) -> tuple[ndarray, ndarray]:
        """Return both sides as finite float32 (N, D)."""
        checked_left = self._checked_side("left", left)
        if right is None or right is left:
            return checked_left, checked_left
        checked_right = self._checked_side("right", right)
        if checked_left.shape != checked_right.shape:
            raise DualencError(
                f"left embeddings have shape {checked_left.shape} and right {checked_right.shape}",
                fix="both towers must give vectors of one dimension",
            )
        return checked_left, checked_right

    def _checked_side(self, side: str, embeddings: ndarray) -> ndarray:
        rows = np.asarray(embeddings, dtype=np.float32)
        if rows.ndim != 2 or len(rows) != self.num_pairs:
            raise DualencError(
                f"{side} embeddings have shape {rows.shape}",
                fix=f"expected ({self.num_pairs}, D), one row per training pair",
            )
        # One NaN would make every comparison with it false, corrupting the whole partition.
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = int(finite.argmin())
            raise DualencError(
                f"{side} embeddings contain a NaN or infinity in row {row}",
                fix="has the training diverged?",
            )
        return rows


def check_at_least(lowest: float, **arguments: float) -> None:
    """Raise a `DualencError` for an argument below `lowest`."""
    for name, value in arguments.items():
        # Written so that NaN fails, too.
        if not value >= lowest:
            raise DualencError(f"{name} is {value}", fix=f"choose at least {lowest}")


def batch_losses(left: ndarray, right: ndarray, batches: ndarray, temperature: float) -> ndarray:
    """Return the InfoNCE loss of each batch in nats, (num_batches,) float64.

    The loss is the mean of both directions, half of Eq. 2 in Cho et al. 2023, arXiv:2307.05906. It
    is computed in numpy, because batching does not import objectives.

    Args:
        left: (N, D) unit-norm embeddings of the left items.
        right: (N, D) unit-norm embeddings of the right items.
        batches: (num_batches, B) pair indices.
        temperature: softmax temperature τ, above 0.
    """
    num_batches, batch_size = batches.shape
    # Bytes per pair: two float32 rows, and a row of B logits with the temporaries of logsumexp.
    per_pair = 4 * (2 * left.shape[1] + 5 * batch_size)
    step = max(1, CHUNK_BYTES // (batch_size * per_pair))
    losses = np.empty(num_batches)
    for start in range(0, num_batches, step):
        rows = batches[start : start + step]
        logits = np.matmul(left[rows], right[rows].swapaxes(1, 2))  # (chunk, B, B)
        logits /= temperature
        positives = np.diagonal(logits, axis1=1, axis2=2)
        # Axis 1 holds the left anchors of a right item, axis 2 the right candidates of a left one.
        left_losses = logsumexp(logits, axis=1) - positives
        right_losses = logsumexp(logits, axis=2) - positives
        per_anchor = [left_losses, right_losses]
        # Averaged in float64: a batch has up to thousands of anchors.
        losses[start : start + step] = np.mean(per_anchor, axis=(0, 2), dtype=np.float64)
    return losses


class RandomBatches(BatchSelector):
    """A random partition of the pairs in each epoch (SGD without replacement).

    This is the default of `Trainer`. Source: Cho et al. 2023, arXiv:2307.05906, Algorithm 4.

    Example:
        RandomBatches(num_pairs=100, batch_size=8).select(epoch=0).shape  # (12, 8)

    The arguments and errors are those of `BatchSelector`.
    """

    uniform = True

    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """Return (num_batches, B) int64 pair indices of an epoch; embeddings are ignored."""
        return self.random_batches(self.generator(epoch))
