"""ISIR: one softmax over a chain's state and all proposals. Shapes: see `chains`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, find
from dualenc.objectives.chains import NO_STATE, ChainObjective, ChainPlan, ChainState
from dualenc.objectives.memory import inverse_cdf


class ISIR(ChainObjective):
    """Each negative is weighted by its share of the softmax over the chain's state and all
    proposals, from which the next state is drawn.

    The softmax over the whole corpus is the chain's invariant law if the proposals are distinct and
    uniform, and the state counts separately unless it is one of them. Source: Andrieu, Lee and
    Vihola 2018 (arXiv:1312.6432); the weights, Cardoso et al. 2022 (arXiv:2207.06364). Its variance
    is lower than that of Metropolis–Hastings (`EMC2`), but states outside the batch are always
    encoded. With views a chain moves between images, each with its two views.

    With proposals="batch" copies of an item are distinguished by the other item of their pair. A
    pair that is in the data twice, both ids alike, is taken for one (docs/objectives.md): leave it
    out.

    Args:
        **chains: see `ChainObjective`.
    """

    def plan(self, anchors: Anchors) -> ChainPlan:
        chain, keys = self.visit(anchors)
        return self.plan_encoding(chain, keys, needed=chain.state != NO_STATE)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        proposed, outside_scores = self.embedded(anchors, plan, outside)
        # Drawn for the global batch, so that any number of ranks makes the same moves.
        uniform = self.draws.uniform(
            len(anchors.directions), anchors.num_batch, like=anchors.embeddings
        )
        uniform = uniform[:, anchors.batch_rows]
        # A state whose own pair is proposed must not count twice; views of an image are proposed
        # together.
        is_proposed, _ = find(plan.keys, plan.chain.state[..., None])
        counts_separately = (plan.chain.state != NO_STATE)[..., None] & ~is_proposed  # (X, A, 1)
        log_copies = self._log_copies(plan.keys)

        def weigh(
            block: Anchors,
            chain: ChainState,
            outside_scores: Tensor,
            counts_separately: Tensor,
            uniform: Tensor,
        ) -> tuple[Tensor, Tensor]:
            scores = block.scores  # (X, a, C)
            found_scores = scores.gather(-1, chain.column)
            state_scores = torch.where(chain.is_found, found_scores, outside_scores)  # (X, a, S)
            with torch.no_grad():
                logits = scores.masked_fill(block.not_negative, -torch.inf)
                logits = logits - log_copies[:, None]
                state_logits = state_scores.masked_fill(~counts_separately, -torch.inf)
                weights, drawn = isir_step(logits, state_logits, uniform)
            return self.chain_losses(block, chain, weights, scores, state_scores), drawn

        losses, drawn = proposed.in_blocks(
            weigh, plan.chain, outside_scores, counts_separately, uniform
        )
        self.store(anchors, plan.chain, self._drawn_keys(plan, drawn))
        return losses

    def items_of_state(self, state: Tensor) -> Tensor:
        """Both views of the state's image."""
        if not self.views:
            return super().items_of_state(state)
        left_view = state // 2 * 2
        views = torch.stack([left_view, left_view + 1], dim=-1)
        return views.where(state[..., None] != NO_STATE, NO_STATE)

    def keys_of_draws(self, ids: Tensor) -> Tensor:
        """Both views of each image; items of no pair otherwise."""
        if self.views:
            return torch.cat([2 * ids, 2 * ids + 1], dim=1)
        return self.keys_of(ids)

    def _log_copies(self, keys: Tensor) -> Tensor:
        """(X, C) log of how often each draw from the corpus is drawn, so that copies count once; 0
        for the batch."""
        if self.proposals == "batch":
            return torch.zeros_like(keys, dtype=torch.float32)
        ordered = keys.sort(dim=1).values
        first = torch.searchsorted(ordered, keys)
        end = torch.searchsorted(ordered, keys, right=True)
        return (end - first).float().log()

    def _drawn_keys(self, plan: ChainPlan, drawn: Tensor) -> Tensor:
        """(X, A) the keys in the drawn columns (X, A); columns from C on are the state's."""
        num_proposals = plan.keys.shape[1]
        staying = plan.chain.state
        if self.views:
            # An image that stays is stored as the view that was drawn.
            view = (drawn - num_proposals).clamp(min=0)
            staying = self.items_of_state(staying).gather(-1, view[..., None])[..., 0]
        proposed = plan.keys.gather(1, drawn.clamp(max=num_proposals - 1))
        return torch.where(drawn < num_proposals, proposed, staying)


def isir_step(proposed: Tensor, states: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One transition of each chain, by log weights of proposals (X, A, C) and of the state (X, A,
    S), and draws (X, A): (X, A, C + S) the softmax over both; (X, A) the column of the next state,
    C or more where it stays."""
    logits = torch.cat([proposed, states], dim=-1)
    # A row of -inf only is 0/0.
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    return weights, inverse_cdf(weights, uniform)
