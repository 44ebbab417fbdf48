"""A linear map from the space of one model to that of another, learned from vectors of the same
texts.

Source: Drift-Adapter (Vejendla 2025, arXiv:2509.23471), which maps queries of a new model into the
space of an old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.linear_model import RidgeCV

from dualenc.errors import DualencError
from dualenc.io.files import atomic_path
from dualenc.search.exact_search import exact_search

NEIGHBOURS = 10
FOLDS = 5
"""Pairs are held out by fifths."""
PENALTIES = 10.0 ** np.arange(-4, 2)
"""Ridge penalties to choose from, in units of the mean squared singular value."""


@dataclass(frozen=True)
class LinearMap:
    """The map x ↦ unit(x·W + b) of vectors (n, D) to unit vectors (n, E).

    Attributes:
        weight: (D, E) float32, W.
        bias: (E,) float32, b.
    """

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Map vectors (n, D) to float32 unit vectors (n, E)."""
        mapped = np.asarray(vectors, np.float32) @ self.weight + self.bias
        lengths = np.linalg.norm(mapped, axis=1, keepdims=True)
        return mapped / np.where(lengths == 0, 1, lengths)

    def save(self, path: Path) -> None:
        """Write a safetensors file, atomically."""
        with atomic_path(path) as part:
            save_file(vars(self), part)

    @classmethod
    def load(cls, path: Path) -> LinearMap:
        """Read the map that `save` wrote."""
        try:
            return cls(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise DualencError(
                f"corrupt ({error})", fix="remove its folder and migrate again", where=path
            ) from None


def fit(x: np.ndarray, y: np.ndarray) -> LinearMap:
    """Ridge regression of pairs x (n, D) and y (n, E), the penalty of `PENALTIES` by the exact
    leave-one-out error."""
    centred = np.asarray(x, np.float64) - x.mean(axis=0, dtype=np.float64)
    scale = np.square(centred).sum() / min(centred.shape)
    ridge = RidgeCV(alphas=PENALTIES * scale).fit(x, y)
    weight = np.ascontiguousarray(ridge.coef_.T, np.float32)
    return LinearMap(weight, ridge.intercept_.astype(np.float32))


def folds(count: int, seed: int = 0) -> np.ndarray:
    """(n,) the fold of each pair, 0 to 4, of equal sizes up to one."""
    return np.random.default_rng(seed).permutation(count) % FOLDS


def out_of_fold(x: np.ndarray, y: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """x (n, D) mapped to (n, E), each row by a map that was learned from the pairs of other
    folds."""
    mapped = np.empty((len(x), y.shape[1]), np.float32)
    for number in range(FOLDS):
        is_held_out = fold == number
        mapped[is_held_out] = fit(x[~is_held_out], y[~is_held_out])(x[is_held_out])
    return mapped


def neighbours(queries: np.ndarray, documents: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The 10 nearest documents (Q, 10) of queries (Q, D), by exact search; a query's own row (Q,)
    is left out."""
    columns = exact_search(queries, documents, NEIGHBOURS + 1)[1]
    # A stable sort moves the query itself, where it was found, behind the others.
    order = np.argsort(columns == rows[:, None], axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)[:, :NEIGHBOURS]


def overlap(results: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(Q,) the share of the true neighbours (Q, k) among the results (Q, k)."""
    return (results[:, :, None] == truth[:, None, :]).any(axis=1).mean(axis=1)
