"""Algorithm 1, step by step, against the formulas of the paper and against plain numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.manifold import spectral_embedding

from dualenc.batching import batch_losses
from dualenc.batching.spectral import affinity, equal_clusters, spectral_batches, spectral_rows
from tests.batching.clusters import planted, purity, random_pairs


def slow_weight(u: np.ndarray, v: np.ndarray, k: int, m: int, batch_size: int, temperature: float) -> float:
    """Eq. 5, term by term."""
    total = 0.0
    for i, j in ((k, m), (m, k)):
        total += math.log(1 + (batch_size - 1) * math.exp(float(u[i] @ (v[j] - v[i])) / temperature))
        total += math.log(1 + (batch_size - 1) * math.exp(float(v[i] @ (u[j] - u[i])) / temperature))
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("batch_size", [2, 7])
def test_affinity_is_equation_5(batch_size: int, temperature: float) -> None:
    u, v = (side.astype(np.float64) for side in random_pairs(9, 5, noise=2.0))
    weights = affinity(u, v, batch_size, temperature)
    for k, m in itertools.product(range(9), repeat=2):
        expected = 0 if k == m else slow_weight(u, v, k, m, batch_size, temperature)
        assert weights[k, m] == pytest.approx(expected, rel=1e-10)


def test_affinity_does_not_overflow_at_a_low_temperature() -> None:
    u, v = random_pairs(6, 5, noise=5.0)
    weights = affinity(u, -v, 4, 0.001)
    assert np.isfinite(weights).all()
    assert weights.max() > 1000


@given(batch_size=st.integers(2, 12), seed=st.integers(0, 999), temperature=st.sampled_from([0.05, 0.1, 0.5, 1.0]))
def test_affinity_bounds_the_loss_from_below(batch_size: int, seed: int, temperature: float) -> None:
    left, right = random_pairs(batch_size, 4, seed, noise=3.0)
    equation_2 = 2 * batch_losses(left, right, np.arange(batch_size)[None], temperature)[0]
    bound = affinity(left, right, batch_size, temperature).sum() / 2 / (batch_size * (batch_size - 1))
    assert bound <= equation_2 + 1e-5


@pytest.mark.parametrize("batch_size", [2, 5])
def test_the_bound_is_tight_where_all_negatives_are_alike(batch_size: int) -> None:
    left = np.eye(batch_size)
    equation_2 = 2 * batch_losses(left, left, np.arange(batch_size)[None], 0.5)[0]
    bound = affinity(left, left, batch_size, 0.5).sum() / 2 / (batch_size * (batch_size - 1))
    assert bound == pytest.approx(equation_2)


def test_unnormalized_rows_are_the_largest_eigenvectors_of_the_laplacian() -> None:
    weights = affinity(*random_pairs(30, 6), 5, 0.1)
    _, vectors = np.linalg.eigh(np.diag(weights.sum(axis=1)) - weights)
    expected = vectors[:, -6:] / np.linalg.norm(vectors[:, -6:], axis=1, keepdims=True)
    rows = spectral_rows(weights, 6, "unnormalized")
    np.testing.assert_allclose(rows @ rows.T, expected @ expected.T, atol=1e-8)


def test_normalized_rows_span_what_scikit_learn_embeds() -> None:
    weights = affinity(*random_pairs(30, 6), 5, 0.1)
    # scikit-learn's rows are scaled by the degree: undo that to get the eigenvectors.
    embedding = spectral_embedding(weights, n_components=6, drop_first=False, random_state=0)
    embedding /= np.linalg.norm(embedding * np.sqrt(weights.sum(axis=1))[:, None], axis=0)
    expected = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    rows = spectral_rows(weights, 6, "normalized")
    np.testing.assert_allclose(np.abs(rows @ rows.T), np.abs(expected @ expected.T), atol=1e-6)


def test_assignment_is_the_cheapest_with_equal_clusters() -> None:
    rows = np.array([[0.0], [1.0], [2.0], [3.0], [100.0], [101.0]])
    clusters = equal_clusters(rows, 2, seed=0)
    # k-means alone would cut 4 : 2; of the four near 1.5, the one nearest to 100 has to move.
    assert sorted(sorted(cluster) for cluster in clusters.tolist()) == [[0, 1, 2], [3, 4, 5]]


@given(clusters=st.integers(1, 6), size=st.integers(1, 8), seed=st.integers(0, 20))
def test_clusters_are_equal_even_of_duplicates(clusters: int, size: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 2, (clusters * size, 2)).astype(float)
    found = equal_clusters(rows, clusters, seed)
    assert sorted(found.ravel().tolist()) == list(range(clusters * size))
    assert found.shape == (clusters, size)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize(("clusters", "size"), [(4, 8), (16, 16), (10, 4), (6, 32)])
def test_recovers_planted_clusters(clusters: int, size: int, temperature: float) -> None:
    left, right, labels = planted(clusters, size)
    assert purity(spectral_batches(left, right, size, temperature, 0, "normalized"), labels) == 1


def test_the_letter_of_the_paper_does_not_recover_planted_clusters() -> None:
    """Why "normalized" is the default: the largest eigenvectors of D − A are contrasts within clusters."""
    left, right, labels = planted(16, 16)
    assert purity(spectral_batches(left, right, 16, 0.1, 0, "unnormalized"), labels) < 0.8
