"""Learned temperatures: the mean gradient in log τ of estimators against ExactGlobal's, at frozen
embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dualenc.objectives import (
    DCL,
    EMC2,
    ISIR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SogCLR,
)
from tests.helpers.frozen_embeddings import Frozen, batches

N, B = 200, 40


def slope(frozen: Frozen, criterion: Objective, num_epochs: int) -> float:
    """Mean gradient in log τ of an epoch, after as many epochs."""
    total = 0.0
    for epoch, order in enumerate(batches(N, B, 2 * num_epochs)):
        for ids in order:
            (gradient,) = torch.autograd.grad(
                frozen.loss(criterion, ids), criterion.log_temperature
            )
            if epoch >= num_epochs:
                total += float(gradient) * B / N / num_epochs
    return total


@pytest.mark.parametrize("start", [0.001, 0.0011])
def test_a_temperature_at_its_bound_can_rise_again(start: float) -> None:
    frozen = Frozen.make(N)
    frozen.tau = start
    criterion = frozen.build(InfoNCE, learnable_temperature=True)
    optimizer = torch.optim.SGD([criterion.log_temperature], lr=1.0)
    ids = torch.arange(B)
    criterion.log_temperature.data -= 5.0  # a step of some optimizer too far
    (gradient,) = torch.autograd.grad(frozen.loss(criterion, ids), criterion.log_temperature)
    assert criterion.temperature.item() == pytest.approx(0.001)
    assert gradient < 0
    criterion.log_temperature.grad = 0.1 * gradient / gradient.abs()
    optimizer.step()
    assert criterion.temperature.item() > 0.00105


@pytest.mark.parametrize(
    ("kind", "arguments", "at_005", "at_02"),
    [
        (ExactGlobal, {"corpus_chunk_size": 64}, (0.999, 1.001), (0.999, 1.001)),
        (ISIR, {}, (0.9, 1.1), (0.97, 1.03)),
        (NegativeCache, {}, (0.9, 1.1), (0.95, 1.05)),
        (EMC2, {}, (0.85, 1.1), (0.95, 1.05)),
        (GlobalCache, {}, (1.0, 1.2), (1.0, 1.05)),
        (GlobalCache, {"extra_encodes": 4.0}, (0.95, 1.1), (0.98, 1.04)),
        (SogCLR, {"gamma": 0.1}, (0.95, 1.2), (0.98, 1.03)),
        (DCL, {}, (2.9, 3.2), (1.05, 1.1)),
    ],
)
def test_the_gradient_of_the_temperature(
    kind: type[Objective],
    arguments: dict[str, Any],
    at_005: tuple[float, float],
    at_02: tuple[float, float],
) -> None:
    """docs/objectives.md has the ratios to the exact one."""
    frozen = Frozen.make(N)
    for tau, (low, high) in ((0.05, at_005), (0.2, at_02)):
        frozen.tau = tau
        exact = slope(frozen, frozen.build(ExactGlobal, learnable_temperature=True), 1)
        criterion = frozen.build(kind, learnable_temperature=True, **arguments)
        assert low <= slope(frozen, criterion, 1 if kind is ExactGlobal else 20) / exact <= high


@pytest.mark.parametrize(("radius", "gamma"), [(0.3, 0.3), (1.0, 0.9)])
def test_temperatures_of_anchors_end_where_the_robust_loss_is_least(
    radius: float, gamma: float
) -> None:
    frozen = Frozen.make(N)
    criterion = frozen.build(ISogCLR, radius=radius, gamma=gamma)
    for order in batches(N, B, 150):
        for ids in order:
            frozen.loss(criterion, ids)
    similarities = (frozen.left @ frozen.right.T).detach().double()
    grid = torch.logspace(-2.3, 0, 200, dtype=torch.float64)  # from 0.005
    losses = []
    for tau in grid:
        for rows in (similarities, similarities.T):
            margins = (rows - rows.diagonal()[:, None]).fill_diagonal_(-torch.inf)
            losses.append(tau * ((margins / tau).logsumexp(dim=1) - math.log(N - 1) + radius))
    best = grid[torch.stack(losses).view(len(grid), 2 * N).argmin(dim=0)]
    assert float((criterion.tau / best).log().abs().mean()) < 0.1
