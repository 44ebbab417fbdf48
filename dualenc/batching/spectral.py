"""Batches of large contrastive loss: balanced bisection, spectral clustering and bandwidth of a neighbour graph."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.spatial.distance import cdist

from dualenc.batching.selector import BatchSelector, Remainder, check_at_least, check_choice, check_temperature
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Method = Literal["bisection", "spectral", "bandwidth"]
Laplacian = Literal["normalized", "unnormalized"]

POWER_ITERATIONS = 6
SIGN_ITERATIONS = 12
CHUNK_FLOATS = 1 << 18  # a megabyte: all iterations on a stack of small nodes stay in cache
EXACT_UP_TO = 20_000  # pairs; the neighbours of more are searched in inverted lists
PROBES = 8


class SpectralBatches(BatchSelector):
    """A partition of all pairs into equal batches of large contrastive loss.

    Methods:

    - "bisection": balanced recursive bisection along leading directions of the pair embeddings, over all pairs
      at once; seconds for 50,000 pairs.
    - "spectral": spectral clustering with equal clusters within random groups of k batches (Cho et al. 2023,
      arXiv:2307.05906, Algorithm 1).
    - "bandwidth": runs along a reverse Cuthill–McKee order of the nearest-neighbour graph (Sachidananda et al.
      2023, arXiv:2210.12874).

    Args:
        num_pairs, batch_size, seed, remainder: as of `BatchSelector`.
        method: how to partition.
        temperature: τ of the affinity ("spectral").
        k: batches in a random group ("spectral"): the time grows with k²·B²·N.
        laplacian: which eigenvectors ("spectral"): see `spectral.spectral_rows`.
        neighbors: edges from each pair ("bandwidth"); by default 8, or B − 1 if that is less.
        share: of the batches that are selected, in [0, 1]; the pairs of the others are mixed at random, which
            limits how often false negatives share a batch.

    Raises:
        DualencError: an argument is out of its range.
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
        laplacian: Laplacian = "normalized",
        neighbors: int | None = None,
        share: float = 1.0,
        remainder: Remainder = "drop",
    ) -> None:
        super().__init__(num_pairs, batch_size, seed, remainder)
        check_choice("method", method, ("bisection", "spectral", "bandwidth"))
        check_choice("laplacian", laplacian, ("normalized", "unnormalized"))
        check_temperature(temperature)
        check_at_least(1, k=k, neighbors=1 if neighbors is None else neighbors)
        if not 0 <= share <= 1:
            raise DualencError(f"share is {share}; choose a number from 0 to 1")
        self.method = method
        self.temperature = temperature
        self.k = k
        self.laplacian = laplacian
        self.neighbors = neighbors
        self.share = share

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """As `BatchSelector.select`; the order of the batches is random."""
        draw = self.generator(epoch)
        batches = self.random_batches(draw)
        if left is None:
            return batches
        left, right = self.check_embeddings(left, right)
        whole = self.num_pairs // self.batch_size  # without the batch that "wrap" completes
        rows = np.sort(batches[:whole], axis=None)  # in order of memory
        if self.method == "bisection":
            points = left[rows]
            points += right[rows]
            selected = rows[bisection_batches(points, self.batch_size, draw)]
        elif self.method == "bandwidth":
            selected = rows[bandwidth_batches(left[rows], right[rows], self.batch_size, self.neighbors)]
        else:
            groups = [batches[first : min(first + self.k, whole)].ravel() for first in range(0, whole, self.k)]
            selected = np.concatenate([self._select_spectral(group, left, right, draw) for group in groups])
        # A random share of the batches is kept; the pairs of the others are mixed at random.
        order = draw.permutation(whole)
        kept, others = np.split(selected[order], [round(self.share * whole)])
        mixed = draw.permutation(others.ravel()).reshape(others.shape)
        return draw.permutation(np.concatenate([kept, mixed, batches[whole:]]))

    def _select_spectral(
        self, group: np.ndarray, left: np.ndarray, right: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """The batches of a random group of pairs."""
        seed = int(draw.integers(2**31))
        chosen = spectral_batches(left[group], right[group], self.batch_size, self.temperature, seed, self.laplacian)
        return group[chosen]


def bisection_batches(points: np.ndarray, batch_size: int, draw: np.random.Generator) -> np.ndarray:
    """Balanced recursive bisection: N points into N/B neighbourhoods of exactly B, in O(N·D·log(N/B)).

    The min-cut of Cho et al. (equal clusters that cut little affinity), with the inner product of pair embeddings as
    affinity: s(x_i, y_j) + s(x_j, y_i) grows with (x_i + y_i)·(x_j + y_j). Level by level: all nodes of a level hold
    m or m + 1 batches, and nodes of one size are split together.

    Args:
        points: (N, D) float32 pair embeddings, B divides N.
        batch_size: B.
        draw: of the starting directions.

    Returns:
        (N/B, B) rows of `points`; neighbouring batches are similar.
    """
    # The nodes are runs of `order`; `sizes` counts the batches in each.
    order = np.arange(len(points))
    sizes = np.array([len(points) // batch_size])
    while sizes.max() > 1:
        starts = (np.cumsum(sizes) - sizes) * batch_size
        for size in np.unique(sizes[sizes > 1]):
            nodes = starts[sizes == size]
            width = size * batch_size
            # As many nodes at a time as stay in the processor's cache through all iterations.
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
    """Split each node so that little affinity is cut.

    Halves that maximise the affinity within them maximise |Σ σ_i p_i|² over balanced signs σ. Its relaxation is the
    leading direction of the points, found by power iterations; from there the same iteration with balanced signs
    (two-means with equal halves) climbs to a maximum of the split itself.

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
            # The direction from the mean of a node's `half` lowest points to the mean of the others.
            order = np.argpartition(heights, half, axis=1)
            weights = np.full_like(heights, 1 / (heights.shape[1] - half))
            np.put_along_axis(weights, order[:, :half], np.float32(-1 / half), axis=1)
        direction = np.matmul(weights[:, None, :], nodes)[:, 0]
        direction /= np.linalg.norm(direction, axis=1, keepdims=True) + np.float32(1e-30)
    return np.argpartition(np.matmul(nodes, direction[:, :, None])[:, :, 0], half, axis=1)


def affinity(left: np.ndarray, right: np.ndarray, batch_size: int, temperature: float) -> np.ndarray:
    """Weights between pairs whose sum over a batch bounds its contrastive loss from below (Cho et al., Eq. 5).

    w(k, l) sums log(1 + (B−1)·exp(u_i·(v_j − v_i)/τ)) + log(1 + (B−1)·exp(v_i·(u_j − u_i)/τ)) over (i, j) = (k, l)
    and (l, k). The sum of a batch's weights over i < j, divided by B(B−1), is at most Eq. 2, twice what
    `batch_losses` gives.

    Args:
        left, right: (n, D) unit-norm embeddings u and v.
        batch_size: B.
        temperature: τ.

    Returns:
        (n, n) float64, symmetric, zero diagonal.
    """
    logits = np.matmul(left, right.T, dtype=np.float64) / temperature
    positives = np.diag(logits)[:, None].copy()
    # With B = 1 the logarithm is −∞, and every weight log(1 + 0).
    with np.errstate(divide="ignore"):
        shift = np.log(batch_size - 1) - positives
    weights = np.logaddexp(0, logits + shift) + np.logaddexp(0, logits.T + shift)
    weights += weights.T.copy()
    np.fill_diagonal(weights, 0)
    return weights


def spectral_rows(weights: np.ndarray, num_clusters: int, laplacian: Laplacian) -> np.ndarray:
    """Lines 2 to 5: leading eigenvectors of the graph, rows scaled to unit norm.

    Args:
        weights: (n, n) affinity.
        num_clusters: k.
        laplacian: "unnormalized": the k largest eigenvectors of L = D − A, to the letter of the paper; these are
            contrasts within clusters and tell clusters apart poorly. "normalized": the k largest eigenvectors of
            D^−½ A D^−½, as in the algorithm it cites (Ng, Jordan, Weiss 2001) and as its authors' code does.

    Returns:
        (n, k) float64.
    """
    degrees = np.maximum(weights.sum(axis=1), np.finfo(np.float64).tiny)
    if laplacian == "unnormalized":
        matrix = np.diag(degrees) - weights
    else:
        scale = 1 / np.sqrt(degrees)
        matrix = scale[:, None] * weights * scale
    size = len(weights)
    _, vectors = eigh(matrix, subset_by_index=[size - num_clusters, size - 1], check_finite=False)
    if vectors.shape[1] < num_clusters:
        # LAPACK's solver for part of the spectrum may fail where eigenvalues coincide.
        vectors = eigh(matrix, driver="evd", overwrite_a=True, check_finite=False)[1][:, -num_clusters:]
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def equal_clusters(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Lines 6 to 10: k-means, then the cheapest assignment that gives every centre as many rows.

    Args:
        rows: (n, F), num_clusters divides n.
        num_clusters: k.
        seed: of k-means.

    Returns:
        (k, n/k): indices of the rows in each cluster.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    size = len(rows) // num_clusters
    with warnings.catch_warnings():
        # Raised for duplicates: fewer distinct rows than clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        centers = KMeans(num_clusters, n_init=1, random_state=seed).fit(rows).cluster_centers_
    distances = np.repeat(cdist(rows, centers), size, axis=1)
    _, places = linear_sum_assignment(distances)
    return np.argsort(places).reshape(num_clusters, size)


def spectral_batches(
    left: np.ndarray, right: np.ndarray, batch_size: int, temperature: float, seed: int, laplacian: Laplacian
) -> np.ndarray:
    """Partition n pairs, B divides n, into batches of large loss: Algorithm 1 of Cho et al. 2023, in O(n³).

    Args:
        left, right: (n, D) unit-norm embeddings.
        batch_size: B.
        temperature: τ.
        seed: of k-means.
        laplacian: see `spectral_rows`.

    Returns:
        (n/B, B) rows of the embeddings.
    """
    num_clusters = len(left) // batch_size
    if num_clusters == 1:
        return np.arange(batch_size)[None]
    weights = affinity(left, right, batch_size, temperature)
    return equal_clusters(spectral_rows(weights, num_clusters, laplacian), num_clusters, seed)


def bandwidth_batches(left: np.ndarray, right: np.ndarray, batch_size: int, neighbors: int | None = None) -> np.ndarray:
    """Partition pairs along a reverse Cuthill–McKee order of their nearest-neighbour graph.

    Source: Sachidananda et al. 2023, Global Selection of Contrastive Batches via Optimization on Sample Permutations,
    arXiv:2210.12874.

    Args:
        left, right: (N, D) float32 unit-norm embeddings, B divides N.
        batch_size: B.
        neighbors: edges from each pair; by default 8, or B − 1 if that is less: otherwise several batches would form
            one neighbourhood.

    Returns:
        (N/B, B) rows of the embeddings.
    """
    if len(left) == batch_size:
        return np.arange(batch_size)[None]
    if neighbors is None:
        neighbors = min(8, batch_size - 1)
    graph = neighbor_graph(left, right, min(max(1, neighbors), len(left) - 1))
    return reverse_cuthill_mckee(graph, symmetric_mode=True).astype(np.int64).reshape(-1, batch_size)


def neighbor_graph(left: np.ndarray, right: np.ndarray, neighbors: int) -> csr_matrix:
    """Symmetric (N, N) graph: an edge from i to the `neighbors` other j with the largest left_i·right_j."""
    import faiss

    size, dim = right.shape
    index: Any = faiss.IndexFlatIP(dim)
    if size > EXACT_UP_TO:
        index = faiss.IndexIVFFlat(index, dim, math.isqrt(size), faiss.METRIC_INNER_PRODUCT)
        index.nprobe = PROBES
        index.train(right)
    index.add(right)
    # One neighbour more, since a pair is usually its own nearest.
    _, found = index.search(left, neighbors + 1)
    sources = np.repeat(np.arange(size), neighbors + 1)
    targets = found.ravel()
    valid = (targets >= 0) & (targets != sources)
    ones = np.ones(valid.sum(), dtype=np.float32)
    graph = coo_matrix((ones, (sources[valid], targets[valid])), shape=(size, size)).tocsr()
    return graph + graph.T
