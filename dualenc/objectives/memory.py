"""The latest embeddings of a corpus, what anchors see in them, and the base of GlobalCache and
NegativeCache.

Shapes: X directions, A anchors of this rank, G of all ranks, K hidden items of each, N items, n of
them, D dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import Objective
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.item_tables import first_occurrence, write_rows

MIN_BLOCK_SIZE = 64  # slots
MAX_BLOCKS = 2**14
PART_ENTRIES = 2**22  # of a (G, n) matrix that exist at a time


class MemoryDraws(NamedTuple):
    """One item per anchor, drawn from its softmax over the memory."""

    keys: Tensor  # (G,) -1 where an anchor sees nothing
    scores: Tensor  # (G,) s/τ with the remembered embedding; -inf where an anchor sees nothing
    log_mean: Tensor  # (G,) log of the mean of exp(s/τ) over what an anchor sees; -inf for nothing


class Attention(NamedTuple):
    """The anchors' softmax over the memory."""

    items: Tensor  # (n,) those that this rank holds and looked at, by slot
    shares: Tensor  # (n,) each item's share of their softmax, averaged over the anchors that see anything
    mean: Tensor  # (G, D) each anchor's mean of what it sees; 0 for nothing
    log_sum: Tensor  # (G,) log of the sum of exp(s/τ) over what an anchor sees; -inf for nothing


class MemoryPart(NamedTuple):
    """Some of this rank's rows, few enough for a (G, n) matrix."""

    items: Tensor  # (n,)
    embeddings: Tensor  # (n, D)
    shares: Tensor  # (G, n) each anchor's softmax over these rows; 0 where it sees nothing
    log_sum: Tensor  # (G,) log of the sum of exp(s/τ) over these rows; -inf for nothing


class EmbeddingMemory(nn.Module):
    """The latest embedding of each item, divided among ranks; empty slots are never seen.

    Item k has slot k mod `num_slots`: with fewer slots than items, each holds the latest of its
    class. A rank's *rows* are its slots, whole blocks of them. A *key* names an item, and where
    wanted the pair that it came with: item = key // keys_per_item. Embeddings are in double
    precision if they come so, else in single precision on a CPU and in half precision on an
    accelerator.

    Ranks call every method together, with the same arguments: anchors are those of all ranks. The
    state dict holds all slots, whatever the number of ranks; `state_dict()` is collective.

    Args:
        num_items: N.
        num_slots: by default N.
        keys_per_item: see above.
    """

    keys: Tensor
    embeddings: Tensor
    counts: Tensor | None  # (N,) how often each item counts; None: once
    num_held: Tensor  # items of this rank, each as often as it counts

    def __init__(
        self, num_items: int, num_slots: int | None = None, keys_per_item: int = 1
    ) -> None:
        super().__init__()
        self.num_items = num_items
        self.num_slots = num_items if num_slots is None else min(num_slots, num_items)
        self.has_every_slot = self.num_slots == num_items
        self.keys_per_item = keys_per_item
        self.block_size = max(MIN_BLOCK_SIZE, math.ceil(self.num_slots / MAX_BLOCKS))
        # At least one slot stays empty: slot `num_slots` belongs to no item.
        self.num_blocks = math.ceil((self.num_slots + 1) / self.block_size)
        # This rank's rows, allocated with the first write, when the dimension is known.
        self.register_buffer("keys", torch.full((0,), PADDING))
        self.register_buffer("embeddings", torch.zeros(0, 0))
        self.register_buffer("counts", None, persistent=False)
        self.register_buffer("num_held", torch.zeros((), dtype=torch.float64), persistent=False)
        self.num_seen = 0
        self.num_refreshes = 0
        self.expect(num_items)

    @property
    def holds_corpus(self) -> bool:
        """Whether every item has a slot, and the first pass over all of them is done."""
        return self.has_every_slot and self.num_seen >= self.num_expected

    def expect(self, num_rows: int, counts: Tensor | None = None) -> None:
        """Set after how many rows of batches it is complete, and how often each item counts (N,),
        by default once."""
        self.counts = counts
        self._count_all()
        self.num_expected = num_rows if self.has_every_slot else min(num_rows, 2 * self.num_slots)

    def count(self, num_rows: int) -> bool:
        """Count rows of a batch; whether they complete the memory for the first time."""
        before = self.num_seen
        self.num_seen += num_rows
        return before < self.num_expected <= self.num_seen

    def write(self, keys: Tensor, embeddings: Tensor) -> None:
        """Remember embeddings (n, D) of keys (n,), -1 for none; of a slot's duplicates the first
        counts."""
        own = self._own_slots
        if self.embeddings.shape[1] == 0:
            self.keys = keys.new_full((own.stop - own.start,), PADDING)
            self.embeddings = embeddings.new_zeros(len(self.keys), embeddings.shape[1])
            if keys.device.type != "cpu" and embeddings.dtype != torch.float64:
                self.embeddings = self.embeddings.half()
        is_item = keys != PADDING
        slots = keys // self.keys_per_item % self.num_slots
        first = first_occurrence(slots, preferred=is_item)
        is_first = first == torch.arange(len(keys), device=keys.device)
        rows = slots - own.start
        # A single process holds all rows, and selecting them would wait for the device.
        if distributed.is_initialized():
            is_own = (rows >= 0) & (rows < len(self.keys))
            rows = rows[is_own]
            first = first[is_own]
            is_first = is_first[is_own]
        replaced = self._counts_of(self._items_at(rows))
        # Selecting the items would wait, too: padding writes what is there.
        write_rows(self.keys, rows, keys[first], is_item[first])
        self.num_held += ((self._counts_of(self._items_at(rows)) - replaced) * is_first).sum()
        write_rows(self.embeddings, rows, embeddings.detach()[first], is_item[first, None])

    def due(self, share: float) -> Tensor:
        """(n,) the items to encode anew in this step, on the CPU: a share of all per step, in
        turn."""
        step = self.num_refreshes
        self.num_refreshes += 1
        # Epsilon, so that 100 steps of 1 % cover the corpus despite rounding.
        start = int(step * share * self.num_items + 1e-9)
        stop = int((step + 1) * share * self.num_items + 1e-9)
        return torch.arange(start, stop) % self.num_items

    def recall(self, items: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) remembered embeddings of items (n,), 0 where none; (n,) whether there is one."""
        rows, is_known = self._find(items)
        remembered = like.new_zeros(len(items), like.shape[-1])
        if len(self.keys):
            remembered = self._embeddings_at(rows, like) * is_known[:, None]
        # One rank at most knows an item.
        return distributed.all_reduce(remembered), distributed.all_reduce(is_known.long()) > 0

    def num_negatives(self, hidden: Tensor) -> Tensor:
        """(G,) remembered items that anchors see, each as often as it counts; `hidden` (G, K) see
        `draw`."""
        _, is_known = self._find(hidden)
        return distributed.all_reduce(
            self.num_held - (self._counts_of(hidden) * is_known).sum(dim=1)
        )

    @torch.no_grad()
    def draw(self, queries: Tensor, hidden: Tensor, uniform: Tensor) -> MemoryDraws:
        """Draw an item per anchor from its softmax: first a block of items, then one of the block.

        Args:
            queries: (G, D) anchors over τ.
            hidden: (G, K) items that an anchor does not see, padded with -1.
            uniform: (2, G) draws in [0, 1).
        """
        block_sums = [queries.new_zeros(len(queries), 0)]
        for rows in self._parts(queries):
            _, _, logits = self._logits(rows, queries, hidden)
            by_block = logits.unflatten(1, (-1, self.block_size))
            block_sums.append(by_block.logsumexp(dim=2))
        log_sums = torch.cat(block_sums, dim=1).double()  # (G, blocks of this rank)
        rank_sums = _by_rank(log_sums.logsumexp(dim=1))  # (ranks, G)
        log_sum = rank_sums.logsumexp(dim=0)
        rank_shares = torch.exp(rank_sums - log_sum).nan_to_num(0.0)
        start, end, total = _own_interval(rank_shares)
        target = uniform[0] * total
        is_own = (target >= start) & (target < end)
        keys = torch.full_like(target, PADDING, dtype=torch.long)
        scores = torch.full_like(target, -torch.inf)
        if len(self.keys):
            # What is left of the first draw places it among this rank's blocks.
            inside = ((target - start) / (end - start)).nan_to_num(0.0)
            block_shares = torch.softmax(log_sums, dim=1).nan_to_num(0.0)
            block = inverse_cdf(block_shares, inside)
            own_keys, own_scores = self._draw_in_block(queries, hidden, block, uniform[1])
            keys = torch.where(is_own, own_keys, keys)
            scores = torch.where(is_own, own_scores, scores)
        # One rank at most has drawn for an anchor; the others bring less than any key or score.
        keys = distributed.all_reduce(keys, "max")
        scores = distributed.all_reduce(scores, "max")
        log_mean = log_sum - self.num_negatives(hidden).clamp(min=1).log()
        return MemoryDraws(keys, scores.to(queries), log_mean.to(queries))

    @torch.no_grad()
    def attend(self, queries: Tensor, hidden: Tensor, slots: Tensor | None = None) -> Attention:
        """The anchors' softmax: the shares of this rank's items, and the mean that each anchor
        sees.

        Args:
            queries, hidden: see `draw`.
            slots: (n,) ascending slots to look at; by default all.
        """

        def weigh(rows: Tensor) -> MemoryPart:
            items, embeddings, logits = self._logits(rows, queries, hidden)
            # NaN for an anchor that sees nothing.
            shares = torch.softmax(logits, dim=1).nan_to_num_(0.0)
            # The largest share is 1/Σ exp(s/τ − peak): no second pass over all exponents.
            log_sum = logits.amax(dim=1) - shares.amax(dim=1).log()
            log_sum = log_sum.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
            return MemoryPart(items, embeddings, shares, log_sum)

        all_rows = self._parts(queries, slots)
        # A single part is kept for the second pass; several would not fit, and are computed again.
        single = [weigh(all_rows[0])] if len(all_rows) == 1 else None
        log_sum = queries.new_full((len(queries),), -torch.inf)
        for part in single or map(weigh, all_rows):
            log_sum = torch.logaddexp(log_sum, part.log_sum)
        log_sum = _by_rank(log_sum).logsumexp(dim=0)

        sees = log_sum.isfinite()
        num_seeing = sees.sum().clamp(min=1)
        items = [hidden.new_zeros(0)]
        shares = [queries.new_zeros(0)]
        mean = torch.zeros_like(queries)
        for part in single or map(weigh, all_rows):
            share_of_part = torch.exp(part.log_sum - log_sum).masked_fill(~sees, 0.0)  # (G,)
            items.append(part.items)
            shares.append(share_of_part / num_seeing @ part.shares)
            mean += share_of_part[:, None] * (part.shares @ part.embeddings)
        mean = distributed.all_reduce(mean)
        return Attention(torch.cat(items), torch.cat(shares), mean, log_sum)

    def _parts(self, queries: Tensor, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        """Ascending rows (n,) of this rank, of slots or all, in parts; those of all rows are whole
        blocks."""
        if slots is None or not len(self.keys):
            rows = torch.arange(len(self.keys), device=queries.device)
        else:
            rows = slots - self._own_slots.start
            if distributed.is_initialized():
                rows = rows[(rows >= 0) & (rows < len(self.keys))]
        if not len(rows):
            return ()
        entries_per_block = max(1, len(queries) * self.block_size)
        num_blocks = max(1, PART_ENTRIES // entries_per_block)
        return rows.split(num_blocks * self.block_size)

    def _logits(
        self, rows: Tensor, queries: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) items and (n, D) embeddings of ascending rows, and (G, n) s/τ plus the log of each
        item's count, -inf for what is not seen."""
        items = self._items_at(rows)
        embeddings = self._embeddings_at(rows, queries)
        log_counts = self._counts_of(items).to(queries).log()
        logits = torch.addmm(log_counts, queries, embeddings.T)
        hidden_rows = hidden % self.num_slots - self._own_slots.start
        column = torch.searchsorted(rows, hidden_rows).clamp(max=len(rows) - 1)  # (G, K)
        is_hidden = (items[column] == hidden) & (hidden != PADDING)
        # Added, not written: a column may be that of a hidden item and of padding at once.
        penalty = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(is_hidden, -torch.inf)
        return items, embeddings, logits.scatter_add_(1, column, penalty)

    def _draw_in_block(
        self, queries: Tensor, hidden: Tensor, block: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(G,) keys and (G,) scores of an item drawn from each anchor's block (G,) of this rank."""
        drawn_rows = []
        drawn_scores = []
        in_block = torch.arange(self.block_size, device=block.device)
        anchors_per_chunk = max(1, PART_ENTRIES // (self.block_size * queries.shape[1]))
        for chunk in torch.arange(len(queries), device=queries.device).split(anchors_per_chunk):
            rows = block[chunk, None] * self.block_size + in_block  # (g, n)
            items = self._items_at(rows)
            scores = torch.einsum("gd,gnd->gn", queries[chunk], self._embeddings_at(rows, queries))
            is_hidden = (items[:, :, None] == hidden[chunk, None, :]).any(dim=2)
            logits = scores + self._counts_of(items).log().to(scores)
            shares = logits.masked_fill(is_hidden, -torch.inf).softmax(dim=1)
            column = inverse_cdf(shares.nan_to_num(0.0), uniform[chunk])[:, None]
            drawn_rows.append(rows.gather(1, column)[:, 0])
            drawn_scores.append(scores.gather(1, column)[:, 0])
        return self.keys[torch.cat(drawn_rows)], torch.cat(drawn_scores).double()

    def _count_all(self) -> None:
        """Count what this rank holds; `write` keeps count from there on."""
        self.num_held.copy_(self._counts_of(self._items_at(slice(None))).sum())

    def _counts_of(self, items: Tensor) -> Tensor:
        """(…) how often items (…) count; 0 for -1, an empty slot."""
        is_item = (items != PADDING).double()
        return is_item if self.counts is None else is_item * self.counts[items.clamp(min=0)]

    def _items_at(self, rows: Tensor | slice) -> Tensor:
        """(…) the items in rows (…) of this rank; -1 for an empty one, which floor division
        keeps."""
        keys = self.keys[rows]
        return keys if self.keys_per_item == 1 else keys // self.keys_per_item

    def _embeddings_at(self, rows: Tensor, like: Tensor) -> Tensor:
        """(…, D) the embeddings in rows (…) of this rank."""
        # Several times as fast as indexing with them.
        selected = self.embeddings.index_select(0, rows.flatten())
        return selected.view(*rows.shape, self.embeddings.shape[1]).to(like)

    def _find(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """(…) rows of items (…), any row where this rank has none; (…) whether it has one."""
        rows = items % self.num_slots - self._own_slots.start
        if not len(self.keys):
            return rows, torch.zeros_like(items, dtype=torch.bool)
        inside = rows.clamp(0, len(self.keys) - 1)
        return inside, (self._items_at(inside) == items) & (rows == inside)

    @property
    def _own_slots(self) -> slice:
        """The slots of this rank: whole blocks, the last of which may go beyond `num_slots`."""
        blocks = distributed.rank_slice(self.num_blocks)
        return slice(blocks.start * self.block_size, blocks.stop * self.block_size)

    def get_extra_state(self) -> Tensor:
        """Rows seen and refreshes made, for the state dict."""
        return torch.tensor([self.num_seen, self.num_refreshes])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        self.num_seen, self.num_refreshes = state.long().tolist()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("keys", "embeddings"):
            destination[prefix + name] = distributed.gather(getattr(self, name))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("keys", "embeddings"):
            if prefix + name in state_dict:
                saved = state_dict[prefix + name]
                if len(saved) not in (0, self.num_blocks * self.block_size):
                    rest[-1].append(f"size mismatch for {prefix}{name}: {len(saved)} slots")
                own = saved[self._own_slots]
                setattr(self, name, torch.zeros_like(own, device=self.keys.device))
                state_dict[prefix + name] = own
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._count_all()


class MemoryObjective(Objective):
    """Base of the objectives that remember the latest embedding of every item, from which the value
    of the loss is taken; `reports_loss` is False until as many pairs were seen as there are.

    Args:
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    memories: Sequence[EmbeddingMemory]  # of each direction's candidates

    needs_num_left = True
    needs_encode = True
    estimates_partition = True

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        sizes = [self.corpus.num_items(direction) for direction in self.directions]
        self.memories = nn.ModuleList(map(EmbeddingMemory, sizes))  # type: ignore[assignment]
        self.draws = SharedRandom(self.seed)

    @property
    def reports_loss(self) -> bool:
        return all(memory.holds_corpus for memory in self.memories)

    def remember(self, anchors: Anchors, items: Tensor, embeddings: Tensor) -> None:
        """Write items (X, n) and their embeddings (X, n, D), the batch's first; -1 for none."""
        for x, direction in enumerate(anchors.directions):
            self.memories[direction].write(items[x], embeddings[x])
            # The rest does not count: batches alone pass through the corpus.
            self.memories[direction].count(anchors.num_batch)


def draw_per_anchor(
    memories: Sequence[EmbeddingMemory], anchors: Anchors, uniform: Tensor
) -> MemoryDraws:
    """`EmbeddingMemory.draw` for this rank's anchors, all (X, A), from the memories of their
    directions.

    Every rank draws for the global batch, by uniform (2, directions, G), so that any number of
    ranks draws the same.
    """
    queries = anchors.gather(anchors.embeddings) / anchors.temperature  # (X, G, D)
    hidden = anchors.gather_lists(anchors.hidden_items)  # (X, G, K)
    draws = []
    for x, direction in enumerate(anchors.directions):
        draws.append(memories[direction].draw(queries[x], hidden[x], uniform[:, direction]))
    return MemoryDraws(
        *(torch.stack(values)[:, anchors.batch_rows] for values in zip(*draws, strict=True))
    )


def sample(attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
    """(num_draws,) ascending items, the same on all ranks; item z is drawn num_draws·share_z times,
    rounded up or down.

    One number, uniform (1,) in [0, 1), places all draws at equal distances along the cumulative
    shares (systematic sampling); all are -1 where all shares are 0. Each rank draws where its
    shares are, so that any number of ranks makes the same draws.
    """
    # A first item of share 0, since a rank may have looked at nothing.
    items = pad(attention.items, (1, 0), value=PADDING)
    cumulative = pad(attention.shares, (1, 0)).cumsum(dim=0, dtype=torch.float64)
    start, end, total = _own_interval(_by_rank(cumulative[-1]))
    steps = torch.arange(num_draws, device=uniform.device) + uniform.double()
    target = steps * (total / max(num_draws, 1))
    is_own = (target >= start) & (target < end)
    column = torch.searchsorted(cumulative, target - start, right=True).clamp(max=len(items) - 1)
    return distributed.all_reduce(items[column].where(is_own, PADDING), "max")


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(…) a column drawn from each row of weights (…, C) ≥ 0, which need not sum to 1; the last for
    rows of zeros. By draws (…) in [0, 1), in double precision: no product with the sum reaches a
    column of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[..., None] * cumulative[..., -1:]
    column = torch.searchsorted(cumulative, target, right=True)[..., 0]
    return column.clamp(max=weights.shape[-1] - 1)


def _by_rank(value: Tensor) -> Tensor:
    """(ranks, …) every rank's value (…)."""
    return distributed.gather(value[None], [1] * distributed.world_size())


def _own_interval(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(…) where this rank's interval of the cumulative sum of values (ranks, …) starts and ends,
    and (…) their sum."""
    ends = values.cumsum(dim=0)
    bounds = torch.cat([torch.zeros_like(ends[:1]), ends])
    return bounds[distributed.rank()], bounds[distributed.rank() + 1], ends[-1]
