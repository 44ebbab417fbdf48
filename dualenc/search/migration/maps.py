"""Linear maps from the space of one model to that of another, fitted on vectors of the same texts.

Sources: Drift-Adapter (Vejendla 2025, arXiv:2509.23471), which maps queries of a new model into the
space of an old one; and the de-whitening of mapped word vectors (Artetxe, Labaka and Agirre 2018,
AAAI).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.linear_model import RidgeCV

from dualenc.encoders.vector import VectorTower
from dualenc.errors import DualencError
from dualenc.io.files import atomic_path
from dualenc.search.exact_search import exact_search

MapKind = Literal["ridge", "rotation", "rescaled"]
KINDS: tuple[MapKind, ...] = ("ridge", "rotation")
"""Kinds that a migration chooses from for documents; queries are mapped by "rescaled"."""
NEIGHBORS = 10
FOLDS = 5
"""Number of folds of the cross-validation."""
PENALTIES = 10.0 ** np.arange(-4, 2)
"""Ridge penalties to choose from, relative to the mean squared singular value."""


@dataclass(frozen=True)
class LinearMap:
    """The map x ↦ unit(x·W + b) from vectors (n, D) to unit vectors (n, E).

    Create one with `fit` or `LinearMap.load`.

        to_new = fit(old_vectors, new_vectors)
        mapped = to_new(more_old_vectors)

    Attributes:
        weight: (D, E) float32, W.
        bias: (E,) float32, b.
    """

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Map vectors (n, D) to unit vectors (n, E) float32; zero stays zero."""
        mapped = np.asarray(vectors, np.float32) @ self.weight + self.bias
        lengths = np.linalg.norm(mapped, axis=1, keepdims=True)
        return mapped / np.where(lengths == 0, 1, lengths)

    def tower(self) -> VectorTower:
        """Return the map as a trainable tower of vectors (B, D)."""
        input_dim, dim = self.weight.shape
        tower = VectorTower("linear", input_dim, dim, None)
        assert isinstance(tower.map, torch.nn.Linear)
        with torch.no_grad():
            tower.map.weight.copy_(torch.from_numpy(self.weight.T))
            tower.map.bias.copy_(torch.from_numpy(self.bias))
        return tower

    def save(self, path: Path) -> None:
        """Write a safetensors file, atomically."""
        with atomic_path(path) as part:
            save_file(vars(self), part)

    @classmethod
    def load(cls, path: Path) -> LinearMap:
        """Read a map that `save` wrote.

        Raises:
            DualencError: the file is corrupt.
        """
        try:
            return cls(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise DualencError(
                f"corrupt ({error})", fix="remove its folder and migrate again", where=path
            ) from None


def fit(x: np.ndarray, y: np.ndarray, kind: MapKind = "ridge") -> LinearMap:
    """Fit a linear map from x to y.

    Args:
        x: (n, D) vectors of the old model.
        y: (n, E) vectors of the new model for the same texts.
        kind: "ridge" for ridge regression, whose penalty among `PENALTIES` minimizes the exact
            leave-one-out error; "rotation" for the orthogonal map of centered vectors with the
            least squared error (Procrustes; Schönemann 1966); "rescaled" for ridge regression whose
            results are stretched along the principal directions of y to the variance of y. Ridge
            regression shrinks what it can hardly predict, and so ranks by few directions.
    """
    if kind == "rotation":
        return _rotation(x, y)
    return _ridge(x, y) if kind == "ridge" else _rescaled(x, y)


def _ridge(x: np.ndarray, y: np.ndarray) -> LinearMap:
    """Fit by ridge regression."""
    centered = np.asarray(x, np.float64) - x.mean(axis=0, dtype=np.float64)
    # The squared Frobenius norm is the sum of squared singular values, of which min(n, D) differ
    # from zero.
    scale = np.square(centered).sum() / min(centered.shape)
    ridge = RidgeCV(alphas=PENALTIES * scale).fit(x, y)
    weight = np.ascontiguousarray(ridge.coef_.T, np.float32)
    return LinearMap(weight, ridge.intercept_.astype(np.float32))


def _rotation(x: np.ndarray, y: np.ndarray) -> LinearMap:
    """Fit by orthogonal Procrustes: W = U·Vᵀ of the singular value decomposition of XᵀY."""
    # Without centering, the mean of all vectors decides the rotation.
    x_mean, y_mean = (each.mean(axis=0, dtype=np.float64) for each in (x, y))
    left, _, right = np.linalg.svd((x - x_mean).T @ (y - y_mean), full_matrices=False)
    weight = left @ right
    bias = y_mean - x_mean @ weight
    return LinearMap(np.ascontiguousarray(weight, np.float32), bias.astype(np.float32))


def _rescaled(x: np.ndarray, y: np.ndarray) -> LinearMap:
    """Fit by ridge regression, and restore the variance of y along its principal directions."""
    ridge = _ridge(x, y)
    mean = y.mean(axis=0, dtype=np.float64)
    variances, directions = np.linalg.eigh(np.cov(y, rowvar=False, bias=True))
    mapped = (np.asarray(x, np.float64) @ ridge.weight + ridge.bias - mean) @ directions
    # Directions without any variance stay at the mean.
    left = np.square(mapped).mean(axis=0).clip(min=1e-12)
    stretch = directions * np.sqrt(variances.clip(min=0) / left) @ directions.T
    bias = (ridge.bias - mean) @ stretch + mean
    weight = np.ascontiguousarray(ridge.weight @ stretch, np.float32)
    return LinearMap(weight, bias.astype(np.float32))


def folds(count: int, seed: int = 0) -> np.ndarray:
    """Return the fold (n,) of each pair, 0 to 4; sizes differ by at most one.

    Args:
        count: n, the number of pairs.
        seed: random seed.
    """
    return np.random.default_rng(seed).permutation(count) % FOLDS


def out_of_fold(
    x: np.ndarray, y: np.ndarray, fold: np.ndarray, kind: MapKind = "ridge"
) -> np.ndarray:
    """Map x to (n, E), each row by a map that was fitted on the other folds.

    Args:
        x: (n, D) vectors of the old model.
        y: (n, E) vectors of the new model for the same texts.
        fold: (n,) fold of each pair.
        kind: kind of map, as in `fit`.
    """
    mapped = np.empty((len(x), y.shape[1]), np.float32)
    for number in range(FOLDS):
        is_held_out = fold == number
        mapped[is_held_out] = fit(x[~is_held_out], y[~is_held_out], kind)(x[is_held_out])
    return mapped


def neighbours(queries: np.ndarray, documents: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the 10 nearest documents (Q, 10) of queries by exact search, without themselves.

    Args:
        queries: (Q, D) vectors.
        documents: (N, D) vectors.
        rows: (Q,) document row of each query.
    """
    columns = exact_search(queries, documents, NEIGHBORS + 1)[1]
    # A stable sort moves the query itself, if it was found, behind the others.
    order = np.argsort(columns == rows[:, None], axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)[:, :NEIGHBORS]


def overlap(results: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the fraction (Q,) of true neighbors that are among the results.

    Args:
        results: (Q, k) document rows.
        truth: (Q, k) document rows of the true neighbors.
    """
    return (results[:, :, None] == truth[:, None, :]).any(axis=1).mean(axis=1)
