"""Probes: rates of SCENT, thresholds that are quantiles, hard batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dualenc.batching import RandomBatches
from dualenc.objectives import GlobalCache, InfoNCE, SogCLR
from tests.helpers.eval_scripts import load_script
from tests.helpers.known_clusters import random_pairs

probes = load_script("probes.py")
NUM_PAIRS = 40
COMMON = {"num_left": NUM_PAIRS, "num_right": NUM_PAIRS, "temperature": 0.2}
IDS = torch.arange(8)


def sides() -> tuple[Tensor, Tensor]:
    """Return (M, D) left and right embeddings; pair 1 is a near copy of pair 0."""
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(NUM_PAIRS, 6, generator=draw)
    right = left + 0.5 * torch.randn(NUM_PAIRS, 6, generator=draw)
    left[1], right[1] = left[0] + 0.01, right[0] + 0.01
    return normalize(left, dim=1), normalize(right, dim=1)


def gradients(objective: Any, ids: Tensor, **positives: Tensor) -> Tensor:
    """Return (2, B, D) gradients of a step on some pairs, with other items as they are."""
    embeddings = sides()
    batch = [side[ids].requires_grad_() for side in embeddings]
    by_side = dict(zip(("left", "right"), embeddings, strict=True))
    out = objective(*batch, ids, encode=lambda side, items: by_side[side][items], **positives)
    return torch.stack(torch.autograd.grad(out.loss, batch))


def batches(count: int, size: int = 16) -> Iterator[Tensor]:
    """Yield ids of random batches."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randperm(NUM_PAIRS, generator=draw)[:size]


@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_scents_averages_are_those_of_a_slow_loop(kappa: float) -> None:
    scent = probes.SCENT(kappa=kappa, gamma=0.3, mean_rate=0.1, **COMMON)
    left, right = (side.double() for side in sides())
    exponentials = torch.cat([left @ right.T, right @ left.T]).div(0.2).exp()
    averages: dict[int, Tensor] = {}
    center = None
    for ids in batches(6):
        gradients(scent, ids)
        rows = torch.cat([ids, NUM_PAIRS + ids]).tolist()
        if visited := [averages[row].log() for row in rows if row in averages]:
            mean = torch.stack(visited).mean()
            center = mean if center is None else 0.9 * center + 0.1 * mean
        for row in rows:
            value = exponentials[row, ids[ids != row % NUM_PAIRS]].mean()
            if row in averages:
                old = averages[row]
                rate = torch.sigmoid(np.log(0.3 / 0.7) + kappa * (old.log() - center))
                value = (1 - rate) * old + rate * value
            averages[row] = value
    expected = torch.stack(list(averages.values())).log()
    found = scent.log_u[list(averages)].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_threshold_becomes_the_quantile_of_all_similarities() -> None:
    objective = probes.FilteredInfoNCE(alpha=0.1, threshold_rate=0.002, start=0.0, **COMMON)
    for ids in batches(3000):
        gradients(objective, ids)
    left, right = sides()
    similarities = torch.cat([left @ right.T, right @ left.T])
    is_other = ~torch.eye(NUM_PAIRS).bool().repeat(2, 1)
    beyond = (similarities > objective.threshold[:, None]) & is_other
    shares = beyond.sum(dim=1) / (NUM_PAIRS - 1)
    assert shares.mean().item() == pytest.approx(0.1, abs=0.01)
    assert shares.max() < 0.2


@pytest.mark.parametrize("plain", [InfoNCE, SogCLR])
def test_a_candidate_beyond_the_threshold_is_as_a_known_positive(plain: type) -> None:
    objective = getattr(probes, f"Filtered{plain.__name__}")(
        alpha=0.05, threshold_rate=0.0, start=0.4, **COMMON
    )
    objective.threshold.fill_(2.0)
    # Between the similarity of the copies, 0.8, and all others.
    objective.threshold[[0, 1, NUM_PAIRS, NUM_PAIRS + 1]] = 0.6
    known = torch.full((8, 1), -1)
    known[0], known[1] = 1, 0
    unfiltered = gradients(plain(**COMMON), IDS)
    torch.testing.assert_close(gradients(objective, IDS), unfiltered)
    objective.set_progress(0.4)
    filtered = gradients(plain(**COMMON), IDS, left_positives=known, right_positives=known)
    if plain is SogCLR:
        objective.log_u.fill_(torch.nan)
    torch.testing.assert_close(gradients(objective, IDS), filtered)
    assert not torch.allclose(filtered, unfiltered)


def test_the_nearest_remembered_items_are_left_out() -> None:
    cache = {"extra_encodes": 0, "pool": NUM_PAIRS, **COMMON}
    filtered, plain = probes.FilteredGlobalCache(count=1, start=0.0, **cache), GlobalCache(**cache)
    for objective in (filtered, plain):
        for ids in torch.arange(NUM_PAIRS).split(8):
            gradients(objective, ids)
    left, right = sides()
    similarities = (left @ right.T).fill_diagonal_(-1)
    nearest = [side[IDS].argmax(dim=1, keepdim=True) for side in (similarities, similarities.T)]
    expected = gradients(plain, IDS, left_positives=nearest[0], right_positives=nearest[1])
    torch.testing.assert_close(gradients(filtered, IDS), expected)


def test_ordered_sgd_takes_the_hardest_of_each_window_of_the_partition() -> None:
    left, right = random_pairs(62, 5, 0, noise=2.0)
    partition = RandomBatches(62, 3, 0).select(2)
    targets = torch.arange(3)

    def loss(batch: list[int]) -> float:
        logits = torch.from_numpy(left[batch]).double() @ torch.from_numpy(right[batch]).double().T
        return float(cross_entropy(logits / 0.1, targets) + cross_entropy(logits.T / 0.1, targets))

    expected: list[list[int]] = []
    for start, kept in ((0, 3), (8, 3), (16, 2)):
        window = partition[start : start + 8].tolist()
        expected += sorted(window, key=loss, reverse=True)[:kept]
    selector = probes.OSGDBatches(62, 3, 0, k=8, q=3)
    assert selector.select(2, left, right).tolist() == expected
    assert selector.num_batches == len(expected)
