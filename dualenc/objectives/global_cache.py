"""GlobalCache: negatives drawn by what is remembered of the whole corpus, weighed by what they are now.

Shapes: X directions, A anchors of this rank, G of all ranks, C candidates, R draws, D dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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


class Compared(NamedTuple):
    """What the memory says of batch and draws; of one direction without X, and with all G anchors for A.

    Attributes:
        items: (X, C + R) the candidates of the batch, then the draws; -1 for a draw that is listed before.
        remembered: (X, C + R, D) their remembered embeddings; 0 for none.
        is_known: (X, C + R) whether there is one.
        log_weights: (X, C + R) log of how often an item is here over how often that was to be expected; -inf for never.
        seen_mean: (X, A, D) what each anchor sees of the memory.
        log_partition: (X, A) log Z.
    """

    items: Tensor
    remembered: Tensor
    is_known: Tensor
    log_weights: Tensor
    seen_mean: Tensor
    log_partition: Tensor


class Plan(NamedTuple):
    """The draws to encode, and what all anchors are compared with.

    Attributes:
        outside: (X, r) this rank's share of the draws that are not in the batch; -1 elsewhere.
        sizes: shares of all ranks.
        compared: of all directions, and of this rank's anchors.
    """

    outside: Tensor
    sizes: list[int]
    compared: Compared


class Pool(NamedTuple):
    """The part of the memory that a step looks at.

    Attributes:
        slots: (n,) ascending.
        log_weights: (n,) log of how many slots each stands for.
        log_chance: log π, of the chance of a slot to be looked at by chance.
    """

    slots: Tensor
    log_weights: Tensor
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

    Embeddings of the batch, of mined negatives and of draws are remembered as they come; draws that the batch holds are
    not encoded again. Ranks share the memory, and the work.

    A step compares all anchors with all that is remembered, 4·B·N·D multiply-adds for both directions together. With
    `pool` below N it looks at a random part of the memory, whose items stand for 1/π items each, with π the chance to
    be in it; and at items that stand for themselves: the 8 hardest that each of its anchors has met so far, and those
    that anchors near the positive keep (a neighbour's hard negatives are hard). So the partition function is estimated
    without bias whatever is kept. With 1,000,000 clustered pairs and the default pool its log is off by -0.43, -0.02
    and -0.01 at the third, fifth and tenth visit of an anchor at τ = 0.02, and by at most 0.01 at τ = 0.07
    (`eval/estimator_bias.py --visits 20 --num_pairs 1000000`).

    `reports_loss` is False in the first epoch, while items are missing, and with a pool for 1/π epochs more.

    Args:
        extra_encodes: items drawn per pair of the batch, for both directions together: R = extra_encodes·B/2 of each
            side, at least 1, and with views R = extra_encodes·B views. 0 draws none.
        control: α in [0, 1].
        pool: look at so many remembered items of each side per step, in random blocks, and at no more than as many
            that anchors keep; null: at all of them.
        **memory: see `MemoryObjective`.
    """

    kept: Tensor

    def __init__(
        self, *, extra_encodes: float = 1.0, control: float = 0.5, pool: int | None = 65_536, **memory: Any
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
        hidden = anchors.gather_lists(anchors.hidden_items)
        by_direction = [self._compare(anchors, x, hidden[x]) for x in range(len(anchors.directions))]
        stacked = Compared(*(torch.stack(values) for values in zip(*by_direction, strict=True)))
        compared = stacked._replace(
            seen_mean=stacked.seen_mean[:, anchors.batch_rows],
            log_partition=stacked.log_partition[:, anchors.batch_rows],
        )
        # All ranks made the same draws; each encodes a part of them.
        draws = compared.items[:, anchors.candidates.shape[1] :]
        own, sizes = distributed.share(draws.T)
        return Plan(own.T, sizes, compared)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        compared: Compared = plan.compared
        own = outside.transpose(0, 1).contiguous()
        drawn = distributed.gather_with_grad(own, plan.sizes).transpose(0, 1)  # (X, R, D)
        if self.updates_state:
            self.remember_batch(anchors)
            for x, direction in enumerate(anchors.directions):
                items = compared.items[x, anchors.candidates.shape[1] :]
                is_drawn = items != PADDING
                self.memory_of(direction).write(items[is_drawn], drawn[x][is_drawn])
        self.watch(log_mean_exp=compared.log_partition - self.corpus.log_num_negatives(anchors))

        def weigh(block: Anchors, seen_mean: Tensor, log_partition: Tensor) -> Tensor:
            scores = block.scores  # (X, a, C + R)
            positive = block.positive_scores  # (X, a)
            with torch.no_grad():
                log_weights = compared.log_weights[:, None].masked_fill(block.not_negative, -torch.inf)
                p = torch.softmax(scores + log_weights, dim=-1).nan_to_num(0.0)  # (X, a, C + R)
                # The same comparison with remembered embeddings, and what it misses of all that is remembered.
                old_scores = block.embeddings @ compared.remembered.mT / block.temperature
                old_logits = (old_scores + log_weights).masked_fill(~compared.is_known[:, None], -torch.inf)
                old_p = torch.softmax(old_logits, dim=-1).nan_to_num(0.0)
                missed = seen_mean - old_p @ compared.remembered  # (X, a, D)
                pull = torch.full_like(positive, -1.0)[..., None]
                all_weights = torch.cat([p, self.control * missed, pull], dim=-1)
            # The anchor's own coordinates are scores too: what was missed is their gradient.
            all_scores = torch.cat([scores, block.embeddings / block.temperature, positive[..., None]], dim=-1)
            value = log_partition.nan_to_num(neginf=0.0) - positive
            return Estimate.apply(value.detach(), all_scores, all_weights)

        candidates = torch.cat([anchors.candidates, drawn], dim=1)
        against_all = anchors.with_candidates(candidates, compared.items // self.num_views)
        width = 4 * candidates.shape[1]
        return against_all.by_blocks(weigh, compared.seen_mean, compared.log_partition, width=width)

    def diagnostics(self) -> dict[str, Tensor]:
        """Those of `MemoryObjective`; and over how many items q is spread, 1/Σ q²: far fewer than R, and draws
        repeat."""
        effective = []
        for shares in self._watched.get("shares", []):
            square = distributed.all_reduce(shares.double().square().sum())
            effective.append(torch.where(square > 0, 1 / square, 0.0))
        mean = torch.stack(effective).mean() if effective else torch.zeros(())
        return super().diagnostics() | {"effective_items": mean}

    def _compare(self, anchors: Anchors, x: int, hidden: Tensor) -> Compared:
        """Draw for one direction, whose anchors do not see hidden (G, K), and weigh batch and draws."""
        direction = anchors.directions[x]
        memory = self.memory_of(direction)
        counts = self.corpus.item_counts(direction)
        queries = anchors.all_embeddings[x] / anchors.temperature  # (G, D)
        rows = self._rows_of_kept(anchors)[x]
        pool = self._pool(anchors, x, rows)
        if pool is None:
            seen = memory.attend(queries, hidden, counts)
        else:
            seen = memory.attend(queries, hidden, counts, pool.slots, pool.log_weights, self.kept.shape[1])
            if self.updates_state:
                self.kept[rows] = seen.hardest[first_occurrence(rows)]
        self.watch(shares=seen.shares)
        num_draws = self._num_draws(anchors)
        drawn = sample(seen, num_draws, self.draws.uniform(1, like=queries))
        items, number = _with_draws(anchors.candidate_items[x], drawn, anchors.num_batch)

        remembered, is_known = memory.recall(items, queries)
        looked_at = is_known
        log_pool = 0.0
        if pool is not None:
            looked_at = is_known & torch.isin(items, pool.slots)
            log_pool = pool.log_chance
        shares = mean_shares(queries, hidden, seen.log_sum, items, remembered, looked_at, log_pool)
        # (B − 1)/(M − 1) + R·q/c: shares are those of a copy, so divided by c already.
        expected = self._expected_in_batch(anchors, direction) + num_draws * shares.where(is_known, 0.0)
        log_expected = expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
        log_partition = seen.log_sum + self.log_missing(direction).to(queries)
        log_weights = number.to(queries).log() - log_expected
        return Compared(items, remembered, is_known, log_weights, seen.mean, log_partition)

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

    def _rows_of_kept(self, anchors: Anchors) -> Tensor:
        """(X, G) rows of all ranks' anchors in the table of kept items."""
        rows = anchors.gather(anchors.rows)
        if not self.views:
            return rows
        # All left views come first in the batch.
        is_right_view = torch.arange(anchors.num_batch, device=rows.device) >= anchors.num_batch // 2
        return 2 * rows + is_right_view

    def _pool(self, anchors: Anchors, x: int, rows: Tensor) -> Pool | None:
        """Random blocks, whose items stand for all that is not kept, and what anchors keep; None to look at all.

        Args:
            rows: (G,) rows of the anchors in the table of kept items.
        """
        direction = anchors.directions[x]
        num_blocks = self._num_blocks(direction)
        if num_blocks is None:
            return None
        memory = self.memory_of(direction)
        shuffled = self.draws.permutation(memory.num_blocks, torch.device("cpu"))
        starts = shuffled[:num_blocks].sort().values * memory.block_size
        random_slots = (starts[:, None] + torch.arange(memory.block_size)).flatten()
        # The last block may go beyond the last slot.
        random_slots = random_slots[random_slots < memory.num_slots].to(rows.device)
        kept = torch.cat([self.kept[rows].flatten(), self._kept_by_neighbors(anchors, x).flatten()]).unique()
        slots = torch.cat([random_slots, kept[kept != PADDING]]).unique()
        log_weights = torch.zeros(len(slots), device=slots.device)
        log_chance = math.log(num_blocks / memory.num_blocks)
        log_weights.masked_fill_(~torch.isin(slots, kept), -log_chance)
        return Pool(slots, log_weights, log_chance)

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


def _with_draws(batch_items: Tensor, drawn: Tensor, num_batch: int) -> tuple[Tensor, Tensor]:
    """(C + R,) items of batch (C,) and draws (R,), repeated ones -1; (C + R,) n_z of each.

    Mined negatives, the candidates from `num_batch` on, count nothing of their own.
    """
    items = torch.cat([batch_items, drawn])
    # All draws of an item count in its first place.
    place = find(items[None], drawn[None])[1][0]
    number = torch.zeros_like(items)
    number[:num_batch] = 1
    number.index_add_(0, place, (drawn != PADDING).long())
    is_repeated = place != torch.arange(len(batch_items), len(items), device=place.device)
    items[len(batch_items) :] = drawn.masked_fill(is_repeated, PADDING)
    return items, number


def mean_shares(
    queries: Tensor,
    hidden: Tensor,
    log_sum: Tensor,
    items: Tensor,
    remembered: Tensor,
    looked_at: Tensor,
    log_pool: float,
) -> Tensor:
    """(n,) q of items: the mean over anchors that see anything of their share of the softmax.

    An item that was not looked at has the share that it would have had: of e^s/(Z + e^s/π), with π the chance of the
    pool to hold it.

    Args:
        queries: (G, D) anchors over τ.
        hidden: (G, K) ascending items that an anchor does not see, padded with -1.
        log_sum: (G,) log Z of each anchor, -inf for nothing.
        items, remembered: (n,) and (n, D).
        looked_at: (n,) whether an item was looked at.
        log_pool: log π.
    """
    sees = log_sum.isfinite()
    log_shares = queries @ remembered.T - log_sum.where(sees, torch.inf)[:, None]
    if log_pool:
        unseen = log_shares - torch.nn.functional.softplus(log_shares - log_pool)
        log_shares = torch.where(looked_at, log_shares, unseen)
    shares = log_shares.exp().clamp(max=1.0).masked_fill(is_listed(items, hidden), 0.0)
    return shares.sum(dim=0) / sees.sum().clamp(min=1)
