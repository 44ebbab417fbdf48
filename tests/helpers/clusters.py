"""Vectors with some structure, as embeddings have it, and the exact neighbours by plain matrix
products."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualenc.search import Index


def clustered(num_vectors: int, dim: int = 16, seed: int = 0, unit: bool = True) -> np.ndarray:
    """(N, D) float32 around 40 centres."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(40, dim))
    vectors = centres[random.integers(0, 40, num_vectors)] + 0.6 * random.normal(
        size=(num_vectors, dim)
    )
    if unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def exact_rows(database: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """(Q, k) rows of the largest inner products, in float64."""
    return np.argsort(
        -(queries.astype(np.float64) @ database.astype(np.float64).T), axis=1, kind="stable"
    )[:, :k]


def search_ids(
    index: Index, queries: np.ndarray, k: int = 10, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Scores (Q, k) and ids (Q, k); where fewer than k are found, -inf and ""."""
    scores, rows = index.search_rows(queries, k, **options)
    ids = np.array([*index.ids, ""], dtype=object)
    return np.where(rows < 0, -np.inf, scores), ids[rows]
