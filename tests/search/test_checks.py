"""The tests behind the checks: groups of two models, the energy test, codes of an index."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from dualenc.search import Index
from dualenc.search.checks.canaries import cosines_of, decode_codes
from dualenc.search.checks.drift import energy_test
from dualenc.search.checks.mixture import compare_groups
from tests.helpers.clusters import clustered

pytestmark = pytest.mark.slow


def of_model(seed: int, count: int, topic: int, dim: int = 128) -> np.ndarray:
    """Unit vectors of a model with a mean and axes of its own, around texts of one topic."""
    model = np.random.default_rng(seed)
    scales, mean = np.exp(0.5 * model.normal(size=dim)), model.normal(size=dim)
    random = np.random.default_rng([seed, topic])
    centers = random.normal(size=(20, dim))
    vectors = centers[random.integers(20, size=count)] + 0.7 * random.normal(size=(count, dim))
    vectors = vectors * scales + mean
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("topic", [0, 1])
def test_two_models_are_told_from_two_topics(topic: int, share: float) -> None:
    count = int(2000 * share)
    base = of_model(0, 2000 - count, 0)
    assert not compare_groups(np.concatenate([base, of_model(0, count, 1)])).are_two_models
    assert compare_groups(np.concatenate([base, of_model(1, count, topic)])).are_two_models


@pytest.mark.parametrize("seed", range(10))
def test_clusters_of_one_model_are_no_two_models(seed: int) -> None:
    random = np.random.default_rng(seed)
    dim = int(random.choice([16, 64, 128]))
    sets = [clustered(1000, dim, seed), of_model(seed, 1000, 0, dim)]
    tight = random.normal(size=(2, dim))[random.integers(2, size=1000)]
    sets.append(tight + 0.05 * random.normal(size=(1000, dim)))
    for vectors in sets:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        assert not compare_groups(unit.astype(np.float32)).are_two_models


def test_energy_test_is_that_of_the_formula() -> None:
    """With all permutations of few points, its p-value counts the larger energies."""
    random = np.random.default_rng(0)
    left, right = random.normal(size=(30, 4)), random.normal(size=(25, 4)) + 0.4

    def energy(x: np.ndarray, y: np.ndarray) -> float:
        return 2 * cdist(x, y).mean() - cdist(x, x).mean() - cdist(y, y).mean()

    pooled, found = np.concatenate([left, right]), energy(left, right)
    orders = [random.permutation(55) for _ in range(2000)]
    larger = sum(energy(pooled[order[:30]], pooled[order[30:]]) >= found for order in orders)
    assert abs(energy_test(left, right) - larger / 2000) < 0.03


def test_energy_test_keeps_its_level() -> None:
    random = np.random.default_rng(0)
    pairs = [random.normal(size=(2, 60, 16)) for _ in range(40)]
    p = np.array([energy_test(*pair) for pair in pairs])
    assert 0.3 < p.mean() < 0.7
    assert energy_test(pairs[0][0], pairs[0][1] + 0.5) < 0.001


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,SQ8", "IVF4,PQ8", "PQ8x4fs", "RaBitQ"])
def test_codes_of_the_same_vector_are_those_stored(factory: str) -> None:
    vectors = clustered(500, 32)
    index = Index.build(vectors, None, factory, recall_queries=0)
    decoded = decode_codes(index.faiss, vectors)
    if factory.startswith("HNSW"):
        assert isinstance(index.faiss, faiss.IndexHNSW)
    assert decoded is not None
    np.testing.assert_allclose(cosines_of(decoded, index.reconstruct(np.arange(500))), 1, atol=1e-5)
