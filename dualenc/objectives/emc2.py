"""EMC²: a Metropolis–Hastings chain per anchor draws its negatives from the softmax over the whole corpus."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode
from dualenc.objectives.chains import NO_STATE, ChainObjective, at, embed, find, known_rows
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
        items, state = visit.items, visit.state
        stored = visit.chains.take("score", visit.own, visit.known).to(visit.similarity)
        score = torch.where(visit.usable, stored, visit.similarity)
        place = find(items, state)
        away = state.masked_fill(place >= 0, NO_STATE)
        draws_of = self.random.rows(anchors.num_global, len(items))
        order = self.random.permutation(len(items), device=items.device)
        proposed = anchors.candidates[: anchors.num_global]
        # (A,) similarities of out-of-batch states, with gradient.
        outside = torch.zeros_like(anchors.positive_similarities)
        if self.score == "fresh" or self.proposals != "batch":
            asked = away if self.score == "fresh" else None
            proposed, rows, embeddings = yield from self.embed_proposals(anchors, visit, asked, 1, encode)
            outside = outside.index_put((rows,), (anchors.embeddings[rows] * embeddings).sum(dim=1))
        if self.score == "fresh":
            score = torch.where(away != NO_STATE, outside.detach(), score)
        log_q, state_log_q = (self.log_density(anchors, visit, some) for some in (items, state))

        def walk_rows(some: Anchors, place: Tensor, score: Tensor, state_log_q: Tensor) -> tuple[Tensor, ...]:
            similarities, allowed = self.compare(some, visit, proposed)
            with torch.no_grad():
                there = place >= 0
                if self.score == "fresh":
                    score = torch.where(there, at(similarities, place.clamp(min=0)), score)
                # The chain compares s − τ·log q + τ·log(1/uniform) of a proposal with s − τ·log q of its state.
                targets = (similarities - some.temperature * log_q)[:, order]
                uniform = draws_of(some.rows_on_cpu, similarities)
                thresholds = (targets - some.temperature * uniform.log()).masked_fill(~allowed[:, order], -torch.inf)
                num_proposals = allowed.sum(dim=1)
                # The small term keeps a product such as 0.29·100 from falling short of its integer.
                skipped = (num_proposals.double() * self.burn_in + 1e-9).long()
                visits, stays, last = walk(targets, thresholds, score - some.temperature * state_log_q, skipped)
                # Without proposals there is no step to count: a state stands for itself.
                stays = torch.where((num_proposals == 0) & (score > -torch.inf), 1, stays)
                total = (num_proposals - skipped).clamp(min=1).to(score)
                weights = torch.zeros_like(similarities)
                weights[:, order] = visits / total[:, None]
                state_weight = stays / total
                weights.scatter_add_(1, place.clamp(min=0)[:, None], torch.where(there, state_weight, 0.0)[:, None])
                column = torch.where(last >= 0, order[last.clamp(min=0)], -1)
                next_score = torch.where(column >= 0, at(similarities, column.clamp(min=0)), score)
            in_batch = (weights * similarities).sum(dim=1)
            return in_batch, torch.where(there, 0.0, state_weight), column, next_score

        # The jumps of the walk hold some four matrices at once.
        of_row = (place, score, state_log_q)
        negatives, state_weight, column, next_score = anchors.by_rows(walk_rows, *of_row, row_entries=4 * len(items))
        if self.updates_state:
            next_state = torch.where(column >= 0, items[column.clamp(min=0)], state)
            visit.chains.store(anchors, visit.own, visit.all_known, next_state, score=next_score)
        if self.score == "stored":
            # Only states that outlived burn-in are encoded.
            late, rows = known_rows((yield away.masked_fill(state_weight <= 0, NO_STATE)), anchors)
            if len(late) or distributed.is_initialized():
                embeddings = embed(late, encode, anchors)
                outside = outside.index_put((rows,), (anchors.embeddings[rows] * embeddings).sum(dim=1))
        return self.global_loss(anchors, visit, negatives + state_weight * outside)


def walk(scores: Tensor, thresholds: Tensor, start: Tensor, burn_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run each chain through its row of proposals, in a number of operations that grows with log R.

    Args:
        scores: (A, R) score of each proposal (any increasing function of its log density).
        thresholds: (A, R) a chain whose score is below accepts the proposal; -inf is no proposal and no step.
        start: (A,) scores of the states the chains come with; -inf accepts the first proposal.
        burn_in: (A,) number of steps that do not count.

    Returns:
        (A, R) counted steps spent on each proposal; (A,) counted steps spent on the state that the chain came with; and
        (A,) the proposal that the chain ends on, -1 for the state it came with.
    """
    # Nodes: 0 the state a chain comes with, 1…R the proposals, R+1 the end.
    num_anchors, num_proposals = scores.shape
    end = num_proposals + 1
    scores = torch.cat([start[:, None], scores], dim=1)

    # From each node a chain goes to the first later one whose threshold is above the node's score: found by bisection.
    peaks = [torch.cat([thresholds, thresholds.new_full((num_anchors, 1), torch.inf)], dim=1)]
    width = 1
    while 2 * width <= end:
        # peaks[k][:, p] is the maximum of the 2^k thresholds from p on; windows beyond the end are infinite.
        peak = peaks[-1].clone()
        torch.maximum(peaks[-1][:, :-width], peaks[-1][:, width:], out=peak[:, :-width])
        peaks.append(peak)
        width *= 2
    position = torch.arange(end, device=scores.device).repeat(num_anchors, 1)
    for peak in reversed(peaks):
        position.add_(peak.gather(1, position) <= scores, alpha=width)
        width //= 2
    del peaks, peak  # as much memory as what follows needs
    jump = torch.cat([position + 1, position.new_full((num_anchors, 1), end)], dim=1)

    # (A, L > R) the nodes visited from node 0 on; the end repeats itself.
    path = torch.zeros_like(jump[:, :1])
    while True:
        # The path so far, and the same path as many jumps later.
        path = torch.cat([path, jump.gather(1, path)], dim=1)
        if path.shape[1] > num_proposals:
            break
        jump = jump.gather(1, jump)

    # (A, R+1) how many of the first 0…R proposals count.
    counted = (torch.isfinite(thresholds).cumsum(dim=1) - burn_in[:, None]).clamp(min=0)
    counted = torch.cat([torch.zeros_like(burn_in)[:, None], counted], dim=1)
    following = torch.cat([path[:, 1:], path.new_full((num_anchors, 1), end)], dim=1)
    spent = counted.gather(1, following - 1) - counted.gather(1, (path - 1).clamp(min=0))
    visits = spent.new_zeros(num_anchors, end + 1).scatter_add_(1, path, spent)
    last = torch.where(path < end, path, 0).amax(dim=1) - 1
    return visits[:, 1:end], visits[:, 0], last
