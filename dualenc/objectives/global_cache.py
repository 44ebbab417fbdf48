"""GlobalCache: negatives drawn by what is remembered of the whole corpus, weighed by what they are now.

Shapes: X directions, A anchors of this rank, G of all ranks, C candidates, R draws, D dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors, is_listed
from dualenc.objectives.chains import find
from dualenc.objectives.checks import fail
from dualenc.objectives.memory import sample
from dualenc.objectives.memory_objective import MemoryObjective
from dualenc.objectives.surrogate import Estimate
from dualenc.objectives.tables import first_occurrence

NUM_KEPT = 8
"""Hardest items that each anchor keeps in mind, where a step looks at a part of the memory only."""


class Looked(NamedTuple):
    """What the anchors of one direction see in the memory, and what was drawn of it.

    Attributes:
        drawn: (R,) items, with repetitions.
        log_sum: (G,) log of the sum of exp(s/τ) over what is remembered; -inf for nothing.
        mean: (G, D) each anchor's mean of what it sees.
        pool: the part that was looked at; None for all.
    """

    drawn: Tensor
    log_sum: Tensor
    mean: Tensor
    pool: Pool | None


class Plan(NamedTuple):
    """The draws to encode, and what all anchors are compared with.

    Attributes:
        outside: (X, r) this rank's share of the draws that are not in the batch; -1 elsewhere.
        sizes: shares of all ranks.
        items: (X, C + R) the candidates of the batch, then the draws; -1 for a draw that is listed before.
        remembered: (X, C + R, D) their remembered embeddings; 0 for none.
        is_known: (X, C + R) whether there is one.
        log_weights: (X, C + R) log of how often an item is here over how often that was to be expected; -inf for never.
        seen_mean: (X, A, D) what each anchor sees of the memory.
        log_partition: (X, A) log Z by the memory and, while that is incomplete, the batch; -inf without negatives.
    """

    outside: Tensor
    sizes: list[int]
    items: Tensor
    remembered: Tensor
    is_known: Tensor
    log_weights: Tensor
    seen_mean: Tensor
    log_partition: Tensor


class Pool(NamedTuple):
    """The part of the memory that a step looks at.

    Attributes:
        slots: (n,) ascending.
        log_weights: (n,) log of how many slots each stands for.
        is_looked_at: (N,) whether a slot is one of them.
        log_chance: log π, of the chance of a slot to be looked at by chance.
    """

    slots: Tensor
    log_weights: Tensor
    is_looked_at: Tensor
    log_chance: float


class GlobalCache(MemoryObjective):
    """The softmax over the batch and a few shared draws, each weighed by 1 / how often it was to be expected here.

    The latest embedding of every item is remembered. A step draws R items from q, the mean over the batch's anchors of
    their softmax over the memory, encodes them anew, and compares all anchors with the batch and the draws:

        p(z|x) ∝ n_z·exp(s(x,z)/τ) / ( (B−1)/(M−1) + R·q(z)/c_z )

    with n_z how often z is among batch and draws, M pairs, and c_z how many of them z is in. The bracket is how often a
    copy of z was to be expected (multiple importance sampling by the balance heuristic, Veach and Guibas 1995): what is
    old or missing in the memory only makes q a worse guide. Normalising leaves a bias: small where anchors share their
    hard negatives, larger where every anchor has its own and R is below B. The sum is 1.03 to 1.12 times Σ_z
    c_z·exp(s/τ) in the mean at N = 6, B = 2 (τ from .07 to 1), and 1.01 times at N = 200, B = 16, since what is drawn
    depends on who is in the batch.

    The gradient into an anchor moves by α times what the same comparison, made with remembered embeddings, misses of
    all that is remembered: a control variate, 0 on average, against noise where parameters move slowly.

    With `partition="memory"` the weights are divided by Z, the sum over all that is remembered, in place of the sum
    over batch and draws. An anchor's weights then sum to 1 on average, not in every step: a larger sum is scaled to 1,
    and what is missing to 1 goes to the mean of what the anchor sees in the memory, which moves the anchor alone. So an
    anchor whose hard negatives were not drawn is not pushed away from others in their place: less noise, more bias.

    Embeddings of the batch, of mined negatives and of draws are remembered as they come; draws that the batch holds are
    not encoded again. Ranks share the memory, and the work.

    A step compares all anchors with all that is remembered, 4·B·N·D multiply-adds for both directions together. With
    `pool` below N it looks at a random part of the memory, whose items stand for 1/π items each, with π the chance to
    be in it; and at items that stand for themselves: the 8 hardest that each of its anchors has met so far, and those
    that anchors near the positive keep (a neighbour's hard negatives are hard). So the partition function is estimated
    without bias whatever is kept. With 1,000,000 clustered pairs and the default pool its log is off by -0.43, -0.02
    and -0.01 at the third, fifth and tenth visit of an anchor at τ = 0.02, and by at most 0.01 at τ = 0.07
    (`eval/estimator_bias.py --visits 20 --num_pairs 1000000`).

    While items are missing, in the first epoch, Z is estimated from what is remembered and the batch: the value is low
    by nats at small τ, so `reports_loss` is False, and with a pool for 1/π epochs more.

    Args:
        extra_encodes: items drawn per pair of the batch, for both directions together: R = extra_encodes·B/2 of each
            side, at least 1, and with views R = extra_encodes·B views. 0 draws none.
        control: α in [0, 1]; unused with partition="memory".
        partition: what weights are divided by: the sum over batch and draws ("sample"), or over the memory ("memory").
        pool: look at so many remembered items of each side per step, in random blocks of ids that are far apart, and at
            no more than as many that anchors keep; null: at all of them.
        **memory: see `MemoryObjective`.
    """

    kept: Tensor

    def __init__(
        self,
        *,
        extra_encodes: float = 1.0,
        control: float = 0.5,
        pool: int | None = 65_536,
        partition: Literal["sample", "memory"] = "sample",
        **memory: Any,
    ) -> None:
        super().__init__(**memory)
        if not 0 <= extra_encodes < math.inf:
            fail(self, "extra_encodes", f"is {extra_encodes}; it must be 0 or more items per pair, such as 1")
        if not 0 <= control <= 1:
            fail(self, "control", f"is {control}; it must lie in [0, 1]")
        if pool is not None and pool < 1:
            fail(self, "pool", f"is {pool}; it must be at least 1, a number of items, or null for all")
        self.extra_encodes = extra_encodes
        self.control = control
        self.pool = pool
        self.partition = partition
        # The hardest items that each anchor met; with views an image has one row for both.
        num_kept = NUM_KEPT if any(self._num_blocks(direction) is not None for direction in self.directions) else 0
        self.register_buffer("kept", torch.full((self.corpus.num_rows * self.num_views, num_kept), PADDING))

    @property
    def needs_uniform_batches(self) -> str | None:
        """How often an item was to be expected in the batch is known for random batches only."""
        return "extra_encodes=0 (the batch alone)" if self.extra_encodes else None

    @property
    def reports_loss(self) -> bool:
        """An epoch fills the memory; with a pool, anchors have looked at N items 1/π epochs later."""
        for direction in self.directions:
            memory = self.memory_of(direction)
            num_blocks = self._num_blocks(direction)
            epochs = 1
            if num_blocks is not None:
                epochs += math.ceil(memory.num_blocks / num_blocks)
            if memory.num_seen <= memory.num_expected * epochs:
                return False
        return True

    @torch.no_grad()
    def plan(self, anchors: Anchors) -> Plan:
        queries = anchors.all_embeddings / anchors.temperature  # (X, G, D)
        hidden = anchors.gather_lists(anchors.hidden_items)  # (X, G, K)
        looked = [self._look(anchors, x, queries[x], hidden[x]) for x in range(len(anchors.directions))]
        log_sum = torch.stack([found.log_sum for found in looked])  # (X, G)
        seen_mean = torch.stack([found.mean for found in looked])  # (X, G, D)
        drawn = torch.stack([found.drawn for found in looked])  # (X, R)
        items, number = with_draws(anchors.candidate_items, drawn, anchors.num_batch)

        memories = [self.memory_of(direction) for direction in anchors.directions]
        recalled = [memory.recall(items[x], queries) for x, memory in enumerate(memories)]
        remembered = torch.stack([embeddings for embeddings, _ in recalled])  # (X, C + R, D)
        is_known = torch.stack([is_known for _, is_known in recalled])  # (X, C + R)
        pools = [found.pool for found in looked]
        shares = mean_shares(queries, hidden, log_sum, items, remembered, pools)
        # (B − 1)/(M − 1) + R·q/c: shares are those of a copy, so divided by c already.
        in_batch = [self._expected_in_batch(anchors, direction) for direction in anchors.directions]
        expected = queries.new_tensor(in_batch)[:, None] + drawn.shape[1] * shares.where(is_known, 0.0)
        log_expected = expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
        # All ranks made the same draws; each encodes a part of them.
        own, sizes = distributed.share(items[:, anchors.candidates.shape[1] :].T)
        return Plan(
            outside=own.T,
            sizes=sizes,
            items=items,
            remembered=remembered,
            is_known=is_known,
            log_weights=number.to(queries).log() - log_expected,
            seen_mean=seen_mean[:, anchors.batch_rows],
            log_partition=self._log_partition(anchors, log_sum, hidden),
        )

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        own = outside.transpose(0, 1).contiguous()
        drawn = distributed.gather_with_grad(own, plan.sizes).transpose(0, 1)  # (X, R, D)
        candidates = torch.cat([anchors.candidates, drawn], dim=1)  # (X, C + R, D)
        if self.updates_state:
            self.remember(anchors, plan.items, candidates)
        self.watch(log_mean_exp=plan.log_partition - self.corpus.log_num_negatives(anchors))

        def weigh(block: Anchors, seen_mean: Tensor, log_partition: Tensor) -> Tensor:
            scores = block.scores  # (X, a, C + R)
            positive = block.positive_scores  # (X, a)
            with torch.no_grad():
                log_weights = plan.log_weights[:, None].masked_fill(block.not_negative, -torch.inf)
                if self.partition == "memory":
                    p, missed = shares_of_memory(scores + log_weights, log_partition, seen_mean)
                else:
                    p = softmax(scores + log_weights)  # (X, a, C + R)
                    # The same comparison with remembered embeddings, and what it misses of all that is remembered.
                    old_scores = block.embeddings @ plan.remembered.mT / block.temperature
                    old_p = softmax((old_scores + log_weights).masked_fill(~plan.is_known[:, None], -torch.inf))
                    missed = self.control * (seen_mean - old_p @ plan.remembered)  # (X, a, D)
                pull = torch.full_like(positive, -1.0)[..., None]
                all_weights = torch.cat([p, missed, pull], dim=-1)
            # The anchor's own coordinates are scores too: what was missed is their gradient.
            all_scores = torch.cat([scores, block.embeddings / block.temperature, positive[..., None]], dim=-1)
            return Estimate.apply(self.log_odds(log_partition, positive), all_scores, all_weights)

        against_all = anchors.with_candidates(candidates, plan.items // self.num_views)
        width = 4 * candidates.shape[1]
        losses: Tensor = against_all.by_blocks(weigh, plan.seen_mean, plan.log_partition, width=width)
        return losses

    def diagnostics(self) -> dict[str, Tensor]:
        """Those of `MemoryObjective`; and over how many items q is spread, 1/Σ q²: far fewer than R, and draws
        repeat."""
        effective = []
        for shares in self._watched.get("shares", []):
            square = distributed.all_reduce(shares.double().square().sum())
            effective.append(torch.where(square > 0, 1 / square, 0.0))
        mean = torch.stack(effective).mean() if effective else torch.zeros(())
        return super().diagnostics() | {"effective_items": mean}

    def _look(self, anchors: Anchors, x: int, queries: Tensor, hidden: Tensor) -> Looked:
        """Draw for one direction, whose anchors over τ (G, D) do not see hidden (G, K)."""
        direction = anchors.directions[x]
        memory = self.memory_of(direction)
        counts = self.corpus.item_counts(direction)
        num_blocks = self._num_blocks(direction)
        pool = None
        if num_blocks is None:
            seen = memory.attend(queries, hidden, counts)
        else:
            rows = self._rows_of_kept(anchors)[x]
            pool = self._pool(anchors, x, rows, num_blocks)
            seen = memory.attend(queries, hidden, counts, pool.slots, pool.log_weights, self.kept.shape[1])
            if self.updates_state:
                self.kept[rows] = seen.hardest[first_occurrence(rows)]
        self.watch(shares=seen.shares)
        drawn = sample(seen, self._num_draws(anchors), self.draws.uniform(1, like=queries))
        return Looked(drawn, seen.log_sum, seen.mean, pool)

    def _log_partition(self, anchors: Anchors, log_sum: Tensor, hidden: Tensor) -> Tensor:
        """(X, A) log Z: what is remembered stands for the corpus; while items are missing, or where nothing is seen,
        together with the batch.

        Args:
            log_sum: (X, G) log of the sum over what is remembered.
            hidden: (X, G, K) items that an anchor does not see.
        """
        log_sum = log_sum[:, anchors.batch_rows]
        # A pool of a share π of the memory has seen so much less.
        chances = [self._chance(direction) for direction in anchors.directions]
        chance = log_sum.new_tensor(chances)[:, None]
        number = chance * self.num_remembered(anchors, hidden)
        log_seen = log_sum + chance.log()

        is_complete = all(self.memory_of(direction).holds_corpus for direction in anchors.directions)
        with_batch = (log_sum == -torch.inf) | (not is_complete)
        # Without mined negatives, which are harder than most.
        batch = slice(anchors.num_batch)
        in_batch = anchors.with_candidates(anchors.candidates[:, batch], anchors.candidate_ids[:, batch])
        log_batch, num_batch = in_batch.by_blocks(lambda block: (block.logits.logsumexp(dim=-1), block.num_negatives))
        number = number + num_batch * with_batch
        log_seen = torch.logaddexp(log_seen, log_batch.masked_fill(~with_batch, -torch.inf))
        return (
            log_seen - number.clamp(min=torch.finfo(number.dtype).tiny).log() + self.corpus.log_num_negatives(anchors)
        )

    def _num_draws(self, anchors: Anchors) -> int:
        """R."""
        if not self.extra_encodes or not anchors.num_batch:
            return 0
        return max(round(self.extra_encodes * anchors.num_batch / 2), 1)

    def _expected_in_batch(self, anchors: Anchors, direction: int) -> float:
        """How often a pair that is not the anchor's was to be expected in the batch."""
        others_in_batch = max(anchors.num_batch // self.num_views - 1, 0)
        others = max(self.corpus.size(direction) - 1, 1)
        return min(others_in_batch / others, 1.0)

    def _num_blocks(self, direction: int) -> int | None:
        """How many blocks of the memory a step looks at; None for all."""
        if self.pool is None:
            return None
        memory = self.memory_of(direction)
        num_blocks = math.ceil(self.pool / memory.block_size)
        return num_blocks if num_blocks < memory.num_blocks else None

    def _chance(self, direction: int) -> float:
        """π, the chance of a slot to be in the random part of the pool."""
        num_blocks = self._num_blocks(direction)
        return 1.0 if num_blocks is None else num_blocks / self.memory_of(direction).num_blocks

    def _rows_of_kept(self, anchors: Anchors) -> Tensor:
        """(X, G) rows of all ranks' anchors in the table of kept items."""
        rows = anchors.gather(anchors.rows)
        if not self.views:
            return rows
        # All left views come first in the batch.
        is_right_view = torch.arange(anchors.num_batch, device=rows.device) >= anchors.num_batch // 2
        return 2 * rows + is_right_view

    def _pool(self, anchors: Anchors, x: int, rows: Tensor, num_blocks: int) -> Pool:
        """Random blocks, whose items stand for all that is not kept, and what anchors keep.

        Args:
            rows: (G,) rows of the anchors in the table of kept items.
            num_blocks: how many.
        """
        memory = self.memory_of(anchors.directions[x])
        kept = torch.cat([self.kept[rows].flatten(), self._kept_by_neighbors(anchors, x).flatten()])
        # One more than there are slots, which padding, -1, is written to.
        is_kept = torch.zeros(memory.num_slots + 1, dtype=torch.bool, device=rows.device)
        is_kept[kept] = True
        is_looked_at = is_kept.clone()
        shuffled = self.draws.permutation(memory.num_blocks, torch.device("cpu"))
        is_looked_at[memory.scattered(shuffled[:num_blocks].to(rows.device))] = True
        is_looked_at = is_looked_at[: memory.num_slots]
        slots = is_looked_at.nonzero()[:, 0]
        log_chance = math.log(self._chance(anchors.directions[x]))
        log_weights = torch.full(slots.shape, -log_chance, device=slots.device).masked_fill_(is_kept[slots], 0.0)
        return Pool(slots, log_weights, is_looked_at, log_chance)

    def _kept_by_neighbors(self, anchors: Anchors, x: int) -> Tensor:
        """(G, k, k) what those anchors keep that the anchors' positives keep; -1 for none."""
        # Rows of left items come first in the table, then those of right ones; views have one row each.
        own_start = 0
        other_start = 0
        if not self.views and anchors.directions[x] == 0:
            other_start = self.num_left or 0
        elif not self.views:
            own_start = self.num_left or 0
        # No more than the pool in all.
        width = min(NUM_KEPT, math.isqrt((self.pool or 0) // max(anchors.num_batch, 1)))
        positives = anchors.gather(anchors.candidate_items.gather(1, anchors.positive_column))[x]
        near = self.kept[other_start + positives][:, :width]
        kept = self.kept[own_start + near.clamp(min=0)][..., :width]
        return kept.masked_fill(near[..., None] == PADDING, PADDING)


def softmax(logits: Tensor) -> Tensor:
    """(…, n) the softmax over the last dimension; 0 in rows of -inf, where it is 0/0."""
    return torch.softmax(logits, dim=-1).nan_to_num(0.0)


def shares_of_memory(logits: Tensor, log_partition: Tensor, seen_mean: Tensor) -> tuple[Tensor, Tensor]:
    """Weights by the remembered partition function.

    Args:
        logits: (X, a, n) s/τ plus the log of how often a candidate is here over how often that was to be expected.
        log_partition: (X, a) log Z; -inf without negatives.
        seen_mean: (X, a, D) what each anchor sees of the memory.

    Returns:
        (X, a, n) shares of Z, which sum to at most 1; (X, a, D) the mean of the memory times what is missing to 1.
    """
    # The softmax over the candidates where their sum is above Z.
    log_sum = torch.maximum(log_partition, logits.logsumexp(dim=-1))[..., None]
    shares = torch.exp(logits - log_sum).nan_to_num(0.0)
    return shares, (1 - shares.sum(dim=-1, keepdim=True)) * seen_mean


def with_draws(batch_items: Tensor, drawn: Tensor, num_batch: int) -> tuple[Tensor, Tensor]:
    """(X, C + R) items of batch (X, C) and draws (X, R), repeated ones -1; (X, C + R) n_z of each.

    Mined negatives, the candidates from `num_batch` on, count nothing of their own.
    """
    num_candidates = batch_items.shape[1]
    items = torch.cat([batch_items, drawn], dim=1)
    # All draws of an item count in its first place.
    place = find(items, drawn)[1]
    number = torch.zeros_like(items)
    number[:, :num_batch] = 1
    number.scatter_add_(1, place, (drawn != PADDING).long())
    is_repeated = place != torch.arange(num_candidates, items.shape[1], device=place.device)
    items[:, num_candidates:].masked_fill_(is_repeated, PADDING)
    return items, number


def mean_shares(
    queries: Tensor,
    hidden: Tensor,
    log_sum: Tensor,
    items: Tensor,
    remembered: Tensor,
    pools: Sequence[Pool | None],
) -> Tensor:
    """(X, n) q of items: the mean over anchors that see anything of their share of the softmax.

    An item that was not looked at has the share that it would have had: of e^s/(Z + e^s/π), with π the chance of the
    pool to hold it.

    Args:
        queries: (X, G, D) anchors over τ.
        hidden: (X, G, K) ascending items that an anchor does not see, padded with -1.
        log_sum: (X, G) log Z of each anchor, -inf for nothing.
        items, remembered: (X, n) and (X, n, D).
        pools: of each direction, what was looked at; None for all.
    """
    sees = log_sum.isfinite()
    log_shares = queries @ remembered.mT - log_sum.where(sees, torch.inf)[..., None]  # (X, G, n)
    for x, pool in enumerate(pools):
        if pool is not None:
            unseen = log_shares[x] - torch.nn.functional.softplus(log_shares[x] - pool.log_chance)
            # Whatever is said of padding: it is in no share.
            log_shares[x] = torch.where(pool.is_looked_at[items[x]], log_shares[x], unseen)
    shares = log_shares.exp().clamp(max=1.0).masked_fill(is_listed(items, hidden), 0.0)
    return shares.sum(dim=1) / sees.sum(dim=1, keepdim=True).clamp(min=1)
