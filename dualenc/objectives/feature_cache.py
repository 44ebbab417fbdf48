"""FeatureCache: remembered embeddings of a whole corpus, and what anchors see in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import PADDING, Anchors, listed
from dualenc.objectives.chains import inverse_cdf, items_of
from dualenc.objectives.guide import Judgement
from dualenc.objectives.item_state import ItemState, pinned_for
from dualenc.objectives.looks import upload
from dualenc.objectives.state import first_rows

MAX_BLOCKS = 16384
MAX_ELEMENTS = 2**22


class Place(NamedTuple):
    """Rows (n,) of a cache, ascending; and the same where the cache is, as a slice where they are neighbours: it copies
    nothing."""

    rows: Tensor
    inside: slice | Tensor


class Sample(NamedTuple):
    """Which part of a cache is looked at: some items for certain, and of the others those in random blocks, which weigh
    1 / the probability of that. So sums over it have the mean of sums over all that is remembered.

    Attributes:
        blocks: ascending numbers of the blocks, the same on every rank.
        probability: of an item to be in one of them, above 0.
        certain: (n,) ascending items, each once, after -1 for none; the same on every rank.
        known: the same on the CPU, where the host knows them.
    """

    blocks: list[int]
    probability: float
    certain: Tensor
    known: Tensor | None = None

    def holds(self, items: Tensor, block_size: int, num_blocks: int) -> Tensor:
        """(n,) whether items (n,) are looked at."""
        drawn = torch.zeros(num_blocks, dtype=torch.bool)
        drawn[self.blocks] = True
        return upload(drawn, items.device)[items // block_size] | listed(self.certain[None], items)[0]


class Attention(NamedTuple):
    """What anchors see in remembered embeddings.

    Attributes:
        items, shares: (n,) what this rank looked at, and the mean over all anchors of its share of their softmax; over
            all ranks shares sum to 1, or to 0 where no anchor sees anything.
        mean: (A, D) of every anchor the mean embedding of what it sees; 0 if nothing.
        log_sum, log_mean: (A,) log of the sum and of the mean of exp(s/τ) over what it sees; -inf if nothing.
        hardest: (A, K) the items that weigh most for each anchor, where asked for, padded with -1.
    """

    items: Tensor
    shares: Tensor
    mean: Tensor
    log_sum: Tensor
    log_mean: Tensor
    hardest: Tensor | None = None


class FeatureCache(ItemState):
    """The last known embedding of each of N items, in half precision; empty slots are never drawn.

    Rounding turns an embedding by 2e-4 rad, less than a step of training does; what decides on the gradient is encoded
    anew. Double precision is kept as it is.

    Each rank holds its blocks only; the state dict holds all of them, whatever the number of ranks (saving is
    collective: call `state_dict()` on every rank).

    Args:
        num_items: N.
        on_cpu: see `ItemState`; what a step compares with is then brought over run by run.
    """

    features: Tensor
    filled: Tensor

    def __init__(self, num_items: int, on_cpu: bool = False) -> None:
        super().__init__(on_cpu)
        self.num_items = num_items
        self.block_size = max(64, -(-num_items // MAX_BLOCKS))
        self.num_blocks = -(-num_items // self.block_size)
        # The dimension is known with the first write.
        self.register_buffer("features", torch.zeros(0, 0), persistent=False)
        self.register_buffer("filled", torch.zeros(0, dtype=torch.bool), persistent=False)
        # How often `due` was asked: a number of the host, which need not wait for it.
        self.num_steps = 0

    def write(self, items: Tensor, features: Tensor, known: Tensor | None = None) -> None:
        """Remember features (n, D) of items (n,), the same on every rank; of an item's copies the first counts.

        Args:
            known: the items on the CPU, where the host knows them.
        """
        if not self.features.shape[1]:
            self._allocate(features)
        local, features = items - self.first_item, features.detach()[first_rows(items)]
        known = None if known is None else known - self.first_item
        if distributed.is_initialized():
            own = (local >= 0) & (local < len(self.features))
            local, features, known = local[own], features[own], None
        self.put(
            local, known, features=features.to(self.features.dtype), filled=torch.ones_like(local, dtype=torch.bool)
        )

    def due(self, share: float) -> Tensor:
        """(n,) the items to encode anew in this step, on the CPU: a share of all per step, in turn."""
        step, self.num_steps = self.num_steps, self.num_steps + 1
        start, stop = (int(steps * share * self.num_items + 1e-9) for steps in (step, step + 1))
        return torch.arange(start, stop) % self.num_items

    def draw(
        self, anchors: Tensor, barred: Tensor, gumbels: Tensor, uniform: Tensor, guide: Judgement | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw an item per anchor from the softmax over the filled slots: a block by Gumbel-max, then one of its items.

        Args:
            anchors: (A, D) embeddings of the anchors of all ranks over τ, the same on every rank.
            barred: (A, K) distinct items that are never drawn, padded with -1.
            gumbels: (num_blocks, A) standard Gumbel draws.
            uniform: (A,) draws in (0, 1).
            guide: what it takes for positives of these anchors is never drawn, and counts as 0 in the mean.

        Returns:
            (A,) items, -1 where nothing can be drawn; and (A,) log of the mean of exp(s/τ) over the cached negatives,
            -inf without any.
        """
        value = anchors.new_full((len(anchors),), -torch.inf)
        log_sum, count, block = value.clone(), torch.zeros_like(value), torch.zeros_like(value, dtype=torch.long)
        first = 0
        for _, logits, seen in self._runs(anchors, barred, guide=guide):
            count += seen
            # The log of the sum of exp over each block, -inf for an empty one; in place.
            blocks = logits.unflatten(1, (-1, self.block_size))
            peak = blocks.amax(dim=2)
            peak.masked_fill_(torch.isneginf(peak), 0.0)
            log_sums = blocks.sub_(peak[:, :, None]).exp_().sum(dim=2).log_().add_(peak)
            best, place = (log_sums + gumbels[self.blocks][first : first + log_sums.shape[1]].T).max(dim=1)
            block = torch.where(best > value, place + first, block)
            value = torch.maximum(value, best)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(log_sums, dim=1))
            first += log_sums.shape[1]
        found = torch.stack([value, log_sum, count])[None].double()
        value_of, log_sum_of, count_of = distributed.gather(found, [1] * distributed.world_size()).unbind(dim=1)
        log_mean = torch.logsumexp(log_sum_of, dim=0) - count_of.sum(dim=0).clamp(min=1).log()
        best, winner = value_of.max(dim=0)
        some, items = torch.isfinite(best), torch.full_like(block, -1)
        if distributed.is_initialized():
            mine = (some & (winner == distributed.rank())).nonzero()[:, 0]
            of_mine = guide and guide.rows(mine)
            items[mine] = self._inside_block(anchors[mine], barred[mine], block[mine], uniform[mine], of_mine)
        elif len(self.features):
            items = torch.where(some, self._inside_block(anchors, barred, block, uniform, guide), items)
        return distributed.all_reduce(items, "max"), log_mean.to(anchors)

    def attend(
        self,
        anchors: Tensor,
        barred: Tensor,
        counts: Tensor | None = None,
        sample: Sample | None = None,
        guide: Judgement | None = None,
        num_hardest: int = 0,
    ) -> Attention:
        """The anchors' softmax over the filled slots: as seen from the items, and from the anchors.

        Args:
            anchors: (A, D) embeddings of the anchors of all ranks over τ, the same on every rank.
            barred: (A, K) distinct items that an anchor does not see, padded with -1.
            counts: (N,) how often each item counts; by default once.
            sample: what to look at; by default everything.
            guide: what it takes for positives of these anchors is not seen, and counts as 0 in the mean.
            num_hardest: K of `Attention.hardest`.
        """
        hardest = Hardest(anchors, num_hardest)

        def runs(first_time: bool) -> Iterator[tuple[Place, Tensor, Tensor, Tensor]]:
            for place, logits, seen in self._runs(anchors, barred, counts, sample, guide):
                if num_hardest and first_time:
                    hardest.add(place.rows + self.first_item, logits, self.block_size)
                peak = logits.amax(dim=1)
                peak.masked_fill_(torch.isneginf(peak), 0.0)
                yield place, logits.sub_(peak[:, None]).exp_(), peak, seen

        log_sum, count, kept = anchors.new_full((len(anchors),), -torch.inf), torch.zeros_like(anchors[:, 0]), []
        for number, run in enumerate(runs(first_time=True)):
            _, weights, peak, seen = run
            log_sum, count = torch.logaddexp(log_sum, weights.sum(dim=1).log() + peak), count + seen
            kept = [run] if number == 0 else []
        found = torch.stack([log_sum, count])[None]
        log_sums, seen_by = distributed.gather(found, [1] * distributed.world_size()).unbind(dim=1)
        log_sum, count = torch.logsumexp(log_sums, dim=0), seen_by.sum(dim=0)
        if num_hardest:
            hardest.gather(0.0 if sample is None else -math.log(sample.probability))
        if sample is not None:
            certain, embeddings, seen_for_certain = self._certain(anchors, barred, counts, sample, guide)
            log_sum, count = torch.logaddexp(log_sum, torch.logsumexp(certain, dim=1)), count + seen_for_certain
            hardest.add(sample.certain, certain, 1)
        sees = torch.isfinite(log_sum)
        mean, nothing = torch.zeros_like(anchors), anchors.new_zeros(0)
        items, shares = [nothing.long()], [nothing]
        if sample is not None and distributed.rank() == 0:
            # All ranks look at these; one of them draws from them.
            weights = torch.exp(certain - torch.where(sees, log_sum, torch.inf)[:, None])
            items.append(sample.certain)
            shares.append(weights.sum(dim=0) / sees.sum().clamp(min=1))
            mean += weights @ embeddings
        # What fits into one run need not be computed again.
        for place, weights, peak, _ in kept or runs(first_time=False):
            scale = torch.exp(peak - log_sum).masked_fill(~sees, 0.0)
            items.append(place.rows + self.first_item)
            shares.append(scale @ weights / sees.sum().clamp(min=1))
            mean += scale[:, None] * (weights @ upload(self.features[place.inside], weights.device).to(weights))
        mean, log_mean = distributed.all_reduce(mean), log_sum - count.clamp(min=1).log()
        return Attention(torch.cat(items), torch.cat(shares), mean, log_sum, log_mean, hardest.items)

    def _certain(
        self,
        anchors: Tensor,
        barred: Tensor,
        counts: Tensor | None,
        sample: Sample,
        guide: Judgement | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `_runs` yields, of the items (n,) that a sample holds for certain: (A, n) logits, the items' embeddings
        (n, D), and (A,) how many of them each anchor sees."""
        items = sample.certain.clamp(min=0)
        known = None if sample.known is None else sample.known.clamp(min=0)
        embeddings, there = self.recall(items, anchors, known)
        number = (there & (sample.certain >= 0)).to(anchors)
        if counts is not None:
            number = number * counts[items]
        hidden = listed(barred, sample.certain)
        seen = number.sum() - (hidden * number).sum(dim=1)
        if guide is not None:
            hidden = hidden | guide.of_items(items)
        return (anchors @ embeddings.T + number.log()).masked_fill(hidden, -torch.inf), embeddings, seen

    def sample(self, attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
        """(num_draws,) items, alike on all ranks; item z comes num_draws·share_z times, rounded up or down.

        One number places all draws at equal distances along the cumulative shares (systematic sampling): of all ways
        to draw with these expectations one with little variance.

        Args:
            attention: of this rank.
            num_draws: how many; all are -1 where all shares are 0.
            uniform: (1,) a draw in [0, 1), the same on every rank.
        """
        cumulative = attention.shares.double().cumsum(dim=0)
        if not len(cumulative):
            cumulative = cumulative.new_zeros(1)
        own = cumulative[-1:]
        ends = distributed.gather(own, [1] * distributed.world_size()).cumsum(dim=0)
        end = ends[distributed.rank()]
        places = (torch.arange(num_draws, device=own.device) + uniform.double()) / max(num_draws, 1) * ends[-1]
        mine = (places >= end - own) & (places < end)
        drawn = torch.searchsorted(cumulative, places - (end - own), right=True).clamp(max=len(cumulative) - 1)
        items = attention.items if len(attention.items) else attention.items.new_zeros(1)
        return distributed.all_reduce(torch.where(mine, items[drawn], -1), "max")

    def recall(self, items: Tensor, like: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What is remembered of items (n,), the same on every rank: (n, D) embeddings such as some (…, D), and (n,)
        whether there is one; 0 where not. `known` are the items on the CPU, where the host knows them."""
        local, num_rows = items - self.first_item, len(self.filled)
        if not num_rows:
            found, there = like.new_zeros(len(items), like.shape[1]), torch.zeros_like(items)
        else:
            inside = local.clamp(0, num_rows - 1)
            known = None if known is None else (known - self.first_item).clamp(0, num_rows - 1)
            there = ((inside == local) & self.take("filled", inside, known)).to(items)
            found = self.take("features", inside, known).to(like) * there[:, None]
        return distributed.all_reduce(found), distributed.all_reduce(there) > 0

    def _runs(
        self,
        anchors: Tensor,
        barred: Tensor,
        counts: Tensor | None = None,
        sample: Sample | None = None,
        guide: Judgement | None = None,
    ) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """Runs of whole blocks of this rank, small enough for (A, n) similarities; the blocks of a sample, without what
        it holds for certain, or all of them.

        Yields:
            Where the run is; (A, n) s/τ, plus the log of an item's count, -inf where an anchor sees no item; and (A,)
            how many items each anchor sees.
        """
        self.settle()
        blocks = None if sample is None else sample.blocks
        own, size = self.blocks, max(1, MAX_ELEMENTS // max(1, len(anchors) * self.block_size))
        wanted = range(own.start, own.stop) if blocks is None else [b for b in blocks if own.start <= b < own.stop]
        for first in range(0, len(wanted) if len(self.features) else 0, size):
            some = wanted[first : first + size]
            start, stop = first * self.block_size, (first + len(some)) * self.block_size
            if blocks is None:
                # All blocks together are looked at where they are.
                rows = torch.arange(start, stop, device=anchors.device)
                place = Place(rows, slice(start, stop))
            else:
                numbers = torch.tensor(some) - own.start
                inside = (numbers[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
                rows = upload(inside, anchors.device)
                place = Place(rows, inside if self.features.device.type == "cpu" else rows)
            number = upload(self.filled[place.inside], anchors.device).to(anchors)
            if counts is not None:
                number = number * counts[(rows + self.first_item).clamp(max=len(counts) - 1)]
            if sample is not None:
                number = number / sample.probability
                local = sample.certain - self.first_item
                column = torch.searchsorted(rows, local).clamp(max=len(rows) - 1)
                column = torch.where(rows[column] == local, column, len(rows))
                number = nn.functional.pad(number, (0, 1)).index_fill(0, column, 0.0)[:-1]
            logits = anchors @ upload(self.features[place.inside], anchors.device).to(anchors).T
            logits += number.log()
            local = barred - self.first_item
            column = torch.searchsorted(rows, local).clamp(max=len(rows) - 1)
            hit = rows[column] == local
            lowered = torch.zeros_like(hit, dtype=logits.dtype).masked_fill_(hit, -torch.inf)
            logits.scatter_add_(1, column, lowered)
            if guide is not None:
                # The last block may be longer than what there is.
                logits.masked_fill_(guide.of_items((rows + self.first_item).clamp(max=self.num_items - 1)), -torch.inf)
            yield place, logits, number.sum() - (number[column] * hit).sum(dim=1)

    def _inside_block(
        self, anchors: Tensor, barred: Tensor, block: Tensor, uniform: Tensor, guide: Judgement | None
    ) -> Tensor:
        """(A,) items drawn inside the winning blocks (A,) of this rank."""
        drawn = [block[:0]]
        width = max(1, self.features.shape[1], 0 if guide is None else guide.vectors.shape[1])
        per_chunk = max(1, MAX_ELEMENTS // (self.block_size * width))
        known = block.to(self.features.device)
        for start in range(0, len(anchors), per_chunk):
            some = slice(start, start + per_chunk)
            rows, known_rows = (
                of[some, None] * self.block_size + torch.arange(self.block_size, device=of.device)
                for of in (block, known)
            )
            features, items = self.take("features", rows, known_rows).to(anchors), rows + self.first_item
            logits = torch.einsum("ad,acd->ac", anchors[some], features)
            possible = self.take("filled", rows, known_rows) & ~(items[:, :, None] == barred[some, None, :]).any(dim=2)
            if guide is not None:
                possible &= ~guide.rows(some).of_each(items.clamp(max=self.num_items - 1))
            weights = torch.softmax(logits.masked_fill(~possible, -torch.inf), dim=1)
            drawn.append(items.gather(1, inverse_cdf(weights, uniform[some, None]))[:, 0])
        return torch.cat(drawn)

    @property
    def blocks(self) -> slice:
        """The blocks that this rank holds."""
        return distributed.rank_slice(self.num_blocks)

    @property
    def first_item(self) -> int:
        """The first item that this rank holds."""
        return self.blocks.start * self.block_size

    def _allocate(self, like: Tensor) -> None:
        num_rows = (self.blocks.stop - self.blocks.start) * self.block_size
        dtype = like.dtype if like.dtype == torch.float64 else torch.float16
        device = torch.device("cpu") if self.on_cpu else like.device
        features = torch.zeros(num_rows, like.shape[1], dtype=dtype, device=device)
        filled = torch.zeros(num_rows, dtype=torch.bool, device=device)
        if self.on_cpu:
            features, filled = pinned_for(like, features), pinned_for(like, filled)
        self.features, self.filled = features, filled

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "num_steps"] = torch.tensor(self.num_steps)
        destination[prefix + "features"] = distributed.gather(self.features)[: self.num_items]
        destination[prefix + "filled"] = distributed.gather(self.filled)[: self.num_items]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, _, missing_keys, unexpected_keys, _ = rest
        keys = [prefix + name for name in ("features", "filled", "num_steps")]
        unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
        missing_keys.extend(key for key in keys if key not in state_dict)
        if any(key not in state_dict for key in keys):
            return
        # Saved elsewhere, for instance on the CPU; used where this cache is.
        features, filled = (state_dict[key].to(self.features.device) for key in keys[:2])
        if not len(filled):
            self.features, self.filled = features.clone(), filled.clone()
        elif len(filled) != self.num_items:
            raise DualencError(
                f"{prefix}features holds {len(filled)} items in the saved state, {self.num_items} here; load it into "
                "an objective with the same num_left, num_right and views"
            )
        else:
            self._allocate(features)
            own = slice(self.first_item, self.first_item + len(self.features))
            self.features[: len(features[own])] = features[own]
            self.filled[: len(filled[own])] = filled[own]
        self.num_steps = int(state_dict[keys[2]])


class Hardest:
    """The K items with the largest logits of each anchor, of all that is added.

    Args:
        anchors: (A, D) of which there are so many, alike on all ranks.
        number: K.
    """

    def __init__(self, anchors: Tensor, number: int) -> None:
        self.number = number
        self.items = torch.full((len(anchors), number), PADDING, device=anchors.device)
        self.logits = torch.full((len(anchors), number), -torch.inf, dtype=anchors.dtype, device=anchors.device)

    def add(self, items: Tensor, logits: Tensor, block_size: int) -> None:
        """Of items (n,) with logits (A, n), in blocks of equal size; -inf is none."""
        if block_size > 1 and logits.shape[1] > self.number * block_size:
            # They lie in the blocks with the K largest maxima: far fewer entries to sort.
            blocks = logits.unflatten(1, (-1, block_size))
            best = blocks.amax(dim=2).topk(self.number, dim=1).indices
            columns = (best[:, :, None] * block_size + torch.arange(block_size, device=items.device)).flatten(1)
            logits, found = logits.gather(1, columns), items[columns]
        else:
            found = items.expand(len(logits), -1)
        self._take(torch.cat([self.logits, logits], dim=1), torch.cat([self.items, found], dim=1))

    def gather(self, correction: float) -> None:
        """Take in those of all ranks, and subtract a number from all logits."""
        size = [1] * distributed.world_size()
        logits, items = (distributed.gather(of[None], size) for of in (self.logits - correction, self.items))
        self._take(logits.transpose(0, 1).flatten(1), items.transpose(0, 1).flatten(1))

    def _take(self, logits: Tensor, items: Tensor) -> None:
        self.logits, column = logits.topk(self.number, dim=1)
        self.items = items.gather(1, column).masked_fill(self.logits == -torch.inf, PADDING)


def queries_of_all(anchors: Anchors) -> tuple[Tensor, Tensor, Judgement | None]:
    """What the anchors of all ranks ask a cache: embeddings over τ (A, D), and the items that are no negatives (A, K),
    padded with -1, or that a guide takes for positives."""
    barred = items_of(anchors.positive_ids, anchors.views)
    # Lists of ranks may differ in length.
    if distributed.is_initialized():
        width = int(distributed.all_reduce(barred.new_full((), barred.shape[1]), "max"))
        barred = nn.functional.pad(barred, (0, width - barred.shape[1]), value=PADDING)
    embeddings = distributed.gather(anchors.embeddings / anchors.temperature, anchors.sizes)
    guide = anchors.guide and anchors.guide.of_all_ranks(anchors.sizes)
    return embeddings, distributed.gather(barred, anchors.sizes), guide


def share_remembered(like: Tensor, *caches: FeatureCache) -> Tensor:
    """How many of all items of some caches have an embedding, as a share, on a tensor's device; all ranks call it
    together."""
    filled = torch.stack([cache.filled.sum().double().to(like.device) for cache in caches]).sum()
    return distributed.all_reduce(filled) / sum(cache.num_items for cache in caches)
