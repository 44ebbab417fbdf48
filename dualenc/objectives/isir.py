"""Iterated sampling importance resampling: one softmax instead of a chain of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc.objectives.chains import Move, Step, at, inverse_cdf


def iterated_sir(step: Step, uniform: Tensor) -> Move:
    """The weights are the softmax over the state and all proposals together; the next state is drawn from it.

    The softmax over the whole corpus is invariant when the proposals are distinct and uniform and the state counts
    beside them unless it is one of them: so for pairs, where copies of an item that come with other pairs are
    proposals of their own. It is invariant for uniform draws when copies and the state count once; and for draws from
    any density that the weights are divided by, with each draw and the state counted. Source: Andrieu, Lee and Vihola
    2018 (arXiv:1312.6432); the use of the probabilities themselves as weights, Cardoso et al. 2022 (arXiv:2207.06364).

    Args:
        step: what the chains see.
        uniform: (A,) draws for the next state.
    """
    proposed = (step.similarities / step.temperature - step.log_density).masked_fill(~step.allowed, -torch.inf)
    outside = step.outside / step.temperature - step.state_log_density[:, None]
    outside = outside.masked_fill(~step.beside[:, None], -torch.inf)
    weights = torch.softmax(torch.cat([proposed, outside], dim=1), dim=1).nan_to_num(0.0)
    drawn = inverse_cdf(weights, uniform)
    num_proposals = len(step.items)
    among, alone = weights[:, :num_proposals], weights[:, num_proposals:].clone()
    column = torch.where((drawn < num_proposals) & (at(weights, drawn) > 0), drawn, -1)
    known = step.places >= 0
    among.scatter_add_(1, step.places.clamp(min=0), alone.masked_fill(~known, 0.0))
    # The clone: a view would keep the whole matrix in memory.
    return Move(among, alone.masked_fill(known, 0.0), column)


def log_copies(items: Tensor) -> Tensor:
    """(C,) log of how many of the items (C,) equal each one."""
    _, place, count = torch.unique(items, return_inverse=True, return_counts=True)
    return count[place].log()
