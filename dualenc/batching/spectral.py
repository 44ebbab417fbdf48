"""Spectral clustering into equal batches: Algorithm 1 of Cho et al., Mini-Batch Optimization of Contrastive Loss."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from dualenc.batching.bandwidth import bandwidth_batches
from dualenc.batching.bisection import bisection_batches
from dualenc.batching.selector import BatchSelector, Remainder, check_at_least, check_choice, check_temperature
from dualenc.errors import DualencError

Laplacian = Literal["normalized", "unnormalized"]


def affinity(left: np.ndarray, right: np.ndarray, batch_size: int, temperature: float) -> np.ndarray:
    """Weights between pairs whose sum over a batch bounds its contrastive loss from below (Eq. 5).

    w(k, l) sums log(1 + (B−1)·exp(u_i·(v_j − v_i)/τ)) + log(1 + (B−1)·exp(v_i·(u_j − u_i)/τ)) over (i, j) = (k, l)
    and (l, k). The sum of a batch's weights over i < j, divided by B(B−1), is at most Eq. 2, twice what
    `batch_losses` gives.

    Args:
        left: (n, D) unit-norm embeddings u.
        right: (n, D) unit-norm embeddings v.
        batch_size: B.
        temperature: τ.

    Returns:
        (n, n) float64, symmetric, zero diagonal.
    """
    logits = np.matmul(left, right.T, dtype=np.float64) / temperature
    positives = np.diag(logits)[:, None].copy()
    with np.errstate(divide="ignore"):  # B = 1: there is nothing to bound, and every weight is log(1 + 0)
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
        # LAPACK's solver for a part of the spectrum may find none of it where eigenvalues coincide.
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
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters: duplicates
        centers = KMeans(num_clusters, n_init=1, random_state=seed).fit(rows).cluster_centers_
    distances = np.repeat(cdist(rows, centers), size, axis=1)
    _, places = linear_sum_assignment(distances)
    return np.argsort(places).reshape(num_clusters, size)


def spectral_batches(
    left: np.ndarray, right: np.ndarray, batch_size: int, temperature: float, seed: int, laplacian: Laplacian
) -> np.ndarray:
    """Algorithm 1: partition n pairs, B divides n, into batches of large loss; O(n³).

    Args:
        left: (n, D) unit-norm embeddings.
        right: (n, D) unit-norm embeddings.
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


Method = Literal["bisection", "spectral", "bandwidth"]


class SpectralBatches(BatchSelector):
    """A partition of all pairs into equal batches of large contrastive loss.

    Methods:

    - "bisection": balanced recursive bisection along leading directions of the pair embeddings, over all pairs
      at once; seconds for 50,000 pairs.
    - "spectral": spectral clustering with equal clusters within random groups of k batches (Cho et al., Mini-Batch
      Optimization of Contrastive Loss, Algorithm 1).
    - "bandwidth": runs along a reverse Cuthill–McKee order of the nearest-neighbour graph (Sachidananda et al.
      2023, Global Selection of Contrastive Batches).

    Args:
        num_pairs: N, the number of training pairs.
        batch_size: B, pairs in each (global) batch.
        seed: of all random choices.
        method: how to partition.
        temperature: τ of the affinity ("spectral").
        k: batches in a random group ("spectral"): the time grows with k²·B²·N.
        laplacian: which eigenvectors ("spectral"): see `spectral.spectral_rows`.
        neighbors: edges from each pair ("bandwidth"); by default 8, or B − 1 if that is less.
        share: of the batches that are selected, in [0, 1]; the pairs of the others meet at random, which
            limits how often false negatives meet.
        remainder: when B does not divide N: "drop" leaves N mod B random pairs out of the epoch; "wrap" adds
            one random batch of them, filled up with other random pairs.

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
        self.method, self.temperature, self.k, self.laplacian = method, temperature, k, laplacian
        self.neighbors, self.share = neighbors, share

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """As `BatchSelector.select`; the order of the batches is random."""
        draw = self.generator(epoch)
        batches = self.random_batches(draw)
        if left is None:
            return batches
        left, right = self.check_embeddings(left, right)
        arrange = {"bisection": self._bisection, "spectral": self._spectral, "bandwidth": self._bandwidth}
        whole = self.num_pairs // self.batch_size  # all batches but the one that "wrap" fills up
        selected = arrange[self.method](left, right, batches[:whole], draw)
        return draw.permutation(np.concatenate([self._mix(selected, draw), batches[whole:]]))

    def _bisection(
        self, left: np.ndarray, right: np.ndarray, batches: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        rows = np.sort(batches, axis=None)  # in order of memory
        points = left[rows]
        points += right[rows]
        return rows[bisection_batches(points, self.batch_size, draw)]

    def _spectral(
        self, left: np.ndarray, right: np.ndarray, batches: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        selected = []
        for first in range(0, len(batches), self.k):
            rows = batches[first : first + self.k].ravel()
            seed = int(draw.integers(2**31))
            found = spectral_batches(left[rows], right[rows], self.batch_size, self.temperature, seed, self.laplacian)
            selected.append(rows[found])
        return np.concatenate(selected)

    def _bandwidth(
        self, left: np.ndarray, right: np.ndarray, batches: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        rows = np.sort(batches, axis=None)
        return rows[bandwidth_batches(left[rows], right[rows], self.batch_size, self.neighbors)]

    def _mix(self, selected: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Keep a random share of the batches; the pairs of the others meet at random."""
        order = draw.permutation(len(selected))
        kept, others = np.split(selected[order], [round(self.share * len(selected))])
        return np.concatenate([kept, draw.permutation(others.ravel()).reshape(others.shape)])
