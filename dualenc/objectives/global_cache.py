"""GlobalCache: negatives drawn by what is remembered of the whole corpus, weighed by what they are now."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors, listed
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import NO_STATE, candidate_items, embed, find, known_candidate_items
from dualenc.objectives.feature_cache import MAX_ELEMENTS, FeatureCache, Sample, queries_of_all, share_remembered
from dualenc.objectives.guide import Judgement
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.looks import Asking, upload
from dualenc.objectives.state import PairsSeen, SharedRandom, first_rows

NUM_KEPT = 8


class KeptItems(ItemState):
    """Of each of m anchors the K hardest items that it has seen, -1 for none.

    Args:
        num_anchors: m.
        on_cpu: see `ItemState`.
    """

    ids: Tensor

    def __init__(self, num_anchors: int, on_cpu: bool = False) -> None:
        super().__init__(on_cpu)
        self.register_buffer("ids", torch.full((num_anchors, NUM_KEPT), NO_STATE))

    def of(self, rows: Tensor) -> Tensor:
        """(…, K) the items of anchors (…), on the device of the table; -1 for an anchor -1."""
        self.settle()
        return torch.where(rows[..., None] < 0, NO_STATE, self.ids[rows.clamp(min=0)])


class GlobalCache(Objective):
    """The softmax over the batch and a few shared draws, each weighed by 1 / how often it was to be expected here.

    The latest embedding of every item is remembered. A step draws R items from q, the mean over the batch's anchors of
    their softmax over what is remembered, encodes them anew, and compares all anchors with the batch and the draws:

        p(z|x) ∝ n_z·exp(s(x,z)/τ) / ( (B−1)/(M−1) + R·q(z)/c_z )

    with n_z how often z stands among batch and draws, M pairs, and c_z how many of them z is in. The bracket is how
    often a copy of z was to be expected (multiple importance sampling by the balance heuristic, Veach and Guibas 1995),
    so that Σ_z n_z·exp(s/τ)/(…) is close to Σ_z c_z·exp(s/τ), over the corpus, at any parameters: what is remembered
    decides who is looked at, and what is old or missing only makes q a worse guide. The mean of that sum is not exact,
    since q depends on who is in the batch: an item of the batch is no negative of its own anchor, so q is lower for it
    and its weight higher. By enumeration of all batches and draws the mean is 1.03 (τ = 0.07) to 1.12 (τ = 1) times the
    true sum at N = 6 and B = 2, and 1.02 to 1.06 at B = 3; at N = 200 and B = 16 it is 1.01, also where all that is
    remembered is unrelated to the present. Normalising leaves a bias of its own: small where anchors share their hard
    negatives, and larger where every anchor has its own and R is below B.

    The gradient into an anchor moves by α times what the same comparison, made with remembered embeddings, misses of
    all that is remembered. That is 0 on average, and takes away noise where parameters move slowly: a control variate.

    Embeddings of the batch, of mined negatives and of draws are remembered as they come, at no cost; draws that the
    batch holds already are not encoded again. A step compares all anchors with all that is remembered, 4·B·N·D
    multiply-adds for both directions together, or with a random part of it where N is large (`pool`). Ranks share what
    is remembered, and the work.

    With a pool smaller than N each anchor keeps the ids of the 8 hardest items that it has seen (64 bytes per item, on
    every rank). A step looks at those of its anchors, at those of anchors that their positives keep (a neighbour's
    hard negatives are hard: so lists fill by far sooner than from the pool alone), and at the items of random blocks
    that are not among them. These weigh 1/π, with π the chance of an item to be in a block. So the estimated sums
    are unbiased whatever is kept, with little variance once that is what weighs most. With 1,000,000 clustered pairs
    and the default pool their logs are off by -0.43, -0.02 and -0.01 at the third, fifth and tenth visit of an anchor
    at τ = 0.02, and by at most 0.01 at τ = 0.07 (`eval/estimator_bias.py --visits 20`).

    No loss is reported (`reports_loss`) in the first epoch, while items are still missing, and with a pool for N/pool
    epochs more.

    Args:
        extra_encodes: items drawn per pair of the batch, for both directions together: R = extra_encodes·B/2 of each
            side, and with views R = extra_encodes·B views, but at least one. 0 draws none.
        control: α in [0, 1].
        pool: look at so many remembered items of each side per step at most, in random blocks, so that its time does
            not grow with N, besides what anchors keep (another `pool` at most, and 8 per anchor); null: at all of them.
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True
    knows_partition = True

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
        self.left_cache = FeatureCache((self.num_left or 1) * (2 if self.views else 1), self.state_on_cpu)
        self.right_cache = self.left_cache if self.views else FeatureCache(self.num_right or 1, self.state_on_cpu)
        # Of the anchors of a side, the hardest items of the other side; where all are looked at, nobody needs to know.
        self.share_seen = min(self._share_seen(cache) for cache in (self.left_cache, self.right_cache))
        self.left_kept = self.right_kept = None
        if self.share_seen < 1:
            self.left_kept = self.right_kept = KeptItems(self.left_cache.num_items, self.state_on_cpu)
            if not self.views:
                self.right_kept = KeptItems(self.right_cache.num_items, self.state_on_cpu)
        self.random = SharedRandom(self.seed)
        self.seen = PairsSeen()

    @property
    def needs_uniform_batches(self) -> str | None:
        """How often an item was to be expected in the batch is known for random batches only."""
        return "extra_encodes=0 (the batch alone)" if self.extra_encodes else None

    @property
    def reports_loss(self) -> bool:
        """The partition function is known once every item is remembered, after an epoch; and with a pool once anchors
        have looked at N items besides, 1/π epochs later."""
        num_pairs = self.num_pairs or max(self.num_left or 1, self.num_right or 1)
        num_epochs = 1 if self.share_seen == 1 else 1 + math.ceil(1 / self.share_seen)
        return self.seen.number > num_epochs * num_pairs

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the mean of exp(s/τ) over what is remembered; what share of all items that is; and over how many
        of them q is spread, 1/Σ q²: far fewer than the draws, and draws come twice."""
        remembered = share_remembered(self.log_temperature, self.left_cache, self.right_cache)
        # Of each direction the probability that two draws are the same item; 0 before anything is remembered.
        twice = [distributed.all_reduce(shares.double().square().sum()) for _, shares in self.watched.values()]
        number = torch.stack([torch.where(of > 0, 1 / of, 0.0) for of in twice]).mean() if twice else remembered * 0
        return self._spread("log_mean_exp") | {"remembered": remembered, "effective_items": number}

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> Asking[AnchorLosses]:
        assert encode is not None
        cache = self.left_cache if anchors.candidate_side == "left" else self.right_cache
        items, num_batch, updates = candidate_items(anchors), anchors.num_global, self.updates_state
        with torch.no_grad():
            asking, barred, guide = queries_of_all(anchors)
            rows, kept, sample = self._sample(anchors, cache)
            seen = cache.attend(
                asking, barred, self._item_counts(anchors), sample, guide, 0 if kept is None else NUM_KEPT
            )
            num_draws = round(self.extra_encodes * num_batch / 2)
            if self.extra_encodes and num_batch:
                # Else a batch of one pair would draw nothing and compare with nothing.
                num_draws = max(num_draws, 1)
            drawn = cache.sample(seen, num_draws, self.random.uniform(1, like=asking))
        # What is drawn from the batch has an embedding already; ranks split the rest.
        away = yield torch.where(find(items, drawn) < 0, drawn, NO_STATE)
        away = away[away != NO_STATE].unique()
        own, sizes = distributed.share(away)
        embeddings = distributed.gather_with_grad(embed(own, encode, anchors), sizes)
        yield None  # what is encoded is looked at before it is remembered
        with torch.no_grad():
            outside = upload(away, items.device)
            compared = torch.cat([items, outside])
            of_batch_on_cpu = known_candidate_items(anchors)
            on_cpu = None if of_batch_on_cpu is None else torch.cat([of_batch_on_cpu, away])
            remembered, known = cache.recall(compared, asking, on_cpu)
            # n_z: once for each place in the batch, and all draws of an item in the first place that holds it.
            number = asking.new_zeros(len(compared))
            number[:num_batch] = 1
            place = find(compared, drawn)
            number.index_add_(0, place.clamp(min=0), (place >= 0).to(number))
            # How often a copy of each item was to be expected: among the draws, and in the batch.
            shares = mean_shares(asking, barred, seen.log_sum, compared, remembered, guide, cache, sample)
            shares = torch.where(known, shares, 0.0)
            num_pairs, of_batch = self.corpus_size(anchors.candidate_side) or 1, num_batch // (2 if self.views else 1)
            expected = min(max(of_batch - 1, 0) / max(num_pairs - 1, 1), 1.0) + num_draws * shares
            log_weights = number.log() - expected.clamp(min=torch.finfo(expected.dtype).tiny).log()
            if updates:
                cache.write(compared, torch.cat([anchors.candidates, embeddings]), on_cpu)
                if kept is not None and seen.hardest is not None:
                    # Who stands twice keeps one list.
                    kept.put(rows, None, ids=seen.hardest[first_rows(rows)])
                if anchors.side == "left":
                    self.seen.number += of_batch
            first = sum(anchors.sizes[: distributed.rank()])
            own_mean, own_log_mean = (of[first : first + len(anchors.ids)] for of in (seen.mean, seen.log_mean))

        self._watch(anchors, own_log_mean, seen.shares)

        def weigh(some: Anchors, seen_mean: Tensor) -> Tensor:
            similarities = torch.cat([some.similarities, some.embeddings @ embeddings.T], dim=1)
            with torch.no_grad():
                hidden = torch.cat([some.excluded, some.hides(outside)], dim=1)
                hidden = hidden | (number == 0)
                weights = softmax(similarities / some.temperature + log_weights, hidden)
                # What the same comparison misses of all that is remembered.
                logits = some.embeddings @ remembered.T / some.temperature + log_weights
                missed = seen_mean - softmax(logits, hidden | ~known) @ remembered
            return (weights * similarities).sum(dim=1) + self.control * (some.embeddings * missed).sum(dim=1)

        negatives = anchors.by_rows(weigh, own_mean, row_entries=4 * len(compared))
        value = own_log_mean.nan_to_num(neginf=0.0) + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(negatives / anchors.temperature - anchors.positive_logits, value.detach())

    def _item_counts(self, anchors: Anchors) -> Tensor | None:
        """(N,) how often each candidate item stands in the corpus; None for once."""
        counts = self.counts(anchors.candidate_side)
        return counts.repeat_interleave(2) if counts is not None and self.views else counts

    def _share_seen(self, cache: FeatureCache) -> float:
        """The probability of an item to be in one of the blocks that a step looks at."""
        wanted = cache.num_blocks if self.pool is None else -(-self.pool // cache.block_size)
        return min(wanted / cache.num_blocks, 1.0)

    def _sample(self, anchors: Anchors, cache: FeatureCache) -> tuple[Tensor, KeptItems | None, Sample | None]:
        """The rows of all anchors of the global batch in their table of kept items; that table, None where nobody keeps
        any; and what to look at in this step, None for all that is remembered."""
        kept, others = self.left_kept, self.right_kept
        if anchors.side == "right":
            kept, others = others, kept
        if kept is None or others is None:
            return anchors.ids, None, None
        rows, probability = self._rows(anchors), self._share_seen(cache)
        if probability == 1:
            return rows, kept, None
        # Drawn on the CPU: an accelerator need not be waited for.
        blocks = self.random.permutation(cache.num_blocks, torch.device("cpu"))[: round(probability * cache.num_blocks)]
        partners = distributed.gather(candidate_items(anchors)[anchors.positive_column], anchors.sizes)
        where = kept.ids.device
        # Anchors that are near the partner, and what these keep: not more than the pool in all.
        width = min(NUM_KEPT, math.isqrt((self.pool or 0) // max(len(rows), 1)))
        alike = others.of(partners.to(where))[:, :width]
        near = [kept.of(rows.to(where)).flatten(), kept.of(alike)[..., :width].flatten()]
        certain = torch.cat(near).sort().values
        copies = torch.zeros_like(certain, dtype=torch.bool)
        copies[1:] = certain[1:] == certain[:-1]
        certain = certain.masked_fill(copies, NO_STATE).sort().values
        known = certain if where.type == "cpu" else None
        return rows, kept, Sample(sorted(blocks.tolist()), probability, upload(certain, rows.device), known)

    def _rows(self, anchors: Anchors) -> Tensor:
        """(A,) rows of the anchors of all ranks among all anchors that there are; with views each view has one."""
        own = anchors.ids
        if self.views:
            own = 2 * own + (anchors.rows >= anchors.num_global // 2)
        return distributed.gather(own, anchors.sizes)


def mean_shares(
    anchors: Tensor,
    barred: Tensor,
    log_sum: Tensor,
    items: Tensor,
    embeddings: Tensor,
    guide: Judgement | None = None,
    cache: FeatureCache | None = None,
    sample: Sample | None = None,
) -> Tensor:
    """(n,) q of items (n,) with some embeddings (n, D): the mean of exp(s/τ − log_sum) over anchors that see anything.

    Of a sample, an item in its blocks has a share that is 1/π times as large, and is there with probability π only: the
    product is the same. One that is not looked at would have had exp(s/τ)/π of the sum.

    Args:
        anchors: (A, D) embeddings over τ.
        barred: (A, K) distinct items that an anchor does not see, padded with -1.
        log_sum: (A,) of what each anchor sees, -inf for nothing.
        guide: what it takes for positives of these anchors they do not see either.
        cache, sample: what was looked at, and of what; by default all.
    """
    beyond = None if sample is None or cache is None else ~sample.holds(items, cache.block_size, cache.num_blocks)
    sees = torch.isfinite(log_sum)
    level, shares = torch.where(sees, log_sum, torch.inf)[:, None], []
    for some in torch.arange(len(items), device=items.device).split(max(1, MAX_ELEMENTS // max(1, len(anchors)))):
        # No share is above 1: what lies outside a pool may be nearer than all inside it.
        weights = torch.exp(anchors @ embeddings[some].T - level).clamp_(max=1.0 if sample is None else 1e30)
        if beyond is not None and sample is not None:
            weights = torch.where(beyond[some], weights / (1 + weights / sample.probability), weights).clamp_(max=1.0)
        weights.masked_fill_(listed(barred, items[some]), 0.0)
        if guide is not None:
            weights.masked_fill_(guide.of_items(items[some]), 0.0)
        shares.append(weights.sum(dim=0))
    return torch.cat(shares) / sees.sum().clamp(min=1)


def softmax(logits: Tensor, hidden: Tensor) -> Tensor:
    """(A, C) over what is not hidden (A, C); 0 in a row where everything is."""
    return torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=1).nan_to_num(0.0)
