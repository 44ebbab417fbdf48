"""Batches as runs along an order of the pairs in which nearest neighbours are close.

Source: Sachidananda et al. 2023, Global Selection of Contrastive Batches via Optimization on Sample Permutations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

if TYPE_CHECKING:
    import faiss
    from scipy.sparse import csr_matrix

EXACT_UP_TO = 20_000
PROBES = 8


def bandwidth_batches(left: np.ndarray, right: np.ndarray, batch_size: int, neighbors: int | None = None) -> np.ndarray:
    """Partition pairs along a reverse Cuthill–McKee order of their nearest-neighbour graph.

    Args:
        left: (N, D) float32 unit-norm embeddings, B divides N.
        right: (N, D) float32 unit-norm embeddings.
        batch_size: B.
        neighbors: edges from each pair; by default 8, or B − 1 if that is less: batches smaller than a
            neighbourhood would otherwise be strung together.

    Returns:
        (N/B, B) rows of the embeddings.
    """
    if len(left) == batch_size:
        return np.arange(batch_size)[None]
    edges = max(1, min(8, batch_size - 1) if neighbors is None else neighbors)
    graph = neighbor_graph(left, right, min(edges, len(left) - 1))
    return reverse_cuthill_mckee(graph, symmetric_mode=True).astype(np.int64).reshape(-1, batch_size)


def neighbor_graph(left: np.ndarray, right: np.ndarray, neighbors: int) -> csr_matrix:
    """Symmetric (N, N) graph: an edge from i to the `neighbors` other j with the largest left_i·right_j."""
    size = len(left)
    index = _index(right)
    _, found = index.search(left, neighbors + 1)
    sources = np.repeat(np.arange(size), neighbors + 1)
    targets = found.ravel()
    valid = (targets >= 0) & (targets != sources)
    ones = np.ones(valid.sum(), dtype=np.float32)
    graph = coo_matrix((ones, (sources[valid], targets[valid])), shape=(size, size)).tocsr()
    return graph + graph.T


def _index(vectors: np.ndarray) -> faiss.Index:
    """A FAISS inner-product index of (N, D): exact for small N, else inverted lists."""
    import faiss

    dim = vectors.shape[1]
    exact = faiss.IndexFlatIP(dim)
    if len(vectors) <= EXACT_UP_TO:
        exact.add(vectors)
        return exact
    lists = faiss.IndexIVFFlat(exact, dim, math.isqrt(len(vectors)), faiss.METRIC_INNER_PRODUCT)
    lists.nprobe = PROBES
    lists.train(vectors)
    lists.add(vectors)
    return lists
