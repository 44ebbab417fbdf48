"""Iterated sampling importance resampling: one softmax instead of a chain of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc.objectives.chains import NO_STATE, Move, Step, at


def iterated_sir(step: Step, uniform: Tensor) -> Move:
    """The weights are the softmax over the state and all proposals together; the next state is drawn from it.

    The softmax over the whole corpus is invariant when the proposals are distinct and uniform; when they are uniform
    draws, with the copies and the state counted once; and when they are draws from any density that the weights are
    divided by, with each draw and the state counted. Source: Andrieu, Lee and Vihola 2018; the use of the
    probabilities themselves as weights, Cardoso et al. 2022.

    Args:
        step: what the chains see; `outside` where the state is not among the proposals.
        uniform: (A,) draws for the next state.
    """
    proposed = (step.similarities / step.temperature - step.log_density).masked_fill(~step.allowed, -torch.inf)
    outside = step.outside / step.temperature - step.state_log_density[:, None]
    logits = torch.cat([proposed, outside], dim=1)
    possible = torch.isfinite(logits).any(dim=1)
    weights = torch.softmax(logits, dim=1).nan_to_num(0.0)
    drawn = inverse_cdf(weights, uniform)
    similarities = torch.cat([step.similarities, step.outside], dim=1)
    num_proposals = len(step.items)
    items = torch.cat([step.items.expand(len(step.state), -1), step.state[:, None].expand_as(step.outside)], dim=1)
    return Move(
        weights=weights[:, :num_proposals],
        outside_weights=weights[:, num_proposals:].clone(),  # a view would keep the whole matrix in memory
        state=torch.where(possible, at(items, drawn), NO_STATE),
        score=torch.where(possible, at(similarities, drawn), -torch.inf),
    )


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(A,) a column drawn from each row of weights (A, C) ≥ 0, which need not sum to 1; any for rows of zeros.

    Args:
        weights: (A, C).
        uniform: (A,) draws in (0, 1); they never lead to a column of weight 0.
    """
    cumulative = weights.cumsum(dim=1)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]
    return drawn.clamp(max=weights.shape[1] - 1)


def log_copies(items: Tensor) -> Tensor:
    """(C,) log of how many of the items (C,) equal each one."""
    _, place, count = torch.unique(items, return_inverse=True, return_counts=True)
    return count[place].log()
