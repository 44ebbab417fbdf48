"""Rows of integers of unequal lengths, concatenated into one array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dualenc.types import Integers


class Ragged(NamedTuple):
    """Rows of integers of unequal lengths, concatenated into one array.

    Row `r` is `values[offsets[r] : offsets[r + 1]]`; both arrays are int64.

        Ragged.from_rows([[3, 1], [], [2]]).row(0)  # array([3, 1])

    Attributes:
        values: the integers of all rows, (sum of lengths,).
        offsets: where each row begins, (R + 1,).
    """

    values: Integers
    offsets: Integers

    @classmethod
    def from_lengths(cls, values: Integers, lengths: Integers | Sequence[int]) -> Ragged:
        """Divide `values` into rows of these lengths (R,)."""
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(np.asarray(values, dtype=np.int64), offsets.astype(np.int64))

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Ragged:
        """Concatenate rows of integers."""
        arrays = [np.asarray(row, dtype=np.int64) for row in rows]
        values = np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
        return cls.from_lengths(values, [len(array) for array in arrays])

    @classmethod
    def from_sorted(cls, keys: Integers, values: Integers, num_keys: int) -> Ragged:
        """Collect in row `k` the values of key `k`, in their order; `keys` must be ascending."""
        return cls.from_lengths(values, np.bincount(keys, minlength=num_keys))

    @classmethod
    def from_pairs(cls, keys: Integers, values: Integers, num_keys: int) -> Ragged:
        """Collect in row `k` the values of key `k`, ascending and without duplicates.

        Values must not be negative.
        """
        # Encode (key, value) as one integer that sorts by key first: much faster than sorting rows
        # of a matrix.
        span = int(values.max(initial=0)) + 1
        unique = distinct(keys.astype(np.int64) * span + values)
        return cls.from_sorted(unique // span, unique % span, num_keys)

    def row(self, index: int) -> Integers:
        """Return the integers of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: Integers) -> Ragged:
        """Return the given rows (n,) in that order; a row may be taken several times."""
        starts = self.offsets[rows]
        lengths = self.offsets[np.asarray(rows) + 1] - starts
        first = np.cumsum(lengths) - lengths
        # Position of each value: the start of its row plus its position within the row.
        positions = np.repeat(starts - first, lengths) + np.arange(lengths.sum())
        return Ragged.from_lengths(self.values[positions], lengths)

    def keep(self, mask: np.ndarray) -> Ragged:
        """Return the same rows with only the values where `mask` (len(values),) is True."""
        # Number of values kept before each position, which are the new offsets at the old ones.
        kept_before = np.concatenate([[0], np.cumsum(mask)])
        return Ragged(self.values[mask], kept_before[self.offsets])

    def first_in_row(self) -> np.ndarray:
        """Return a mask (len(values),), False where a value repeats an earlier one of its row.

        Values must not be negative.
        """
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        # As in `from_pairs`; return_index gives the first of equal integers.
        span = int(self.values.max(initial=0)) + 1
        _, first = np.unique(rows * span + self.values, return_index=True)
        result = np.zeros(len(self.values), dtype=bool)
        result[first] = True
        return result

    @property
    def lengths(self) -> Integers:
        """The number of integers in each row."""
        return np.diff(self.offsets)

    def padded(self, rows: Integers) -> Integers:
        """Return the given rows (n,) as one matrix (n, K), padded with -1 to the longest row."""
        taken = self.take(rows)
        inside = np.arange(taken.lengths.max(initial=0)) < taken.lengths[:, None]
        result = np.full(inside.shape, -1, dtype=np.int64)
        result[inside] = taken.values
        return result


def distinct(values: Integers) -> Integers:
    """Return the distinct numbers (n,) in ascending order."""
    # Asking for counts makes NumPy sort: its hash table takes up to 60 times as long.
    return np.unique(values, return_counts=True)[0]
