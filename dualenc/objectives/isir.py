"""ISIR: iterated sampling importance resampling, one softmax over a chain's state and all proposals.

Shapes: X directions, A anchors, C proposals, S items that a state stands for (1; with views 2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.chains import NO_STATE, ChainObjective, Plan, Visit, find
from dualenc.objectives.memory import inverse_cdf


def isir_step(proposed: Tensor, states: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One transition of each chain.

    Args:
        proposed: (X, A, C) log weights of the proposals; -inf where one is not a negative.
        states: (X, A, S) log weights of the state; -inf where there is none, or a proposal stands for it.
        uniform: (X, A) draws in [0, 1).

    Returns:
        (X, A, C + S) the softmax over both, 0 in a row without negatives; (X, A) the column of the next state, C or
        more where the chain stays.
    """
    weights = torch.softmax(torch.cat([proposed, states], dim=-1), dim=-1).nan_to_num(0.0)
    return weights, inverse_cdf(weights, uniform)


class ISIR(ChainObjective):
    """Negatives weigh their share of the softmax over the state of a chain and all proposals; the next state is drawn
    from it.

    The softmax over the whole corpus is invariant when the proposals are distinct and uniform and the state counts
    apart
    unless it is one of them: so for pairs, where copies of an item that come with other pairs are proposals of their
    own. It is invariant for uniform draws when copies and the state count once. Source: Andrieu, Lee and Vihola 2018
    (arXiv:1312.6432); the use of the probabilities themselves as weights, Cardoso et al. 2022 (arXiv:2207.06364). It
    varies less than Metropolis–Hastings (`EMC2`); states outside the batch are always encoded.

    With 200 random pairs at τ = 0.02 the bias of the gradient is gone from the second epoch on (below the 0.1
    that a few runs resolve). With chains that start cold (`recent=0`) it is .93 after one epoch, .48 after 30 at B = 4;
    0.67 and 0.31 after one and ten at B = 16; 0.51 and 0.16 at B = 32 (`eval/estimator_bias.py --mixing`).

    With views a chain moves between images, each with its two views; its state is named by the view that was drawn.

    Args:
        **chains: see `ChainObjective`.
    """

    def plan(self, anchors: Anchors) -> Plan:
        visit = self.visit(anchors)
        return self.plan_encoding(visit, wanted=visit.state != NO_STATE)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        visit = plan.visit
        proposed, outside_scores = self.embedded(anchors, plan, outside)
        uniform = self.draws.uniform(len(anchors.directions), anchors.num_batch, like=anchors.embeddings)
        # The state counts apart, unless its own pair is proposed.
        is_proposed = find(visit.keys, self._first_keys(visit.state)[..., None])[0][..., 0]
        counts_apart = (visit.state != NO_STATE) & ~is_proposed
        log_copies = self._log_copies(visit.keys)

        def weigh(
            block: Anchors,
            is_found: Tensor,
            column: Tensor,
            outside_scores: Tensor,
            counts_apart: Tensor,
            log_sum: Tensor,
            uniform: Tensor,
        ) -> tuple[Tensor, Tensor]:
            scores = block.scores
            state_scores = torch.where(is_found, scores.gather(-1, column), outside_scores)
            with torch.no_grad():
                logits = scores.masked_fill(block.not_negative, -torch.inf) - log_copies[:, None]
                state_logits = state_scores.masked_fill(~counts_apart[..., None], -torch.inf)
                weights, drawn = isir_step(logits, state_logits, uniform)
            state_weights = weights[..., scores.shape[-1] :]
            weights = weights[..., : scores.shape[-1]]
            return self.chain_losses(block, weights, state_weights, state_scores, scores, log_sum), drawn

        rows = (visit.is_found, visit.column, outside_scores, counts_apart, visit.log_sum)
        losses, drawn = proposed.by_blocks(weigh, *rows, uniform[:, anchors.batch_rows])
        self.store(anchors, visit, self._drawn_keys(visit, drawn))
        return losses

    @property
    def state_size(self) -> int:
        return 2 if self.views else 1

    def items_of_state(self, state: Tensor) -> Tensor:
        """Both views of the state's image."""
        if not self.views:
            return super().items_of_state(state)
        first = self._first_keys(state)
        return torch.stack([first, torch.where(first < 0, first, first + 1)], dim=-1)

    def keys_of_draws(self, ids: Tensor) -> Tensor:
        """Both views of each image; items of no pair otherwise."""
        if self.views:
            return torch.cat([2 * ids, 2 * ids + 1], dim=1)
        return self.keys_of(ids)

    def _first_keys(self, state: Tensor) -> Tensor:
        """(X, A) the keys that stand for states: with views the image's left view."""
        return torch.where(state < 0, state, state // 2 * 2) if self.views else state

    def _log_copies(self, keys: Tensor) -> Tensor:
        """(X, C) log of how often each draw from the corpus is drawn: copies count once. 0 for proposals of the
        batch."""
        if self.proposals == "batch":
            return torch.zeros_like(keys, dtype=torch.float32)
        ordered = keys.sort(dim=1).values
        copies = torch.searchsorted(ordered, keys, right=True) - torch.searchsorted(ordered, keys)
        return copies.float().log()

    def _drawn_keys(self, visit: Visit, drawn: Tensor) -> Tensor:
        """(X, A) the keys in the drawn columns (X, A), of which those from C on are the state's."""
        num_proposals = visit.keys.shape[1]
        proposed = visit.keys[:, None].expand(-1, drawn.shape[1], -1)
        if not num_proposals:
            return visit.state
        chosen = proposed.gather(-1, drawn.clamp(max=num_proposals - 1)[..., None])[..., 0]
        if self.views:
            items = self.items_of_state(visit.state)
            staying = items.gather(-1, (drawn - num_proposals).clamp(min=0)[..., None])[..., 0]
        else:
            staying = visit.state
        return torch.where(drawn < num_proposals, chosen, staying)
