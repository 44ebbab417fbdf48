"""EMC²: a Markov chain per anchor draws its negatives from the softmax over the whole corpus."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import (
    NO_STATE,
    Chains,
    Mixture,
    Move,
    Neighbors,
    RecentItems,
    Step,
    at,
    candidate_items,
    embed,
    find,
    ids_of,
    left_view,
    log_mean_of_negatives,
    similarities_beside,
)
from dualenc.objectives.isir import iterated_sir, log_copies
from dualenc.objectives.state import RowDraws, SharedRandom
from dualenc.types import Side


def metropolis_hastings(step: Step, uniform: Tensor, order: Tensor, burn_in: float) -> Move:
    """Each proposal in turn is accepted with probability min(1, exp((s' − s)/τ)) (emc2.txt, Algorithm 1).

    Where proposals are not uniform but have density q, the ratio is exp((s' − s)/τ)·q(s)/q(s').

    Args:
        step: what the chains see.
        uniform: (A, C) draws of the acceptance tests.
        order: (C,) the order in which the proposals come.
        burn_in: share of an anchor's proposals before steps count.
    """
    scores = (step.similarities - step.temperature * step.log_density)[:, order]
    allowed = step.allowed[:, order]
    start = step.score - step.temperature * step.state_log_density
    thresholds = (scores - step.temperature * uniform.log()).masked_fill(~allowed, -torch.inf)
    num_proposals = allowed.sum(dim=1)
    # The small term keeps a product such as 0.29·100 from falling short of its integer.
    skipped = (num_proposals.double() * burn_in + 1e-9).long()
    visits, stays, last = walk(scores, thresholds, start, skipped)
    # Without proposals there is no step to count: the state stands for itself.
    stays = torch.where((num_proposals == 0) & (step.state != NO_STATE), 1, stays)
    total = (num_proposals - skipped).clamp(min=1).to(scores.dtype)
    weights = torch.zeros_like(scores)
    weights[:, order] = visits / total[:, None]
    stay_weight = stays / total
    column = step.places[:, 0]
    among = column >= 0
    weights.scatter_add_(1, column.clamp(min=0)[:, None], torch.where(among, stay_weight, 0.0)[:, None])
    return Move(
        weights=weights,
        outside_weights=torch.where(among, 0.0, stay_weight)[:, None],
        column=torch.where(last >= 0, order[last.clamp(min=0)], -1),
    )


class Walk(NamedTuple):
    """What chains did.

    visits: (A, R) counted steps spent on each proposal.
    stays: (A,) counted steps spent on the state that the chain came with.
    last: (A,) proposal the chain ends on, -1 for the state it came with.
    """

    visits: Tensor
    stays: Tensor
    last: Tensor


def walk(scores: Tensor, thresholds: Tensor, start: Tensor, burn_in: Tensor) -> Walk:
    """Run each chain through its row of proposals.

    Args:
        scores: (A, R) score of each proposal (any increasing function of its log density).
        thresholds: (A, R) a chain whose score is below accepts the proposal; -inf is no proposal and no step.
        start: (A,) scores of the states the chains come with; -inf accepts the first proposal.
        burn_in: (A,) number of steps that do not count.
    """
    num_anchors, num_proposals = scores.shape
    end = num_proposals + 1
    successor = _successors(torch.cat([start[:, None], scores], dim=1), thresholds)
    path = _path(successor, num_proposals)
    following = torch.cat([path[:, 1:], path.new_full((num_anchors, 1), end)], dim=1)
    counted = _counted_steps(thresholds, burn_in)
    spent = counted.gather(1, following - 1) - counted.gather(1, (path - 1).clamp(min=0))
    visits = spent.new_zeros(num_anchors, end + 1).scatter_add_(1, path, spent)
    last = torch.where(path < end, path, 0).amax(dim=1) - 1
    return Walk(visits[:, 1:end], visits[:, 0], last)


def _successors(scores: Tensor, thresholds: Tensor) -> Tensor:
    """(A, R+2) where a chain goes from each node: 0 the state it came with, 1…R the proposals, R+1 the end.

    Args:
        scores: (A, R+1) scores of nodes 0…R.
        thresholds: (A, R) thresholds of nodes 1…R.
    """
    num_anchors, num_nodes = scores.shape
    peaks = [torch.cat([thresholds, thresholds.new_full((num_anchors, 1), torch.inf)], dim=1)]
    width = 1
    while 2 * width <= num_nodes:
        # peaks[k][:, p] is the maximum of the 2^k thresholds from p on; windows beyond the end are infinite.
        peak = peaks[-1].clone()
        torch.maximum(peaks[-1][:, :-width], peaks[-1][:, width:], out=peak[:, :-width])
        peaks.append(peak)
        width *= 2
    position = torch.arange(num_nodes, device=scores.device).repeat(num_anchors, 1)
    for peak in reversed(peaks):
        position.add_(peak.gather(1, position) <= scores, alpha=width)
        width //= 2
    return torch.cat([position + 1, position.new_full((num_anchors, 1), num_nodes)], dim=1)


def _path(successor: Tensor, num_proposals: int) -> Tensor:
    """(A, L) nodes visited from node 0 on, L > R; the end repeats itself."""
    path = torch.zeros_like(successor[:, :1])
    jump = successor
    while True:
        # The path so far, and the same path as many jumps later.
        path = torch.cat([path, jump.gather(1, path)], dim=1)
        if path.shape[1] > num_proposals:
            return path
        jump = jump.gather(1, jump)


def _counted_steps(thresholds: Tensor, burn_in: Tensor) -> Tensor:
    """(A, R+1) how many of the first 0…R proposals count."""
    steps = torch.isfinite(thresholds).cumsum(dim=1)
    counted = (steps - burn_in[:, None]).clamp(min=0)
    return torch.cat([torch.zeros_like(burn_in)[:, None], counted], dim=1)


class EMC2(Objective):
    """Negatives weigh what a Markov chain on the corpus, kept per anchor from step to step, gives them.

    The law of a chain at fixed parameters is the softmax over all negatives of its anchor, so the gradient is that of
    the global loss whatever the batch size, once the chains have mixed. Source: Yau et al. 2024 (EMC²: Efficient MCMC
    negative sampling for contrastive learning), Algorithm 1 and Eq. 11.

    Where a chain starts never changes its law, but it decides when the law is reached. On an anchor's first visit the
    chain starts on a draw from the softmax over the latest embeddings of up to `recent` items; once these are there
    for the first time (after an epoch, or 2·`recent` items of a larger corpus) every chain starts anew.
    With 200 random pairs at τ = 0.02 the bias of i-SIR's gradient is gone from the second epoch on (below the 0.1
    that a few runs resolve). With chains that start cold (`recent=0`) it is .93 after one epoch, .48 after 30 at B = 4;
    0.67 and 0.31 after one and ten at B = 16; 0.51 and 0.16 at B = 32 (`eval/estimator_bias.py --mixing`). Where the
    corpus is much larger than `recent`, a start is as good as a softmax over so many negatives, and chains mix on
    from there.

    The value of the loss takes the partition function from the same embeddings. At fixed parameters it is exact from
    the second epoch on where the corpus has no more than `recent` items. Of a larger one they are a sample, and the
    value errs low where a few negatives outweigh all others.

    Mined negatives are no uniform proposals and take no part. In-batch proposals are uniform only if batches are
    random: with selected batches draw them from the corpus (`proposals=64`).

    Args:
        kernel: "mh", Metropolis–Hastings: a weight is the share of steps after burn-in that the chain spends on the
            item. "isir", iterated sampling importance resampling: the weights are the softmax over the state and all
            proposals, the next state is drawn from it; less variance, and the state is always encoded anew.
        score: "mh" compares with the state's similarity as "stored" when it was accepted (m floats, as on the paper's
            poster), or with a "fresh" one (exact at the current parameters; each out-of-batch state is encoded).
        proposals: "batch", the other items of the batch in random order: the corpus is then the multiset of the pairs'
            items, so that a document counts once for each of its queries (pairs that
            are listed twice are one). Or R: so many items drawn uniformly from
            the whole id space, encoded once and shared by all chains: every item of the corpus then counts once.
        burn_in: share of the proposals before "mh" counts, in [0, 1).
        neighbor_share: share in [0, 1) of the R draws that comes from the neighbours of the batch's anchors, told by
            `set_neighbors` (the trainer does so at the start of every epoch, after a pass over the data); acceptance
            and weights are corrected by the density of the proposals, so that harder proposals make chains faster and
            not biased.
        neighbors: how many neighbours of each item to be told.
        shared_chain: with views, False gives each of an image's two views a chain of its own, which is exact. True is
            the paper's Fig. 2: both walk on from one state, and the first view's walk is kept; that costs a relative
            bias of the gradient of 0.2 to 0.5 at τ ≤ 0.07.
        recent: of how many items of each side the latest embeddings are kept (`recent`·D floats beside the model), for
            chains to start on and for the value of the loss. 0 keeps none: chains start on their first batch.
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True

    def __init__(
        self,
        *,
        kernel: Literal["mh", "isir"] = "mh",
        score: Literal["stored", "fresh"] = "stored",
        proposals: Literal["batch"] | int = "batch",
        burn_in: float = 0.5,
        neighbor_share: float = 0.0,
        neighbors: int = 16,
        shared_chain: bool = False,
        recent: int = 4096,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for argument, value, choices in (("kernel", kernel, ("mh", "isir")), ("score", score, ("stored", "fresh"))):
            if value not in choices:
                raise DualencError(f"EMC2: {argument} is {value!r}; it must be one of {', '.join(choices)}")
        if proposals != "batch" and (not isinstance(proposals, int) or proposals < 1):
            raise DualencError(f'EMC2: proposals is {proposals!r}; it must be "batch" or a number of draws, at least 1')
        if not 0 <= burn_in < 1:
            raise DualencError(f"EMC2: burn_in is {burn_in}; it must lie in [0, 1), a share of the proposals")
        if not 0 <= neighbor_share < 1 or (neighbor_share and proposals == "batch"):
            raise DualencError(
                f"EMC2: neighbor_share is {neighbor_share}; it must lie in [0, 1), and needs proposals to be a number"
            )
        if neighbors < 1:
            raise DualencError(f"EMC2: neighbors is {neighbors}; it must be at least 1")
        if recent < 0:
            raise DualencError(f"EMC2: recent is {recent}; it must be at least 0, a number of items")
        self.kernel, self.score, self.proposals, self.burn_in = kernel, score, proposals, burn_in
        # Draws from the corpus weigh every item once.
        self.corpus_of_pairs = proposals == "batch"
        self.neighbor_share = neighbor_share
        self.num_neighbors = neighbors if neighbor_share else 0
        self.encodes_every_state = kernel == "isir" or score == "fresh"
        # i-SIR moves between images, each with its two views; Metropolis–Hastings between single views.
        self.moves_images = self.views and kernel == "isir"
        # How many matrices the kernels hold at once: the jumps of Metropolis–Hastings take many.
        self.matrices = 4 if kernel == "mh" else 2
        self.shared_chain = shared_chain or not self.views
        self.left_chains = Chains((self.num_left or 1) * (1 if self.shared_chain else 2))
        self.right_chains = self.left_chains if self.views else Chains(self.num_right or 1)
        self.left_neighbors, self.right_neighbors = Neighbors(), Neighbors()
        num_left, num_right = ((count or 1) * (2 if self.views else 1) for count in (self.num_left, self.num_right))
        # Of left items for the chains of right anchors, and the other way round; with views both are the same.
        self.recent_left = RecentItems(recent * (2 if self.views else 1), num_left)
        self.recent_right = self.recent_left if self.views else RecentItems(recent, num_right)
        self.random = SharedRandom(self.seed)

    def set_neighbors(self, side: Side, ids: Tensor) -> None:
        """Tell which items are near each anchor, from an index over the current embeddings; any list keeps the law.

        Args:
            side: of the anchors, "left" or "right".
            ids: (m, k) ids of the other side's items (with views: of images), padded with -1; row i is for anchor i.
        """
        if side == "left":
            self.left_neighbors.set(ids, self.num_left or 1, self.num_right or 1)
        else:
            self.right_neighbors.set(ids, self.num_right or 1, self.num_left or 1)

    @property
    def needs_uniform_batches(self) -> str | None:
        """In-batch proposals follow the law that chains assume in random batches only."""
        return "proposals=64" if self.proposals == "batch" else None

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        """Tell how many pairs each item is in; where proposals come from the corpus, every item weighs the same."""
        super().set_counts(left_counts, right_counts)
        if self.views:
            left_counts = right_counts = left_counts.repeat_interleave(2)
        self.recent_left.set_counts(left_counts, weigh=self.corpus_of_pairs)
        self.recent_right.set_counts(right_counts, weigh=self.corpus_of_pairs)

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        assert encode is not None
        writes, draws = self.updates_state, self.random.draws
        chains = self.left_chains if anchors.side == "left" else self.right_chains
        recent = self.recent_right if anchors.candidate_side == "right" else self.recent_left
        partners = self._partners(anchors)
        if writes and recent.num_slots:
            own_batch = slice(anchors.num_in_batch)
            recent.add(candidate_items(anchors)[own_batch], partners, anchors.candidates[own_batch])
            if recent.visited(anchors.num_in_batch):
                # Chains that began while little was there begin anew.
                chains.forget()
        own = self._chain_of(anchors)
        usable = anchors.is_negative(ids_of(chains.state[own], self.views)[:, None])[:, 0]
        usable &= chains.state[own] != NO_STATE
        log_sum, log_count, *start = self._seen(anchors, recent, usable)
        state, partner, stored = self._states(chains, own, usable, start)
        items, mixture = self._proposed(anchors)
        if self.proposals != "batch":
            partners = torch.full_like(items, NO_STATE)
        places, beside = self._places(anchors, items, partners, state, partner, mixture)
        log_density, state_log_density = self._log_densities(mixture, items, state)
        away = (state != NO_STATE) & (places[:, 0] < 0)
        now = away.nonzero()[:, 0] if self.encodes_every_state else state[:0]
        proposed, outside = self._encoded(anchors, items, state, now, encode)
        if writes and recent.num_slots and self.proposals != "batch" and mixture.is_uniform:
            recent.add(items, partners, proposed)
        kernel = self._kernel(anchors, items)

        def walk(
            some: Anchors,
            state: Tensor,
            places: Tensor,
            beside: Tensor,
            stored: Tensor,
            outside: Tensor,
            density: Tensor,
        ) -> tuple[Tensor, ...]:
            allowed, similarities = self._compared(some, items, proposed)
            with torch.no_grad():
                known = similarities.gather(1, places.clamp(min=0)) if len(items) else outside
                outside = torch.where(places >= 0, known, outside)
                score = stored
                if self.encodes_every_state:
                    log_mean = torch.logsumexp(outside / some.temperature, dim=1) - math.log(outside.shape[1])
                    score = some.temperature * log_mean
                score = torch.where(state == NO_STATE, -torch.inf, score)
                step = Step(
                    items=items,
                    similarities=similarities,
                    allowed=allowed,
                    state=state,
                    places=places,
                    beside=beside,
                    score=score,
                    outside=outside,
                    log_density=log_density,
                    state_log_density=density,
                    temperature=some.temperature,
                )
                move = kernel(step, some.rows)
                gained = at(similarities, move.column.clamp(min=0)) if len(items) else score
                gained = torch.where(move.column >= 0, gained, score)
            among = (move.weights * similarities).sum(dim=1)
            return among, move.outside_weights, move.column, score, gained, log_mean_of_negatives(step)

        rows = (state, places, beside, stored, outside.detach(), state_log_density)
        found = anchors.by_rows(walk, *rows, row_entries=self.matrices * len(items))
        among, outside_weights, column, score, next_score, log_mean = found
        log_mean = recent.log_mean(log_sum, log_count, state, score / anchors.temperature.detach(), log_mean)
        if writes:
            moved, column = column >= 0, column.clamp(min=0)
            next_state = torch.where(moved, items[column], state) if len(items) else state
            next_partner = torch.where(moved, partners[column], partner) if len(items) else partner
            chains.store(anchors, own, next_state, next_partner, next_score)
        else:
            self.random.draws = draws
        if not self.encodes_every_state:
            late = (away & (outside_weights[:, 0] > 0)).nonzero()[:, 0]
            if len(late):
                outside = similarities_beside(anchors, late, embed(state[late], encode, anchors), num_each=1)
        negatives = among + (outside_weights * torch.where(outside_weights > 0, outside, 0.0)).sum(dim=1)
        surrogate = negatives / anchors.temperature - anchors.positive_logits
        value = log_mean + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(surrogate, value.detach())

    def _chain_of(self, anchors: Anchors) -> Tensor:
        """(A,) the number of each anchor's chain."""
        if self.shared_chain:
            return anchors.ids
        # The second views are the second half of all anchors.
        return 2 * anchors.ids + (anchors.rows >= anchors.num_global // 2)

    def _proposed(self, anchors: Anchors) -> tuple[Tensor, Mixture]:
        """(C,) the proposed items, and what they were drawn from."""
        neighbors = self.left_neighbors if anchors.side == "left" else self.right_neighbors
        mixture = Mixture(self.num_items(anchors.candidate_side) or 1, anchors.embeddings.detach())
        if self.proposals == "batch":
            return candidate_items(anchors)[: anchors.num_in_batch], mixture
        if self.neighbor_share and len(neighbors.ids):
            near = neighbors.near(distributed.gather(anchors.ids, anchors.sizes))
            mixture = mixture.with_list(near, self.neighbor_share)
        ids = mixture.draw(self.proposals, self.random)
        if not self.views:
            return ids, mixture
        if self.moves_images:
            return torch.cat([2 * ids, 2 * ids + 1]), mixture
        return 2 * ids + self.random.integers(2, self.proposals, device=ids.device), mixture

    def _partners(self, anchors: Anchors) -> Tensor:
        """(num_in_batch,) the other id of the pair that each candidate of the batch comes from, -1 with views."""
        if self.views:
            return torch.full_like(anchors.candidate_ids[: anchors.num_in_batch], NO_STATE)
        return distributed.gather(anchors.ids, anchors.sizes)

    def _seen(self, anchors: Anchors, recent: RecentItems, usable: Tensor) -> tuple[Tensor, ...]:
        """(A,) each: what `RecentItems.look` gives, with a draw where a chain has no usable state."""
        uniform = torch.zeros_like(anchors.positive_similarities)
        if not recent.num_slots:
            return recent.look(anchors, uniform, draw=False)
        uniform = self.random.uniform(anchors.num_global, like=uniform)[anchors.rows]
        return recent.look(anchors, uniform, draw=not bool(usable.all()))

    def _states(
        self, chains: Chains, own: Tensor, usable: Tensor, start: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(A,) states, partners and scores; those of the start where a chain has no negative of this anchor."""
        there = chains.state[own], chains.partner[own], chains.score[own].to(start[2])
        state, partner, score = (torch.where(usable, old, new) for old, new in zip(there, start, strict=True))
        return (left_view(state) if self.moves_images else state), partner, score

    def _places(
        self, anchors: Anchors, items: Tensor, partners: Tensor, state: Tensor, partner: Tensor, mixture: Mixture
    ) -> tuple[Tensor, Tensor]:
        """(A, S) columns of what the states stand for, -1 for none; (A,) whether they count beside the proposals."""
        column = find(left_view(items) if self.moves_images else items, state)
        if self.kernel == "isir" and not mixture.is_uniform:
            # Draws of unequal density cannot stand for the state: it counts beside them.
            among = torch.zeros_like(column, dtype=torch.bool)
        elif self.kernel == "isir" and self.proposals == "batch" and not self.views:
            # Other copies of the item do not stand for the state's own pair. A pair that is not known is any.
            width = self.num_items(anchors.side) or 1
            among = (find(items * width + partners, state * width + partner) >= 0) | ((partner < 0) & (column >= 0))
        else:
            among = column >= 0
        beside = (state != NO_STATE) & ~among
        if not self.moves_images:
            return column[:, None], beside
        return torch.stack([column, torch.where(column < 0, -1, column + len(items) // 2)], dim=1), beside

    def _log_densities(self, mixture: Mixture, items: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(C,) and (A,) log of how often proposals and states are proposed, over uniform proposals."""
        proposed, states = (mixture.log_density(ids_of(some, self.views)) for some in (items, state))
        if self.kernel == "isir" and mixture.is_uniform and (self.views or self.proposals != "batch"):
            proposed = proposed + log_copies(items)
        return proposed, states

    def _encoded(
        self, anchors: Anchors, items: Tensor, state: Tensor, rows: Tensor, encode: Encode
    ) -> tuple[Tensor, Tensor]:
        """(C, D) the proposals, and (A, S) similarities with what the states of some rows (n,) stand for."""
        wanted, num_each = state[rows], 1
        if self.moves_images:
            wanted, num_each = torch.stack([wanted, wanted + 1], dim=1).flatten(), 2
        if self.proposals == "batch":
            beside = similarities_beside(anchors, rows, embed(wanted, encode, anchors), num_each)
            return anchors.candidates[: anchors.num_in_batch], beside
        own, sizes = distributed.share(items)
        embeddings = embed(torch.cat([own, wanted]), encode, anchors)
        proposed = distributed.gather_with_grad(embeddings[: len(own)], sizes)
        return proposed, similarities_beside(anchors, rows, embeddings[len(own) :], num_each)

    def _compared(self, anchors: Anchors, items: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
        """(A, C) whether the proposals are negatives of the anchors, and (A, C) the similarities."""
        if self.proposals == "batch":
            own = slice(anchors.num_in_batch)
            return anchors.allowed[:, own], anchors.similarities[:, own]
        return anchors.is_negative(ids_of(items, self.views)), anchors.embeddings @ proposed.T

    def _kernel(self, anchors: Anchors, items: Tensor) -> Callable[[Step, Tensor], Move]:
        """The move of some rows (n,) of the global batch; all that is random is settled here, alike on all ranks."""
        if self.kernel == "isir":
            uniform = self.random.uniform(anchors.num_global, like=anchors.embeddings)
            return lambda step, rows: iterated_sir(step, uniform[rows])
        draws = RowDraws(self.random, anchors.num_global, len(items))
        order = self.random.permutation(len(items), device=items.device)
        like = anchors.embeddings.detach()
        return lambda step, rows: metropolis_hastings(step, draws.of(rows, like), order, self.burn_in)
