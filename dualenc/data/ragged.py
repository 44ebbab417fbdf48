"""Rows of integers of unequal lengths, one after the other in one array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Rows of integers of unequal lengths: row `r` is `values[offsets[r] : offsets[r + 1]]`, both
    int64."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_lengths(cls, values: np.ndarray, lengths: np.ndarray | Sequence[int]) -> Ragged:
        """Rows of these lengths."""
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(np.asarray(values, dtype=np.int64), offsets.astype(np.int64))

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Ragged:
        """Lay rows of integers one after the other."""
        arrays = [np.asarray(row, dtype=np.int64) for row in rows]
        values = np.concatenate([np.zeros(0, dtype=np.int64), *arrays])
        return cls.from_lengths(values, [len(array) for array in arrays])

    @classmethod
    def from_sorted(cls, keys: np.ndarray, values: np.ndarray, num_keys: int) -> Ragged:
        """Row `k` holds the values of key `k`, in their order; `keys` ascend."""
        return cls.from_lengths(values, np.bincount(keys, minlength=num_keys))

    @classmethod
    def from_pairs(cls, keys: np.ndarray, values: np.ndarray, num_keys: int) -> Ragged:
        """Row `k` holds, ascending and without repeats, the values (not negative) of key `k`."""
        # One number for each (key, value): its order is that of keys first, and equal pairs are
        # equal numbers.
        span = int(values.max(initial=0)) + 1
        unique = distinct(keys.astype(np.int64) * span + values)
        return cls.from_sorted(unique // span, unique % span, num_keys)

    def row(self, index: int) -> np.ndarray:
        """The integers of a row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: np.ndarray) -> Ragged:
        """The given rows, in that order, repeats allowed."""
        starts = self.offsets[rows]
        lengths = self.offsets[np.asarray(rows) + 1] - starts
        first = np.cumsum(lengths) - lengths
        # Each value's position: the start of its row, and its position within the row.
        positions = np.repeat(starts - first, lengths) + np.arange(lengths.sum())
        return Ragged.from_lengths(self.values[positions], lengths)

    def keep(self, mask: np.ndarray) -> Ragged:
        """The same rows with only those values for which `mask`, (len(values),) bool, is true."""
        return Ragged(self.values[mask], np.concatenate([[0], np.cumsum(mask)])[self.offsets])

    def first_in_row(self) -> np.ndarray:
        """Which values (not negative) do not repeat an earlier one of their row, (len(values),)
        bool."""
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        span = int(self.values.max(initial=0)) + 1
        _, first = np.unique(rows * span + self.values, return_index=True)
        result = np.zeros(len(self.values), dtype=bool)
        result[first] = True
        return result

    @property
    def lengths(self) -> np.ndarray:
        """The number of integers in each row."""
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """The given rows as one matrix (n, K), K the longest of them, filled up with -1."""
        taken = self.take(rows)
        inside = np.arange(taken.lengths.max(initial=0)) < taken.lengths[:, None]
        result = np.full(inside.shape, -1, dtype=np.int64)
        result[inside] = taken.values
        return result


def distinct(values: np.ndarray) -> np.ndarray:
    """(n,) the different numbers among some, ascending."""
    # Counts make NumPy sort: its table of hashes takes up to 60 times as long.
    return np.unique(values, return_counts=True)[0]
