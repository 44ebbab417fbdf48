"""Bias of the objectives' gradients, against cross entropy over every batch."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers.eval_scripts import load_script

estimators = load_script("estimators.py")
TAU = 0.2
SETTINGS = {"vectors": "random", "num_pairs": 6, "dimension": 3, "views": False, "drift": 0.0}


def slow_gradient(pairs: estimators.FrozenPairs, rows: tuple[int, ...]) -> torch.Tensor:
    """Return the gradient of InfoNCE on pairs `rows`, by cross entropy."""
    at = list(rows)
    scores = pairs.left[at] @ pairs.right[at].T / TAU
    own = torch.arange(len(at))
    loss = (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2
    return torch.cat(torch.autograd.grad(loss, [pairs.left, pairs.right]))


@pytest.mark.slow
def test_bias_is_that_over_all_batches() -> None:
    pairs = estimators.pairs_of(SETTINGS)(0)
    batches = [slow_gradient(pairs, rows) for rows in combinations(range(6), 3)]
    expected = estimators.relative(torch.stack(batches).mean(dim=0), pairs.exact(TAU)[0])
    own = {"objective": "InfoNCE", "options": {}, "batch_size": 3, "temperature": TAU}
    own |= {"warm_up": 0, "epochs": 96, "stretches": 8, "runs": 1}
    found = estimators.run({**SETTINGS, **own})
    assert found["±"] < 0.02
    assert found["bias"] == pytest.approx(expected, abs=4 * found["±"] + 1e-3)


@pytest.mark.parametrize("gap", [0, 1], ids=["runs", "stretches"])
def test_bias_is_freed_of_noise(gap: int) -> None:
    draw, exact = torch.Generator().manual_seed(0), torch.full((50, 2), 2.0, dtype=torch.float64)
    noise = torch.randn(40, 50, 2, generator=draw, dtype=torch.float64)
    value, error = estimators.bias_of(exact + 0.5 + noise, exact, gap)
    assert value == pytest.approx(0.25, abs=3 * error)
    assert estimators.bias_of(exact + noise, exact, gap)[0] < 0.1
