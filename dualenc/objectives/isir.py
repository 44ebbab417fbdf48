"""ISIR: iterated sampling importance resampling, one softmax over a chain's state and all proposals."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode
from dualenc.objectives.chains import NO_STATE, ChainObjective, Visit, find_in_rows, inverse_cdf
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

    With views a chain moves between images, each with its two views; its state is named by the view that was drawn.

    Args:
        **chains: see `ChainObjective`.
    """

    # Of a document that three queries share, a chain knows on which of the three copies it is.
    remembers: ClassVar[dict[str, float]] = {"partner": NO_STATE}
    beside: Literal["partner", "similarity"] = "partner"

    def items_drawn(self, ids: Tensor) -> Tensor:
        """Both views of each image."""
        return torch.cat([2 * ids, 2 * ids + 1]) if self.views else ids

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> Asking[AnchorLosses]:
        assert encode is not None
        visit = self.visit(anchors)
        state, num_views, num_proposals = visit.state, 2 if self.views else 1, visit.items.shape[1]
        if self.views:
            state = torch.where(state < 0, state, state // 2 * 2)
        partner = torch.where(visit.usable, self.take("partner", visit.chains), visit.told)
        there, place = visit.find(state)
        # (A, S) the state's item, with views S = 2: where it is among the proposals, and how similar it is elsewhere.
        places = place
        if self.views:
            # A left view stands in the first half; what is not there has any place.
            places = torch.cat([place, (place + num_proposals // 2) % num_proposals], dim=1)
        uniform = anchors.of_rank(self.random.uniform(anchors.num_rows, 1, like=anchors.embeddings))
        is_there = there[:, 0]
        away = state.masked_fill(is_there, NO_STATE)
        proposed, outside = yield from self.embed_proposals(anchors, visit, away, num_views, encode)
        if outside is None:
            outside = anchors.embeddings.new_zeros(places.shape)
        outside = outside / anchors.temperature
        stands_for_state, log_q = self._stands_for_state(anchors, visit, state, partner, is_there, place)
        # What the state's own weight is divided by is 1 where proposals are uniform.
        absent, outside_log_q = (stands_for_state | (state == NO_STATE))[:, None], []
        if self.views and anchors.guide is not None:
            # A chain is on an image of which a guide may allow one view only.
            absent = absent | anchors.guide.of_each(torch.stack([state, state + 1], dim=1))
        if not visit.uniform:
            outside_log_q = [self.log_density(anchors, visit, state.view(len(visit.items), -1)).view(-1)]

        def weigh(
            some: Anchors,
            uniform: Tensor,
            there: Tensor,
            places: Tensor,
            absent: Tensor,
            log_mean: Tensor,
            outside: Tensor,
            *outside_log_q: Tensor,
        ) -> tuple[Tensor, Tensor]:
            scores, logits = self.compare(some, visit, proposed)
            with torch.no_grad():
                # A state of which there is a copy is what that is now.
                of_states = torch.where(there, scores.gather(1, places), outside)
                if outside_log_q:
                    of_states = of_states - outside_log_q[0][:, None]
                if log_q is not None:
                    logits = logits - visit.by_row(log_q, some)
                of_states = of_states.masked_fill(absent, -torch.inf)
                weights, column = iterated_sir(logits, of_states, uniform, never_nothing)
                # What the state weighs where a proposal equals it is that one's too.
                of_states = weights[:, num_proposals:]
                weights.scatter_add_(1, places, of_states * there)
                of_states.masked_fill_(there, 0.0)
            return self.losses_of(some, torch.cat([scores, outside], dim=1), weights, log_mean), column

        never_nothing = self.proposals == "batch" and anchors.all_have_negatives
        of_row = (uniform, there, places, absent, visit.log_mean, outside, *outside_log_q)
        losses, column = anchors.by_rows(weigh, *of_row, row_entries=2 * num_proposals)
        if self.updates_state:
            moved, place = column < num_proposals, column.clamp(max=num_proposals - 1)
            next_state, next_partner = visit.after(moved, place, (visit.items, visit.state), (visit.partners, partner))
            self.store(anchors, visit.chains, next_state, partner=next_partner)
        return AnchorLosses(losses)

    def _stands_for_state(
        self, anchors: Anchors, visit: Visit, state: Tensor, partner: Tensor, there: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(A,) whether a proposal stands for the state; and (X, C) what the weights of proposals are divided by, in
        logs, None for nothing."""
        items, partners, num = visit.items, visit.partners, len(visit.items)
        if not visit.uniform:
            # Draws of unequal density cannot stand for the state: it counts apart.
            return torch.zeros_like(there), self.log_density(anchors, visit, items)
        if self.views or self.proposals != "batch":
            ordered = items.sort(dim=1).values
            copies = torch.searchsorted(ordered, items, right=True) - torch.searchsorted(ordered, items)
            return there, copies.to(anchors.embeddings).log()
        # Other copies of the item do not stand for the state's own pair. A pair that is not known is any.
        if anchors.distinct:
            same_pair = partners.gather(1, place.view(num, -1)).view(-1) == partner
        else:
            width = max(self.num_left or 1, self.num_right or 1)
            same_pair, _ = find_in_rows(items * width + partners, (state * width + partner).view(num, -1))
            same_pair = same_pair.view(-1)
        return there & (same_pair | (partner < 0)), None


def iterated_sir(
    proposed: Tensor, outside: Tensor, uniform: Tensor, never_nothing: bool = False
) -> tuple[Tensor, Tensor]:
    """One transition of each chain.

    Args:
        proposed: (A, C) log weights of the proposals; -inf where one is no negative.
        outside: (A, S) log weights of what the state stands for; -inf where a proposal stands for it.
        uniform: (A, 1) draws in [0, 1).
        never_nothing: it is known that no row is -inf everywhere.

    Returns:
        (A, C + S) the softmax over both (0 in a row without negatives), and (A,) the proposal that is the next state,
        C or more where the chain stays.
    """
    logits = torch.cat([proposed, outside], dim=1)
    weights = torch.softmax(logits, dim=1)
    drawn = inverse_cdf(weights, uniform)
    if never_nothing:
        return weights, drawn[:, 0]
    # Without negatives there is nothing to draw.
    nothing = weights.isnan()[:, :1]
    return weights.masked_fill_(nothing, 0.0), drawn.masked_fill_(nothing, proposed.shape[1])[:, 0]
