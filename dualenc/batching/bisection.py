"""Balanced recursive bisection: N points into N/B neighbourhoods of exactly B, in O(N·D·log(N/B)).

The min-cut of Cho et al. (equal clusters that cut little affinity), with the inner product of pair embeddings as
affinity: s(x_i, y_j) + s(x_j, y_i) grows with (x_i + y_i)·(x_j + y_j). A split into halves that maximises the
affinity within them maximises |Σ σ_i p_i|² over balanced signs σ. Its relaxation is the leading direction of the
points, found by power iterations; from there the same iteration with balanced signs (two-means with equal
halves) climbs to a maximum of the split itself.
"""

from __future__ import annotations

import numpy as np

POWER_ITERATIONS = 6
SIGN_ITERATIONS = 12
CHUNK_FLOATS = 1 << 18  # a megabyte: all iterations on a stack of small nodes stay in cache


def bisection_batches(points: np.ndarray, batch_size: int, draw: np.random.Generator) -> np.ndarray:
    """Partition points into batches of near neighbours.

    Level by level: all nodes of a level hold m or m + 1 batches, and nodes of one size are split together.

    Args:
        points: (N, D) float32 pair embeddings, B divides N.
        batch_size: B.
        draw: of the starting directions.

    Returns:
        (N/B, B) rows of `points`; near batches are near each other.
    """
    order = np.arange(len(points))
    sizes = np.array([len(points) // batch_size])  # batches in each node; the nodes are runs of `order`
    while sizes.max() > 1:
        starts = (np.cumsum(sizes) - sizes) * batch_size
        for size in np.unique(sizes[sizes > 1]):
            nodes = starts[sizes == size]
            width = size * batch_size
            step = max(1, CHUNK_FLOATS // (width * points.shape[1]))
            for first in range(0, len(nodes), step):
                places = nodes[first : first + step, None] + np.arange(width)
                members = order[places]
                halves = split(points[members], (size // 2) * batch_size, draw)
                order[places] = np.take_along_axis(members, halves, axis=1)
        sizes = np.stack([sizes // 2, sizes - sizes // 2], axis=1).ravel()
        sizes = sizes[sizes > 0]
    return order.reshape(-1, batch_size)


def split(nodes: np.ndarray, half: int, draw: np.random.Generator) -> np.ndarray:
    """Split each node where little affinity is cut.

    Args:
        nodes: (P, S, D) float32: P nodes of S points each.
        half: how many points go first.
        draw: of the starting directions.

    Returns:
        (P, S): a permutation of each node's points, whose first `half` are on one side.
    """
    direction = draw.standard_normal((nodes.shape[0], nodes.shape[2]), dtype=np.float32)
    for iteration in range(POWER_ITERATIONS + SIGN_ITERATIONS):
        heights = np.matmul(nodes, direction[:, :, None])[:, :, 0]
        if iteration < POWER_ITERATIONS:
            weights = heights - heights.mean(axis=1, keepdims=True)
        else:
            weights = _balanced_signs(heights, half)
        direction = np.matmul(weights[:, None, :], nodes)[:, 0]
        direction /= np.linalg.norm(direction, axis=1, keepdims=True) + np.float32(1e-30)
    return np.argpartition(np.matmul(nodes, direction[:, :, None])[:, :, 0], half, axis=1)


def _balanced_signs(heights: np.ndarray, half: int) -> np.ndarray:
    """(P, S) heights to weights that take the mean of each node's highest points minus that of its `half` lowest."""
    order = np.argpartition(heights, half, axis=1)
    weights = np.full_like(heights, 1 / (heights.shape[1] - half))
    np.put_along_axis(weights, order[:, :half], np.float32(-1 / half), axis=1)
    return weights
