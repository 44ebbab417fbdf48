"""Bias and error of the objectives' gradients, against their definitions in float64 loops over
every batch there is."""

from __future__ import annotations

from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.objectives import DCL, ISIR, ExactGlobal, InfoNCE
from tests.helpers.eval_scripts import load_script

TAU = 0.2
Array = np.ndarray


@pytest.fixture(scope="module")
def estimators() -> ModuleType:
    return load_script("estimator_bias.py")


def unit_rows(count: int, seed: int, dimension: int = 3) -> torch.Tensor:
    rows = np.random.default_rng(seed).normal(size=(count, dimension))
    return torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True))


@pytest.fixture
def frozen(estimators: ModuleType) -> Any:
    """Six pairs in float64, each right item near its left one."""
    left = unit_rows(6, 0)
    right = left + 0.8 * unit_rows(6, 1)
    return estimators.FrozenPairs.one_to_one(left, right / right.norm(dim=1, keepdim=True))


def slow_gradient(left: Array, right: Array, rows: tuple[int, ...], with_positive: bool) -> Array:
    """Of the mean over both directions of −s⁺/τ + log Σ_c exp(s_c/τ), with or without c = the
    positive."""
    gradient = np.zeros((2, *left.shape))
    for anchors, others, own, partner in ((left, right, 0, 1), (right, left, 1, 0)):
        for a in rows:
            candidates = [c for c in rows if with_positive or c != a]
            weights = np.exp([anchors[a] @ others[c] / TAU for c in candidates])
            weights /= weights.sum()
            for c, weight in [*zip(candidates, weights), (a, -1.0)]:
                gradient[own, a] += weight * others[c] / TAU / (2 * len(rows))
                gradient[partner, c] += weight * anchors[a] / TAU / (2 * len(rows))
    return gradient


def slow_bias(frozen: Any, batch_size: int, with_positive: bool) -> float:
    """Distance of the mean over all batches from the gradient with the whole corpus as negatives,
    relative."""
    left, right = frozen.left.detach().numpy(), frozen.right.detach().numpy()
    exact = slow_gradient(left, right, tuple(range(len(left))), with_positive=False)
    batches = list(combinations(range(len(left)), batch_size))
    mean = sum(slow_gradient(left, right, rows, with_positive) for rows in batches) / len(batches)
    return float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "with_positive"), [(InfoNCE, True), (DCL, False)], ids=["InfoNCE", "DCL"]
)
def test_bias_is_that_over_all_batches(
    estimators: ModuleType, frozen: Any, kind: type[InfoNCE] | type[DCL], with_positive: bool
) -> None:
    found = estimators.measure_stretches(frozen, kind, TAU, 3, warm_up=0, stretch=96)
    assert found.bias.error < 0.02
    assert found.bias.value == pytest.approx(
        slow_bias(frozen, 3, with_positive), abs=4 * found.bias.error + 1e-3
    )
    assert found.encodes == found.state_bytes == 0


@pytest.mark.slow
def test_error_of_a_step_is_its_mean_over_all_batches(estimators: ModuleType, frozen: Any) -> None:
    left, right = frozen.left.detach().numpy(), frozen.right.detach().numpy()
    errors = []
    for rows in combinations(range(6), 3):
        # The exact gradient of the anchors of the batch, all items being candidates.
        exact = np.zeros((2, *left.shape))
        for anchors, others, own, partner in ((left, right, 0, 1), (right, left, 1, 0)):
            for a in rows:
                weights = np.exp(anchors[a] @ others.T / TAU) * (np.arange(6) != a)
                weights = weights / weights.sum() - (np.arange(6) == a)
                exact[own, a] += weights @ others / TAU / 6
                exact[partner] += weights[:, None] * anchors[a] / TAU / 6
        errors.append(
            np.linalg.norm(slow_gradient(left, right, rows, True) - exact) / np.linalg.norm(exact)
        )
    found = estimators.measure_stretches(frozen, InfoNCE, TAU, 3, warm_up=0, stretch=1).step_errors
    standard_error = np.std(errors) / np.sqrt(len(found))
    assert len(found) == 16
    assert np.mean(found) == pytest.approx(np.mean(errors), abs=4 * standard_error)


@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
def test_the_oracle_has_no_bias_and_no_error(
    estimators: ModuleType, frozen: Any, views: bool
) -> None:
    frozen.views = views
    found = estimators.measure_stretches(frozen, ExactGlobal, TAU, 2, warm_up=0, stretch=1)
    assert found.bias.value < 1e-6
    assert max(found.step_errors) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
def test_an_unbiased_estimator_stays_below_its_error(
    estimators: ModuleType, frozen: Any, views: bool
) -> None:
    frozen.views = views
    found = estimators.measure_stretches(frozen, ISIR, TAU, 3, warm_up=5, stretch=8)
    assert found.bias.squared < 2 * found.bias.squared_error
    assert found.encodes > 0
    assert found.state_bytes > 0


@pytest.mark.parametrize("gap", [0, 1], ids=["runs", "stretches"])
def test_bias_is_freed_of_noise(estimators: ModuleType, gap: int) -> None:
    draw, exact = torch.Generator().manual_seed(0), torch.full((50, 2), 2.0, dtype=torch.float64)
    noise = torch.randn(40, 50, 2, generator=draw, dtype=torch.float64)
    found = estimators.bias_of(exact + 0.5 + noise, exact, gap=gap)
    assert found.value == pytest.approx(0.25, abs=3 * found.error)
    assert found.squared > 2 * found.squared_error
    without = estimators.bias_of(exact + noise, exact, gap=gap)
    assert without.value < 0.1
    assert without.squared < 2 * without.squared_error < 0.01
