"""MomentumQueue equals a float64 loop over a deque of past embeddings, and lightly's memory
bank."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import MomentumQueue
from tests.helpers.slow import (
    Case,
    Item,
    batch_items,
    gradients,
    is_hidden,
    item_anchors,
    make_case,
)

TAU, SIZE, STEPS = 0.3, 14, 5
Queue = deque[tuple[Item, Tensor]]


def make_keys(case: Case, seed: int) -> Case:
    """The same batch as another encoder sees it."""
    other = make_case(1000 + seed, len(case.left_id), case.views)
    return Case(other.left.detach(), other.right.detach(), case.left_id, case.right_id, case.views)


def partner_key(keys: Case, side: str, place: int) -> Tensor:
    """The key of the partner of an anchor, by its place among those of its side."""
    size = len(keys.left_id)
    is_left = place < size if side == "views" else side == "left"
    return (keys.right if is_left else keys.left)[place % size]


def loop_loss(case: Case, keys: Case, queues: dict[str, Queue]) -> Tensor:
    """He et al. 2020, Algorithm 1, in the first step against the batch's own keys. Appends to the
    queues, in place."""
    losses = []
    for side in case.sides:
        of_side = []
        for place, anchor in enumerate(item_anchors(case, side)):
            positive = anchor.vector @ partner_key(keys, side, place)
            seen = list(queues[side]) or batch_items(keys, side)
            negatives = [
                anchor.vector @ vector for item, vector in seen if not is_hidden(case, anchor, item)
            ]
            total = (positive / TAU).exp() + sum((s / TAU).exp() for s in negatives)
            of_side.append(-((positive / TAU).exp() / total).log())
        losses.append(torch.stack(of_side).mean())
        queues[side].extend((item, vector.detach()) for item, vector in batch_items(keys, side))
    return torch.stack(losses).mean()


def keys_given(keys: Case) -> dict[str, Tensor]:
    return {"keys_left": keys.left, "keys_right": keys.right}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_momentum_queue_equals_a_loop(seed: int, views: bool) -> None:
    """The queue's end is within a batch, batches have several sizes, and with views one is larger
    than the queue."""
    criterion = MomentumQueue(queue_size=SIZE, temperature=TAU, views=views).double()
    queues: dict[str, Queue] = {side: deque(maxlen=SIZE) for side in ("views", "left", "right")}
    for step in range(STEPS):
        case = make_case(seed * STEPS + step, [5, 3, 8, 1, 4][step], views)
        keys = make_keys(case, step)
        found = criterion(**case.arguments(), **keys_given(keys)).loss
        expected = loop_loss(case, keys, queues)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found, case), gradients(expected, case))


def unit(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(*shape, 6, generator=draw), dim=-1)


def test_momentum_queue_is_the_memory_bank_of_lightly() -> None:
    losses = pytest.importorskip("lightly.loss")
    criterion = MomentumQueue(queue_size=12, temperature=TAU)
    banks = [losses.NTXentLoss(temperature=TAU, memory_bank_size=(12, 6)) for _ in range(2)]
    for step in range(7):
        left, right, keys_left, keys_right = unit(step, 4, 4)
        left.requires_grad_()
        right.requires_grad_()
        found = criterion(
            left, right, torch.arange(4) + 4 * step, keys_left=keys_left, keys_right=keys_right
        ).loss
        expected = (banks[0](left, keys_right) + banks[1](right, keys_left)) / 2
        # Until it is full, lightly's bank holds random vectors.
        if step >= 3:
            torch.testing.assert_close(found, expected)


def test_mined_negatives_stand_beside_the_queue() -> None:
    criterion = MomentumQueue(queue_size=8, temperature=TAU)
    left, right, keys_left, keys_right = unit(0, 4, 3)
    keys = {"keys_left": keys_left, "keys_right": keys_right}
    criterion(left, right, torch.arange(3), **keys)
    mined = unit(1, 2).requires_grad_()
    found = criterion(
        left, right, torch.arange(3, 6), **keys, negatives=mined, negative_id=torch.tensor([7, 4])
    ).loss
    losses = []
    for i in range(3):
        # Item 4 is the second pair's own.
        others = [*keys_right, mined[0], *([mined[1]] if i != 1 else [])]
        for anchor, key, negatives in (
            (left[i], keys_right[i], others),
            (right[i], keys_left[i], keys_left),
        ):
            logits = torch.stack([anchor @ key, *(anchor @ vector for vector in negatives)]) / TAU
            losses.append(logits.logsumexp(0) - logits[0])
    torch.testing.assert_close(found, torch.stack(losses).mean())
    found.backward()
    assert mined.grad is not None
    assert bool(mined.grad.any())


def test_the_loss_is_reported_once_the_queue_is_full() -> None:
    criterion = MomentumQueue(queue_size=5)
    reported = []
    for step in range(3):
        left, right, keys_left, keys_right = unit(step, 4, 3)
        criterion(
            left.requires_grad_(),
            right,
            torch.arange(3),
            keys_left=keys_left,
            keys_right=keys_right,
        )
        reported.append(criterion.reports_loss)
    assert reported == [False, True, True]
