"""Objectives with memory as float64 loops: python dictionaries of plain numbers, one row at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from tests.objectives.slow import Case, Row, directions

Table = dict[tuple[str, int], float]


def _mean_by_item(rows: list[tuple[tuple[str, int], float]]) -> Table:
    grouped = defaultdict(list)
    for key, value in rows:
        grouped[key].append(value)
    return {key: sum(values) / len(values) for key, values in grouped.items()}


def sogclr_surrogate(case: Case, u: Table, tau: float, gamma: float) -> Tensor:
    """Yuan et al. 2022, Algorithm 1: weights exp(s/τ)/(n·u_a); updates u in place."""

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        if not row.negatives:
            return -row.positive / tau, None
        mean = sum(math.exp(float(s.detach()) / tau) for s in row.negatives) / len(row.negatives)
        old = u.get((row.table, row.item))
        own = mean if old is None else (1 - gamma) * old + gamma * mean
        weights = [math.exp(float(s.detach()) / tau) / (len(row.negatives) * own) for s in row.negatives]
        return sum(w * s / tau for w, s in zip(weights, row.negatives)) - row.positive / tau, own

    return _run(case, u, anchor)


def isogclr_surrogate(case: Case, u: Table, taus: Table, slopes: Table, arguments: dict[str, float]) -> Tensor:
    """Qiu et al. 2023, Algorithm 1, scaled by 1/τ₀; updates u, the temperatures and their momentum in place."""
    start, gamma = arguments["temperature"], arguments["gamma"]
    gradients: list[tuple[tuple[str, int], float]] = []

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        key = (row.table, row.item)
        tau = taus.get(key, start)
        scores = [float(s.detach()) / tau for s in row.negatives]
        if not scores:
            return -row.positive / start, None
        mean = sum(map(math.exp, scores)) / len(scores)
        own = mean if key not in u else (1 - gamma) * u[key] + gamma * mean
        weights = [math.exp(s) / (len(scores) * own) for s in scores]
        slope = math.log(own) + arguments["radius"] - sum(w * s for w, s in zip(weights, scores))
        gradients.append((key, slope))
        return (sum(w * s for w, s in zip(weights, row.negatives)) - row.positive) / start, own

    loss = _run(case, u, anchor)
    for key, slope in _mean_by_item(gradients).items():
        momentum = arguments["temperature_momentum"]
        slopes[key] = momentum * slopes.get(key, 0.0) + (1 - momentum) * slope
        moved = taus.get(key, start) - arguments["temperature_rate"] * slopes[key]
        taus[key] = min(max(moved, arguments["min_temperature"]), arguments["max_temperature"])
    return loss


def saclr_surrogate(case: Case, inverse_scale: Table, tau: float, alpha: float, rho: float, cauchy: bool) -> Tensor:
    """Eq. 11 with the scale of Eq. 4 after its update, every candidate a negative; updates 1/s in place."""
    total = case.num_items

    def kernel(similarity: Tensor) -> Tensor:
        distance = (1 - similarity) / tau
        return 1 / (1 + distance) if cauchy else (-distance).exp()

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        positive = kernel(row.positive)
        known = len(_positives(case, row))
        count = (total - known) * (2 if case.views else 1)
        mean = sum(kernel(s) for s in row.negatives) / len(row.negatives) if row.negatives else 0.0 * positive
        new = float(((alpha * total + 1 - alpha) * positive + (1 - alpha) * count * mean).detach())
        old = inverse_scale.get((row.table, row.item))
        update = new if old is None else rho * old + (1 - rho) * new
        return -positive.log() + (positive + count * mean) / update, update

    return _run(case, inverse_scale, anchor)


def saclr_authors_surrogate(case: Case, scale: Table, tau: float, alpha: float, rho: float) -> Tensor:
    """Algorithm 1 as the authors' program has it: 1/(s·n) from 0.01 on, used before its update; in place."""

    def kernel(similarity: Tensor) -> Tensor:
        return (-(1 - similarity) / tau).exp()

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        positive = kernel(row.positive)
        mean = sum(kernel(s) for s in row.negatives) / len(row.negatives) if row.negatives else 0.0 * positive
        old = scale.get((row.table, row.item), 0.01)
        new = float((alpha * positive + (1 - alpha) * mean).detach())
        return -positive.log() + mean / old, rho * old + (1 - rho) * new

    return _run(case, scale, anchor)


def _positives(case: Case, row: Row) -> set[int]:
    """Ids of the candidate side that the batch knows to be positive with the anchor."""
    if case.views:
        return {row.item}
    known = case.relevant | set(zip(case.left_id, case.right_id))
    if row.table == "left":
        return {r for q, r in known if q == row.item}
    return {q for q, r in known if r == row.item}


def _run(case: Case, table: Table, anchor: Callable[[Row], tuple[Tensor, float | None]]) -> Tensor:
    losses = []
    for rows in directions(case):
        results = [anchor(row) for row in rows]
        updates = [((r.table, r.item), new) for r, (_, new) in zip(rows, results) if new is not None]
        table.update(_mean_by_item(updates))
        losses.append(torch.stack([loss for loss, _ in results]).mean())
    return torch.stack(losses).mean()
