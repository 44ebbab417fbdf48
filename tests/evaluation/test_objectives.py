"""Bias and error of the objectives' gradients, against their definitions in float64 loops over every batch there is."""

from __future__ import annotations

import statistics
from itertools import combinations

import numpy as np
import pytest
import torch

from dualenc.evaluation.objectives import (
    ESTIMATORS,
    Bias,
    FrozenPairs,
    Measured,
    advice,
    bias_of,
    found_first,
    measure_objective,
)
from dualenc.objectives import DCL, ISIR, ExactGlobal, InfoNCE

TAU = 0.2
Array = np.ndarray


def unit_rows(count: int, seed: int, dimension: int = 3) -> torch.Tensor:
    rows = np.random.default_rng(seed).normal(size=(count, dimension))
    return torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True))


@pytest.fixture
def frozen() -> FrozenPairs:
    """Six pairs in float64, each right item near its left one."""
    left = unit_rows(6, 0)
    right = left + 0.8 * unit_rows(6, 1)
    return FrozenPairs.one_to_one(left, right / right.norm(dim=1, keepdim=True))


def slow_gradient(left: Array, right: Array, rows: tuple[int, ...], with_positive: bool) -> Array:
    """Of the mean over both directions of −s⁺/τ + log Σ_c exp(s_c/τ), with or without c = the positive."""
    gradient = np.zeros((2, *left.shape))
    for anchors, others, of, partner in ((left, right, 0, 1), (right, left, 1, 0)):
        for a in rows:
            candidates = [c for c in rows if with_positive or c != a]
            weights = np.exp([anchors[a] @ others[c] / TAU for c in candidates])
            weights /= weights.sum()
            for c, weight in [*zip(candidates, weights), (a, -1.0)]:
                gradient[of, a] += weight * others[c] / TAU / (2 * len(rows))
                gradient[partner, c] += weight * anchors[a] / TAU / (2 * len(rows))
    return gradient


def slow_bias(frozen: FrozenPairs, batch_size: int, with_positive: bool) -> float:
    """Distance of the mean over all batches from the gradient with the whole corpus as negatives, relative."""
    left, right = frozen.left.detach().numpy(), frozen.right.detach().numpy()
    exact = slow_gradient(left, right, tuple(range(len(left))), with_positive=False)
    batches = list(combinations(range(len(left)), batch_size))
    mean = sum(slow_gradient(left, right, rows, with_positive) for rows in batches) / len(batches)
    return float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "with_positive"), [(InfoNCE, True), (DCL, False)], ids=["InfoNCE", "DCL"])
def test_bias_is_that_over_all_batches(
    frozen: FrozenPairs, kind: type[InfoNCE] | type[DCL], with_positive: bool
) -> None:
    found = measure_objective(frozen, kind, TAU, 3, warm_up=0, bound=0.01, max_epochs=32)
    assert found.bias.is_significant
    assert found.bias.value == pytest.approx(slow_bias(frozen, 3, with_positive), abs=4 * found.bias.error + 1e-3)
    assert found.encodes == found.state_bytes == 0


@pytest.mark.slow
def test_error_of_a_step_is_its_mean_over_all_batches(frozen: FrozenPairs) -> None:
    left, right = frozen.left.detach().numpy(), frozen.right.detach().numpy()
    errors = []
    for rows in combinations(range(6), 3):
        # The exact gradient of the anchors of the batch, all items being candidates.
        own = np.zeros((2, *left.shape))
        for anchors, others, of, partner in ((left, right, 0, 1), (right, left, 1, 0)):
            for a in rows:
                weights = np.exp(anchors[a] @ others.T / TAU) * (np.arange(6) != a)
                weights = weights / weights.sum() - (np.arange(6) == a)
                own[of, a] += weights @ others / TAU / 6
                own[partner] += weights[:, None] * anchors[a] / TAU / 6
        errors.append(np.linalg.norm(slow_gradient(left, right, rows, True) - own) / np.linalg.norm(own))
    found = measure_objective(frozen, InfoNCE, TAU, 3, warm_up=0, bound=0.0, max_epochs=8)
    assert found.step_error == pytest.approx(np.mean(errors), abs=4 * found.step_error_error)


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
def test_the_oracle_has_no_bias_and_no_error(frozen: FrozenPairs, views: bool) -> None:
    frozen.views = views
    found = measure_objective(frozen, ExactGlobal, TAU, 2, warm_up=0)
    assert found.bias.value < 1e-6
    assert found.step_error < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
def test_an_unbiased_estimator_stays_below_its_error(frozen: FrozenPairs, views: bool) -> None:
    frozen.views = views
    found = measure_objective(frozen, ISIR, TAU, 3, warm_up=5, bound=0.1, max_epochs=8)
    assert not found.bias.is_significant
    assert str(found.bias).startswith("< 0.")
    assert found.encodes > 0
    assert found.state_bytes > 0


@pytest.mark.parametrize("gap", [0, 1], ids=["runs", "stretches"])
def test_bias_is_freed_of_noise(gap: int) -> None:
    draw, exact = torch.Generator().manual_seed(0), torch.full((50, 2), 2.0, dtype=torch.float64)
    noise = torch.randn(40, 50, 2, generator=draw, dtype=torch.float64)
    found = bias_of(exact + 0.5 + noise, exact, gap=gap)
    assert found.value == pytest.approx(0.25, abs=3 * found.error)
    assert found.is_significant
    without = bias_of(exact + noise, exact, gap=gap)
    assert without.value < without.limit < 0.1
    assert not without.is_significant


def test_a_positive_is_found_first_if_no_negative_is_nearer() -> None:
    """Items may be in several pairs; known positives are no negatives."""
    left, right = unit_rows(3, 0), unit_rows(4, 1)
    left_id, right_id = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 2, 3, 2])
    positives = {0: {0, 1}, 1: {2}, 2: {2, 3}}
    listed = torch.tensor([[0, 1], [0, 1], [2, -1], [2, 3], [2, 3]])
    frozen = FrozenPairs(left, right, left_id, right_id, left_positives=listed)

    def is_first(row: int) -> bool:
        anchor = int(left_id[row])
        scores = {z: float(left[anchor] @ right[z]) for z in range(4)}
        negatives = [score for z, score in scores.items() if z not in positives[anchor]]
        return scores[int(right_id[row])] > max(negatives)

    batches = [torch.tensor([0, 2, 4]), torch.tensor([1, 3])]
    assert found_first(frozen, batches) == statistics.mean(map(is_first, range(5)))


def measured(bias: float, encodes: float = 0.0, step_error: float = 0.5, error: float = 1e-4) -> Measured:
    return Measured(Bias(bias**2, error), 12, [step_error], encodes=encodes)


def test_advice_names_what_is_missed_and_what_is_nearest() -> None:
    found = {
        "InfoNCE": measured(0.62),
        "DCL": measured(0.27),
        "SogCLR-0.1": measured(0.07),
        "NegativeCache": measured(0.0, encodes=1.5, step_error=0.8),
        "ISIR": measured(0.0, encodes=0.9),
    }
    assert advice(found, 32, first=0.1) == (
        "at B=32 InfoNCE misses 62% of the gradient; SogCLR-0.1 7% without extra encodes; "
        "ISIR below 1% for 0.9 extra encodes per pair"
    )
    assert advice({"InfoNCE": measured(0.62)}, 8, first=0.5) == "at B=8 InfoNCE misses 62% of the gradient"
    tuned = advice({"InfoNCE": measured(0.62)}, 8, first=0.93)
    assert "finds 93% of the positives first: to fine-tune such a model, keep the positive in the softmax" in tuned


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_is_measured_with_pairs_and_with_views(frozen: FrozenPairs, name: str) -> None:
    for views in (False, True):
        frozen.views = views
        found = measure_objective(frozen, ESTIMATORS[name], TAU, 3, warm_up=1, max_epochs=1, num_runs=3)
        assert found.epochs == 3
        assert np.isfinite(found.bias.value)
        assert np.isfinite(found.step_error)
