"""Partitions of large loss: bisection, and Algorithm 1 against its formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.manifold import spectral_embedding

from dualenc.batching import RandomBatches, SpectralBatches, batch_losses
from dualenc.batching.spectral import (
    affinity,
    equal_clusters,
    spectral_batches,
    spectral_rows,
    split_nodes,
)
from tests.helpers.known_clusters import planted, purity, random_pairs


def as_sets(batches: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(batch) for batch in batches.tolist()}


def test_the_order_is_random_in_each_epoch():
    left, right, labels = planted(40, 8)
    orders = [
        labels[SpectralBatches(320, 8).select(epoch, left, right)[:, 0]].tolist()
        for epoch in range(2)
    ]
    assert orders[0] != orders[1]


def test_spectral_clusters_random_groups_of_k_batches():
    left, right = random_pairs(60, 8)
    selector = SpectralBatches(60, 5, seed=7, method="spectral", k=4)
    found = as_sets(selector.select(2, left, right))
    draw = np.random.default_rng([7, 2])
    groups = draw.permutation(60).reshape(3, 20)
    np.testing.assert_array_equal(groups.reshape(12, 5), RandomBatches(60, 5, seed=7).select(2))
    expected: set[frozenset[int]] = set()
    for group in groups:
        seed = int(draw.integers(2**31))
        expected |= as_sets(group[spectral_batches(left[group], right[group], 5, 0.1, seed)])
    assert found == expected


@pytest.mark.parametrize("method", ["bisection", "spectral"])
@pytest.mark.parametrize(("clusters", "size"), [(4, 8), (16, 16), (12, 4), (13, 32)])
def test_planted_clusters_are_recovered(method, clusters, size):
    left, right, labels = planted(clusters, size, noise=0.1)
    batches = SpectralBatches(len(left), size, method=method).select(0, left, right)
    assert purity(batches, labels) > (0.95 if method == "bisection" else 0.999)
    random = RandomBatches(len(left), size).select(0)
    assert (
        batch_losses(left, right, batches, 0.1).mean()
        > 1.5 * batch_losses(left, right, random, 0.1).mean()
    )


def separation(points: np.ndarray, low: np.ndarray) -> float:
    """Distance between the means of the two sides."""
    return float(np.linalg.norm(points[low].mean(axis=0) - points[~low].mean(axis=0)))


@pytest.mark.parametrize("half", [2, 4, 5])
def test_splits_are_nearly_as_good_as_the_best_of_all(half):
    draw = np.random.default_rng(half)
    every = [np.isin(np.arange(8), chosen) for chosen in itertools.combinations(range(8), half)]
    shares = []
    for points in draw.standard_normal((50, 8, 3)).astype(np.float32):
        order = split_nodes(points[None], half, draw)[0]
        assert sorted(order.tolist()) == list(range(8))
        found = separation(points, np.isin(np.arange(8), order[:half]))
        shares.append(found / max(separation(points, low) for low in every))
    assert np.mean(shares) > 0.9


def test_nodes_are_split_independently():
    draw = np.random.default_rng(0)
    nodes = draw.standard_normal((4, 24, 5)).astype(np.float32)
    together = split_nodes(nodes, 12, np.random.default_rng(1))
    stream = np.random.default_rng(1)
    alone = [split_nodes(node[None], 12, stream)[0] for node in nodes]
    for a, b in zip(together, alone):
        assert {frozenset(a[:12]), frozenset(a[12:])} == {frozenset(b[:12]), frozenset(b[12:])}


def slow_weight(
    u: np.ndarray, v: np.ndarray, k: int, m: int, batch_size: int, temperature: float
) -> float:
    """Eq. 5, term by term."""
    total = 0.0
    for i, j in ((k, m), (m, k)):
        total += math.log(
            1 + (batch_size - 1) * math.exp(float(u[i] @ (v[j] - v[i])) / temperature)
        )
        total += math.log(
            1 + (batch_size - 1) * math.exp(float(v[i] @ (u[j] - u[i])) / temperature)
        )
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("batch_size", [2, 7])
def test_affinity_is_equation_5(batch_size, temperature):
    assert np.isfinite(affinity(*random_pairs(6, 5, noise=5.0), batch_size, 0.0005)).all()
    u, v = (side.astype(np.float64) for side in random_pairs(9, 5, noise=2.0))
    weights = affinity(u, v, batch_size, temperature)
    for k, m in itertools.product(range(9), repeat=2):
        expected = 0 if k == m else slow_weight(u, v, k, m, batch_size, temperature)
        assert weights[k, m] == pytest.approx(expected, rel=1e-10)


@given(
    batch_size=st.integers(2, 12),
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.05, 0.1, 0.5, 1.0]),
)
def test_affinity_bounds_the_loss_from_below(batch_size, seed, temperature):
    """And tightly where all negatives are alike."""
    for left, right in (
        random_pairs(batch_size, 4, seed, noise=3.0),
        (np.eye(batch_size), np.eye(batch_size)),
    ):
        equation_2 = 2 * batch_losses(left, right, np.arange(batch_size)[None], temperature)[0]
        bound = (
            affinity(left, right, batch_size, temperature).sum()
            / 2
            / (batch_size * (batch_size - 1))
        )
        assert bound <= equation_2 + 1e-5
    assert bound == pytest.approx(equation_2)


def test_rows_span_what_scikit_learn_embeds():
    weights = affinity(*random_pairs(30, 6), 5, 0.1)
    # scikit-learn's rows are scaled by the degree: undo that to get the eigenvectors.
    embedding = spectral_embedding(weights, n_components=6, drop_first=False, random_state=0)
    embedding /= np.linalg.norm(embedding * np.sqrt(weights.sum(axis=1))[:, None], axis=0)
    expected = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    rows = spectral_rows(weights, 6)
    np.testing.assert_allclose(np.abs(rows @ rows.T), np.abs(expected @ expected.T), atol=1e-6)


def test_assignment_is_the_cheapest_with_equal_clusters():
    rows = np.array([[0.0], [1.0], [2.0], [3.0], [100.0], [101.0]])
    clusters = equal_clusters(rows, 2, seed=0)
    # k-means alone would cut 4 : 2; of the four near 1.5, the one nearest to 100 has to move.
    assert sorted(sorted(cluster) for cluster in clusters.tolist()) == [[0, 1, 2], [3, 4, 5]]


@given(clusters=st.integers(1, 6), size=st.integers(1, 8), seed=st.integers(0, 20))
def test_clusters_are_equal_even_of_duplicates(clusters, size, seed):
    rows = np.random.default_rng(seed).integers(0, 2, (clusters * size, 2)).astype(float)
    found = equal_clusters(rows, clusters, seed)
    assert sorted(found.ravel().tolist()) == list(range(clusters * size))
    assert found.shape == (clusters, size)
