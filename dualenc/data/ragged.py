"""Rows of integers of different lengths, in two flat arrays: small and fast at a million rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Row `r` is `values[offsets[r] : offsets[r + 1]]`.

    Attributes:
        values: every row's integers, one row after the other, int64.
        offsets: where each row starts, and the end, int64 of shape (rows + 1,).
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Ragged:
        """Lay rows of integers one after the other."""
        arrays = [np.asarray(row, dtype=np.int64) for row in rows]
        return cls(_concatenate(arrays), _offsets(np.array([len(a) for a in arrays], dtype=np.int64)))

    @classmethod
    def from_sorted(cls, keys: np.ndarray, values: np.ndarray, num_keys: int) -> Ragged:
        """Row `k` holds the values that stand beside key `k`, in their order; `keys` ascend."""
        return cls(np.asarray(values, dtype=np.int64), _offsets(np.bincount(keys, minlength=num_keys)))

    @classmethod
    def from_pairs(cls, keys: np.ndarray, values: np.ndarray, num_keys: int) -> Ragged:
        """Row `k` holds, ascending and without repeats, the values that stand beside key `k`.

        Args:
            keys: row of each value, (M,), in [0, num_keys).
            values: (M,), not negative.
            num_keys: how many rows there are.
        """
        span = int(values.max(initial=0)) + 1
        unique = np.unique(keys.astype(np.int64) * span + values)
        return cls(unique % span, _offsets(np.bincount(unique // span, minlength=num_keys)))

    def row(self, index: int) -> np.ndarray:
        """The integers of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: np.ndarray) -> Ragged:
        """The given rows, in that order, repeats allowed."""
        starts = self.offsets[rows]
        lengths = self.offsets[np.asarray(rows) + 1] - starts
        offsets = _offsets(lengths)
        places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[places], offsets)

    def keep(self, mask: np.ndarray) -> Ragged:
        """The same rows with only those values for which `mask`, (len(values),) bool, is true."""
        return Ragged(self.values[mask], np.concatenate([[0], np.cumsum(mask)])[self.offsets])

    @property
    def lengths(self) -> np.ndarray:
        """How many integers each row holds."""
        return np.diff(self.offsets)

    def padded(self, rows: np.ndarray, fill: int = -1) -> np.ndarray:
        """The given rows as one matrix (n, K), K the longest of them, filled up with `fill`."""
        starts = self.offsets[rows]
        lengths = self.offsets[np.asarray(rows) + 1] - starts
        columns = np.arange(lengths.max(initial=0))
        inside = columns < lengths[:, None]
        result = np.full(inside.shape, fill, dtype=np.int64)
        result[inside] = self.values[(starts[:, None] + columns)[inside]]
        return result


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
