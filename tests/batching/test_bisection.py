"""Balanced bisection: equal halves along the leading direction, and near neighbours in one batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.batching import RandomBatches, SpectralBatches, batch_losses
from dualenc.batching import spectral as module
from dualenc.batching.spectral import bisection_batches, split
from tests.batching.clusters import planted, purity, unit


def separation(points: np.ndarray, low: np.ndarray) -> float:
    """Distance between the means of the two sides."""
    return float(np.linalg.norm(points[low].mean(axis=0) - points[~low].mean(axis=0)))


@pytest.mark.parametrize("half", [2, 4, 5])
def test_splits_are_nearly_as_good_as_the_best_of_all(half: int) -> None:
    draw = np.random.default_rng(half)
    every = [np.isin(np.arange(8), chosen) for chosen in itertools.combinations(range(8), half)]
    shares = []
    for points in draw.standard_normal((50, 8, 3)).astype(np.float32):
        order = split(points[None], half, draw)[0]
        assert sorted(order.tolist()) == list(range(8))
        found = separation(points, np.isin(np.arange(8), order[:half]))
        shares.append(found / max(separation(points, low) for low in every))
    assert np.mean(shares) > 0.9


def test_a_split_tells_two_groups_apart() -> None:
    draw = np.random.default_rng(0)
    side = draw.permutation(np.repeat([0, 1], 50))
    points = (draw.standard_normal((100, 16)) + 3 * side[:, None] * np.eye(16)[2]).astype(np.float32)
    order = split(points[None], 50, draw)[0]
    found = np.isin(np.arange(100), order[:50])
    assert max(np.mean(found == side), np.mean(found != side)) > 0.9


def test_nodes_are_split_independently() -> None:
    draw = np.random.default_rng(0)
    nodes = draw.standard_normal((4, 24, 5)).astype(np.float32)
    together = split(nodes, 12, np.random.default_rng(1))
    stream = np.random.default_rng(1)
    alone = [split(node[None], 12, stream)[0] for node in nodes]
    for a, b in zip(together, alone):
        assert {frozenset(a[:12]), frozenset(a[12:])} == {frozenset(b[:12]), frozenset(b[12:])}


@given(num_batches=st.integers(1, 40), batch_size=st.integers(1, 6), dim=st.integers(1, 5), seed=st.integers(0, 9))
def test_is_a_partition_for_any_number_of_batches(num_batches: int, batch_size: int, dim: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    points = draw.standard_normal((num_batches * batch_size, dim)).astype(np.float32)
    batches = bisection_batches(points, batch_size, draw)
    assert batches.shape == (num_batches, batch_size)
    assert sorted(batches.ravel().tolist()) == list(range(num_batches * batch_size))


def test_the_size_of_chunks_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    expected = bisection_batches(points, 10, np.random.default_rng(1))
    monkeypatch.setattr(module, "CHUNK_FLOATS", 1)
    found = bisection_batches(points, 10, np.random.default_rng(1))
    assert {frozenset(batch) for batch in found.tolist()} == {frozenset(batch) for batch in expected.tolist()}


@pytest.mark.parametrize(("clusters", "size"), [(4, 8), (16, 16), (12, 4), (13, 32)])
def test_recovers_planted_clusters(clusters: int, size: int) -> None:
    left, right, labels = planted(clusters, size, noise=0.1)
    batches = SpectralBatches(len(left), size, method="bisection").select(0, left, right)
    assert purity(batches, labels) > 0.95


def test_batches_are_much_harder_than_random_ones_and_than_spectral_groups() -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 60, 4096)
    centers = unit(draw.standard_normal((60, 64)))
    left = unit(centers[labels] + 0.1 * draw.standard_normal((4096, 64))).astype(np.float32)
    right = unit(left + 0.05 * draw.standard_normal((4096, 64))).astype(np.float32)
    losses = {
        name: batch_losses(left, right, selector.select(0, left, right), 0.1).mean()
        for name, selector in {
            "random": RandomBatches(4096, 16),
            "spectral": SpectralBatches(4096, 16, method="spectral", k=16),
            "bisection": SpectralBatches(4096, 16, method="bisection"),
        }.items()
    }
    assert losses["random"] < losses["spectral"] < losses["bisection"]
    assert losses["bisection"] > 1.7 * losses["spectral"]
