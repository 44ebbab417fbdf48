"""GlobalCache: negatives drawn from a memory bank of the corpus and reweighted after re-encoding.

Shapes: X directions, A anchors of this rank, G of all ranks, C candidates, R draws, D dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dualenc import distributed
from dualenc.objectives.anchors import BLOCK_ENTRIES, PADDING, Anchors, find, is_listed
from dualenc.objectives.base import CommonArguments, Estimate
from dualenc.objectives.checks import check_count, check_range
from dualenc.objectives.memory import MemoryObjective, sample


class CachePlan(NamedTuple):
    """The draws to encode, and the items that all anchors are compared with."""

    outside: Tensor  # (X, r) this rank's share of the draws that are not in the batch; -1 elsewhere
    sizes: list[int]  # shares of all ranks
    # (X, C + R) candidates of the batch, then the draws; -1 for a draw that occurs before
    items: Tensor
    # (X, C + R) log(n_z / expected n_z); -inf if an item does not count
    log_weights: Tensor
    seen_mean: Tensor  # (X, A, D) each anchor's softmax mean of the memory
    # (X, A) log Z from the memory and, while that is incomplete, the batch; -inf without negatives
    log_partition: Tensor


class GlobalCache(MemoryObjective):
    """The softmax over the batch and a few shared draws, each divided by its expected count.

    A step draws R items from q, the mean over the batch's anchors of their softmax over the
    remembered embeddings. It re-encodes them and compares all anchors with the batch and the draws:

        p(z|x) = n_z·exp(s(x,z)/τ) / ( Z(x)·( (B−1)/(M−1) + R·q(z)/c_z ) )

    Here n_z is the number of times z occurs among batch and draws, M the number of pairs, c_z the
    number of pairs that contain z, and Z(x) the sum of exp(s/τ) over the memory, or over batch and
    draws where that is larger. This is multiple importance sampling with the balance heuristic
    (Veach and Guibas 1995, doi:10.1145/218380.218498). The weight that p lacks to 1 goes to the
    anchor's mean of the memory. docs/objectives.md describes the bias.

        criterion = GlobalCache(num_left=m, num_right=n, temperature=0.05)
        criterion(left, right, left_id, right_id, encode=encode).loss.backward()

    Args:
        extra_encodes: number of items drawn per pair of the batch, both directions together: R =
            extra_encodes·B/2 per side, at least 1; with views R = extra_encodes·B views. 0 draws
            none.
        pool: maximum number of remembered items per side that a step scores, one drawn at random
            from each N/pool consecutive items. If that is not all of them, `reports_loss` is False.
        **memory: see `MemoryObjective`.
    """

    def __init__(
        self,
        *,
        extra_encodes: float = 1.0,
        pool: int = 2048,
        **memory: Unpack[CommonArguments],
    ) -> None:
        super().__init__(**memory)
        check_range("extra_encodes", extra_encodes, "[0, inf)")
        check_count("pool", pool)
        # The probability of an item to be in the batch, (B−1)/(M−1), holds for random batches only.
        if extra_encodes:
            self.remedy_for_other_batches = "extra_encodes=0 (the batch alone)"
        self.extra_encodes = extra_encodes
        # The number of items that each item of the pool stands for: ⌈N/pool⌉.
        sizes = [self.corpus.num_items(direction) for direction in self.directions]
        self.strides = [-(-size // pool) for size in sizes]

    @property
    def reports_loss(self) -> bool:
        """True if the memory holds the corpus and a step scores all of it.

        The log of a partial sum is too low if a few negatives dominate: by several nats at small τ.
        """
        return super().reports_loss and all(stride == 1 for stride in self.strides)

    def plan(self, anchors: Anchors) -> CachePlan:
        queries = anchors.embeddings / anchors.temperature  # (X, A, D)
        all_queries = anchors.gather(queries)  # (X, G, D)
        hidden = anchors.gather_lists(anchors.hidden_items)  # (X, G, K)
        num_draws = 0
        if self.extra_encodes and anchors.num_batch:
            num_draws = max(round(self.extra_encodes * anchors.num_batch / 2), 1)  # R
        memories = [self.memories[direction] for direction in anchors.directions]
        strides = [self.strides[direction] for direction in anchors.directions]
        pools = []
        draws = []
        log_sums = []
        means = []
        for x, direction in enumerate(anchors.directions):
            pool = self._pool(direction, queries)
            attention = memories[x].attend(all_queries[x], hidden[x], pool)
            pools.append(pool)
            draws.append(sample(attention, num_draws, self.draws.uniform(1, like=queries)))
            log_sums.append(attention.log_sum)
            means.append(attention.mean)
        log_strides = anchors.per_direction(strides).log()  # (X, 1)
        log_seen = torch.stack(log_sums)[:, anchors.batch_rows]  # (X, A)
        seen_mean = torch.stack(means)[:, anchors.batch_rows]  # (X, A, D)
        items, number = with_draws(anchors.candidate_items, torch.stack(draws), anchors.num_batch)

        # q(z) of every candidate: its softmax weight if it were scored with its old embedding.
        recalled = [memory.recall(items[x], queries) for x, memory in enumerate(memories)]
        remembered = torch.stack([embeddings for embeddings, _ in recalled])  # (X, C + R, D)
        is_known = torch.stack([is_known for _, is_known in recalled])  # (X, C + R)
        in_pool = []
        for x, stride in enumerate(strides):
            # A pool has one item per stretch. -1 reads the last entry, which is a different item.
            of_same_stretch = pools[x][items[x] // stride]
            in_pool.append(of_same_stretch == items[x])
        shares = mean_shares(
            queries,
            anchors.hidden_items,
            log_seen + log_strides,
            items,
            remembered,
            torch.stack(in_pool),
            log_strides,
        )
        # (B − 1)/(M − 1) + R·q/c. Shares belong to one copy, so they are divided by c already.
        others = max(anchors.num_batch // self.num_views - 1, 0)
        in_batch = []
        for direction in anchors.directions:
            num_pairs = self.corpus.size(direction)  # M
            share = others / max(num_pairs - 1, 1)
            in_batch.append(min(share, 1.0))
        expected = anchors.per_direction(in_batch) + num_draws * shares.where(is_known, 0.0)
        # Clamped, so that an item that could not be expected has a large weight and not inf.
        smallest = torch.finfo(expected.dtype).tiny
        log_expected = expected.clamp(min=smallest).log()
        # All ranks made the same draws; each encodes its share of them.
        num_candidates = anchors.candidates.shape[1]  # C
        own, sizes = distributed.share(items[:, num_candidates:].T)
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
                # The memory may miss the items that dominate now. Where the candidates sum to more
                # than it, their own softmax is used, so that weights never sum to more than 1.
                log_sum = torch.maximum(log_partition, logits.logsumexp(dim=-1))  # (X, a)
                p = torch.exp(logits - log_sum[..., None]).nan_to_num(0.0)  # (X, a, C + R)
                missed = (1 - p.sum(dim=-1, keepdim=True)) * seen_mean  # (X, a, D)
                all_weights = torch.cat([p, missed], dim=-1)
            # Σ_d m_d·x_d/τ has the gradient m/τ in x: the anchor's coordinates serve as D further
            # scores, whose weights are the missing share of the memory's mean.
            coordinates = block.embeddings / block.temperature
            all_scores = torch.cat([scores, coordinates], dim=-1)
            positive = block.positive_scores  # (X, a)
            return Estimate.apply(
                self.log_odds(log_partition, positive), all_scores, all_weights, positive
            )

        against_all = anchors.with_candidates(candidates, plan.items // self.num_views)
        # A block holds scores, logits, p and the concatenated weights at once.
        width = 4 * candidates.shape[1]
        return against_all.in_blocks(weigh, plan.seen_mean, plan.log_partition, width=width)

    def _pool(self, direction: int, like: Tensor) -> Tensor:
        """Return (n,) ascending slots to score, one at random per stretch; N if out of range."""
        num_items = self.corpus.num_items(direction)
        stride = self.strides[direction]
        first = torch.arange(0, num_items, stride, device=like.device)
        items = first + self.draws.integers(stride, len(first), device=like.device)
        return items.clamp(max=num_items)

    def _log_partition(
        self, anchors: Anchors, log_seen: Tensor, log_strides: Tensor, hidden: Tensor
    ) -> Tensor:
        """Return (X, A) log Z, extrapolated from the seen part to the corpus.

        While items are missing, or if nothing is seen, the batch is counted as well.

        Args:
            anchors: anchors of the batch.
            log_seen: (X, A) log of the sum of exp(s/τ) over the seen part.
            log_strides: (X, 1) log of the number of items that each seen one stands for.
            hidden: (X, G, K) hidden items, see `EmbeddingMemory.draw`.
        """
        numbers = [
            self.memories[direction].num_negatives(hidden[x])
            for x, direction in enumerate(anchors.directions)
        ]
        number = torch.stack(numbers)[:, anchors.batch_rows].to(log_seen)  # (X, A)
        number = number / log_strides.exp()
        is_complete = all(self.memories[direction].holds_corpus for direction in anchors.directions)
        with_batch = (log_seen == -torch.inf) | (not is_complete)
        # Mined negatives are harder than most items, and would bias the mean.
        batch = slice(anchors.num_batch)
        in_batch = anchors.with_candidates(
            anchors.candidates[:, batch], anchors.candidate_ids[:, batch]
        )
        log_batch, num_batch = in_batch.in_blocks(
            lambda block: (block.logits.logsumexp(dim=-1), block.num_negatives)
        )
        # log Z = log(mean of exp(s/τ) over what is seen) + log(number of negatives).
        number = number + num_batch * with_batch
        log_added = log_batch.masked_fill(~with_batch, -torch.inf)
        log_seen = torch.logaddexp(log_seen, log_added)
        smallest = torch.finfo(number.dtype).tiny
        log_mean = log_seen - number.clamp(min=smallest).log()
        return log_mean + self.corpus.log_num_negatives(anchors)


def with_draws(batch_items: Tensor, drawn: Tensor, num_batch: int) -> tuple[Tensor, Tensor]:
    """Join the items of the batch (X, C) and draws (X, R).

    Mined negatives, the candidates from `num_batch` on, do not count unless they are drawn.

    Returns:
        (X, C + R) items, -1 for repeated draws; (X, C + R) the count n_z of each.
    """
    num_candidates = batch_items.shape[1]
    items = torch.cat([batch_items, drawn], dim=1)
    # All draws of an item are counted in its first column.
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
    """Return (X, n) q of items: their softmax weight, averaged over all anchors that see any item.

    An item outside the pool has the weight it would have in place of its stretch's item: e^s/(Z +
    stride·e^s).

    Args:
        queries: (X, A, D) this rank's anchors divided by τ.
        hidden: (X, A, K) items that an anchor does not see.
        log_sum: (X, A) log of the sum of exp(s/τ), scaled up to the corpus.
        items: (X, n) items, -1 for none.
        remembered: (X, n, D) their remembered embeddings.
        in_pool: (X, n) True if the item was scored.
        log_strides: (X, 1) log of the number of items that each item of the pool stands for.
    """
    sees = log_sum.isfinite()
    log_sum = log_sum.where(sees, torch.inf)[..., None]
    total = queries.new_zeros(items.shape)
    # In blocks of anchors: a whole (X, A, n) matrix would grow with the square of the batch.
    size = max(1, BLOCK_ENTRIES // max(1, items.numel()))
    for start in range(0, queries.shape[1], size):
        block = slice(start, start + size)
        scores = queries[:, block] @ remembered.mT  # (X, a, n) s/τ
        log_shares = scores - log_sum[:, block]
        # log(e^s/(Z + stride·e^s)) = (s − log Z) − softplus(s − log Z + log stride)
        outside = log_shares - softplus(log_shares + log_strides[..., None])
        log_shares = torch.where(in_pool[:, None], log_shares, outside)
        shares = log_shares.exp().clamp(max=1.0)
        is_hidden = is_listed(items, hidden[:, block])
        total += shares.masked_fill(is_hidden, 0.0).sum(dim=1)
    num_seeing = distributed.all_reduce(sees.sum(dim=1, keepdim=True))
    return distributed.all_reduce(total) / num_seeing.clamp(min=1)
