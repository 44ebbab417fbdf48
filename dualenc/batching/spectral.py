"""Spectral clustering into equal batches: Algorithm 1 of Cho et al., Mini-Batch Optimization of Contrastive Loss."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

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
