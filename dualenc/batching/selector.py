"""What every batch selector shares: its arguments, its random draws and the partition into equal batches."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from dualenc.errors import DualencError

Remainder = Literal["drop", "wrap"]


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
        checked_left = self._finite_rows("left", left)
        if right is None or right is left:
            return checked_left, checked_left
        checked_right = self._finite_rows("right", right)
        if checked_left.shape != checked_right.shape:
            raise DualencError(
                f"left embeddings have shape {checked_left.shape} and right {checked_right.shape}; "
                "both towers must give vectors of one dimension"
            )
        return checked_left, checked_right

    def _finite_rows(self, side: str, embeddings: np.ndarray) -> np.ndarray:
        rows = np.asarray(embeddings, dtype=np.float32)
        if rows.ndim != 2 or len(rows) != self.num_pairs or rows.shape[1] == 0:
            raise DualencError(
                f"{side} embeddings have shape {rows.shape}; expected ({self.num_pairs}, D), one row per training pair"
            )
        for start in range(0, len(rows), 65536):
            broken = ~np.isfinite(rows[start : start + 65536]).all(axis=1)
            if broken.any():
                raise DualencError(
                    f"{side} embeddings hold a NaN or an infinity in row {start + int(broken.argmax())}; "
                    "has the training diverged?"
                )
        return rows


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
