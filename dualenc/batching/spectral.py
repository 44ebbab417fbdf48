"""Hard batches of large contrastive loss, by balanced bisection or spectral clustering."""

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
CHUNK_FLOATS = 1 << 18  # 1 MB, so that all iterations on a stack of small nodes stay in cache


class SpectralBatches(BatchSelector):
    """A partition of all pairs into equal batches of large contrastive loss.

    Similar pairs share a batch, so in-batch negatives are hard. There are two methods:

    - "bisection": balanced recursive bisection along leading directions of the pair embeddings,
      over all pairs at once. It takes seconds for 50,000 pairs.
    - "spectral": spectral clustering with equal clusters within random groups of k batches (Cho et
      al. 2023, arXiv:2307.05906, Algorithm 1).

    Example:
        batching = SpectralBatches(len(pairs), batch_size=32)
        Trainer(output="run", batch_size=32).fit(model, pairs, objective, batching)

    Args:
        num_pairs: number of training pairs, N.
        batch_size: number of pairs in each global batch, B.
        seed: random seed; equal embeddings and equal (seed, epoch) give equal batches.
        method: "bisection" or "spectral".
        temperature: temperature τ of the affinity ("spectral" only).
        k: number of batches in a random group ("spectral" only); time grows with k²·B²·N.

    Raises:
        DualencError: an argument is out of range.
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
            known = ", ".join(get_args(Method))
            raise DualencError(f"method is {method!r}", fix=f"choose one of {known}")
        if not temperature > 0:
            raise DualencError(f"temperature is {temperature}", fix="choose a number above 0")
        check_at_least(1, k=k)
        self.method = method
        self.temperature = temperature
        self.k = k

    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """Choose the batches of an epoch, in random order. See `BatchSelector.select`."""
        draw = self.generator(epoch)
        # Drawn even if embeddings replace them: they decide which N mod B pairs sit out.
        batches = self.random_batches(draw)
        if left is None:
            return batches
        left, right = self.check_embeddings(left, right)
        if self.method == "spectral":
            return draw.permutation(self._select_spectral(batches, left, right, draw))
        # Sorted, so that gathering the rows below reads memory in order.
        rows = np.sort(batches, axis=None)
        points = left[rows]
        points += right[rows]
        chosen = bisection_batches(points, self.batch_size, draw)
        return draw.permutation(rows[chosen])

    def _select_spectral(
        self, batches: ndarray, left: ndarray, right: ndarray, draw: Generator
    ) -> ndarray:
        """Partition the pairs of each group of k random batches."""
        selected = []
        # In groups, because the affinity matrix is quadratic and its eigenvectors cubic in k·B.
        for first in range(0, len(batches), self.k):
            group = batches[first : first + self.k].ravel()
            seed = int(draw.integers(2**31))
            rows = spectral_batches(
                left[group], right[group], self.batch_size, self.temperature, seed
            )
            selected.append(group[rows])
        return np.concatenate(selected)


def bisection_batches(points: ndarray, batch_size: int, draw: Generator) -> ndarray:
    """Partition points into N/B neighborhoods of exactly B by balanced recursive bisection.

    This approximates the min-cut of Cho et al. (equal clusters that cut little affinity). Affinity
    is the inner product of pair embeddings: s(x_i, y_j) + s(x_j, y_i) grows with
    (x_i + y_i)·(x_j + y_j). The time is O(N·D·log(N/B)).

    Args:
        points: (N, D) float32 pair embeddings x + y; N is a multiple of B.
        batch_size: number of points in each neighborhood, B.
        draw: random generator.

    Returns:
        (N/B, B) rows of `points`. Consecutive batches are similar.
    """
    # The nodes are runs of `order`; `sizes` counts the batches in each. All nodes of a level hold
    # m or m + 1 batches, and nodes of one size are split together.
    order = np.arange(len(points))
    sizes = np.array([len(points) // batch_size])
    while sizes.max() > 1:
        starts = (np.cumsum(sizes) - sizes) * batch_size
        for size in np.unique(sizes[sizes > 1]):
            nodes = starts[sizes == size]
            width = size * batch_size
            half = (size // 2) * batch_size
            # Split as many nodes at a time as fit into the processor's cache for all iterations.
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
        # A node of one batch has an empty lower half.
        sizes = sizes[sizes > 0]
    return order.reshape(-1, batch_size)


def split_nodes(nodes: ndarray, half: int, draw: Generator) -> ndarray:
    """Split each node in two so that little affinity is cut.

    Maximizing the affinity within the halves means maximizing |Σ σ_i p_i|² over balanced signs σ.
    The relaxation is the leading direction of the points, found by power iterations. From there the
    same iteration with balanced signs (two-means with equal halves) climbs to a local maximum of
    the split itself.

    Args:
        nodes: (P, S, D) float32 points of P nodes.
        half: number of points in the first part.
        draw: random generator.

    Returns:
        (P, S) permutation of each node's points, with those of the first part in front.
    """
    num_nodes, size, dim = nodes.shape
    # In float32 like the points: float64 weights would promote every product below.
    direction = draw.standard_normal((num_nodes, dim), dtype=np.float32)
    for iteration in range(POWER_ITERATIONS + SIGN_ITERATIONS):
        heights = _heights(nodes, direction)
        if iteration < POWER_ITERATIONS:
            # Centered, or the mean of the points would be their leading direction.
            weights = heights - heights.mean(axis=1, keepdims=True)
        else:
            # Point from the mean of a node's `half` lowest points to the mean of the others.
            order = np.argpartition(heights, half, axis=1)
            lowest = order[:, :half]
            weights = np.full_like(heights, 1 / (size - half))
            down = np.float32(-1 / half)
            np.put_along_axis(weights, lowest, down, axis=1)
        sums = np.matmul(weights[:, None, :], nodes)
        direction = sums[:, 0]
        norms = np.linalg.norm(direction, axis=1, keepdims=True)
        # Identical points have direction 0; the epsilon keeps it there instead of at NaN.
        direction /= norms + np.float32(1e-30)
    return np.argpartition(_heights(nodes, direction), half, axis=1)


def _heights(nodes: ndarray, direction: ndarray) -> ndarray:
    """Return the projections (P, S) of points (P, S, D) onto their node's direction (P, D)."""
    columns = direction[:, :, None]
    return np.matmul(nodes, columns)[:, :, 0]


def affinity(left: ndarray, right: ndarray, batch_size: int, temperature: float) -> ndarray:
    """Return weights (n, n) whose sum over a batch bounds its loss from below (Cho et al., Eq. 5).

    With embeddings u and v, w(k, l) sums log(1 + (B−1)·exp(u_i·(v_j − v_i)/τ)) and
    log(1 + (B−1)·exp(v_i·(u_j − u_i)/τ)) over (i, j) = (k, l) and (l, k). The sum of a batch's
    weights over i < j, divided by B(B−1), is at most Eq. 2, which is twice `batch_losses`.

    Args:
        left: (n, D) unit-norm embeddings u.
        right: (n, D) unit-norm embeddings v.
        batch_size: number of pairs in each batch, B.
        temperature: softmax temperature τ, above 0.
    """
    logits = np.matmul(left, right.T, dtype=np.float64)
    logits /= temperature
    positives = np.diag(logits).copy()[:, None]
    # With B = 1 the logarithm is −∞, and every weight is log(1 + 0).
    with np.errstate(divide="ignore"):
        shift = np.log(batch_size - 1) - positives
    weights = np.logaddexp(0, logits + shift)
    weights += np.logaddexp(0, logits.T + shift)
    # Copied, because the transpose is a view of the array being changed.
    weights += weights.T.copy()
    np.fill_diagonal(weights, 0)
    return weights


def spectral_rows(weights: ndarray, num_clusters: int) -> ndarray:
    """Return the k leading eigenvectors of an affinity matrix, (n, k), with rows of unit norm.

    These are lines 2 to 5 of Algorithm 1. The matrix is D^−½ A D^−½, as in the algorithm that the
    paper cites (Ng, Jordan, Weiss 2001) and in its authors' code. The paper's text asks for the
    largest eigenvectors of D − A, but those contrast points within clusters and separate clusters
    poorly.

    Args:
        weights: (n, n) symmetric affinity, A.
        num_clusters: number of eigenvectors, k.
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
    """Cluster rows with k-means, then assign equally many rows to each center at the lowest cost.

    These are lines 6 to 10 of Algorithm 1.

    Args:
        rows: (n, F) features.
        num_clusters: number of clusters, k, a divisor of n.
        seed: random seed of k-means.

    Returns:
        (k, n/k) indices of `rows`.
    """
    # Imported late: scikit-learn takes over a second, and only "spectral" needs it.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    size = len(rows) // num_clusters
    with warnings.catch_warnings():
        # k-means warns if there are fewer distinct rows than clusters, as with duplicates.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = KMeans(num_clusters, n_init=1, random_state=seed).fit(rows)
    distances = cdist(rows, clusters.cluster_centers_)
    # Each center is repeated once per place in its cluster: a linear assignment of rows to places.
    costs = np.repeat(distances, size, axis=1)
    _, places = linear_sum_assignment(costs)
    order = np.argsort(places)
    return order.reshape(num_clusters, size)


def spectral_batches(
    left: ndarray, right: ndarray, batch_size: int, temperature: float, seed: int
) -> ndarray:
    """Partition n pairs into batches of large loss with Algorithm 1 of Cho et al. 2023, in O(n³).

    Args:
        left: (n, D) unit-norm embeddings of the left items; n is a multiple of B.
        right: (n, D) unit-norm embeddings of the right items.
        batch_size: number of pairs in each batch, B.
        temperature: temperature τ of the affinity, above 0.
        seed: random seed of k-means.

    Returns:
        (n/B, B) rows of the embeddings.
    """
    num_clusters = len(left) // batch_size
    if num_clusters == 1:
        return np.arange(batch_size)[None]
    weights = affinity(left, right, batch_size, temperature)
    rows = spectral_rows(weights, num_clusters)
    return equal_clusters(rows, num_clusters, seed)
