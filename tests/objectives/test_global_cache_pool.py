"""GlobalCache that looks at a part of what is remembered: what it reports, when, and what it keeps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import GlobalCache

NUM_PAIRS, BATCH_SIZE = 320, 16


def clustered() -> tuple[Tensor, Tensor]:
    """(N, D) pairs: of each anchor a few negatives weigh most. Neighbouring ids, so blocks of a cache, are not near."""
    draw = torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(NUM_PAIRS // 20, 16, generator=draw), dim=1)
    left = normalize(centres.repeat(20, 1) + 0.12 * torch.randn(NUM_PAIRS, 16, generator=draw), dim=1)
    return left, normalize(left + 0.1 * torch.randn(NUM_PAIRS, 16, generator=draw), dim=1)


def exact(left: Tensor, right: Tensor, tau: float) -> Tensor:
    """(2, N) losses of left and right anchors over the whole corpus."""
    scores = (left @ right.T / tau).double()
    masked = scores.clone().fill_diagonal_(-torch.inf)
    return torch.stack([torch.logsumexp(masked, dim=dim) - scores.diagonal() for dim in (1, 0)])


def run(criterion: GlobalCache, left: Tensor, right: Tensor, num_epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and losses (2, B) of each step."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(num_epochs):
        for ids in torch.randperm(len(left), generator=draw).split(BATCH_SIZE):
            given = [table[ids].requires_grad_() for table in (left, right)]
            out = criterion(*given, ids, encode=lambda side, ids: (left if side == "left" else right)[ids])
            yield ids, out.per_anchor.view(2, -1).double()


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.02, 0.07])
def test_a_reported_loss_is_within_a_tenth_of_the_true_one(tau: float) -> None:
    """And one comes at last."""
    left, right = clustered()
    true = exact(left, right, tau)
    criterion, errors, steps = GlobalCache(num_left=NUM_PAIRS, temperature=tau, pool=64), [], 0
    for ids, losses in run(criterion, left, right, 10):
        if criterion.reports_loss:
            errors.append(float((losses - true[:, ids]).mean()))
        steps += 1
    assert steps > len(errors) > 20
    assert abs(statistics.mean(errors)) < 0.1


@pytest.mark.slow
def test_the_sum_over_what_is_looked_at_has_the_mean_of_the_whole_one() -> None:
    """Whatever is kept, from the first step after everything is remembered."""
    left, right = clustered()
    true, criterion = exact(left, right, 0.3), GlobalCache(num_left=NUM_PAIRS, temperature=0.3, pool=64)
    ratios = [(losses - true[:, ids]).exp() for ids, losses in run(criterion, left, right, 12)]
    found = torch.stack([part.mean() for part in ratios[NUM_PAIRS // BATCH_SIZE :]])
    assert abs(float(found.mean()) - 1) < 0.005 + 3 * float(found.std()) / len(found) ** 0.5
    assert float(found.std()) / len(found) ** 0.5 < 0.01


@pytest.mark.slow
def test_no_loss_is_reported_while_the_cache_fills() -> None:
    left, right = clustered()
    criterion = GlobalCache(num_left=NUM_PAIRS, temperature=0.05, pool=None)
    true, reported = exact(left, right, 0.05), []
    for number, (ids, losses) in enumerate(run(criterion, left, right, 2)):
        reported.append(criterion.reports_loss)
        if reported[-1]:
            torch.testing.assert_close(losses, true[:, ids], atol=0.01, rtol=0)
        if number == NUM_PAIRS // BATCH_SIZE + 5:
            resumed = GlobalCache(num_left=NUM_PAIRS, temperature=0.05, pool=None)
            resumed.load_state_dict(criterion.state_dict())
            assert resumed.reports_loss
    assert reported == [False] * (NUM_PAIRS // BATCH_SIZE) + [True] * (NUM_PAIRS // BATCH_SIZE)


@pytest.mark.slow
def test_neighbouring_ids_of_one_topic_need_no_shuffling() -> None:
    """Clusters of 20 consecutive ids, in a memory that is full: after three visits the value is near the exact one."""
    num_pairs, draw = 2000, torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(num_pairs // 20 + 1, 64, generator=draw), dim=1)
    topics = centres.repeat_interleave(20, dim=0)[:num_pairs]
    left = normalize(topics + 0.07 * torch.randn(num_pairs, 64, generator=draw), dim=1)
    right = normalize(left + 0.05 * torch.randn(num_pairs, 64, generator=draw), dim=1)
    criterion = GlobalCache(num_left=num_pairs, temperature=0.02, pool=128)
    for direction, table in enumerate((right, left)):
        criterion.memory_of(direction).write(torch.arange(num_pairs), table)
        criterion.memory_of(direction).count(num_pairs)
    true = exact(left, right, 0.02)[0]
    for _ in range(3):
        errors = []
        for anchor in torch.randperm(60, generator=draw):
            others = 60 + torch.randperm(num_pairs - 60, generator=draw)[:15]
            ids = torch.cat([anchor[None], others])
            given = [table[ids].requires_grad_() for table in (left, right)]
            out = criterion(*given, ids, encode=lambda side, ids: (left if side == "left" else right)[ids])
            errors.append(float(out.per_anchor[0] - true[anchor]))
    assert abs(statistics.mean(errors)) < 1
