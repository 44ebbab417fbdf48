"""ISIR: iterated sampling importance resampling, one softmax over a chain's state and all proposals."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode
from dualenc.objectives.chains import NO_STATE, ChainObjective, at, find, inverse_cdf
from dualenc.objectives.looks import Asking


class ISIR(ChainObjective):
    """Negatives weigh their share of the softmax over the state of a chain and all proposals; the next state is drawn
    from it.

    The softmax over the whole corpus is invariant when the proposals are distinct and uniform and the state counts
    apart unless it is one of them: so for pairs, where copies of an item that come with other pairs are
    proposals of their own. It is invariant for uniform draws when copies and the state count once; and for draws from
    any density q that the weights are divided by, with each draw and the state counted. Source: Andrieu, Lee and
    Vihola 2018 (arXiv:1312.6432); the use of the probabilities themselves as weights, Cardoso et al. 2022
    (arXiv:2207.06364). It varies less than Metropolis–Hastings (`EMC2`); out-of-batch states are always encoded.

    With 200 random pairs at τ = 0.02 the bias of the gradient is gone from the second epoch on (below the 0.1
    that a few runs resolve). With chains that start cold (`recent=0`) it is .93 after one epoch, .48 after 30 at B = 4;
    0.67 and 0.31 after one and ten at B = 16; 0.51 and 0.16 at B = 32 (`eval/estimator_bias.py --mixing`).

    With views a chain moves between images, each with its two views. A state is named by its left view then.

    Args:
        **chains: see `ChainObjective`.
    """

    # Of a document that three queries share, a chain knows on which of the three copies it is.
    remembers: ClassVar[dict[str, float]] = {"partner": NO_STATE}

    def items_drawn(self, ids: Tensor) -> Tensor:
        """Both views of each image."""
        return torch.cat([2 * ids, 2 * ids + 1]) if self.views else ids

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> Asking[AnchorLosses]:
        assert encode is not None
        visit = self.visit(anchors)
        items, state, num_views = visit.items, visit.state, 2 if self.views else 1
        if self.views:
            state = torch.where(state < 0, state, state // 2 * 2)
        partner = torch.where(visit.usable, visit.chains.take("partner", visit.own, visit.known), visit.partner)
        place = find(items, state)
        # (A, S) the state's item, with views S = 2: where it is among the proposals, and how similar it is elsewhere.
        places = place[:, None]
        if self.views:
            places = torch.where(places < 0, -1, torch.cat([places, places + len(items) // 2], dim=1))
        uniform = self.random.uniform(anchors.num_global, like=anchors.embeddings)[anchors.rows]
        away = state.masked_fill(place >= 0, NO_STATE)
        proposed, rows, embeddings = yield from self.embed_proposals(anchors, visit, away, num_views, encode)
        embeddings = embeddings.view(len(rows), num_views, anchors.embeddings.shape[1])
        outside = anchors.embeddings.new_full(places.shape, -torch.inf)
        outside = outside.index_put((rows,), torch.einsum("ad,asd->as", anchors.embeddings[rows], embeddings))
        log_q, state_log_q = (self.log_density(anchors, visit, some) for some in (items, state))
        if visit.near is not None:
            # Draws of unequal density cannot stand for the state: it counts apart.
            stands_for_state = torch.zeros_like(place, dtype=torch.bool)
        elif self.proposals == "batch" and not self.views:
            # Other copies of the item do not stand for the state's own pair. A pair that is not known is any.
            width = self.num_items(anchors.side) or 1
            same_pair = find(items * width + visit.partners, state * width + partner) >= 0
            stands_for_state = same_pair | ((partner < 0) & (place >= 0))
        else:
            ordered = items.sort().values
            copies = torch.searchsorted(ordered, items, right=True) - torch.searchsorted(ordered, items)
            log_q = log_q + copies.log()
            stands_for_state = place >= 0
        state_log_weight = (-state_log_q).masked_fill((state == NO_STATE) | stands_for_state, -torch.inf)

        def weigh(
            some: Anchors, uniform: Tensor, places: Tensor, outside: Tensor, state_log_weight: Tensor
        ) -> tuple[Tensor, ...]:
            similarities, allowed = self.compare(some, visit, proposed)
            with torch.no_grad():
                there = places >= 0
                outside = torch.where(there, similarities.gather(1, places.clamp(min=0)), outside)
                logits, outside_logits = similarities / some.temperature, outside / some.temperature
                log_weights = (-log_q).expand_as(allowed).masked_fill(~allowed, -torch.inf)
                weights, column = iterated_sir(
                    logits + log_weights, outside_logits + state_log_weight[:, None], uniform
                )
                weights, outside_weights = weights.split([len(items), places.shape[1]], dim=1)
                # What the state weighs where a proposal equals it is that one's too.
                weights.scatter_add_(1, places.clamp(min=0), outside_weights.masked_fill(~there, 0.0))
                outside_weights = outside_weights.masked_fill(there, 0.0)
            return (weights * similarities).sum(dim=1), outside_weights, column

        of_row = (uniform, places, outside.detach(), state_log_weight)
        negatives, outside_weights, column = anchors.by_rows(weigh, *of_row, row_entries=2 * len(items))
        if self.updates_state:
            moved, column = column >= 0, column.clamp(min=0)
            next_partner = torch.where(moved, visit.partners[column], partner)
            next_state = torch.where(moved, items[column], state)
            visit.chains.store(anchors, visit.own, visit.all_known, next_state, partner=next_partner)
        negatives = negatives + (outside_weights * torch.where(outside_weights > 0, outside, 0.0)).sum(dim=1)
        return self.global_loss(anchors, visit, negatives)


def iterated_sir(proposed: Tensor, outside: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One transition of each chain.

    Args:
        proposed: (A, C) log weights of the proposals; -inf where one is no negative.
        outside: (A, S) log weights of what the state stands for; -inf where a proposal stands for it.
        uniform: (A,) draws in (0, 1).

    Returns:
        (A, C + S) the softmax over both (0 in a row without negatives), and (A,) the proposal that is the next state,
        -1 where the chain stays.
    """
    weights = torch.softmax(torch.cat([proposed, outside], dim=1), dim=1).nan_to_num(0.0)
    drawn = inverse_cdf(weights, uniform)
    moves = (drawn < proposed.shape[1]) & (at(weights, drawn) > 0)
    return weights, torch.where(moves, drawn, -1)
