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


class Plan(NamedTuple):
    """The draws, and what the memory says of batch and draws (C + R).

    Attributes:
        outside: (X, r) this rank's share of the draws that are not in the batch; -1 elsewhere.
        sizes: shares of all ranks.
        items: (X, C + R) the candidates of the batch, then the draws; -1 for a draw that is listed before.
        remembered: (X, C + R, D) their remembered embeddings; 0 for none.
        is_known: (X, C + R) whether there is one.
        log_weights: (X, C + R) log of how often an item is here over how often that was to be expected; -inf for never.
        seen_mean: (X, A, D) what each anchor sees of the memory.
        log_partition: (X, A) log Z.
    """

    outside: Tensor
    sizes: list[int]
    items: Tensor
    remembered: Tensor
    is_known: Tensor
    log_weights: Tensor
    seen_mean: Tensor
    log_partition: Tensor


class GlobalCache(MemoryObjective):
    """The softmax over the batch and a few shared draws, each weighed by 1 / how often it was to be expected here.

    The latest embedding of every item is remembered. A step draws R items from q, the mean over the batch's anchors of
    their softmax over the memory, encodes them anew, and compares all anchors with the batch and the draws:

        p(z|x) ∝ n_z·exp(s(x,z)/τ) / ( (B−1)/(M−1) + R·q(z)/c_z )

    with n_z how often z is among batch and draws, M pairs, and c_z how many of them z is in. The bracket is how often a
    copy of z was to be expected (multiple importance sampling by the balance heuristic, Veach and Guibas 1995): what is
    remembered decides who is looked at, and what is old or missing only makes q a worse guide. Normalising leaves a
    bias: small where anchors share their hard negatives, and larger where every anchor has its own and R is below B.
    The sum has not quite the mean Σ_z c_z·exp(s/τ), since what is drawn depends on who is in the batch: enumerated over
    all batches and draws it is 1.03 to 1.12 times that at N = 6, B = 2 (τ from .07 to 1), and 1.01 times at N = 200, B
    = 16.

    The gradient into an anchor moves by α times what the same comparison, made with remembered embeddings, misses of
    all that is remembered. That is 0 on average, and takes away noise where parameters move slowly: a control variate.

    Embeddings of the batch, of mined negatives and of draws are remembered as they come, at no cost; draws that the
    batch holds already are not encoded again. Ranks share the memory, and the work.

    A step compares all anchors with all that is remembered, 4·B·N·D multiply-adds for both directions together. With
    `pool` below N it looks at a random part of the memory, whose items stand for 1/π items each, with π the chance to
    be in it; and at items that stand for themselves: the 8 hardest that each of its anchors has met so far, and those
    that other anchors near the positive keep (a neighbour's hard negatives are hard, so lists fill far sooner than from
    the pool alone). So the partition function is estimated without bias whatever is kept, and with little variance once
    the kept items weigh most. With 1,000,000 clustered pairs and the default pool its log is off by -0.43, -0.02 and
    -0.01 at the third, fifth and tenth visit of an anchor at τ = 0.02, and by at most 0.01 at τ = 0.07
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
        memories = [(self.memory_of(direction), self._num_blocks(direction)) for direction in self.directions]
        return all(
            memory.num_seen > memory.num_expected * (1 if wanted is None else 1 + -(-memory.num_blocks // wanted))
            for memory, wanted in memories
        )

    @torch.no_grad()
    def plan(self, anchors: Anchors) -> Plan:
        hidden = anchors.gather_lists(anchors.hidden_items)
        plans = [self._plan_direction(anchors, x, hidden[x]) for x in range(len(anchors.directions))]
        items, remembered, is_known, log_weights, mean, log_sum = (
            torch.stack(values) for values in zip(*plans, strict=True)
        )
        num_candidates = anchors.candidates.shape[1]
        own, sizes = distributed.share(items[:, num_candidates:].T)
        return Plan(
            outside=own.T,
            sizes=sizes,
            items=items,
            remembered=remembered,
            is_known=is_known,
            log_weights=log_weights,
            seen_mean=mean[:, anchors.batch_rows],
            log_partition=log_sum[:, anchors.batch_rows],
        )

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        own = outside.transpose(0, 1).contiguous()
        drawn = distributed.gather_with_grad(own, plan.sizes).transpose(0, 1)
        compared = anchors.with_candidates(
            torch.cat([anchors.candidates, drawn], dim=1), plan.items // 2 if self.views else plan.items
        )
        if self.updates_state:
            self.remember_batch(anchors)
            for x, direction in enumerate(anchors.directions):
                is_drawn = plan.items[x, -drawn.shape[1] :] != PADDING if drawn.shape[1] else slice(0)
                items = plan.items[x, anchors.candidates.shape[1] :]
                self.memory_of(direction).write(items[is_drawn], drawn[x][is_drawn])
        self.watch(log_mean_exp=plan.log_partition - self.corpus.log_num_negatives(anchors))

        def weigh(block: Anchors, seen_mean: Tensor, log_partition: Tensor) -> Tensor:
            scores, positive = block.scores, block.positive_scores
            with torch.no_grad():
                log_weights = plan.log_weights[:, None].masked_fill(block.not_negative, -torch.inf)
                weights = torch.softmax(scores + log_weights, dim=-1).nan_to_num(0.0)
                # The same comparison with remembered embeddings, and what it misses of all that is remembered.
                old_scores = block.embeddings @ plan.remembered.mT / block.temperature
                old_logits = (old_scores + log_weights).masked_fill(~plan.is_known[:, None], -torch.inf)
                missed = seen_mean - torch.softmax(old_logits, dim=-1).nan_to_num(0.0) @ plan.remembered
                all_weights = torch.cat(
                    [weights, self.control * missed, torch.full_like(missed[..., :1], -1.0)], dim=-1
                )
            all_scores = torch.cat([scores, block.embeddings / block.temperature, positive[..., None]], dim=-1)
            value = log_partition.nan_to_num(neginf=0.0) - positive
            return Estimate.apply(value.detach(), all_scores, all_weights)

        width = 4 * compared.candidates.shape[1]
        return compared.by_blocks(weigh, plan.seen_mean, plan.log_partition, width=width)

    def diagnostics(self) -> dict[str, Tensor]:
        """Those of `MemoryObjective`; and over how many items q is spread, 1/Σ q²: far fewer than R, and draws
        repeat."""
        squares = [distributed.all_reduce(shares.double().square().sum()) for shares in self._watched.get("shares", [])]
        spread = [torch.where(square > 0, 1 / square, 0.0) for square in squares]
        effective = torch.stack(spread).mean() if spread else torch.zeros(())
        return super().diagnostics() | {"effective_items": effective}

    def _plan_direction(self, anchors: Anchors, x: int, hidden: Tensor) -> tuple[Tensor, ...]:
        """Items, remembered, is_known, log_weights of `Plan` for one direction; (G, D) means and (G,) log Z."""
        direction = anchors.directions[x]
        memory, counts = self.memory_of(direction), self.corpus.item_counts(direction)
        queries = anchors.all_embeddings[x] / anchors.temperature
        rows = self._rows_of_kept(anchors)[x]
        slots, log_weights = self._look_at(anchors, x, rows)
        num_kept = self.kept.shape[1] if slots is not None else 0
        seen = memory.attend(queries, hidden, counts, slots, log_weights, num_kept)
        if num_kept and self.updates_state:
            self.kept[rows] = seen.hardest[first_occurrence(rows)]
        num_draws = self._num_draws(anchors)
        drawn = sample(seen, num_draws, self.draws.uniform(1, like=queries))

        # n_z: one for each place in the batch, none for mined negatives; all draws of an item count in its first place.
        batch_items = anchors.candidate_items[x]
        items = torch.cat([batch_items, drawn])
        place = find(items[None], drawn[None])[1][0]
        is_repeated = place != torch.arange(len(batch_items), len(items), device=place.device)
        number = torch.zeros(len(items), dtype=queries.dtype, device=place.device)
        number[: anchors.num_batch] = 1
        number.index_add_(0, place, (drawn != PADDING).to(number))
        items[len(batch_items) :] = drawn.masked_fill(is_repeated, PADDING)

        remembered, is_known = memory.recall(items, queries)
        log_pool = 0.0 if log_weights is None else -float(log_weights.max())
        looked_at = is_known if slots is None else is_known & torch.isin(items, slots)
        shares = mean_shares(queries, hidden, seen.log_sum, items, remembered, looked_at, log_pool)
        expected = self._expected_in_batch(anchors, direction) + num_draws * shares.where(is_known, 0.0)
        log_weights = number.log() - expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
        self.watch(shares=seen.shares)
        return (
            items,
            remembered,
            is_known,
            log_weights,
            seen.mean,
            seen.log_sum + self.log_missing(direction).to(queries),
        )

    def _num_draws(self, anchors: Anchors) -> int:
        """R."""
        wanted = round(self.extra_encodes * anchors.num_batch / 2)
        return max(wanted, 1) if self.extra_encodes and anchors.num_batch else wanted

    def _expected_in_batch(self, anchors: Anchors, direction: int) -> float:
        """How often a pair that is not the anchor's was to be expected in the batch."""
        num_pairs = anchors.num_batch // self.num_views
        return min(max(num_pairs - 1, 0) / max(self.corpus.size(direction) - 1, 1), 1.0)

    def _num_blocks(self, direction: int) -> int | None:
        """How many blocks of the memory a step looks at; None for all."""
        memory = self.memory_of(direction)
        if self.pool is None or self.pool >= memory.num_slots:
            return None
        wanted = -(-self.pool // memory.block_size)
        return None if wanted >= memory.num_blocks else wanted

    def _rows_of_kept(self, anchors: Anchors) -> Tensor:
        """(X, G) rows of all ranks' anchors in the table of kept items."""
        rows = anchors.gather(anchors.rows)
        if not self.views:
            return rows
        return 2 * rows + (torch.arange(anchors.num_batch, device=rows.device) >= anchors.num_batch // 2)

    def _look_at(self, anchors: Anchors, x: int, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(n,) ascending slots to look at, None for all; (n,) log of how many slots each stands for.

        A random pool, whose items stand for all that is not kept, and what anchors keep.

        Args:
            rows: (G,) rows of the anchors in the table of kept items.
        """
        direction = anchors.directions[x]
        num_blocks = self._num_blocks(direction)
        if num_blocks is None:
            return None, None
        memory = self.memory_of(direction)
        blocks = self.draws.permutation(memory.num_blocks, torch.device("cpu"))[:num_blocks].sort().values
        pool = (blocks[:, None] * memory.block_size + torch.arange(memory.block_size)).flatten()
        kept = torch.cat([self.kept[rows].flatten(), self._kept_by_neighbors(anchors, x).flatten()]).unique()
        slots = torch.cat([pool[pool < memory.num_slots].to(kept.device), kept[kept != PADDING]]).unique()
        log_weights = torch.zeros(len(slots), device=slots.device)
        log_weights.masked_fill_(~torch.isin(slots, kept), math.log(memory.num_blocks / num_blocks))
        return slots, log_weights

    def _kept_by_neighbors(self, anchors: Anchors, x: int) -> Tensor:
        """(G, k, k) what those anchors keep that the anchors' positives keep; -1 for none."""
        own_start, other_start = 0, 0
        if not self.views:
            starts = (0, self.num_left or 0)
            own_start = starts[anchors.directions[x]]
            other_start = sum(starts) - own_start
        # No more than the pool in all.
        width = min(NUM_KEPT, math.isqrt((self.pool or 0) // max(anchors.num_batch, 1)))
        positives = anchors.gather(anchors.candidate_items.gather(1, anchors.positive_column))[x]
        near = self.kept[other_start + positives][:, :width]
        kept = self.kept[own_start + near.clamp(min=0)][..., :width]
        return kept.masked_fill(near[..., None] == PADDING, PADDING)


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
