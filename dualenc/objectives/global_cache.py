"""GlobalCache: negatives drawn by what is remembered of the whole corpus, weighed by what they are
now.

Shapes: X directions, A anchors of this rank, G of all ranks, C candidates, R draws, D dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dualenc import distributed
from dualenc.objectives.anchors import BLOCK_ENTRIES, PADDING, Anchors, find, is_listed
from dualenc.objectives.base import Estimate
from dualenc.objectives.checks import check_count, check_range
from dualenc.objectives.memory import MemoryObjective, sample


class CachePlan(NamedTuple):
    """The draws to encode, and what all anchors are compared with."""

    outside: Tensor  # (X, r) this rank's share of the draws that are not in the batch; -1 elsewhere
    sizes: list[int]  # shares of all ranks
    items: Tensor  # (X, C + R) the candidates of the batch, then the draws; -1 for a draw that is listed before
    log_weights: (
        Tensor  # (X, C + R) log of how often an item is here over its expectation; -inf for never
    )
    seen_mean: Tensor  # (X, A, D) what each anchor sees of the memory
    log_partition: Tensor  # (X, A) log Z by the memory and, while that is incomplete, the batch; -inf without negatives


class GlobalCache(MemoryObjective):
    """The softmax over the batch and a few shared draws, each weighed by 1 / how often it was to be
    expected here.

    A step draws R items from q, the mean over the batch's anchors of their softmax over the
    remembered embeddings, encodes them anew, and compares all anchors with the batch and the draws:

        p(z|x) = n_z·exp(s(x,z)/τ) / ( Z(x)·( (B−1)/(M−1) + R·q(z)/c_z ) )

    with n_z how often z is among batch and draws, M pairs, c_z how many of them z is in, and Z(x)
    the sum of exp(s/τ) over the memory, or that over batch and draws where it is larger: multiple
    importance sampling by the balance heuristic (Veach and Guibas 1995, doi:10.1145/218380.218498).
    What p lacks of 1 goes to the anchor's mean of the memory. docs/objectives.md has its bias.

    Args:
        extra_encodes: items drawn per pair of the batch, for both directions together: R =
            extra_encodes·B/2 of each side, at least 1, and with views R = extra_encodes·B views. 0
            draws none.
        pool: look at no more than so many remembered items of each side per step, one at random of
            every N/pool that follow one another. Of fewer than all `reports_loss` is False.
        **memory: see `MemoryObjective`.
    """

    def __init__(self, *, extra_encodes: float = 1.0, pool: int = 2048, **memory: Any) -> None:
        super().__init__(**memory)
        check_range("extra_encodes", extra_encodes, "[0, inf)")
        check_count("pool", pool)
        # How often an item was to be expected in the batch is known for random batches only.
        self.remedy_for_other_batches = (
            "extra_encodes=0 (the batch alone)" if extra_encodes else None
        )
        self.extra_encodes = extra_encodes
        # Each item of the pool stands for so many.
        self.strides = [
            -(-self.corpus.num_items(direction) // pool) for direction in self.directions
        ]

    @property
    def reports_loss(self) -> bool:
        """Whether the cache holds the corpus and a step looks at all of it: the log of a part's sum
        is too low where few negatives weigh most, by several nats at small τ."""
        return super().reports_loss and all(stride == 1 for stride in self.strides)

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
        for x, direction in enumerate(anchors.directions):
            pool = self._pool(direction, queries)
            attention = self.memories[direction].attend(all_queries[x], hidden[x], pool)
            draws.append(sample(attention, num_draws, self.draws.uniform(1, like=queries)))
            pools.append(pool)
            seen.append(attention)
        strides = [self.strides[direction] for direction in anchors.directions]
        log_strides = anchors.per_direction(strides).log()  # (X, 1)
        log_seen = torch.stack([attention.log_sum for attention in seen])[
            :, anchors.batch_rows
        ]  # (X, A)
        seen_mean = torch.stack([attention.mean for attention in seen])[
            :, anchors.batch_rows
        ]  # (X, A, D)
        items, number = with_draws(anchors.candidate_items, torch.stack(draws), anchors.num_batch)

        memories = [self.memories[direction] for direction in anchors.directions]
        recalled = [memory.recall(items[x], queries) for x, memory in enumerate(memories)]
        remembered = torch.stack([embeddings for embeddings, _ in recalled])  # (X, C + R, D)
        is_known = torch.stack([is_known for _, is_known in recalled])  # (X, C + R)
        # A pool has one item of each stretch; for -1 it is the last, another item.
        in_pool = [pools[x][items[x] // stride] == items[x] for x, stride in enumerate(strides)]
        known = (queries, anchors.hidden_items, log_seen + log_strides, items, remembered)
        shares = mean_shares(*known, torch.stack(in_pool), log_strides)
        # (B − 1)/(M − 1) + R·q/c: shares are those of a copy, so divided by c already.
        others = max(anchors.num_batch // self.num_views - 1, 0)
        in_batch = [min(others / max(self.corpus.size(x) - 1, 1), 1.0) for x in anchors.directions]
        expected = anchors.per_direction(in_batch) + num_draws * shares.where(is_known, 0.0)
        log_expected = expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
        # All ranks made the same draws; each encodes a part of them.
        own, sizes = distributed.share(items[:, anchors.candidates.shape[1] :].T)
        return CachePlan(
            outside=own.T,
            sizes=sizes,
            items=items,
            log_weights=number.to(queries).log() - log_expected,
            seen_mean=seen_mean,
            log_partition=self._log_partition(anchors, log_seen, log_strides, hidden),
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
            with torch.no_grad():
                log_weights = plan.log_weights[:, None].masked_fill(block.not_negative, -torch.inf)
                logits = scores + log_weights
                # The softmax over the candidates where their sum is above that of the memory.
                log_sum = torch.maximum(log_partition, logits.logsumexp(dim=-1))  # (X, a)
                p = torch.exp(logits - log_sum[..., None]).nan_to_num(0.0)  # (X, a, C + R)
                missed = (1 - p.sum(dim=-1, keepdim=True)) * seen_mean  # (X, a, D)
                all_weights = torch.cat([p, missed], dim=-1)
            # The anchor's own coordinates are scores too: what was missed is their gradient.
            coordinates = block.embeddings / block.temperature
            all_scores = torch.cat([scores, coordinates], dim=-1)
            positive = block.positive_scores  # (X, a)
            return Estimate.apply(
                self.log_odds(log_partition, positive), all_scores, all_weights, positive
            )

        against_all = anchors.with_candidates(candidates, plan.items // self.num_views)
        width = 4 * candidates.shape[1]
        return against_all.in_blocks(weigh, plan.seen_mean, plan.log_partition, width=width)

    def _pool(self, direction: int, like: Tensor) -> Tensor:
        """(n,) ascending items to look at, one at random of each stretch; N for one beyond the
        corpus."""
        num_items = self.corpus.num_items(direction)
        stride = self.strides[direction]
        first = torch.arange(0, num_items, stride, device=like.device)
        items = first + self.draws.integers(stride, len(first), device=like.device)
        return items.clamp(max=num_items)

    def _log_partition(
        self, anchors: Anchors, log_seen: Tensor, log_strides: Tensor, hidden: Tensor
    ) -> Tensor:
        """(X, A) log Z: what is seen, whose sum has the log (X, A), stands for the corpus; while
        items are missing, or where nothing is seen, together with the batch. `hidden` (X, G, K) see
        `EmbeddingMemory.draw`."""
        numbers = [
            self.memories[direction].num_negatives(hidden[x])
            for x, direction in enumerate(anchors.directions)
        ]
        number = torch.stack(numbers)[:, anchors.batch_rows].to(log_seen) / log_strides.exp()
        is_complete = all(self.memories[direction].holds_corpus for direction in anchors.directions)
        with_batch = (log_seen == -torch.inf) | (not is_complete)
        # Without mined negatives, which are harder than most.
        batch = slice(anchors.num_batch)
        in_batch = anchors.with_candidates(
            anchors.candidates[:, batch], anchors.candidate_ids[:, batch]
        )
        log_batch, num_batch = in_batch.in_blocks(
            lambda block: (block.logits.logsumexp(dim=-1), block.num_negatives)
        )
        number = number + num_batch * with_batch
        log_seen = torch.logaddexp(log_seen, log_batch.masked_fill(~with_batch, -torch.inf))
        log_mean = log_seen - number.clamp(min=torch.finfo(number.dtype).tiny).log()
        return log_mean + self.corpus.log_num_negatives(anchors)


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
    in_pool: Tensor,
    log_strides: Tensor,
) -> Tensor:
    """(X, n) q of items: the mean over the anchors of all ranks that see anything of their share of
    the softmax.

    An item outside the pool has its share, had it been in it for those beside it: e^s/(Z +
    stride·e^s).

    Args:
        queries, hidden, log_sum: of each anchor of this rank, over τ, see `EmbeddingMemory.attend`.
        items, remembered, in_pool: (X, n), (X, n, D) and (X, n).
        log_strides: (X, 1) log of how many items each of the pool stands for.
    """
    sees = log_sum.isfinite()
    log_sum = log_sum.where(sees, torch.inf)[..., None]
    total = queries.new_zeros(items.shape)
    # Whole (X, A, n) matrices would grow with the square of the batch.
    size = max(1, BLOCK_ENTRIES // max(1, items.numel()))
    for start in range(0, queries.shape[1], size):
        block = slice(start, start + size)
        log_shares = queries[:, block] @ remembered.mT - log_sum[:, block]  # (X, a, n)
        outside = log_shares - softplus(log_shares + log_strides[..., None])
        shares = torch.where(in_pool[:, None], log_shares, outside).exp().clamp(max=1.0)
        total += shares.masked_fill(is_listed(items, hidden[:, block]), 0.0).sum(dim=1)
    num_seeing = distributed.all_reduce(sees.sum(dim=1, keepdim=True))
    return distributed.all_reduce(total) / num_seeing.clamp(min=1)
