"""GlobalCache: negatives drawn by what is remembered of the whole corpus, weighed by what they are now."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors, listed
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import candidate_items, embed, find, ids_of, items_of
from dualenc.objectives.feature_cache import MAX_ELEMENTS, FeatureCache
from dualenc.objectives.state import SharedRandom

LEAST_PARTITION = 0.25
"""No less of what the comparison alone gives: a weight is at most four times what it would be without memories."""


class GlobalCache(Objective):
    """The softmax over the batch and a few shared draws, corrected by all that is remembered of the corpus.

    The latest embedding of every item is remembered. A step draws R items from q, the mean over the batch's anchors of
    their softmax over what is remembered, encodes them anew, and compares all anchors with the batch and the draws. An
    item z that stands there n_z times gets the weight

        w_z = n_z / ( (B−1)/(M−1) + R·q(z)/c_z )

    with M pairs and c_z how many of them z is in: the bracket is how often a copy of z was to be expected (multiple
    importance sampling by the balance heuristic, Veach and Guibas 1995). So Σ_z w_z·f(z) has the mean of f over the
    corpus, for any f and at any parameters; it stands for the partition function and for its gradient, each with what
    is remembered as control variate:

        Ẑ_x = Σ_z w_z·e^{s(x,z)/τ} + α·( Σ_v e^{s(x,v̄)/τ} − Σ_z w_z·e^{s(x,z̄)/τ} ),   v over all, v̄ as remembered

    and the same with e^{s/τ}·∇s for e^{s/τ}; what is remembered has a gradient into x alone. The brackets after α are 0
    on average: old memories make noise, and no bias. The ratio of the two has a bias of the order of (1 − α)/R where
    parameters stand still.

    Embeddings of the batch, of mined negatives and of draws are remembered as they come, at no cost; draws that the
    batch holds already are not encoded again. A step compares all anchors with all that is remembered, 4·B·N·D
    multiply-adds for both directions together, or with a random part of it where N is large (`pool`).
    Ranks share what is remembered, and the work.

    Args:
        extra_encodes: items drawn per pair of the batch, for both directions together: R = extra_encodes·B/2 of each
            side, and with views R = extra_encodes·B views. 0 draws none.
        control: α in [0, 1]. 0 normalises weights over batch and draws alone; 1 is unbiased where parameters move
            little between two visits of an item, and loses quality where they move much.
        pool: look at so many remembered items of each side per step at most, in random blocks, so that its time does
            not grow with N; null: at all of them.
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True

    def __init__(
        self, *, extra_encodes: float = 1.0, control: float = 0.5, pool: int | None = 65_536, **common: Any
    ) -> None:
        super().__init__(**common)
        if not 0 <= extra_encodes < math.inf:
            self._fail("extra_encodes", f"is {extra_encodes}; it must be 0 or more items per pair, such as 1")
        if not 0 <= control <= 1:
            self._fail("control", f"is {control}; it must lie in [0, 1]")
        if pool is not None and pool < 1:
            self._fail("pool", f"is {pool}; it must be at least 1, a number of items, or null for all")
        self.extra_encodes, self.control, self.pool = extra_encodes, control, pool
        # Named by the items they hold: left anchors draw from the right items.
        self.left_cache = FeatureCache((self.num_left or 1) * (2 if self.views else 1))
        self.right_cache = self.left_cache if self.views else FeatureCache(self.num_right or 1)
        self.random = SharedRandom(self.seed)

    @property
    def needs_uniform_batches(self) -> str | None:
        """How often an item was to be expected in the batch is known for random batches only."""
        return "extra_encodes=0 (the batch alone)" if self.extra_encodes else None

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        assert encode is not None
        cache = self.left_cache if anchors.candidate_side == "left" else self.right_cache
        items, num_batch, updates = candidate_items(anchors), anchors.num_global, self.updates_state
        with torch.no_grad():
            asking, barred = self._everyone(anchors)
            blocks, share_seen = self._blocks(cache, anchors.ids.device)
            seen = cache.attend(asking, barred, self._item_counts(anchors), blocks)
            num_draws = round(self.extra_encodes * num_batch / 2)
            drawn = cache.sample(seen, num_draws, self.random.uniform(1, like=asking))
            distinct, copies = torch.unique(drawn, return_counts=True)
            outside = distinct[find(items, distinct) < 0]
        # What is drawn from the batch has an embedding already; ranks split the rest.
        own, sizes = distributed.share(outside)
        embeddings = distributed.gather_with_grad(embed(own, encode, anchors), sizes)
        with torch.no_grad():
            compared = torch.cat([items, outside])
            remembered, known = cache.recall(compared, like=asking)
            # n_z: once for each place in the batch, and all draws of an item in the first place that holds it.
            number = asking.new_zeros(len(compared))
            number[:num_batch] = 1
            number.index_add_(0, find(compared, distinct), copies.to(number))
            # How often a copy of each item was to be expected: among the draws, and in the batch.
            shares = torch.where(known, mean_shares(asking, barred, seen.log_sum, compared, remembered), 0.0)
            num_pairs, of_batch = self.corpus_size(anchors.candidate_side) or 1, num_batch // (2 if self.views else 1)
            expected = min(max(of_batch - 1, 0) / max(num_pairs - 1, 1), 1.0) + num_draws * share_seen * shares
            log_weights = number.log() - expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
            if updates:
                cache.write(compared, torch.cat([anchors.candidates, embeddings]))
            first = sum(anchors.sizes[: distributed.rank()])
            own_rows = slice(first, first + len(anchors.ids))

        def weigh(some: Anchors, seen_mean: Tensor, seen_sum: Tensor) -> Tensor:
            similarities = torch.cat([some.similarities, some.embeddings @ embeddings.T], dim=1)
            with torch.no_grad():
                hidden = torch.cat([some.excluded, ~some.is_negative(ids_of(outside, some.views))], dim=1)
                log_now = (similarities / some.temperature + log_weights).masked_fill(hidden, -torch.inf)
                log_then = some.embeddings @ remembered.T / some.temperature + log_weights
                # All that follows is relative to what an anchor sees, now or as remembered.
                level = torch.maximum(torch.logsumexp(log_now, dim=1), seen_sum)[:, None].nan_to_num(neginf=0.0)
                now = torch.exp(log_now - level)
                then = torch.exp((log_then - level).masked_fill(hidden | ~known, -torch.inf))
                now_sum, all_then = now.sum(dim=1, keepdim=True), torch.exp(seen_sum[:, None] - level)
                partition = now_sum + self.control * (all_then - then.sum(dim=1, keepdim=True))
                partition = torch.maximum(partition, LEAST_PARTITION * now_sum).clamp(min=torch.finfo(now.dtype).tiny)
                missed = self.control * (all_then * seen_mean - then @ remembered) / partition
            return (now / partition * similarities).sum(dim=1) + (some.embeddings * missed).sum(dim=1)

        # What a pool shows stands for all.
        seen_rows = (seen.mean[own_rows], seen.log_sum[own_rows] - math.log(share_seen))
        negatives = anchors.by_rows(weigh, *seen_rows, row_entries=4 * len(compared))
        value = seen.log_mean[own_rows].nan_to_num(neginf=0.0) + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(negatives / anchors.temperature - anchors.positive_logits, value.detach())

    def _everyone(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Of the anchors of all ranks: embeddings over τ (A, D), and the items (A, K) that are no negatives."""
        barred = items_of(anchors.positive_ids, self.views)
        # Lists of ranks may differ in length.
        width = int(distributed.all_reduce(barred.new_full((), barred.shape[1]), "max"))
        barred = nn.functional.pad(barred, (0, width - barred.shape[1]), value=PADDING)
        embeddings = distributed.gather(anchors.embeddings / anchors.temperature, anchors.sizes)
        return embeddings, distributed.gather(barred, anchors.sizes)

    def _item_counts(self, anchors: Anchors) -> Tensor | None:
        """(N,) how often each candidate item stands in the corpus; None for once."""
        counts = self.counts(anchors.candidate_side)
        return counts.repeat_interleave(2) if counts is not None and self.views else counts

    def _blocks(self, cache: FeatureCache, device: torch.device) -> tuple[list[int] | None, float]:
        """The blocks to look at in this step, None for all; and the probability of an item to be in one of them."""
        wanted = cache.num_blocks if self.pool is None else -(-self.pool // cache.block_size)
        if wanted >= cache.num_blocks:
            return None, 1.0
        blocks = self.random.permutation(cache.num_blocks, device)[:wanted]
        return sorted(blocks.tolist()), wanted / cache.num_blocks


def mean_shares(anchors: Tensor, barred: Tensor, log_sum: Tensor, items: Tensor, embeddings: Tensor) -> Tensor:
    """(n,) q of items (n,) with some embeddings (n, D): the mean of exp(s/τ − log_sum) over anchors that see anything.

    Args:
        anchors: (A, D) embeddings over τ.
        barred: (A, K) distinct items that an anchor does not see, padded with -1.
        log_sum: (A,) of what each anchor sees, -inf for nothing.
    """
    sees = torch.isfinite(log_sum)
    level, shares = torch.where(sees, log_sum, torch.inf)[:, None], []
    for some in torch.arange(len(items), device=items.device).split(max(1, MAX_ELEMENTS // max(1, len(anchors)))):
        weights = torch.exp(anchors @ embeddings[some].T - level)
        shares.append(weights.masked_fill_(listed(barred, items[some]), 0.0).sum(dim=0))
    return torch.cat(shares) / sees.sum().clamp(min=1)
