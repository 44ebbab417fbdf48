"""The Metropolis–Hastings chain over a row of proposals, for all anchors at once.

A chain at score s accepts proposal r when s < t_r, with the threshold t_r = s_r − τ·log U_r known beforehand. So from
proposal r a chain goes to the first later proposal whose threshold exceeds s_r, whatever came before r: all these
pointers are found together by binary search over running maxima, and followed by repeated squaring. That is O(log R)
array operations on (A, R) for R proposals, and comparisons alone: the result equals the loop bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualenc.objectives.chains import NO_STATE, Move, Step


def metropolis_hastings(step: Step, uniform: Tensor, order: Tensor, burn_in: float) -> Move:
    """Each proposal in turn is accepted with probability min(1, exp((s' − s)/τ)) (emc2.txt, Algorithm 1).

    Where proposals are not uniform but have density q, the ratio is exp((s' − s)/τ)·q(s)/q(s').

    Args:
        step: what the chains see.
        uniform: (A, C) draws of the acceptance tests.
        order: (C,) the order in which the proposals come.
        burn_in: share of an anchor's proposals before steps count.
    """
    scores = (step.similarities - step.temperature * step.log_density)[:, order]
    allowed = step.allowed[:, order]
    start = step.score - step.temperature * step.state_log_density
    thresholds = (scores - step.temperature * uniform.log()).masked_fill(~allowed, -torch.inf)
    num_proposals = allowed.sum(dim=1)
    # The small term keeps a product such as 0.29·100 from falling short of its integer.
    skipped = (num_proposals.double() * burn_in + 1e-9).long()
    visits, stays, last = walk(scores, thresholds, start, skipped)
    # Without proposals there is no step to count: the state stands for itself.
    stays = torch.where((num_proposals == 0) & (step.state != NO_STATE), 1, stays)
    total = (num_proposals - skipped).clamp(min=1).to(scores.dtype)
    weights = torch.zeros_like(scores)
    weights[:, order] = visits / total[:, None]
    stay_weight = stays / total
    column = step.places[:, 0]
    among = column >= 0
    weights.scatter_add_(1, column.clamp(min=0)[:, None], torch.where(among, stay_weight, 0.0)[:, None])
    return Move(
        weights=weights,
        outside_weights=torch.where(among, 0.0, stay_weight)[:, None],
        column=torch.where(last >= 0, order[last.clamp(min=0)], -1),
    )


class Walk(NamedTuple):
    """What chains did.

    visits: (A, R) counted steps spent on each proposal.
    stays: (A,) counted steps spent on the state that the chain came with.
    last: (A,) proposal the chain ends on, -1 for the state it came with.
    """

    visits: Tensor
    stays: Tensor
    last: Tensor


def walk(scores: Tensor, thresholds: Tensor, start: Tensor, burn_in: Tensor) -> Walk:
    """Run each chain through its row of proposals.

    Args:
        scores: (A, R) score of each proposal (any increasing function of its log density).
        thresholds: (A, R) a chain whose score is below accepts the proposal; -inf is no proposal and no step.
        start: (A,) scores of the states the chains come with; -inf accepts the first proposal.
        burn_in: (A,) number of steps that do not count.
    """
    num_anchors, num_proposals = scores.shape
    end = num_proposals + 1
    successor = _successors(torch.cat([start[:, None], scores], dim=1), thresholds)
    path = _path(successor, num_proposals)
    following = torch.cat([path[:, 1:], path.new_full((num_anchors, 1), end)], dim=1)
    counted = _counted_steps(thresholds, burn_in)
    spent = counted.gather(1, following - 1) - counted.gather(1, (path - 1).clamp(min=0))
    visits = spent.new_zeros(num_anchors, end + 1).scatter_add_(1, path, spent)
    last = torch.where(path < end, path, 0).amax(dim=1) - 1
    return Walk(visits[:, 1:end], visits[:, 0], last)


def _successors(scores: Tensor, thresholds: Tensor) -> Tensor:
    """(A, R+2) where a chain goes from each node: 0 the state it came with, 1…R the proposals, R+1 the end.

    Args:
        scores: (A, R+1) scores of nodes 0…R.
        thresholds: (A, R) thresholds of nodes 1…R.
    """
    num_anchors, num_nodes = scores.shape
    peaks = [torch.cat([thresholds, thresholds.new_full((num_anchors, 1), torch.inf)], dim=1)]
    width = 1
    while 2 * width <= num_nodes:
        # peaks[k][:, p] is the maximum of the 2^k thresholds from p on; windows beyond the end are infinite.
        peak = peaks[-1].clone()
        torch.maximum(peaks[-1][:, :-width], peaks[-1][:, width:], out=peak[:, :-width])
        peaks.append(peak)
        width *= 2
    position = torch.arange(num_nodes, device=scores.device).repeat(num_anchors, 1)
    for peak in reversed(peaks):
        position.add_(peak.gather(1, position) <= scores, alpha=width)
        width //= 2
    return torch.cat([position + 1, position.new_full((num_anchors, 1), num_nodes)], dim=1)


def _path(successor: Tensor, num_proposals: int) -> Tensor:
    """(A, L) nodes visited from node 0 on, L > R; the end repeats itself."""
    path = torch.zeros_like(successor[:, :1])
    jump = successor
    while True:
        # The path so far, and the same path as many jumps later.
        path = torch.cat([path, jump.gather(1, path)], dim=1)
        if path.shape[1] > num_proposals:
            return path
        jump = jump.gather(1, jump)


def _counted_steps(thresholds: Tensor, burn_in: Tensor) -> Tensor:
    """(A, R+1) how many of the first 0…R proposals count."""
    steps = torch.isfinite(thresholds).cumsum(dim=1)
    counted = (steps - burn_in[:, None]).clamp(min=0)
    return torch.cat([torch.zeros_like(burn_in)[:, None], counted], dim=1)
