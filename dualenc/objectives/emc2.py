"""EMC²: a Metropolis–Hastings chain per anchor draws its negatives from the softmax over the whole corpus."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode
from dualenc.objectives.chains import NO_STATE, ChainObjective
from dualenc.objectives.looks import Asking


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
        score = torch.where(visit.usable, self.take("score", anchors).to(visit.told), visit.told)
        there, place = visit.find(state)
        away = state.masked_fill(there, NO_STATE)
        draws_of = self.random.rows(anchors.num_rows, num_proposals)
        order = self.random.permutation(num_proposals, device=state.device)
        # Nodes of the walk: 0 the state, then the proposals in this order. Columns here: the proposals, then the state.
        column_of = pad(order, (1, 0), value=num_proposals)
        node_of = column_of.argsort()
        proposed: list[Tensor] = []
        # (A, 1) similarities of out-of-batch states, with gradient.
        outside: Tensor | None = None
        if fresh or self.proposals != "batch":
            asked = away if fresh else None
            proposed, outside = yield from self.embed_proposals(anchors, visit, asked, 1, encode)
        if fresh and outside is not None:
            score = torch.where(away != NO_STATE, outside.detach()[:, 0], score)
        log_q, state_log_q = None, []
        if not visit.uniform:
            log_q = self.log_density(anchors, visit, visit.items)
            state_log_q = [self.log_density(anchors, visit, state.view(len(visit.items), -1)).view(-1, 1)]

        def walk_rows(
            some: Anchors, there: Tensor, place: Tensor, score: Tensor, log_mean: Tensor, *state_log_q: Tensor
        ) -> tuple[Tensor, ...]:
            scores, logits = self.compare(some, visit, proposed)
            with torch.no_grad():
                if fresh:
                    score = torch.where(there, scores.gather(1, place) * some.temperature, score)
                # The chain compares s/τ − log q + log(1/uniform) of a proposal with s/τ − log q of its state.
                start = score / some.temperature
                if log_q is not None:
                    logits, start = logits - visit.by_row(log_q, some), start - state_log_q[0]
                thresholds = logits - draws_of(some.rows_on_cpu, logits).log_()
                skipped, total = self._steps(some, logits)
                targets = torch.cat([start, logits[:, order]], dim=1)
                spent, last = walk(targets, thresholds[:, order], skipped)
                weights = spent[:, node_of].to(scores) / total
                of_state = weights[:, num_proposals:]
                if not some.all_have_negatives or self.proposals != "batch":
                    # Without proposals there is no step to count: a state stands for itself.
                    alone = (logits == -torch.inf).all(dim=1, keepdim=True)
                    of_state.masked_fill_(alone & (score > -torch.inf), 1.0)
                weights.scatter_add_(1, place, of_state * there)
                of_state = of_state.masked_fill(there, 0.0)
                column = column_of[last]
                moved, inside = column < num_proposals, column.clamp(max=num_proposals - 1)
                next_score = torch.where(moved, scores.gather(1, inside) * some.temperature, score)
            losses = self.losses_of(some, scores, weights[:, :num_proposals], log_mean)
            return losses, of_state, column, next_score

        # The jumps of the walk hold some four matrices at once.
        of_row = (there[:, None], place[:, None], score[:, None], visit.log_mean, *state_log_q)
        losses, state_weight, column, next_score = anchors.by_rows(walk_rows, *of_row, row_entries=4 * num_proposals)
        if self.updates_state:
            (next_state,) = visit.after(column[:, 0], state)
            self.store(anchors, next_state, score=next_score[:, 0])
        if not fresh:
            # Only states that outlived burn-in are encoded.
            outside = yield from self.embed_states(anchors, away.masked_fill(state_weight[:, 0] <= 0, NO_STATE), encode)
        if outside is None:
            return AnchorLosses(losses)
        surrogate = losses + (state_weight * outside)[:, 0] / anchors.temperature
        return AnchorLosses(surrogate, losses.detach() if self.reports_loss else None)

    def _steps(self, some: Anchors, logits: Tensor) -> tuple[int | Tensor, int | Tensor]:
        """How many proposals of logits (a, C) some anchors skip, and how many steps count, at least 1; also (a, 1)."""
        # The small term keeps a product such as 0.29·100 from falling short of its integer.
        if self.proposals == "batch" and some.all_have_negatives:
            number = logits.shape[1] - (2 if some.views else 1)
            skipped = int(number * self.burn_in + 1e-9)
            return skipped, max(number - skipped, 1)
        numbers = (logits > -torch.inf).sum(dim=1, keepdim=True)
        skips = (numbers.double() * self.burn_in + 1e-9).long()
        return skips, (numbers - skips).clamp(min=1)


def walk(scores: Tensor, thresholds: Tensor, burn_in: int | Tensor) -> tuple[Tensor, Tensor]:
    """Run each chain through its row of proposals, in a number of operations that grows with log R.

    Args:
        scores: (A, 1 + R) score of the state that each chain comes with, -inf if it accepts the first proposal, and of
            each proposal (any increasing function of its log density).
        thresholds: (A, R) a chain whose score is below accepts the proposal; -inf is no proposal and no step.
        burn_in: number of steps that do not count, or (A, 1).

    Returns:
        (A, 1 + R) counted steps spent on that state and on each proposal; and (A, 1) where the chain ends, 0 for the
        state and r for the r-th proposal.
    """
    # Nodes: 0 the state a chain comes with, 1…R the proposals, R+1 the end.
    end = scores.shape[1]
    following = torch.arange(1, end + 1, device=scores.device)
    levels = end.bit_length()

    # From each node a chain goes to the first later one whose threshold is above the node's score: found by bisection.
    # peaks[k][:, p] is the maximum of the 2^k thresholds from p on; those of the end and beyond are infinite.
    peaks = [pad(thresholds, (1, 2 ** (levels - 1)), value=torch.inf)]
    for level in range(levels - 1):
        peaks.append(torch.maximum(peaks[-1][:, : -(2**level)], peaks[-1][:, 2**level :]))
    position = torch.add(following, peaks.pop()[:, 1 : end + 1] <= scores, alpha=2 ** (levels - 1))
    while peaks:
        peak = peaks.pop()
        position.add_(peak.gather(1, position) <= scores, alpha=2 ** len(peaks))
    first_jump = jump = pad(position, (0, 1), value=end)

    # (A, R+2) ones where a chain comes by: the first 1, 2, 4, … nodes of its path, and those as many jumps later.
    visited = pad(jump.new_ones(len(jump), 1), (0, end))
    for level in range((end - 1).bit_length()):
        jump = jump if level == 0 else jump.gather(1, jump)
        visited = visited.scatter_add(1, jump, visited)

    # (A, R+2) how many of the proposals before each node count.
    counted = ((thresholds > -torch.inf).cumsum(dim=1) - burn_in).clamp_(min=0)
    before = pad(counted, (2, 0))
    spent = (before.gather(1, first_jump) - before) * visited
    last = (visited[:, :end] * following).amax(dim=1, keepdim=True) - 1
    return spent[:, :end], last
