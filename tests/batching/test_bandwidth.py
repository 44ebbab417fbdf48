"""Batches as runs along an order in which nearest neighbours are close."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from dualenc.batching import SpectralBatches
from dualenc.batching import spectral as module
from dualenc.batching.spectral import bandwidth_batches, neighbor_graph
from tests.batching.clusters import planted, purity, random_pairs


def slow_graph(left: np.ndarray, right: np.ndarray, neighbors: int) -> np.ndarray:
    """Brute force by scikit-learn: on unit vectors the nearest by distance have the largest product."""
    edges = np.zeros((len(left), len(left)), dtype=bool)
    _, found = NearestNeighbors(n_neighbors=neighbors + 1, algorithm="brute").fit(right).kneighbors(left)
    for source, targets in enumerate(found):
        edges[source, targets[targets != source]] = True
    return edges | edges.T


def test_graph_joins_nearest_neighbors() -> None:
    left, right = random_pairs(80, 6, noise=0.1)
    graph = neighbor_graph(left, right, 4).toarray() > 0
    np.testing.assert_array_equal(graph, slow_graph(left, right, 4))


def test_inverted_lists_find_most_of_the_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, _ = planted(20, 100)
    exact = neighbor_graph(left, right, 4).toarray() > 0
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    approximate = neighbor_graph(left, right, 4).toarray() > 0
    assert (exact & approximate).sum() > 0.9 * exact.sum()


@pytest.mark.parametrize(("clusters", "size"), [(4, 8), (16, 16), (10, 4), (6, 32)])
def test_recovers_planted_clusters(clusters: int, size: int) -> None:
    left, right, labels = planted(clusters, size)
    batches = SpectralBatches(len(left), size, method="bandwidth").select(0, left, right)
    assert purity(batches, labels) == 1


def test_more_neighbors_than_pairs_are_as_many_as_there_are() -> None:
    left, right = random_pairs(6, 4)
    assert sorted(bandwidth_batches(left, right, 2, neighbors=50).ravel().tolist()) == list(range(6))
