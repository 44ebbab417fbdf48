"""Bias of the objectives' gradients, against cross entropy over every batch."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
import torch
from torch.nn.functional import cross_entropy

from dualenc.objectives import GlobalCache, InfoNCE
from tests.helpers.eval_scripts import load_script

estimators = load_script("estimators.py")
TAU = 0.2


def slow_gradient(pairs: estimators.FrozenPairs, rows: tuple[int, ...]) -> torch.Tensor:
    """Return the gradient of InfoNCE on pairs `rows`, by cross entropy."""
    at = list(rows)
    scores = pairs.left[at] @ pairs.right[at].T / TAU
    own = torch.arange(len(at))
    loss = (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2
    return torch.cat(torch.autograd.grad(loss, [pairs.left, pairs.right]))


@pytest.mark.slow
def test_bias_is_that_over_all_batches() -> None:
    pairs = estimators.random_pairs(6, 3)
    exact = pairs.exact(TAU)
    batches = [slow_gradient(pairs, rows) for rows in combinations(range(6), 3)]
    expected = estimators.relative(torch.stack(batches).mean(dim=0), exact[0])
    spans = [range(start, start + 96) for start in range(0, 8 * 96, 96)]
    build = partial(pairs.build, InfoNCE, TAU)
    [found] = estimators.measure(pairs.at, build, 3, spans)
    row = estimators.summary(found, exact, gap=1)
    assert row["±"] < 0.02
    assert row["bias"] == pytest.approx(expected, abs=4 * row["±"] + 1e-3)


@pytest.mark.parametrize("gap", [0, 1], ids=["runs", "stretches"])
def test_bias_is_freed_of_noise(gap: int) -> None:
    draw, exact = torch.Generator().manual_seed(0), torch.full((50, 2), 2.0, dtype=torch.float64)
    noise = torch.randn(40, 50, 2, generator=draw, dtype=torch.float64)
    value, error = estimators.bias_of(exact + 0.5 + noise, exact, gap)
    assert value == pytest.approx(0.25, abs=3 * error)
    assert estimators.bias_of(exact + noise, exact, gap)[0] < 0.1


def test_repaired_correction_is_the_softmax_with_the_positive() -> None:
    pairs = estimators.random_pairs(6, 3)
    exact = pairs.exact(TAU, positive_in_softmax=True)[0]
    assert torch.allclose(exact, slow_gradient(pairs, tuple(range(6))), atol=1e-5)
    option = pairs.build(GlobalCache, TAU, positive_in_softmax=True)
    criteria = (pairs.build(estimators.RepairedCache, TAU), option, pairs.build(GlobalCache, TAU))
    found = [pairs.step(criterion, torch.arange(6))[0] for criterion in criteria]
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert float((found[0] - found[2]).norm()) > 0.1
