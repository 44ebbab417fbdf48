"""Ordered SGD, which `eval/probes.py` has for comparison: the hardest batches of each window, by a
slow loop."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from dualenc.batching import RandomBatches
from dualenc.errors import DualencError
from tests.helpers.eval_scripts import load_script
from tests.helpers.known_clusters import random_pairs

OSGDBatches = load_script("probes.py").OSGDBatches


def slow_loss(left: np.ndarray, right: np.ndarray, batch: list[int]) -> float:
    logits = (
        torch.from_numpy(left[batch]).double() @ torch.from_numpy(right[batch]).double().T / 0.1
    )
    targets = torch.arange(len(batch))
    return float(cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


@given(num_batches=st.integers(1, 40), k=st.integers(1, 12), seed=st.integers(0, 9), data=st.data())
def test_takes_the_hardest_of_each_window_of_the_partition(num_batches, k, seed, data):
    q = data.draw(st.integers(1, k))
    num_pairs = 3 * num_batches + seed % 3
    left, right = random_pairs(num_pairs, 5, seed, noise=2.0)
    partition = RandomBatches(num_pairs, 3, seed).select(2)
    expected: list[list[int]] = []
    for start in range(0, num_batches, k):
        window = partition[start : start + k]
        window = sorted(window.tolist(), key=lambda batch: -slow_loss(left, right, batch))
        expected += window[: -(-q * len(window) // k)]
    selector = OSGDBatches(num_pairs, 3, seed, k=k, q=q)
    chosen = selector.select(2, left, right)
    assert chosen.tolist() == expected
    assert len(chosen) == selector.num_batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 10, "q": 11}, "q is 11 but k is 10"),
        ({"temperature": 0.0}, r"temperature is 0\.0; choose a number above 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(DualencError, match=message):
        OSGDBatches(100, 5, **arguments)
