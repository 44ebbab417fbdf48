"""Learned temperatures: the mean gradient in log τ of every objective against ExactGlobal's, at frozen embeddings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dualenc.objectives
from dualenc.objectives import ExactGlobal, ISogCLR, Objective
from tests.objectives.every import CLASSES
from tests.objectives.frozen import Frozen, batches

N, B = 200, 40
TEMPERATURES = (0.05, 0.2)

# By objective and arguments: bounds of the ratio to the exact gradient at both temperatures.
RATIOS: list[tuple[str, dict[str, Any], tuple[float, float], tuple[float, float]]] = [
    ("ExactGlobal", {"corpus_chunk_size": 64}, (0.999, 1.001), (0.999, 1.001)),
    ("ISIR", {}, (0.9, 1.1), (0.97, 1.03)),
    ("NegativeCache", {}, (0.9, 1.1), (0.95, 1.05)),
    ("EMC2", {}, (0.85, 1.1), (0.95, 1.05)),
    ("GlobalCache", {}, (1.3, 1.65), (1.0, 1.06)),
    ("GlobalCache", {"extra_encodes": 4.0}, (0.95, 1.1), (0.98, 1.04)),
    ("GlobalCache", {"partition": "memory"}, (1.0, 1.2), (1.0, 1.05)),
    ("SogCLR", {"gamma": 0.1}, (0.95, 1.2), (0.98, 1.03)),
    ("SogCLR", {"gamma": 0.3}, (1.1, 1.4), (1.0, 1.05)),
    ("SogCLR", {}, (1.9, 2.3), (1.03, 1.09)),
    ("DCL", {}, (2.9, 3.2), (1.05, 1.1)),
    # Of other losses: with the positive in the softmax, over fewer negatives, and of other weights.
    ("InfoNCE", {}, (0.1, 0.16), (0.72, 0.77)),
    ("MomentumQueue", {"queue_size": 160}, (0.25, 0.35), (0.88, 0.95)),
    ("HCL", {}, (0.4, 0.65), (0.16, 0.25)),
    ("SACLR", {}, (-0.35, -0.1), (0.3, 0.42)),
    ("SigLIP", {}, (-130.0, -115.0), (3.2, 3.5)),
]


def slope(frozen: Frozen, criterion: Objective, num_warm_up: int, num_epochs: int) -> float:
    """Mean gradient in log τ of an epoch."""
    criterion.set_progress(1.0)
    total = 0.0
    for epoch, order in enumerate(batches(N, B, num_warm_up + num_epochs)):
        for ids in order:
            loss = frozen.loss(criterion, ids)
            if epoch >= num_warm_up:
                (gradient,) = torch.autograd.grad(loss, criterion.log_temperature)
                total += float(gradient) * B / N / num_epochs
    return total


def test_every_objective_is_measured() -> None:
    """`ISogCLR` has no shared temperature to learn."""
    assert {name for name, *_ in RATIOS} == {kind.__name__ for kind in CLASSES} - {"ISogCLR"}


@pytest.mark.parametrize(("name", "arguments", "low_tau", "high_tau"), RATIOS, ids=lambda value: str(value))
def test_the_gradient_of_the_temperature(
    name: str, arguments: dict[str, Any], low_tau: tuple[float, float], high_tau: tuple[float, float]
) -> None:
    """docs/objectives.md has the ratios."""
    frozen = Frozen.make(N)
    for tau, (low, high) in zip(TEMPERATURES, (low_tau, high_tau), strict=True):
        frozen.tau = tau
        exact = slope(frozen, frozen.build(ExactGlobal, learnable_temperature=True), 0, 1)
        kind = getattr(dualenc.objectives, name)
        criterion = frozen.build(kind, learnable_temperature=True, **arguments)
        num_epochs = 1 if kind is ExactGlobal else 20
        ratio = slope(frozen, criterion, num_epochs, num_epochs) / exact
        assert low <= ratio <= high, f"{name} at τ = {tau}: {ratio:.3f}"


@pytest.mark.parametrize(("radius", "gamma"), [(0.3, 0.3), (1.0, 0.9)])
def test_temperatures_of_anchors_end_where_the_robust_loss_is_least(radius: float, gamma: float) -> None:
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
