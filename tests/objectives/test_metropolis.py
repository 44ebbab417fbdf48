"""The Metropolis–Hastings walk: a loop over proposals, without the loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dualenc.objectives.emc2 import walk


def slow_walk(scores: Tensor, thresholds: Tensor, start: float, burn_in: int) -> tuple[list[int], int, int]:
    """One chain, proposal by proposal: visits, stays and last."""
    visits, stays, last, score, step = [0] * len(scores), 0, -1, start, 0
    for r, threshold in enumerate(thresholds.tolist()):
        if threshold == -torch.inf:
            continue
        if score < threshold:
            score, last = float(scores[r]), r
        step += 1
        if step > burn_in and last >= 0:
            visits[last] += 1
        elif step > burn_in:
            stays += 1
    return visits, stays, last


def problem(seed: int, num_anchors: int, num_proposals: int, tau: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=dtype)

    scores = rand(num_anchors, num_proposals)
    thresholds = (scores - tau * rand(num_anchors, num_proposals).log()).masked_fill(
        rand(num_anchors, num_proposals) < 0.2, -torch.inf
    )
    start = rand(num_anchors).masked_fill(rand(num_anchors) < 0.3, -torch.inf)
    burn_in = (torch.isfinite(thresholds).sum(dim=1) * rand(num_anchors)).long()
    return scores, thresholds, start, burn_in


@given(
    seed=st.integers(0, 10_000),
    num_anchors=st.integers(0, 4),
    num_proposals=st.integers(0, 40),
    tau=st.sampled_from([0.005, 0.07, 1.0, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_the_loop_bit_by_bit(
    seed: int, num_anchors: int, num_proposals: int, tau: float, dtype: torch.dtype
) -> None:
    scores, thresholds, start, burn_in = problem(seed, num_anchors, num_proposals, tau, dtype)
    found = walk(scores, thresholds, start, burn_in)
    for a in range(num_anchors):
        visits, stays, last = slow_walk(scores[a], thresholds[a], float(start[a]), int(burn_in[a]))
        assert found.visits[a].tolist() == visits
        assert int(found.stays[a]) == stays
        assert int(found.last[a]) == last


class Count(TorchDispatchMode):
    """Counts operations: on an accelerator, each is a kernel launch or a view."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_number_of_operations_grows_with_the_logarithm_of_the_proposals() -> None:
    calls = {}
    for num_proposals in (64, 128, 1024):
        with Count() as counting:
            walk(*problem(0, 3, num_proposals, 0.07, torch.float32))
        calls[num_proposals] = counting.calls
    per_doubling = calls[128] - calls[64]
    assert calls[1024] == calls[128] + 3 * per_doubling
    assert calls[1024] < 1024 / 4
