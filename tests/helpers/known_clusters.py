"""Embeddings with clusters that are known."""

from __future__ import annotations

import numpy as np


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to norm 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def random_pairs(
    num_pairs: int, dim: int, seed: int = 0, noise: float = 0.5
) -> tuple[np.ndarray, np.ndarray]:
    """(N, D) and (N, D): unit vectors in random directions, right near left."""
    draw = np.random.default_rng(seed)
    left = unit(draw.standard_normal((num_pairs, dim)))
    right = unit(left + noise / np.sqrt(dim) * draw.standard_normal((num_pairs, dim)))
    return left.astype(np.float32), right.astype(np.float32)


def planted(
    clusters: int, size: int, dim: int = 64, noise: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, ...]:
    """(N, D), (N, D) and the cluster (N,) of each pair: equal tight clusters, in random order."""
    draw = np.random.default_rng(seed)
    centers = unit(draw.standard_normal((clusters, dim)))
    labels = draw.permutation(np.repeat(np.arange(clusters), size))
    left, right = (
        unit(centers[labels] + noise / np.sqrt(dim) * draw.standard_normal((clusters * size, dim)))
        for _ in range(2)
    )
    return left.astype(np.float32), right.astype(np.float32), labels


def purity(batches: np.ndarray, labels: np.ndarray) -> float:
    """Mean share of a batch's largest cluster."""
    return float(np.mean([np.bincount(labels[batch]).max() / len(batch) for batch in batches]))
