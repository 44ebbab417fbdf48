"""GlobalCache: how far the mean of its sum over batch and draws is from that of the corpus; it always draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import GlobalCache

NUM_ITEMS = 6


def mean_of_sum(left: Tensor, right: Tensor, batch_size: int, num_draws: int, tau: float) -> Tensor:
    """(N,) of each left anchor the mean over all batches with it, and over all draws, of the sum over batch and draws,
    over the true sum; as in the docstring of `GlobalCache`, with everything remembered as it is now."""
    masses = (left @ right.T / tau).exp().fill_diagonal_(0)
    true = masses.sum(dim=1)
    total, count = torch.zeros_like(true), torch.zeros_like(true)
    for batch in itertools.combinations(range(len(left)), batch_size):
        rows = torch.tensor(batch)
        q = (masses[rows] / true[rows, None]).mean(dim=0)
        expected = (batch_size - 1) / (len(left) - 1) + num_draws * q
        # One number u places all draws, at (k + u)/R along the cumulative q: what is drawn changes at these u.
        ends = q.cumsum(dim=0)
        cuts = sorted({0.0, 1.0, *(num_draws * ends % 1).tolist()})
        for low, high in itertools.pairwise(cuts):
            if high - low < 1e-12:
                continue
            places = (torch.arange(num_draws, dtype=torch.float64) + (low + high) / 2) / num_draws
            drawn = torch.searchsorted(ends, places)
            number = torch.bincount(torch.cat([rows, drawn]), minlength=len(left))
            sums = (masses[rows] * number / expected.clamp(min=1e-300)).sum(dim=1)
            total[rows] += (high - low) * sums
        count[rows] += 1
    return total / count / true


@pytest.mark.parametrize(
    ("batch_size", "tau", "low", "high"),
    [(2, 0.07, 1.02, 1.04), (2, 1.0, 1.11, 1.13), (3, 0.07, 1.01, 1.03), (3, 1.0, 1.05, 1.065)],
)
def test_mean_of_the_sum_over_all_batches_and_draws(batch_size: int, tau: float, low: float, high: float) -> None:
    found = []
    for seed in range(10):
        draws = torch.randn(2, NUM_ITEMS, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        left, right = normalize(draws, dim=2)
        found.append(mean_of_sum(left, right, batch_size, num_draws=round(batch_size / 2), tau=tau))
    mean = float(torch.stack(found).mean())
    assert low < mean < high


def test_the_mean_is_exact_for_a_batch_of_one() -> None:
    """What is drawn does not depend on who else is there."""
    left, right = normalize(torch.randn(2, NUM_ITEMS, 5, dtype=torch.float64), dim=2)
    torch.testing.assert_close(mean_of_sum(left, right, 1, 1, 0.2), torch.ones(NUM_ITEMS, dtype=torch.float64))


@pytest.mark.parametrize("extra_encodes", [1.0, 0.1, 0.0])
def test_a_batch_of_one_pair_draws_at_least_one_item(extra_encodes: float) -> None:
    left, right = normalize(torch.randn(2, NUM_ITEMS, 5, dtype=torch.float64), dim=2)
    criterion = GlobalCache(num_left=NUM_ITEMS, temperature=0.2, extra_encodes=extra_encodes).double()
    asked: list[int] = []

    def encode(side: str, ids: Tensor) -> Tensor:
        asked.extend(ids.tolist())
        return (left if side == "left" else right)[ids]

    for step in range(2 * NUM_ITEMS):
        asked.clear()
        ids = torch.tensor([step % NUM_ITEMS])
        criterion(left[ids], right[ids], ids, encode=encode)
        # Before the second step nothing is there to be drawn.
        assert len(asked) == (2 if extra_encodes and step else 0)
