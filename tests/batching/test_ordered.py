"""Ordered SGD takes the hardest batches, of a partition or of all."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.batching import OSGDBatches, RandomBatches, batch_losses
from dualenc.errors import DualencError
from tests.batching.clusters import random_pairs
from tests.batching.test_losses import slow_loss


@pytest.mark.parametrize("seed", range(5))
def test_exhaustive_selection_takes_the_maximum_of_all_28_batches(seed: int) -> None:
    left, right = random_pairs(8, 4, seed, noise=2.0)
    every = [np.array(pair) for pair in itertools.combinations(range(8), 2)]
    hardest = max(every, key=lambda batch: slow_loss(left, right, batch, 1.0))
    chosen = OSGDBatches(8, 2, q=1, temperature=1.0, exhaustive=True).select(0, left, right)
    assert chosen.tolist() == [hardest.tolist()]


def test_exhaustive_selection_takes_the_q_hardest_in_order() -> None:
    left, right = random_pairs(7, 4, noise=2.0)
    every = [np.array(batch) for batch in itertools.combinations(range(7), 3)]
    expected = sorted((slow_loss(left, right, batch, 0.1) for batch in every), reverse=True)[:5]
    selector = OSGDBatches(7, 3, q=5, exhaustive=True)
    chosen = selector.select(0, left, right)
    assert selector.num_batches == len(chosen) == 5
    np.testing.assert_allclose(batch_losses(left, right, chosen, 0.1), expected, rtol=1e-4)


@given(num_batches=st.integers(1, 40), k=st.integers(1, 12), seed=st.integers(0, 9), data=st.data())
def test_takes_the_hardest_of_each_window_of_the_partition(
    num_batches: int, k: int, seed: int, data: st.DataObject
) -> None:
    q = data.draw(st.integers(1, k))
    num_pairs = 3 * num_batches + seed % 3
    left, right = random_pairs(num_pairs, 5, seed, noise=2.0)
    partition = RandomBatches(num_pairs, 3, seed).select(2)
    expected: list[list[int]] = []
    for start in range(0, num_batches, k):
        window = partition[start : start + k]
        window = sorted(window.tolist(), key=lambda batch: -slow_loss(left, right, np.array(batch), 0.1))
        expected += window[: -(-q * len(window) // k)]
    selector = OSGDBatches(num_pairs, 3, seed, k=k, q=q)
    chosen = selector.select(2, left, right)
    assert chosen.tolist() == expected
    assert len(chosen) == selector.num_batches


def test_says_how_many_pairs_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    left, right = random_pairs(100, 8)
    selector = OSGDBatches(100, 5, k=10, q=2)
    with caplog.at_level(logging.INFO, logger="dualenc"):
        chosen = selector.select(3, left, right)
    assert selector.left_out(chosen) == 100 - 4 * 5
    assert "epoch 3 leaves out 80 of 100 pairs" in caplog.text


def test_more_to_choose_than_to_choose_from_is_refused() -> None:
    with pytest.raises(DualencError, match="q is 11 but k is 10; choose a q of at most k"):
        OSGDBatches(100, 5, k=10, q=11)


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(DualencError, match=r"C\(100, 5\) batches are more than 1,000,000; set exhaustive=False"):
        OSGDBatches(100, 5, exhaustive=True)
