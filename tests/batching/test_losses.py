"""The loss of a batch is what torch computes, one batch at a time, in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dualenc.batching import batch_losses
from dualenc.errors import DualencError
from tests.batching.clusters import random_pairs


def slow_loss(left: np.ndarray, right: np.ndarray, batch: np.ndarray, temperature: float) -> float:
    logits = torch.from_numpy(left[batch]).double() @ torch.from_numpy(right[batch]).double().T / temperature
    targets = torch.arange(len(batch))
    return float(cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.005])
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 24])
def test_equals_cross_entropy_batch_by_batch(temperature: float, chunk_bytes: int) -> None:
    left, right = random_pairs(70, 12, noise=2.0)
    batches = np.random.default_rng(0).permutation(70).reshape(10, 7)
    expected = [slow_loss(left, right, batch, temperature) for batch in batches]
    np.testing.assert_allclose(batch_losses(left, right, batches, temperature, chunk_bytes), expected, rtol=1e-4)


def test_a_batch_of_one_has_nothing_to_tell_apart() -> None:
    left, right = random_pairs(3, 4)
    np.testing.assert_allclose(batch_losses(left, right, np.array([[0], [2]]), 0.1), 0, atol=1e-6)


def test_a_temperature_of_zero_is_refused() -> None:
    left, right = random_pairs(3, 4)
    with pytest.raises(DualencError, match=r"temperature is 0\.0; choose a number above 0"):
        batch_losses(left, right, np.array([[0, 1]]), 0.0)
