"""EMC²: a Metropolis–Hastings chain per anchor draws its negatives from the softmax over the whole corpus."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dualenc.objectives.anchors import Anchors, WithGradient
from dualenc.objectives.base import AnchorLosses, Encode
from dualenc.objectives.chains import NO_STATE, ChainObjective
from dualenc.objectives.looks import Asking

# The walk compares all proposals of so few with one another, and of more those of each run.
AT_ONCE, RUN = 80, 16


class EMC2(ChainObjective):
    """Negatives weigh what a Metropolis–Hastings chain on the corpus, kept per anchor from step to step, gives them.

    Each proposal z' in turn, in random order, is accepted in place of the state z with probability

        min(1, exp((s(x, z') − s(x, z))/τ)·q(z)/q(z')),

    with q the density of the proposals, which cancels where they are uniform. The weight of an item is the share of
    the steps after burn-in that the chain spends on it. The law of a chain at fixed parameters is the softmax over all
    negatives of its anchor, so the gradient is that of the global loss whatever the batch size, once the chains have
    mixed. Source: Yau et al. 2024 (EMC²: Efficient MCMC negative sampling for contrastive learning, arXiv:2404.10575),
    Algorithm 1 and Eq. 11.

    With views a chain moves between single views.

    Args:
        score: a proposal is compared with the state's similarity as "stored" when it was accepted (m floats, as on the
            paper's poster), or with a "fresh" one (exact at the current parameters; each out-of-batch state is
            encoded).
        burn_in: share of the proposals before steps count, in [0, 1).
        **chains: see `ChainObjective`; proposals="batch" is the paper's choice, one pass through the batch.
    """

    remembers: ClassVar[dict[str, float]] = {"score": -torch.inf}
    beside: Literal["partner", "similarity"] = "similarity"

    def __init__(self, *, score: Literal["stored", "fresh"] = "stored", burn_in: float = 0.5, **chains: Any) -> None:
        super().__init__(**chains)
        if score not in ("stored", "fresh"):
            self._fail("score", f"is {score!r}; it must be one of stored, fresh")
        if not 0 <= burn_in < 1:
            self._fail("burn_in", f"is {burn_in}; it must lie in [0, 1), a share of the proposals")
        self.score, self.burn_in = score, burn_in

    def items_drawn(self, ids: Tensor) -> Tensor:
        """One view of each image."""
        return 2 * ids + self.random.integers(2, len(ids), device=ids.device) if self.views else ids

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> Asking[AnchorLosses]:
        assert encode is not None
        visit = self.visit(anchors)
        state, num_proposals, fresh = visit.state, visit.items.shape[1], self.score == "fresh"
        score = torch.where(visit.usable, self.take("score", visit.chains).to(visit.told), visit.told)
        of_state = visit.column(state)
        log_inverse_uniform = self.random.rows(anchors.num_rows, num_proposals)
        order = self.random.permutation(num_proposals, device=state.device)
        proposed: list[Tensor] = []
        # (A,) similarities of out-of-batch states, with gradient.
        outside: Tensor | None = None
        if fresh or self.proposals != "batch":
            away = state.masked_fill(of_state[:, 0] < num_proposals, NO_STATE)
            asked = away if fresh else None
            proposed, of_states = yield from self.embed_proposals(anchors, visit, asked, 1, encode)
            if fresh and of_states is not None:
                outside = of_states[:, 0]
                score = torch.where(away != NO_STATE, outside.detach(), score)
        log_q, state_log_q = None, []
        if not visit.uniform:
            log_q = self.log_density(anchors, visit, visit.items)
            state_log_q = [self.log_density(anchors, visit, state.view(len(visit.items), -1)).view(-1, 1)]

        def walk_rows(
            some: Anchors, of_state: Tensor, score: Tensor, log_mean: Tensor, *state_log_q: Tensor
        ) -> tuple[Tensor, ...]:
            scores, logits = self.compare(some, visit, proposed)
            with torch.no_grad():
                if fresh:
                    inside = scores.gather(1, of_state.clamp(max=num_proposals - 1))[:, 0] * some.temperature
                    score = torch.where(of_state[:, 0] < num_proposals, inside, score)
                # The chain compares s/τ − log q + log(1/uniform) of a proposal with s/τ − log q of its state.
                start = score[:, None] / some.temperature
                if log_q is not None:
                    logits, start = logits - visit.by_row(log_q, some), start - state_log_q[0]
                rows = None if some.num_own == anchors.num_rows else some.rows_on_cpu
                in_order = logits[:, order]
                thresholds = in_order + log_inverse_uniform(rows, logits)
                node = walk(start, in_order, thresholds)
                column = torch.cat([of_state, order.expand(len(node), -1)], dim=1).gather(1, node)
                weights = logits.new_zeros(len(node), num_proposals + 1)
                weights.scatter_add_(1, column, self._shares(some, thresholds))
                if not some.all_have_negatives or self.proposals != "batch":
                    # Without proposals there is no step to count: a state stands for itself.
                    alone = (logits == -torch.inf).all(dim=1, keepdim=True) & (start > -torch.inf)
                    weights.scatter_add_(1, of_state, alone.to(weights))
                moved, place = node[:, -1] > 0, column[:, -1:].clamp(max=num_proposals - 1)
                next_score = torch.where(moved, scores.gather(1, place)[:, 0] * some.temperature, score)
                state_weight = weights[:, num_proposals].clone()
            losses = self.losses_of(some, scores, weights[:, :num_proposals], log_mean)
            return losses, state_weight, moved, place, next_score

        of_row = (of_state, score, visit.log_mean, *state_log_q)
        losses, state_weight, moved, place, next_score = anchors.by_rows(
            walk_rows, *of_row, row_entries=4 * num_proposals
        )
        if self.updates_state:
            (next_state,) = visit.after(moved, place, (visit.items, state))
            self.store(anchors, visit.chains, next_state, score=next_score)
        if not fresh:
            # Only states outside the batch that outlived burn-in are encoded.
            outside = yield from self.embed_states(anchors, state.masked_fill(state_weight <= 0, NO_STATE), encode)
        if outside is None:
            return AnchorLosses(losses)
        outside = outside / anchors.temperature
        if self.reports_loss:
            return AnchorLosses(WithGradient.apply(losses, outside, state_weight))
        return AnchorLosses(torch.addcmul(losses, state_weight, outside))

    def _shares(self, some: Anchors, thresholds: Tensor) -> Tensor:
        """(a, R) which share of the steps of some anchors that count each proposal is; 0 before, and if it is none."""
        is_step = thresholds > -torch.inf
        number = is_step.cumsum(dim=1, dtype=thresholds.dtype)
        if self.proposals == "batch" and some.all_have_negatives:
            total: int | Tensor = thresholds.shape[1] - (2 if some.views else 1)
            # The small term keeps a product such as 0.29·100 from falling short of its integer.
            skipped: int | Tensor = int(total * self.burn_in + 1e-9)
        else:
            total = number[:, -1:]
            skipped = (total.double() * self.burn_in + 1e-9).long()
            total = total.clamp(min=1)
        return number.gt_(skipped).mul_(is_step).div_(total - skipped)


def walk(start: Tensor, scores: Tensor, thresholds: Tensor) -> Tensor:
    """Run each chain through its row of proposals.

    Args:
        start: (A, 1) score of the state that each chain comes with, -inf if it accepts the first proposal.
        scores: (A, R) of each proposal (any increasing function of its log density).
        thresholds: (A, R) a chain whose score is below accepts the proposal; -inf is no proposal. None is below the
            score of its own proposal.

    Returns:
        (A, R) where the chain is after each proposal: 0 the state, r the r-th proposal; (A, 1) without proposals.
    """
    if not scores.shape[1]:  # nobody is there to propose or to walk
        return torch.zeros_like(start, dtype=torch.int64)
    if scores.device.type == "cpu":
        return torch.from_numpy(_one_by_one(start.numpy(), scores.numpy(), thresholds.numpy()))
    return without_a_loop(start, scores, thresholds)


def _one_by_one(start: np.ndarray, scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """What `walk` gives, by its definition: the least work, and on an accelerator a thousand small operations."""
    scores, thresholds = np.ascontiguousarray(scores.T), np.ascontiguousarray(thresholds.T)
    where = np.zeros(thresholds.shape, dtype=np.int64)
    state, score = np.zeros(len(where.T), dtype=np.int64), start[:, 0].copy()
    for r, threshold in enumerate(thresholds):
        accepts = score < threshold
        np.copyto(score, scores[r], where=accepts)
        np.copyto(state, r + 1, where=accepts)
        where[r] = state
    return where.T


def without_a_loop(start: Tensor, scores: Tensor, thresholds: Tensor) -> Tensor:
    """What `walk` gives, in few operations on large tensors.

    Proposal i is left for the first later one whose threshold is above its score. All that comes by before has lower
    thresholds, so lower scores, and were it accepted, it would be left by then, too. Hence two things:

    - After r a chain is on the first proposal i, accepted or not, for which none of i + 1, …, r would be left.
    - Where a chain is once it has moved does not depend on where it was before. So a run of proposals is to it as a
      single one, with the largest of their thresholds and the score of the one that the chain is on after them.
    """
    num_proposals = scores.shape[1]
    if num_proposals <= AT_ONCE:
        return _first_kept(torch.cat([start, scores], dim=1), thresholds)

    num_runs = -(-num_proposals // RUN)
    if missing := num_runs * RUN - num_proposals:
        scores, thresholds = (pad(of, (0, missing), value=-torch.inf) for of in (scores, thresholds))
    scores, thresholds = (of.view(-1, num_runs, RUN) for of in (scores, thresholds))
    inside = _first_kept(scores, thresholds)
    last_score = scores.gather(2, inside[:, :, -1:])[:, :, 0]
    # Whoever comes into a run stays where it is until one of the thresholds is above its score.
    came = pad(without_a_loop(start, last_score, thresholds.amax(dim=2)), (1, -1))
    came_score = torch.cat([start, last_score], dim=1).gather(1, came)
    stays = thresholds.cummax(dim=2).values <= came_score[:, :, None]
    inside += torch.arange(1, num_proposals + 1, RUN, device=scores.device)[:, None]
    # No chain goes back: where it stays is the last place before that any was on.
    where = inside.masked_fill_(stays, 0).flatten(1).cummax(dim=1).values
    return where[:, :num_proposals] if missing else where


def _first_kept(scores: Tensor, thresholds: Tensor) -> Tensor:
    """(…, R) after each of R proposals, the first for which no later one would be left.

    Args:
        scores: (…, R) of the proposals, or (…, 1 + R) with that of a state in front, which then counts as the first.
        thresholds: (…, R) of the proposals.
    """
    num_states = scores.shape[-1] - thresholds.shape[-1]
    left = (thresholds[..., None, :] > scores[..., None]).triu_(1 - num_states)
    return left.cumsum(dim=-1, dtype=torch.uint8).argmin(dim=-2)
