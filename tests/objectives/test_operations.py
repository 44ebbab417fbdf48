"""How many operations a step of an objective dispatches, forward and backward, and how often the host waits in it for a
GPU: next to a loss of a few matrices, that is what a small batch costs. Both are the same on every machine. The numbers
are held: they may fall, and rise only by decision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dualenc import objectives
from dualenc.objectives import Objective
from tests.objectives.every import Dispatched
from tests.pretended_device import DEVICE, pretended_device

DIMENSION = 64
# Per objective: operations at B = 32 and at B = 1024, where large matrices are cut into blocks of rows; and waits.
AT_MOST: dict[str, tuple[int, int, int]] = {
    "InfoNCE": (58, 58, 1),
    "DCL": (74, 74, 1),
    "HCL": (136, 136, 1),
    "SigLIP": (102, 102, 1),
    "SogCLR": (74, 74, 1),
    "ISogCLR": (107, 107, 1),
    "SACLR": (140, 140, 1),
    "NegativeCache": (515, 515, 3),
    "GlobalCache": (563, 870, 3),
    "EMC2": (189, 208, 3),
    "ISIR": (184, 184, 3),
    "ExactGlobal": (177, 519, 2),
}
FURTHER_WAITS: list[tuple[str, dict[str, Any]]] = [
    ("EMC2", {"score": "fresh"}),
    ("EMC2", {"proposals": 64}),
    ("EMC2", {"proposals": 64, "score": "fresh"}),
    ("GlobalCache", {"pool": 64}),
    ("ISIR", {"proposals": 64}),
    ("NegativeCache", {"refresh": 0.0}),
    ("SACLR", {"negatives": 1}),
    *((name, {"views": True}) for name in ("EMC2", "ISIR", "GlobalCache", "ISogCLR", "NegativeCache")),
]


def unit(count: int, seed: int) -> Tensor:
    draw = torch.randn(count, DIMENSION, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(draw, dim=1)


def step_counts(criterion: Objective, batch_size: int, num_pairs: int, guided: bool = False) -> tuple[int, int]:
    """Operations and waits of a third step on an accelerator, when tables and caches hold something.

    Items outside the batch come from a table there, which costs two operations and no wait; a guide's vectors too.
    """
    with pretended_device() as device:
        # Every item stands in one pair, which the trainer tells.
        criterion.set_counts(torch.ones(num_pairs), torch.ones(num_pairs))
        criterion = criterion.to(DEVICE)
        corpus = {"left": unit(num_pairs, 0).to(DEVICE), "right": unit(num_pairs, 1).to(DEVICE)}

        def encode(side: str, ids: Tensor) -> Tensor:
            return corpus[side][ids.to(DEVICE, non_blocking=True)]

        for step in range(3):
            ids = torch.randperm(num_pairs, generator=torch.Generator().manual_seed(step))[:batch_size].to(DEVICE)
            left, right = (corpus[side][ids].requires_grad_() for side in ("left", "right"))
            before = device.waits
            with Dispatched() as dispatched:
                criterion(left, right, ids, encode=encode, guide=encode if guided else None).loss.backward()
        return dispatched.count, device.waits - before


@pytest.mark.parametrize(("batch_size", "column"), [(32, 0), (1024, 1)])
@pytest.mark.parametrize("name", AT_MOST)
def test_operations_and_waits_of_a_step(name: str, batch_size: int, column: int) -> None:
    num_pairs = max(200, 4 * batch_size)
    operations, waits = step_counts(getattr(objectives, name)(num_left=num_pairs), batch_size, num_pairs)
    assert operations <= AT_MOST[name][column]
    assert waits <= AT_MOST[name][2]


@pytest.mark.parametrize(
    ("name", "arguments", "waits"), [("ISIR", {}, 3), ("EMC2", {"score": "fresh"}, 3), ("EMC2", {}, 4)]
)
def test_waits_of_proposals_near_the_batch(name: str, arguments: dict[str, Any], waits: int) -> None:
    criterion = getattr(objectives, name)(num_left=200, proposals=64, neighbor_share=0.5, **arguments)
    for side in ("left", "right"):
        criterion.set_neighbors(side, torch.arange(600).view(200, 3) % 200)
    assert step_counts(criterion, 32, 200)[1] <= waits


@pytest.mark.parametrize("name", ["SogCLR", "ISogCLR", "SACLR", "EMC2", "ISIR", "GlobalCache", "NegativeCache"])
def test_tables_in_cpu_memory_need_no_further_wait(name: str) -> None:
    """But to draw from a cache there: the host has to know the blocks that are to come over, of either direction."""
    criterion = getattr(objectives, name)(num_left=200, state_device="cpu")
    assert step_counts(criterion, 32, 200)[1] <= AT_MOST[name][2] + (2 if name == "NegativeCache" else 0)


@pytest.mark.parametrize(("name", "arguments"), FURTHER_WAITS)
def test_no_variant_waits_more_than_three_times(name: str, arguments: dict[str, Any]) -> None:
    """For what is wrong with the input, for the ids of what is to be encoded, and for what is wrong with that."""
    assert step_counts(getattr(objectives, name)(num_left=200, **arguments), 32, 200)[1] <= 3


@pytest.mark.parametrize("name", AT_MOST)
def test_a_guide_on_the_device_needs_no_further_wait(name: str) -> None:
    criterion = getattr(objectives, name)(num_left=200)
    assert step_counts(criterion, 32, 200, guided=True)[1] <= AT_MOST[name][2]


def test_metrics_cost_nothing_until_they_are_read() -> None:
    out = objectives.InfoNCE()(unit(32, 0), unit(32, 1), torch.arange(32))
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
    left, right = (unit(32, seed).requires_grad_() for seed in range(2))
    with Dispatched() as theirs:
        loss(left, right, torch.tensor(1 / 0.07)).backward()
    assert step_counts(objectives.InfoNCE(), 32, 200)[0] <= 1.5 * theirs.count
