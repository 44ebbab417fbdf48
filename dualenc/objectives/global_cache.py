"""GlobalCache: negatives drawn by what is remembered of the whole corpus, weighed by what they are now.

Shapes: X directions, A anchors of this rank, G of all ranks, C candidates, R draws, D dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors, find, is_listed
from dualenc.objectives.base import Estimate
from dualenc.objectives.checks import check_choice, check_range
from dualenc.objectives.memory import Attention, MemoryObjective, sample
from dualenc.objectives.tables import first_occurrence

NUM_HARDEST = 8  # items that each anchor keeps, where a step looks at a part of the memory only


class Pool(NamedTuple):
    """The part of the memory that a step looks at."""

    slots: Tensor  # (n,) ascending
    log_weights: Tensor  # (n,) log of how many slots each stands for
    in_pool: Tensor  # (N,) whether a slot is one of them
    log_chance: float  # log π, of the chance of a slot to be in the random part


class CachePlan(NamedTuple):
    """The draws to encode, and what all anchors are compared with."""

    outside: Tensor  # (X, r) this rank's share of the draws that are not in the batch; -1 elsewhere
    sizes: list[int]  # shares of all ranks
    items: Tensor  # (X, C + R) the candidates of the batch, then the draws; -1 for a draw that is listed before
    remembered: Tensor  # (X, C + R, D) their remembered embeddings; 0 for none
    is_known: Tensor  # (X, C + R) whether there is one
    log_weights: Tensor  # (X, C + R) log of how often an item is here over its expectation; -inf for never
    seen_mean: Tensor  # (X, A, D) what each anchor sees of the memory
    log_partition: Tensor  # (X, A) log Z by the memory and, while that is incomplete, the batch; -inf without negatives


class GlobalCache(MemoryObjective):
    """The softmax over the batch and a few shared draws, each weighed by 1 / how often it was to be expected here.

    A step draws R items from q, the mean over the batch's anchors of their softmax over the remembered embeddings,
    encodes them anew, and compares all anchors with the batch and the draws:

        p(z|x) ∝ n_z·exp(s(x,z)/τ) / ( (B−1)/(M−1) + R·q(z)/c_z )

    with n_z how often z is among batch and draws, M pairs, and c_z how many of them z is in: multiple importance
    sampling by the balance heuristic (Veach and Guibas 1995, doi:10.1145/218380.218498). docs/objectives.md has its
    bias, the control variate and the pool.

    Args:
        extra_encodes: items drawn per pair of the batch, for both directions together: R = extra_encodes·B/2 of each
            side, at least 1, and with views R = extra_encodes·B views. 0 draws none.
        control: α in [0, 1], of the control variate by remembered embeddings; unused with partition="memory".
        partition: what weights are divided by: the sum over batch and draws ("sample"), or over the memory ("memory").
        pool: look at so many remembered items of each side per step, in random blocks of ids that are far apart, and at
            no more than as many that anchors keep; null: at all of them.
        **memory: see `MemoryObjective`.
    """

    hardest: Tensor

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
        check_range("extra_encodes", extra_encodes, "[0, inf)")
        check_range("control", control, "[0, 1]")
        check_choice("partition", partition, ("sample", "memory"))
        if pool is not None:
            check_range("pool", pool, "[1, inf)")
        # How often an item was to be expected in the batch is known for random batches only.
        self.needs_uniform_batches = "extra_encodes=0 (the batch alone)" if extra_encodes else None
        self.extra_encodes = extra_encodes
        self.control = control
        self.pool = pool
        self.partition = partition
        # The hardest items that each anchor met; with views an image has one row for both.
        has_pool = any(self._chance(direction) < 1 for direction in self.directions)
        num_rows = self.corpus.num_rows * self.num_views
        self.register_buffer("hardest", torch.full((num_rows, NUM_HARDEST * has_pool), PADDING))

    @property
    def reports_loss(self) -> bool:
        """An epoch fills the memory; with a pool, anchors have looked at N items 1/π epochs later."""
        for direction, memory in zip(self.directions, self.memories, strict=True):
            epochs = 1
            if self._chance(direction) < 1:
                epochs += math.ceil(memory.num_blocks / self._num_blocks(direction))
            if memory.num_seen <= memory.num_expected * epochs:
                return False
        return True

    @torch.no_grad()
    def plan(self, anchors: Anchors) -> CachePlan:
        queries = anchors.embeddings / anchors.temperature  # (X, A, D)
        all_queries = anchors.gather(queries)  # (X, G, D)
        hidden = anchors.gather_lists(anchors.hidden_items)  # (X, G, K)
        num_draws = 0
        if self.extra_encodes and anchors.num_batch:
            num_draws = max(round(self.extra_encodes * anchors.num_batch / 2), 1)  # R
        pools = []
        seen = []
        draws = []
        for x in range(len(anchors.directions)):
            pool = self._pool(anchors, x)
            attention = self._look(anchors, x, all_queries[x], hidden[x], pool)
            draws.append(sample(attention, num_draws, self.draws.uniform(1, like=queries)))
            pools.append(pool)
            seen.append(attention)
        log_sum = torch.stack([attention.log_sum for attention in seen])[:, anchors.batch_rows]  # (X, A)
        seen_mean = torch.stack([attention.mean for attention in seen])[:, anchors.batch_rows]  # (X, A, D)
        items, number = with_draws(anchors.candidate_items, torch.stack(draws), anchors.num_batch)

        memories = [self.memories[direction] for direction in anchors.directions]
        recalled = [memory.recall(items[x], queries) for x, memory in enumerate(memories)]
        remembered = torch.stack([embeddings for embeddings, _ in recalled])  # (X, C + R, D)
        is_known = torch.stack([is_known for _, is_known in recalled])  # (X, C + R)
        shares = mean_shares(queries, anchors.hidden_items, log_sum, items, remembered, pools)
        # (B − 1)/(M − 1) + R·q/c: shares are those of a copy, so divided by c already.
        others = max(anchors.num_batch // self.num_views - 1, 0)
        in_batch = [min(others / max(self.corpus.size(x) - 1, 1), 1.0) for x in anchors.directions]
        expected = queries.new_tensor(in_batch)[:, None] + num_draws * shares.where(is_known, 0.0)
        log_expected = expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
        # All ranks made the same draws; each encodes a part of them.
        own, sizes = distributed.share(items[:, anchors.candidates.shape[1] :].T)
        return CachePlan(
            outside=own.T,
            sizes=sizes,
            items=items,
            remembered=remembered,
            is_known=is_known,
            log_weights=number.to(queries).log() - log_expected,
            seen_mean=seen_mean,
            log_partition=self._log_partition(anchors, log_sum, hidden),
        )

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        own = outside.transpose(0, 1).contiguous()
        drawn = distributed.gather_with_grad(own, plan.sizes).transpose(0, 1)  # (X, R, D)
        candidates = torch.cat([anchors.candidates, drawn], dim=1)  # (X, C + R, D)
        if self.updates_state:
            self.remember(anchors, plan.items, candidates)
        self.record(log_mean_exp=plan.log_partition - self.corpus.log_num_negatives(anchors))

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
                    old_logits = old_scores + log_weights
                    old_p = softmax(old_logits.masked_fill(~plan.is_known[:, None], -torch.inf))
                    missed = self.control * (seen_mean - old_p @ plan.remembered)  # (X, a, D)
                pull = torch.full_like(positive, -1.0)[..., None]
                all_weights = torch.cat([p, missed, pull], dim=-1)
            # The anchor's own coordinates are scores too: what was missed is their gradient.
            coordinates = block.embeddings / block.temperature
            all_scores = torch.cat([scores, coordinates, positive[..., None]], dim=-1)
            return Estimate.apply(self.log_odds(log_partition, positive), all_scores, all_weights)

        against_all = anchors.with_candidates(candidates, plan.items // self.num_views)
        width = 4 * candidates.shape[1]
        return against_all.in_blocks(weigh, plan.seen_mean, plan.log_partition, width=width)

    def _look(
        self, anchors: Anchors, x: int, queries: Tensor, hidden: Tensor, pool: Pool | None
    ) -> Attention:
        """What the anchors of one direction, over τ (G, D), see of the memory without hidden items (G, K)."""
        direction = anchors.directions[x]
        memory = self.memories[direction]
        counts = self.corpus.item_counts(direction)
        if pool is None:
            return memory.attend(queries, hidden, counts)
        num_hardest = self.hardest.shape[1]
        seen = memory.attend(queries, hidden, counts, pool.slots, pool.log_weights, num_hardest)
        if self.updates_state:
            rows = self._hardest_rows(anchors)[x]
            self.hardest[rows] = seen.hardest[first_occurrence(rows)]
        return seen

    def _log_partition(self, anchors: Anchors, log_sum: Tensor, hidden: Tensor) -> Tensor:
        """(X, A) log Z: what is remembered, whose sum has the log (X, A), stands for the corpus; while items are
        missing, or where nothing is seen, together with the batch. `hidden` (X, G, K) see `MemoryObjective`."""
        # A pool of a share π of the memory has seen so much less.
        chances = [self._chance(direction) for direction in anchors.directions]
        chance = log_sum.new_tensor(chances)[:, None]
        number = chance * self.num_remembered(anchors, hidden)
        log_seen = log_sum + chance.log()

        is_complete = all(self.memories[direction].holds_corpus for direction in anchors.directions)
        with_batch = (log_sum == -torch.inf) | (not is_complete)
        # Without mined negatives, which are harder than most.
        batch = slice(anchors.num_batch)
        in_batch = anchors.with_candidates(anchors.candidates[:, batch], anchors.candidate_ids[:, batch])
        log_batch, num_batch = in_batch.in_blocks(
            lambda block: (block.logits.logsumexp(dim=-1), block.num_negatives)
        )
        number = number + num_batch * with_batch
        log_seen = torch.logaddexp(log_seen, log_batch.masked_fill(~with_batch, -torch.inf))
        log_mean = log_seen - number.clamp(min=torch.finfo(number.dtype).tiny).log()
        return log_mean + self.corpus.log_num_negatives(anchors)

    def _num_blocks(self, direction: int) -> int:
        """How many blocks of the memory a step looks at."""
        memory = self.memories[direction]
        if self.pool is None:
            return memory.num_blocks
        return min(math.ceil(self.pool / memory.block_size), memory.num_blocks)

    def _chance(self, direction: int) -> float:
        """π, the chance of a slot to be in the random part of the pool; 1 where a step looks at all."""
        return self._num_blocks(direction) / self.memories[direction].num_blocks

    def _hardest_rows(self, anchors: Anchors) -> Tensor:
        """(X, G) rows of all ranks' anchors in the table of their hardest items."""
        rows = anchors.gather(anchors.rows)
        if not self.views:
            return rows
        # All left views come first in the batch.
        is_right_view = torch.arange(anchors.num_batch, device=rows.device) >= anchors.num_batch // 2
        return 2 * rows + is_right_view

    def _pool(self, anchors: Anchors, x: int) -> Pool | None:
        """Random blocks, whose items stand for all others, and the hardest items of the anchors and their neighbours;
        None for the whole memory."""
        direction = anchors.directions[x]
        chance = self._chance(direction)
        if chance == 1:
            return None
        memory = self.memories[direction]
        own = self.hardest[self._hardest_rows(anchors)[x]]
        hardest = torch.cat([own.flatten(), self._hardest_of_neighbors(anchors, x).flatten()])
        # One more than there are slots, which padding, -1, is written to.
        is_hard = torch.zeros(memory.num_slots + 1, dtype=torch.bool, device=hardest.device)
        is_hard[hardest] = True
        in_pool = is_hard.clone()
        shuffled = self.draws.permutation(memory.num_blocks, torch.device("cpu"))
        blocks = shuffled[: self._num_blocks(direction)].to(hardest.device)
        in_pool[memory.scattered(blocks)] = True
        in_pool = in_pool[: memory.num_slots]
        slots = in_pool.nonzero()[:, 0]
        log_weights = torch.full(slots.shape, -math.log(chance), device=slots.device)
        log_weights[is_hard[slots]] = 0.0
        return Pool(slots, log_weights, in_pool, math.log(chance))

    def _hardest_of_neighbors(self, anchors: Anchors, x: int) -> Tensor:
        """(G, k, k) the hardest items of those anchors that are hardest for the anchors' positives; -1 for none."""
        # Rows of left items come first in the table, then those of right ones; views have one row each.
        own_start = 0
        other_start = 0
        if not self.views and anchors.directions[x] == 0:
            other_start = self.num_left or 0
        elif not self.views:
            own_start = self.num_left or 0
        # No more than the pool in all.
        width = min(NUM_HARDEST, math.isqrt((self.pool or 0) // max(anchors.num_batch, 1)))
        positives = anchors.gather(anchors.candidate_items.gather(1, anchors.positive_column))[x]
        near = self.hardest[other_start + positives][:, :width]
        hardest = self.hardest[own_start + near.clamp(min=0)][..., :width]
        return hardest.masked_fill(near[..., None] == PADDING, PADDING)


def softmax(logits: Tensor) -> Tensor:
    """(…, n) the softmax over the last dimension; 0 in rows of -inf, where it is 0/0."""
    return torch.softmax(logits, dim=-1).nan_to_num(0.0)


def shares_of_memory(logits: Tensor, log_partition: Tensor, seen_mean: Tensor) -> tuple[Tensor, Tensor]:
    """(X, a, n) shares of Z, which sum to at most 1, of weighed logits (X, a, n) by log Z (X, a); (X, a, D) what is
    missing to 1 times the mean of the memory (X, a, D)."""
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
    # All draws of an item count in its first column.
    _, column = find(items, drawn)
    number = torch.zeros_like(items)
    number[:, :num_batch] = 1
    number.scatter_add_(1, column, (drawn != PADDING).long())
    is_repeated = column != torch.arange(num_candidates, items.shape[1], device=column.device)
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
    """(X, n) q of items: the mean over the anchors of all ranks that see anything of their share of the softmax.

    An item outside the pool has its share, had it been sampled: e^s/(Z + e^s/π), with π the chance of the pool.

    Args:
        queries, hidden, log_sum: of each anchor of this rank, over τ, see `EmbeddingMemory.attend`.
        items, remembered: (X, n) and (X, n, D).
        pools: of each direction; None for the whole memory.
    """
    sees = log_sum.isfinite()
    log_shares = queries @ remembered.mT - log_sum.where(sees, torch.inf)[..., None]  # (X, A, n)
    for x, pool in enumerate(pools):
        if pool is not None:
            unseen = log_shares[x] - softplus(log_shares[x] - pool.log_chance)
            # Padding is masked out below.
            log_shares[x] = torch.where(pool.in_pool[items[x]], log_shares[x], unseen)
    shares = log_shares.exp().clamp(max=1.0).masked_fill(is_listed(items, hidden), 0.0)
    num_seeing = distributed.all_reduce(sees.sum(dim=1, keepdim=True))
    return distributed.all_reduce(shares.sum(dim=1)) / num_seeing.clamp(min=1)
