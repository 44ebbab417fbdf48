"""The memory of EMC²'s Markov chains, and what goes into and comes out of one transition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.tables import first_rows

NO_STATE = -1


class Chains(nn.Module):
    """One chain per anchor: the item it is on (-1 before its first step) and that item's similarity when accepted.

    Args:
        num_anchors: m, the number of chains.
    """

    state: Tensor
    score: Tensor

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.full((num_anchors,), NO_STATE))
        self.register_buffer("score", torch.full((num_anchors,), -torch.inf))

    def store(self, anchors: Anchors, chains: Tensor, state: Tensor, score: Tensor) -> None:
        """Write where the chains (A,) of all ranks' anchors are now; of several rows of a chain the first counts."""
        whole = distributed.gather(torch.stack([anchors.rows, chains, state], dim=1), anchors.sizes)
        score = distributed.gather(score, anchors.sizes)
        in_order = whole[:, 0].argsort()
        in_order = in_order[whole[in_order, 2] != NO_STATE]
        chosen = in_order[first_rows(whole[in_order, 1])]
        _, chains, state = whole[chosen].unbind(dim=1)
        self.state[chains] = state
        self.score[chains] = score[chosen].to(self.score)


@dataclass
class Step:
    """What a kernel sees. Similarities, not logits, so that stored ones stay valid when the temperature is learned.

    Attributes:
        items: (C,) the proposals.
        similarities: (A, C) cosines with the proposals.
        allowed: (A, C) whether a proposal is a negative of the anchor.
        state: (A,) item that the chain comes with, -1 for none.
        column: (A,) the proposal that is the same item, -1 where there is none.
        score: (A,) similarity of the state, stored or fresh; -inf for none.
        outside: (A, S) similarities of what the state stands for beside the proposals; -inf where it is among them,
            or not known.
        log_density: (C,) log of how often each proposal is proposed, over uniform proposals.
        state_log_density: (A,) the same of the state.
        temperature: scalar τ.
    """

    items: Tensor
    similarities: Tensor
    allowed: Tensor
    state: Tensor
    column: Tensor
    score: Tensor
    outside: Tensor
    log_density: Tensor
    state_log_density: Tensor
    temperature: Tensor


class Move(NamedTuple):
    """What a kernel gives: the negatives' weights, and where the chain is now.

    weights: (A, C) of the proposals; outside_weights: (A, S) of what the state stands for beside them; together they
    sum to 1 (to 0 where the anchor has no negative at all). state: (A,) the next item, -1 for none; score: (A,) its
    similarity.
    """

    weights: Tensor
    outside_weights: Tensor
    state: Tensor
    score: Tensor


def at(values: Tensor, column: Tensor) -> Tensor:
    """(A,) of each row of values (A, C) the entry in its column (A,)."""
    return values.gather(1, column[:, None])[:, 0]


@torch.no_grad()
def log_mean_of_negatives(step: Step) -> Tensor:
    """(A,) estimate of the log of the mean of exp(s/τ) over all negatives.

    The mean over uniform proposals errs low (Jensen), the mean over proposals and state errs high (they are a
    size-biased sample); halfway between both the errors nearly cancel (bidirectional Monte Carlo, Grosse et al. 2015).
    """
    log_weight = (-step.log_density).expand_as(step.allowed).masked_fill(~step.allowed, -torch.inf)
    log_sum = torch.logsumexp(step.similarities / step.temperature + log_weight, dim=1)
    log_count = torch.logsumexp(log_weight, dim=1)
    low = log_sum - log_count
    with_state = torch.logaddexp(log_sum, step.score / step.temperature - step.state_log_density)
    high = with_state - torch.logaddexp(log_count, -step.state_log_density)
    high = torch.where((step.state != NO_STATE) & (step.column < 0), high, low)
    return torch.where(torch.isfinite(log_count), (low + high) / 2, high).nan_to_num(nan=0.0, neginf=0.0)
