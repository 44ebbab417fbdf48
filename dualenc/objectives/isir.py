"""ISIR: one softmax over a chain's state and all proposals. Shapes: see `chains`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, find
from dualenc.objectives.chains import NO_STATE, ChainObjective, ChainPlan, ChainState
from dualenc.objectives.memory import inverse_cdf


class ISIR(ChainObjective):
    """Weighs negatives by the softmax over a chain's state and all proposals.

    The next state is drawn from the same softmax. If the proposals are distinct and uniform, and
    the state counts separately unless it is one of them, the chain's invariant law is the softmax
    over the whole corpus. Source: Andrieu, Lee and Vihola 2018 (arXiv:1312.6432); the weights,
    Cardoso et al. 2022 (arXiv:2207.06364). The variance is lower than that of Metropolis–Hastings
    (`EMC2`), but states outside the batch are always encoded. With views a chain moves between
    images, each with both of its views.

    With proposals="batch" copies of an item are distinguished by the other item of their pair. A
    pair that occurs twice with the same ids counts as one (docs/objectives.md), so remove such
    duplicates.

        criterion = ISIR(num_left=m, num_right=n, proposals=64)
        criterion(left, right, left_id, right_id, encode=encode).loss.backward()

    Args:
        **chains: see `ChainObjective`.
    """

    def plan(self, anchors: Anchors) -> ChainPlan:
        chain, keys = self.visit(anchors)
        return self.plan_encoding(chain, keys, needed=chain.state != NO_STATE)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        proposed, outside_scores = self.embedded(anchors, plan, outside)
        uniform = self.draws.per_anchor(anchors)  # (X, A)
        # A state whose own pair is among the proposals must not count twice. The two views of an
        # image are proposed together.
        state = plan.chain.state[..., None]  # (X, A, 1)
        is_proposed, _ = find(plan.keys, state)
        counts_separately = (state != NO_STATE) & ~is_proposed
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
        """Return both views of the state's image."""
        if not self.views:
            return super().items_of_state(state)
        left_view = state // 2 * 2
        views = torch.stack([left_view, left_view + 1], dim=-1)
        return views.where(state[..., None] != NO_STATE, NO_STATE)

    def keys_of_draws(self, ids: Tensor) -> Tensor:
        """Return both views of each image; without views, items without a pair."""
        if self.views:
            return torch.cat([2 * ids, 2 * ids + 1], dim=1)
        return self.keys_of(ids)

    def _log_copies(self, keys: Tensor) -> Tensor:
        """Return (X, C) log of the number of times each item was drawn, so that copies count once.

        It is 0 if the batch makes the proposals, where copies are distinct pairs.
        """
        if self.proposals == "batch":
            return torch.zeros_like(keys, dtype=torch.float32)
        ordered = keys.sort(dim=1).values
        first = torch.searchsorted(ordered, keys)
        end = torch.searchsorted(ordered, keys, right=True)
        return (end - first).float().log()

    def _drawn_keys(self, plan: ChainPlan, drawn: Tensor) -> Tensor:
        """Return (X, A) the keys in the drawn columns (X, A); columns from C on mean the state."""
        num_proposals = plan.keys.shape[1]
        staying = plan.chain.state
        if self.views:
            # If the chain stays on its image, the view that was drawn is stored.
            view = (drawn - num_proposals).clamp(min=0)
            views = self.items_of_state(staying)  # (X, A, 2)
            staying = views.gather(-1, view[..., None]).squeeze(-1)
        column = drawn.clamp(max=num_proposals - 1)
        proposed = plan.keys.gather(1, column)
        return torch.where(drawn < num_proposals, proposed, staying)


def isir_step(proposed: Tensor, states: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Make one transition of each chain.

    Args:
        proposed: (X, A, C) log weights of the proposals.
        states: (X, A, S) log weights of the states.
        uniform: (X, A) draws in [0, 1).

    Returns:
        (X, A, C + S) the softmax over both; (X, A) the column of the next state, C or more if the
        chain stays.
    """
    logits = torch.cat([proposed, states], dim=-1)
    # The softmax of a row of -inf is 0/0.
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    return weights, inverse_cdf(weights, uniform)
