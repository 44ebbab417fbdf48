"""The arguments of SpectralBatches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.batching import RandomBatches, SpectralBatches
from dualenc.batching.spectral import spectral_batches
from dualenc.errors import DualencError
from tests.batching.clusters import planted, purity, random_pairs


def as_sets(batches: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(batch) for batch in batches.tolist()}


@given(share=st.floats(0, 1), seed=st.integers(0, 20))
def test_share_keeps_that_many_batches_as_they_were_selected(share: float, seed: int) -> None:
    left, right, _ = planted(20, 4, dim=16, seed=seed)
    selected = as_sets(SpectralBatches(80, 4, seed).select(0, left, right))
    mixed = SpectralBatches(80, 4, seed, share=share).select(0, left, right)
    assert sorted(mixed.ravel().tolist()) == list(range(80))
    kept = len(as_sets(mixed) & selected)
    # Random batches are the same as selected ones only if just a few are left to shuffle.
    assert round(share * 20) <= kept <= round(share * 20) + 2


def test_share_of_none_is_random() -> None:
    left, right, labels = planted(40, 8)
    batches = SpectralBatches(320, 8, share=0.0).select(0, left, right)
    assert purity(batches, labels) < 0.4


def test_other_batches_are_random_in_each_epoch() -> None:
    left, right, _ = planted(20, 4)
    selector = SpectralBatches(80, 4, share=0.5)
    assert as_sets(selector.select(0, left, right)) != as_sets(selector.select(1, left, right))


def test_the_order_of_batches_is_random() -> None:
    left, right, labels = planted(30, 4)
    orders = [tuple(labels[SpectralBatches(120, 4).select(e, left, right)[:, 0]]) for e in range(2)]
    assert orders[0] != orders[1]


def test_spectral_clusters_random_groups_of_k_batches() -> None:
    left, right = random_pairs(60, 8)
    selector = SpectralBatches(60, 5, seed=7, method="spectral", k=4)
    found = as_sets(selector.select(2, left, right))
    draw = np.random.default_rng([7, 2])
    groups = draw.permutation(60).reshape(3, 20)
    np.testing.assert_array_equal(groups.reshape(12, 5), RandomBatches(60, 5, seed=7).select(2))
    expected: set[frozenset[int]] = set()
    for group in groups:
        seed = int(draw.integers(2**31))
        expected |= as_sets(group[spectral_batches(left[group], right[group], 5, 0.1, seed, "normalized")])
    assert found == expected


@pytest.mark.parametrize("method", ["bisection", "spectral", "bandwidth"])
def test_planted_clusters_survive_a_remainder(method: str) -> None:
    left, right, labels = planted(12, 8, noise=0.1)
    extra = random_pairs(5, 64, seed=9)
    left, right = np.concatenate([left, extra[0]]), np.concatenate([right, extra[1]])
    labels = np.concatenate([labels, np.arange(12, 17)])
    batches = SpectralBatches(101, 8, method=method, remainder="wrap").select(0, left, right)
    assert purity(batches, labels) > 0.7


def test_arguments_out_of_range_are_refused() -> None:
    for arguments, message in [
        ({"method": "bisect"}, "method is 'bisect'; did you mean 'bisection'"),
        ({"laplacian": "normal"}, "laplacian is 'normal'; did you mean 'normalized'"),
        ({"temperature": 0}, "temperature is 0; choose a number above 0"),
        ({"k": 0}, "k is 0; choose at least 1"),
        ({"neighbors": 0}, "neighbors is 0; choose at least 1"),
        ({"share": 1.5}, "share is 1.5; choose a number from 0 to 1"),
    ]:
        with pytest.raises(DualencError, match=message):
            SpectralBatches(100, 10, **arguments)
