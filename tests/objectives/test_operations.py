"""How many operations a step of an objective dispatches, forward and backward: next to a loss of a few matrices, that
is what a small batch costs. The numbers are held: they may fall, and rise only by decision."""

from __future__ import annotations

import pytest
import torch

from dualenc import objectives
from dualenc.objectives import Objective
from tests.objectives.every import Dispatched

BATCH_SIZE, DIMENSION, NUM_PAIRS = 32, 64, 200
AT_MOST = {
    "InfoNCE": 60,
    "DCL": 100,
    "HCL": 245,
    "SigLIP": 122,
    "SogCLR": 140,
    "ISogCLR": 206,
    "SACLR": 265,
    "NegativeCache": 600,
    "EMC2": 830,
    "ISIR": 655,
    "ExactGlobal": 215,
}


def unit(count: int, seed: int) -> torch.Tensor:
    draw = torch.randn(count, DIMENSION, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(draw, dim=1)


def operations(criterion: Objective) -> int:
    """Of a third step, when tables and caches hold something."""
    corpus = {"left": unit(NUM_PAIRS, 0), "right": unit(NUM_PAIRS, 1)}
    for step in range(3):
        ids = torch.randperm(NUM_PAIRS, generator=torch.Generator().manual_seed(step))[:BATCH_SIZE]
        left, right = (corpus[side][ids].requires_grad_() for side in ("left", "right"))
        with Dispatched() as dispatched:
            criterion(left, right, ids, encode=lambda side, ids: corpus[side][ids]).loss.backward()
    return dispatched.count


@pytest.mark.parametrize("name", AT_MOST)
def test_operations_of_a_step(name: str) -> None:
    assert operations(getattr(objectives, name)(num_left=NUM_PAIRS)) <= AT_MOST[name]


def test_metrics_cost_nothing_until_they_are_read() -> None:
    ids = torch.arange(BATCH_SIZE)
    out = objectives.InfoNCE()(unit(BATCH_SIZE, 0), unit(BATCH_SIZE, 1), ids)
    with Dispatched() as unread:
        assert list(out.metrics) == ["batch_estimate", "accuracy", "positive_similarity", "temperature"]
    with Dispatched() as read:
        first = dict(out.metrics)
    with Dispatched() as again:
        assert all(out.metrics[name] is value for name, value in first.items())
    assert (unread.count, again.count) == (0, 0)
    assert read.count > 20


def test_open_clip_needs_few_less() -> None:
    """Its loss has no ids, checks nothing and knows no temperature but the model's."""
    loss = pytest.importorskip("open_clip.loss").ClipLoss()
    left, right = (unit(BATCH_SIZE, seed).requires_grad_() for seed in range(2))
    with Dispatched() as theirs:
        loss(left, right, torch.tensor(1 / 0.07)).backward()
    assert operations(objectives.InfoNCE()) <= 1.5 * theirs.count
