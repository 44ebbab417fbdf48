"""EMC²: a Metropolis–Hastings chain per anchor draws its negatives from the softmax.

Shapes: see `chains`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.chains import (
    NO_STATE,
    ChainArguments,
    ChainObjective,
    ChainPlan,
    ChainState,
)
from dualenc.objectives.checks import check_range


class Walk(NamedTuple):
    """The moves of chains in a step."""

    weights: Tensor  # (X, A, C + 1) share of the visits to each proposal and, last, the old state
    column: Tensor  # (X, A) the chain's new state: a proposal, or C if it never moved


class EMC2(ChainObjective):
    """Weighs negatives by the visits of a persistent Metropolis–Hastings chain per anchor.

    Each proposal z' in turn, in random order, replaces the state z with probability

        min(1, exp((s(x, z') − s(x, z))/τ)).

    The weight of an item is the share of steps after burn-in that the chain spends on it; s(x, z)
    is stored when z is accepted. Source: Yau et al. 2024 (arXiv:2404.10575), Algorithm 1 and Eq.
    11. With proposals drawn from the corpus the stationary law is the softmax over all negatives;
    the items of a batch come without repetition, which leaves a small bias. The walk runs on the
    CPU, which holds the (X, A, C) scores of the step.

        criterion = EMC2(num_left=m, num_right=n, burn_in=0.5)
        criterion(left, right, left_id, right_id, encode=encode).loss.backward()

    Args:
        burn_in: share of the proposals before steps count, in [0, 1).
        **chains: see `ChainObjective`; proposals="batch", one pass through the batch, is the
            paper's choice.
    """

    similarity: Tensor  # of each chain's anchor and state

    def __init__(self, *, burn_in: float = 0.5, **chains: Unpack[ChainArguments]) -> None:
        super().__init__(**chains)
        check_range("burn_in", burn_in, "[0, 1)")
        self.burn_in = burn_in
        self.register_buffer("similarity", torch.full(self.state.shape, -torch.inf))

    def plan(self, anchors: Anchors) -> ChainPlan:
        chain, keys = self.visit(anchors)
        if self.proposals != "batch":
            return self.plan_encoding(chain, keys, needed=chain.state != NO_STATE)
        # With in-batch proposals the walk needs no further scores. It runs before encoding, so that
        # states that do not outlive burn-in are never encoded.
        walk = self._walk(anchors, self._stored_scores(anchors, chain))
        weight_of_state = walk.weights[..., -1]  # (X, A)
        plan = self.plan_encoding(chain, keys, needed=weight_of_state > 0)
        return plan._replace(walk=walk)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        proposed, outside_scores = self.embedded(anchors, plan, outside)
        start_scores = self._stored_scores(anchors, plan.chain)
        walk = plan.walk or self._walk(proposed, start_scores)
        self._store(proposed, plan, walk, start_scores)
        return proposed.in_blocks(self._block_losses, plan.chain, walk, outside_scores)

    def _block_losses(
        self, block: Anchors, chain: ChainState, walk: Walk, outside_scores: Tensor
    ) -> Tensor:
        scores = block.scores  # (X, a, C)
        # The gradient of a state in the batch flows through the batch: it is not encoded again.
        in_batch = scores.gather(-1, chain.column)
        state_scores = torch.where(chain.is_found, in_batch, outside_scores)  # (X, a, 1)
        return self.chain_losses(block, chain, walk.weights, scores, state_scores)

    def keys_of_draws(self, ids: Tensor) -> Tensor:
        """Return one random view of each image; without views, items without a pair."""
        if self.views:
            return 2 * ids + self.draws.integers(2, *ids.shape, device=ids.device)
        return self.keys_of(ids)

    def _stored_scores(self, anchors: Anchors, chain: ChainState) -> Tensor:
        """Return (X, A) stored s/τ of the states; -inf without one, so the first proposal wins."""
        similarity = self.similarity[chain.chains].to(anchors.embeddings)
        stored_scores = similarity / anchors.temperature
        scores = torch.where(chain.started, chain.start_scores, stored_scores)
        return scores.masked_fill(chain.state == NO_STATE, -torch.inf).detach()

    @torch.no_grad()
    def _walk(self, proposed: Anchors, start_scores: Tensor) -> Walk:
        """Run each chain through the proposals in random order."""
        # A single transfer, because each stalls an accelerator: (X, A, C + 1) s/τ of the proposals,
        # -inf if not a negative, and last of the state.
        logits = torch.cat([proposed.logits, start_scores[..., None]], dim=-1).cpu()
        num_directions, num_anchors = start_scores.shape
        num_proposals = logits.shape[-1] - 1
        # Order and uniforms are drawn for the global batch, so that the walk does not depend on the
        # number of ranks.
        order = self.draws.permutation(num_proposals, logits.device)
        uniform = self.draws.uniform(num_proposals, num_directions, proposed.num_batch, like=logits)
        if distributed.is_initialized():
            uniform = uniform[:, :, proposed.batch_rows.cpu()]
        # Proposals are the first dimension, because each step of the walk reads one of them for all
        # chains.
        visits, last = metropolis_hastings(
            start=logits[..., -1].flatten().numpy(),
            scores=logits.flatten(0, 1).T[order].numpy(),  # (C, X·A)
            log_uniform=uniform.flatten(1).log().numpy(),  # (C, X·A)
            burn_in=self.burn_in,
        )
        # Undo the random order of the proposals; the state stays last.
        columns = torch.cat([order, torch.tensor([num_proposals])])
        weights = torch.zeros(visits.shape, dtype=logits.dtype)
        weights[columns] = torch.from_numpy(visits).to(logits.dtype)
        weights = weights.T.reshape(num_directions, num_anchors, num_proposals + 1)
        column = columns[torch.from_numpy(last)].view(num_directions, num_anchors)
        device = start_scores.device
        return Walk(
            weights=weights.to(device, non_blocking=True),
            column=column.to(device, non_blocking=True),
        )

    @torch.no_grad()
    def _store(self, proposed: Anchors, plan: ChainPlan, walk: Walk, start_scores: Tensor) -> None:
        """Store the chains' new states and their similarities."""
        num_proposals = plan.keys.shape[1]
        has_moved = walk.column < num_proposals
        column = walk.column.clamp(max=num_proposals - 1)
        accepted_keys = plan.keys.gather(1, column)
        state = torch.where(has_moved, accepted_keys, plan.chain.state)
        # One dot product per anchor is cheaper than computing all (X, A, C) scores again.
        accepted = proposed.candidates.take_along_dim(column[..., None], dim=1)  # (X, A, D)
        accepted_scores = (proposed.embeddings * accepted).sum(dim=-1) / proposed.temperature
        scores = torch.where(has_moved, accepted_scores, start_scores)
        # Stored without τ, which changes between visits if it is learned.
        similarities = scores * proposed.temperature
        self.store(proposed, plan.chain, state, (self.similarity, similarities))


def metropolis_hastings(
    start: np.ndarray, scores: np.ndarray, log_uniform: np.ndarray, burn_in: float
) -> tuple[np.ndarray, np.ndarray]:
    """Run Algorithm 1 of Yau et al. 2024 for n chains at once.

    Args:
        start: (n,) s/τ of the initial state of each chain; -inf for none, which accepts the first
            proposal.
        scores: (C, n) s/τ of each proposal in the order of the walk; -inf if it is not a negative.
        log_uniform: (C, n) logs of uniform draws, for accepting each proposal.
        burn_in: share of a chain's proposals before steps count.

    Returns:
        (C + 1, n) share of the counted steps on each proposal and, last, on the initial state; (n,)
        the index of each chain's last state.
    """
    num_proposals, num_chains = scores.shape
    is_negative = scores > -np.inf
    num_steps = is_negative.sum(axis=0)
    # Epsilon, so that a product such as 0.29·100 does not fall below its integer.
    num_skipped = np.floor(num_steps * burn_in + 1e-9).astype(np.int64)
    visits = np.zeros((num_proposals + 1, num_chains))
    chains = np.arange(num_chains)
    state = np.full(num_chains, num_proposals)
    score = start.copy()
    step = np.zeros(num_chains, dtype=np.int64)
    for proposal in range(num_proposals):
        # Compared in logs: exp of a difference of scores overflows at small τ.
        makes_step = is_negative[proposal]
        threshold = score + log_uniform[proposal]
        accepts = makes_step & (threshold < scores[proposal])
        np.copyto(state, proposal, where=accepts)
        np.copyto(score, scores[proposal], where=accepts)
        step += makes_step
        visits[state, chains] += makes_step & (step > num_skipped)
    # A chain without proposals makes no step and has only visited its initial state.
    visits[num_proposals] += (num_steps == 0) & (start > -np.inf)
    return visits / np.maximum(num_steps - num_skipped, 1), state
