"""Numbered draws: uniform, reproducible, and continued from two integers."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import kstest

from dualenc.errors import DualencError
from dualenc.objectives.state import SharedRandom

LIKE = torch.zeros(())


def test_draws_are_uniform_within_and_across_numbers() -> None:
    random = SharedRandom(0)
    assert kstest(random.uniform(5000, like=LIKE).numpy(), "uniform").pvalue > 0.001
    firsts = torch.stack([SharedRandom(seed).uniform(1, like=LIKE) for seed in range(1000)])
    assert kstest(firsts.flatten().numpy(), "uniform").pvalue > 0.001
    assert kstest(torch.cat([random.uniform(1, like=LIKE) for _ in range(1000)]).numpy(), "uniform").pvalue > 0.001


def test_the_ends_never_appear() -> None:
    draws = SharedRandom(0).uniform(1_000_000, like=LIKE)
    assert draws.min() > 0
    assert draws.max() < 1


def test_precisions_see_the_same_numbers() -> None:
    single, double = SharedRandom(3).uniform(9, like=LIKE), SharedRandom(3).uniform(9, like=LIKE.double())
    assert torch.equal(single.double(), double)


def test_state_continues_where_it_stopped() -> None:
    random = SharedRandom(7)
    random.uniform(5, like=LIKE)
    other = SharedRandom(0)
    other.load_state_dict(random.state_dict())
    device = torch.device("cpu")
    for _ in range(3):
        assert torch.equal(random.uniform(4, like=LIKE), other.uniform(4, like=LIKE))
        assert torch.equal(random.integers(100, 5, device=device), other.integers(100, 5, device=device))
        assert torch.equal(random.permutation(6, device), other.permutation(6, device))


def test_a_foreign_state_is_told() -> None:
    with pytest.raises(DualencError, match="seed and position"):
        SharedRandom(0).set_extra_state(torch.zeros(5056, dtype=torch.uint8))
