"""What every batch selector shares, the loss of batches, and the selectors that need nothing else: random and OSGD."""

from __future__ import annotations

import difflib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from dualenc.errors import DualencError

Remainder = Literal["drop", "wrap"]
MAX_COMBINATIONS = 1_000_000
logger = logging.getLogger(__name__)


class BatchSelector(ABC):
    """Decides which training pairs meet in a batch.

    Args:
        num_pairs: N, the number of training pairs.
        batch_size: B, pairs in each (global) batch.
        seed: of all random choices; with equal embeddings, equal (seed, epoch) give equal batches.
        remainder: when B does not divide N: "drop" leaves N mod B random pairs out of the epoch; "wrap" adds
            one batch of them, filled up with other random pairs.

    Raises:
        DualencError: an argument is out of its range.
    """

    needs_embeddings: bool = False
    uniform: bool = False
    """Whether any pairs are equally likely to meet in a batch."""

    def __init__(self, num_pairs: int, batch_size: int, seed: int = 0, remainder: Remainder = "drop") -> None:
        check_at_least(1, num_pairs=num_pairs, batch_size=batch_size)
        check_at_least(0, seed=seed)
        check_choice("remainder", remainder, ("drop", "wrap"))
        if batch_size > num_pairs:
            raise DualencError(
                f"batch_size {batch_size} exceeds num_pairs {num_pairs}; choose a batch_size of at most {num_pairs}"
            )
        self.num_pairs, self.batch_size, self.seed, self.remainder = num_pairs, batch_size, seed, remainder

    @property
    def num_batches(self) -> int:
        """Batches in one epoch."""
        return self.partition_size

    @property
    def partition_size(self) -> int:
        """Batches in a partition of the pairs."""
        whole, rest = divmod(self.num_pairs, self.batch_size)
        return whole + (rest > 0 and self.remainder == "wrap")

    @abstractmethod
    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """Choose the batches of an epoch.

        Args:
            epoch: ≥ 0; each epoch draws anew.
            left: (N, D) unit-norm embeddings of the left side. While there are none (the first epoch), every
                selector returns random batches.
            right: (N, D) embeddings of the right side; by default those of the left.

        Returns:
            (num_batches, B) int64 pair indices; a pair is in a batch at most once.

        Raises:
            DualencError: the embeddings have another shape, or hold a NaN or an infinity.
        """

    def left_out(self, batches: np.ndarray) -> int:
        """How many of the N pairs are in none of the batches (num_batches, B)."""
        return self.num_pairs - np.unique(batches).size

    def generator(self, epoch: int) -> np.random.Generator:
        """The random draws of one epoch."""
        check_at_least(0, epoch=epoch)
        return np.random.default_rng([self.seed, epoch])

    def random_batches(self, draw: np.random.Generator) -> np.ndarray:
        """(partition_size, B): a random partition of the pairs; with "wrap", the batch that repeats some is last."""
        shuffled = draw.permutation(self.num_pairs)
        # np.resize cuts the end off, or starts again from the beginning: whose pairs the last batch lacks.
        return np.resize(shuffled, (self.partition_size, self.batch_size)).astype(np.int64, copy=False)

    def check_embeddings(self, left: np.ndarray, right: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Both sides as finite float32 (N, D)."""
        checked: list[np.ndarray] = []
        for side, given in (("left", left), ("right", right)):
            if checked and (given is None or given is left):
                return checked[0], checked[0]
            rows = np.asarray(given, dtype=np.float32)
            if rows.ndim != 2 or len(rows) != self.num_pairs or rows.shape[1] == 0:
                expected = f"({self.num_pairs}, D), one row per training pair"
                raise DualencError(f"{side} embeddings have shape {rows.shape}; expected {expected}")
            for start in range(0, len(rows), 65536):
                broken = ~np.isfinite(rows[start : start + 65536]).all(axis=1)
                if broken.any():
                    raise DualencError(
                        f"{side} embeddings hold a NaN or an infinity in row {start + int(broken.argmax())}; "
                        "has the training diverged?"
                    )
            checked.append(rows)
        if checked[0].shape != checked[1].shape:
            raise DualencError(
                f"left embeddings have shape {checked[0].shape} and right {checked[1].shape}; "
                "both towers must give vectors of one dimension"
            )
        return checked[0], checked[1]


def check_at_least(lowest: float, **arguments: float) -> None:
    """Raise a `DualencError` for an argument below `lowest`."""
    for name, value in arguments.items():
        if not value >= lowest:
            raise DualencError(f"{name} is {value}; choose at least {lowest}")


def check_temperature(temperature: float) -> None:
    """Raise a `DualencError` for a τ that is not positive."""
    if not temperature > 0:
        raise DualencError(f"temperature is {temperature}; choose a number above 0")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a `DualencError`, with the nearest valid value, for a string that is not among the choices."""
    if value not in choices:
        nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise DualencError(f"{name} is {value!r}; did you mean {nearest!r}? Valid: {', '.join(choices)}")


def batch_losses(
    left: np.ndarray, right: np.ndarray, batches: np.ndarray, temperature: float, chunk_bytes: int = 1 << 24
) -> np.ndarray:
    """Loss of each batch: the `InfoNCE` objective of its pairs; `.mean()` is that of the epoch.

    The mean of both directions, so half of Eq. 2 in Cho et al. 2023, arXiv:2307.05906. Here in numpy and many
    batches at a time, since batching imports no objective.

    Args:
        left, right: (N, D) unit-norm embeddings.
        batches: (num_batches, B) pair indices.
        temperature: τ > 0.
        chunk_bytes: about how much memory to work in.

    Returns:
        (num_batches,) float64, in nats.

    Raises:
        DualencError: the temperature is not positive.
    """
    check_temperature(temperature)
    num_batches, batch_size = batches.shape
    per_batch = 4 * batch_size * (2 * left.shape[1] + 4 * batch_size)
    step = max(1, chunk_bytes // per_batch)
    losses = np.empty(num_batches)
    for start in range(0, num_batches, step):
        rows = batches[start : start + step]
        logits = np.matmul(left[rows], right[rows].swapaxes(1, 2)) / temperature  # (chunk, B, B)
        positives = np.diagonal(logits, axis1=1, axis2=2)
        both = np.zeros(len(rows))
        for axis in (1, 2):  # log Σ exp(logit) − positive logit, mean over the anchors of one direction
            highest = logits.max(axis=axis, keepdims=True)
            log_sums = (highest + np.log(np.exp(logits - highest).sum(axis=axis, keepdims=True))).squeeze(axis)
            both += (log_sums - positives).mean(axis=1, dtype=np.float64)
        losses[start : start + step] = both / 2
    return losses


class RandomBatches(BatchSelector):
    """A random partition of the pairs in each epoch (SGD without replacement).

    Source: Cho et al. 2023, arXiv:2307.05906, Algorithm 4. Arguments and errors as of `BatchSelector`.
    """

    uniform = True

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """(num_batches, B) int64 pair indices of an epoch ≥ 0; embeddings make no difference."""
        return self.random_batches(self.generator(epoch))


class OSGDBatches(BatchSelector):
    """Of each k random batches, the q with the largest loss; the other pairs are left out of the epoch.

    By default the k batches are disjoint (Algorithm 6, without replacement): an epoch is a random partition into
    N/B batches, cut into windows of k. With `exhaustive` the q come from all C(N, B) batches (Algorithm 5 with
    k = C(N, B)), for small N: one call of `select` is one iteration, and its batches may share pairs.
    How many pairs an epoch leaves out is logged; `left_out` counts them.

    Source: Cho et al. 2023, arXiv:2307.05906, Algorithms 5 and 6; Kawaguchi and Lu 2020, arXiv:1907.04371.

    Args:
        num_pairs, batch_size, seed, remainder: as of `BatchSelector`.
        k: batches to choose from, as in the paper; a window of fewer (the last, or all if k > N/B) gives in
            proportion. Unused if exhaustive.
        q: batches to choose, at most k.
        temperature: τ of the loss.
        exhaustive: Algorithm 5 instead of 6.

    Raises:
        DualencError: an argument is out of its range, or C(N, B) exceeds a million.
    """

    needs_embeddings = True

    def __init__(
        self,
        num_pairs: int,
        batch_size: int,
        seed: int = 0,
        k: int = 1500,
        q: int = 150,
        temperature: float = 0.1,
        exhaustive: bool = False,
        remainder: Remainder = "drop",
    ) -> None:
        super().__init__(num_pairs, batch_size, seed, remainder)
        check_at_least(1, k=k, q=q)
        check_temperature(temperature)
        if q > k and not exhaustive:
            raise DualencError(f"q is {q} but k is {k}; choose a q of at most k")
        if exhaustive and math.comb(num_pairs, batch_size) > MAX_COMBINATIONS:
            raise DualencError(
                f"C({num_pairs}, {batch_size}) batches are more than {MAX_COMBINATIONS:,}; set exhaustive=False"
            )
        self.k, self.q, self.temperature, self.exhaustive = k, q, temperature, exhaustive

    @property
    def num_batches(self) -> int:
        """Batches that one call of `select` returns once it is given embeddings."""
        if self.exhaustive:
            return min(self.q, math.comb(self.num_pairs, self.batch_size))
        full, rest = divmod(self.partition_size, self.k)
        return full * self.q + self._share_of(rest)

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """As `BatchSelector.select`: the batches of the largest loss, by falling loss within each window of k."""
        candidates = self.random_batches(self.generator(epoch))
        if left is None:
            return candidates
        left, right = self.check_embeddings(left, right)
        if self.exhaustive:
            pairs = itertools.combinations(range(self.num_pairs), self.batch_size)
            candidates = np.array(list(pairs), dtype=np.int64)
        losses = batch_losses(left, right, candidates, self.temperature)
        chosen = []
        window = len(candidates) if self.exhaustive else self.k
        for start in range(0, len(candidates), window):
            order = np.argsort(-losses[start : start + window], kind="stable")
            chosen.append(candidates[start + order[: self.q if self.exhaustive else self._share_of(len(order))]])
        selected = np.concatenate(chosen)
        logger.info("epoch %d leaves out %d of %d pairs", epoch, self.left_out(selected), self.num_pairs)
        return selected

    def _share_of(self, window: int) -> int:
        return math.ceil(self.q * window / self.k)
