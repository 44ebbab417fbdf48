"""Batches of large contrastive loss: balanced bisection, and spectral clustering."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from dualenc.batching.selector import BatchSelector, check_at_least
from dualenc.errors import DualencError

Method = Literal["bisection", "spectral"]

POWER_ITERATIONS = 6
SIGN_ITERATIONS = 12
CHUNK_FLOATS = 1 << 18  # a megabyte: all iterations on a stack of small nodes stay in cache


class SpectralBatches(BatchSelector):
    """A partition of all pairs into equal batches of large contrastive loss.

    Methods:

    - "bisection": balanced recursive bisection along leading directions of the pair embeddings,
      over all pairs at once; seconds for 50,000 pairs.
    - "spectral": spectral clustering with equal clusters within random groups of k batches (Cho et
      al. 2023, arXiv:2307.05906, Algorithm 1).

    Args:
        num_pairs, batch_size, seed: as of `BatchSelector`.
        method: how to partition.
        temperature: τ of the affinity ("spectral").
        k: batches in a random group ("spectral"): the time grows with k²·B²·N.
    """

    needs_embeddings = True

    def __init__(
        self,
        num_pairs: int,
        batch_size: int,
        seed: int = 0,
        method: Method = "bisection",
        temperature: float = 0.1,
        k: int = 40,
    ) -> None:
        super().__init__(num_pairs, batch_size, seed)
        if method not in get_args(Method):
            raise DualencError(f"method is {method!r}; choose one of {', '.join(get_args(Method))}")
        if not temperature > 0:
            raise DualencError(f"temperature is {temperature}; choose a number above 0")
        check_at_least(1, k=k)
        self.method = method
        self.temperature = temperature
        self.k = k

    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """As `BatchSelector.select`; the order of the batches is random."""
        draw = self.generator(epoch)
        batches = self.random_batches(draw)
        if left is None:
            return batches
        left, right = self.check_embeddings(left, right)
        if self.method == "spectral":
            return draw.permutation(self._select_spectral(batches, left, right, draw))
        rows = np.sort(batches, axis=None)  # in order of memory
        points = left[rows]
        points += right[rows]
        chosen = bisection_batches(points, self.batch_size, draw)
        return draw.permutation(rows[chosen])

    def _select_spectral(
        self, batches: ndarray, left: ndarray, right: ndarray, draw: Generator
    ) -> ndarray:
        """Partition the pairs of each k random batches."""
        selected = []
        for first in range(0, len(batches), self.k):
            last = first + self.k
            group = batches[first:last].ravel()
            seed = int(draw.integers(2**31))
            chosen = spectral_batches(
                left[group], right[group], self.batch_size, self.temperature, seed
            )
            selected.append(group[chosen])
        return np.concatenate(selected)


def bisection_batches(points: ndarray, batch_size: int, draw: Generator) -> ndarray:
    """Balanced recursive bisection: N points into N/B neighbourhoods of exactly B, in
    O(N·D·log(N/B)).

    The min-cut of Cho et al. (equal clusters that cut little affinity), with the inner product of
    pair embeddings as affinity: s(x_i, y_j) + s(x_j, y_i) grows with (x_i + y_i)·(x_j + y_j). Level
    by level: all nodes of a level hold m or m + 1 batches, and nodes of one size are split
    together.

    Returns (N/B, B) rows of `points` (N, D), float32; neighbouring batches are similar.
    """
    # The nodes are runs of `order`; `sizes` counts the batches in each.
    order = np.arange(len(points))
    sizes = np.array([len(points) // batch_size])
    while sizes.max() > 1:
        starts = (np.cumsum(sizes) - sizes) * batch_size
        for size in np.unique(sizes[sizes > 1]):
            nodes = starts[sizes == size]
            width = size * batch_size
            half = (size // 2) * batch_size
            # As many nodes at a time as stay in the processor's cache through all iterations.
            floats = width * points.shape[1]
            step = max(1, CHUNK_FLOATS // floats)
            for first in range(0, len(nodes), step):
                stack = nodes[first : first + step]
                places = stack[:, None] + np.arange(width)
                members = order[places]
                halves = split_nodes(points[members], half, draw)
                order[places] = np.take_along_axis(members, halves, axis=1)
        lower = sizes // 2
        upper = sizes - lower
        sizes = np.stack([lower, upper], axis=1).ravel()
        sizes = sizes[sizes > 0]
    return order.reshape(-1, batch_size)


def split_nodes(nodes: ndarray, half: int, draw: Generator) -> ndarray:
    """Split P nodes of S points each, (P, S, D), so that little affinity is cut.

    Halves that maximise the affinity within them maximise |Σ σ_i p_i|² over balanced signs σ. Its
    relaxation is the leading direction of the points, found by power iterations; from there the
    same iteration with balanced signs (two-means with equal halves) climbs to a maximum of the
    split itself.

    Returns (P, S): a permutation of each node's points, whose first `half` are on one side.
    """
    num_nodes, size, dim = nodes.shape
    direction = draw.standard_normal((num_nodes, dim), dtype=np.float32)
    for iteration in range(POWER_ITERATIONS + SIGN_ITERATIONS):
        heights = _heights(nodes, direction)
        if iteration < POWER_ITERATIONS:
            weights = heights - heights.mean(axis=1, keepdims=True)
        else:
            # The direction from the mean of a node's `half` lowest points to the mean of the
            # others.
            order = np.argpartition(heights, half, axis=1)
            lowest = order[:, :half]
            weights = np.full_like(heights, 1 / (size - half))
            down = np.float32(-1 / half)
            np.put_along_axis(weights, lowest, down, axis=1)
        sums = np.matmul(weights[:, None, :], nodes)
        direction = sums[:, 0]
        norms = np.linalg.norm(direction, axis=1, keepdims=True)
        direction /= norms + np.float32(1e-30)
    return np.argpartition(_heights(nodes, direction), half, axis=1)


def _heights(nodes: ndarray, direction: ndarray) -> ndarray:
    """(P, S): each point of (P, S, D) along its node's direction (P, D)."""
    columns = direction[:, :, None]
    return np.matmul(nodes, columns)[:, :, 0]


def affinity(left: ndarray, right: ndarray, batch_size: int, temperature: float) -> ndarray:
    """(n, n) weights between pairs whose sum over a batch bounds its contrastive loss from below
    (Cho et al., Eq. 5).

    With embeddings u and v (n, D), w(k, l) sums log(1 + (B−1)·exp(u_i·(v_j − v_i)/τ)) and
    log(1 + (B−1)·exp(v_i·(u_j − u_i)/τ)) over (i, j) = (k, l) and (l, k). The sum of a batch's
    weights over i < j, divided by B(B−1), is at most Eq. 2, twice what `batch_losses` gives.
    """
    logits = np.matmul(left, right.T, dtype=np.float64)
    logits /= temperature
    positives = np.diag(logits).copy()[:, None]
    # With B = 1 the logarithm is −∞, and every weight log(1 + 0).
    with np.errstate(divide="ignore"):
        shift = np.log(batch_size - 1) - positives
    weights = np.logaddexp(0, logits + shift)
    weights += np.logaddexp(0, logits.T + shift)
    weights += weights.T.copy()
    np.fill_diagonal(weights, 0)
    return weights


def spectral_rows(weights: ndarray, num_clusters: int) -> ndarray:
    """Lines 2 to 5: (n, k) leading eigenvectors of a graph's affinity (n, n), rows scaled to unit
    norm.

    Of D^−½ A D^−½, as in the algorithm that the paper cites (Ng, Jordan, Weiss 2001) and in its
    authors' code; the largest of D − A, to its letter, are contrasts within clusters and tell
    clusters apart poorly.
    """
    tiny = np.finfo(np.float64).tiny
    degrees = np.maximum(weights.sum(axis=1), tiny)
    scale = 1 / np.sqrt(degrees)
    matrix = scale[:, None] * weights * scale
    size = len(weights)
    largest = [size - num_clusters, size - 1]
    _, vectors = eigh(matrix, subset_by_index=largest, check_finite=False)
    if vectors.shape[1] < num_clusters:
        # LAPACK's solver for part of the spectrum may fail where eigenvalues coincide.
        _, vectors = eigh(matrix, driver="evd", overwrite_a=True, check_finite=False)
        vectors = vectors[:, -num_clusters:]
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, tiny)


def equal_clusters(rows: ndarray, num_clusters: int, seed: int) -> ndarray:
    """Lines 6 to 10: k-means, then the cheapest assignment that gives every centre as many rows.

    Returns (k, n/k) indices of `rows` (n, F).
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    size = len(rows) // num_clusters
    with warnings.catch_warnings():
        # Raised for duplicates: fewer distinct rows than clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = KMeans(num_clusters, n_init=1, random_state=seed).fit(rows)
    distances = cdist(rows, clusters.cluster_centers_)
    costs = np.repeat(distances, size, axis=1)
    _, places = linear_sum_assignment(costs)
    order = np.argsort(places)
    return order.reshape(num_clusters, size)


def spectral_batches(
    left: ndarray, right: ndarray, batch_size: int, temperature: float, seed: int
) -> ndarray:
    """Partition n pairs, (n, D) each side, into batches of large loss: Algorithm 1 of Cho et al.
    2023, in O(n³).

    Returns (n/B, B) rows of the embeddings; the seed is that of k-means.
    """
    num_clusters = len(left) // batch_size
    if num_clusters == 1:
        return np.arange(batch_size)[None]
    weights = affinity(left, right, batch_size, temperature)
    rows = spectral_rows(weights, num_clusters)
    return equal_clusters(rows, num_clusters, seed)
