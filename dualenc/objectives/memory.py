"""Sharded memory bank of the latest embedding per item, and the base of two objectives.

Shapes: X directions, A anchors of this rank, G anchors of all ranks, K hidden items per anchor, N
items, n some of them, D dimension.

The ranks divide the slots, and every rank computes for the anchors of all ranks, by random numbers
that all ranks share: an embedding crosses the network only when it is drawn or averaged, and the
result does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import CommonArguments, Objective
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.item_tables import first_occurrence, write_rows

# A draw chooses a block of slots first, then a slot inside it: (G, blocks) and (G, block size)
# numbers are kept in place of (G, N).
MIN_BLOCK_SIZE = 64  # slots
MAX_BLOCKS = 2**14
PART_ENTRIES = 2**22  # largest (G, n) matrix in memory, in entries


class MemoryDraws(NamedTuple):
    """One item per anchor, drawn from its softmax over the memory."""

    keys: Tensor  # (G,) -1 if an anchor sees no item
    scores: Tensor  # (G,) s/τ with the remembered embedding; -inf if an anchor sees no item
    log_mean: Tensor  # (G,) log of the mean of exp(s/τ) over visible items; -inf if there are none


class Attention(NamedTuple):
    """The softmax of anchors over the memory."""

    items: Tensor  # (n,) items of this rank that were scored, by slot
    # (n,) softmax weight of each item, averaged over the anchors that see any item
    shares: Tensor
    mean: Tensor  # (G, D) mean embedding under each anchor's softmax; 0 if it sees no item
    log_sum: Tensor  # (G,) log of the sum of exp(s/τ) over visible items; -inf if there are none


class MemoryPart(NamedTuple):
    """A subset of this rank's rows, small enough for a (G, n) matrix."""

    items: Tensor  # (n,)
    embeddings: Tensor  # (n, D)
    shares: Tensor  # (G, n) each anchor's softmax over these rows; 0 if it sees none of them
    log_sum: Tensor  # (G,) log of the sum of exp(s/τ) over these rows; -inf if it sees none


class EmbeddingMemory(nn.Module):
    """The latest embedding of each item, divided among ranks; empty slots are never seen.

    Item k has slot k mod `num_slots`, so if there are fewer slots than items, each slot holds the
    latest item of its residue class. The *rows* of a rank are its slots, in whole blocks. A *key*
    identifies an item and optionally the pair that it came with: item = key // keys_per_item.
    Embeddings stay in double precision if they come so; otherwise they are stored in single
    precision on a CPU and in half precision on an accelerator.

    All ranks must call every method together with the same arguments, which describe the anchors of
    all ranks. The state dict holds all slots, whatever the number of ranks; `state_dict()` is
    collective.

        memory = EmbeddingMemory(num_items=1000)
        memory.write(torch.arange(8), embeddings)

    Args:
        num_items: N, the number of items.
        num_slots: number of slots; defaults to N.
        keys_per_item: number of keys per item.
    """

    keys: Tensor
    embeddings: Tensor
    counts: Tensor | None  # (N,) multiplicity of each item; None if each counts once
    num_held: Tensor  # number of items in this rank's rows, with multiplicity

    def __init__(
        self, num_items: int, num_slots: int | None = None, keys_per_item: int = 1
    ) -> None:
        super().__init__()
        self.num_items = num_items
        self.num_slots = num_items if num_slots is None else min(num_slots, num_items)
        self.has_every_slot = self.num_slots == num_items
        self.keys_per_item = keys_per_item
        self.block_size = max(MIN_BLOCK_SIZE, math.ceil(self.num_slots / MAX_BLOCKS))
        # At least one slot stays empty: `GlobalCache._pool` looks at slot `num_slots` for "no
        # item".
        self.num_blocks = math.ceil((self.num_slots + 1) / self.block_size)
        # This rank's rows are allocated by the first write, when the dimension is known.
        self.register_buffer("keys", torch.full((0,), PADDING))
        self.register_buffer("embeddings", torch.zeros(0, 0))
        self.register_buffer("counts", None, persistent=False)
        self.register_buffer("num_held", torch.zeros((), dtype=torch.float64), persistent=False)
        self.num_seen = 0
        self.num_refreshes = 0
        self.expect(num_items)

    @property
    def holds_corpus(self) -> bool:
        """True if every item has a slot and the first pass over the corpus is complete."""
        return self.has_every_slot and self.num_seen >= self.num_expected

    def expect(self, num_rows: int, counts: Tensor | None = None) -> None:
        """Set when the memory counts as full, and how often each item counts.

        Args:
            num_rows: number of batch rows after which it is full.
            counts: (N,) multiplicity of each item; None if each counts once.
        """
        self.counts = counts
        self._count_all()
        # With fewer slots than items, two passes over the slots fill nearly all of them.
        self.num_expected = num_rows if self.has_every_slot else min(num_rows, 2 * self.num_slots)

    def count(self, num_rows: int) -> bool:
        """Count rows of a batch; return True if they complete the memory for the first time."""
        before = self.num_seen
        self.num_seen += num_rows
        return before < self.num_expected <= self.num_seen

    def write(self, keys: Tensor, embeddings: Tensor) -> None:
        """Store embeddings (n, D) under keys (n,), -1 for none; the first of duplicates wins."""
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
        # A single process holds all rows; selecting them by a mask would wait for the device.
        if distributed.is_initialized():
            is_own = (rows >= 0) & (rows < len(self.keys))
            rows = rows[is_own]
            first = first[is_own]
            is_first = is_first[is_own]
        # `num_held` is updated by the difference: counting all rows again would cost O(N) per step.
        replaced = self._counts_of(self._items_at(rows))
        # Padding rewrites the present value, because selecting the items would wait for the device,
        # too.
        is_written = is_item[first]
        write_rows(self.keys, rows, keys[first], is_written)
        stored = self._counts_of(self._items_at(rows))
        added = (stored - replaced) * is_first
        self.num_held += added.sum()
        new = embeddings.detach()[first]
        write_rows(self.embeddings, rows, new, is_written[:, None])

    def due(self, share: float) -> Tensor:
        """Return (n,) items to re-encode in this step, on the CPU: a share of the corpus."""
        step = self.num_refreshes
        self.num_refreshes += 1
        # Epsilon, so that 100 steps of 1% cover the corpus despite rounding.
        start = int(step * share * self.num_items + 1e-9)
        stop = int((step + 1) * share * self.num_items + 1e-9)
        return torch.arange(start, stop) % self.num_items

    def recall(self, items: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n, D) stored embeddings of items (n,), 0 if absent; (n,) True where present."""
        rows, is_known = self._find(items)
        remembered = like.new_zeros(len(items), like.shape[-1])
        if len(self.keys):
            remembered = self._embeddings_at(rows, like) * is_known[:, None]
        # At most one rank holds an item, so the sum over ranks is its embedding.
        remembered = distributed.all_reduce(remembered)
        num_ranks = distributed.all_reduce(is_known.long())
        return remembered, num_ranks > 0

    def num_negatives(self, hidden: Tensor) -> Tensor:
        """Return (G,) the number of items, with multiplicity, that anchors see.

        Args:
            hidden: (G, K) items that an anchor does not see, padded with -1.
        """
        _, is_known = self._find(hidden)
        num_hidden = (self._counts_of(hidden) * is_known).sum(dim=1)
        return distributed.all_reduce(self.num_held - num_hidden)

    @torch.no_grad()
    def draw(self, queries: Tensor, hidden: Tensor, uniform: Tensor) -> MemoryDraws:
        """Draw one item per anchor from its softmax: first a block, then an item of the block.

        Args:
            queries: (G, D) anchors divided by τ.
            hidden: (G, K) items that an anchor does not see, padded with -1.
            uniform: (2, G) draws in [0, 1), for the block and for the item.
        """
        log_sums = self._block_log_sums(queries, hidden)  # (G, blocks of this rank)
        # Each rank has an interval of [0, 1) as long as its share of the sum, in rank order. The
        # rank whose interval contains the first draw makes the draw.
        rank_sums = _by_rank(log_sums.logsumexp(dim=1))  # (ranks, G)
        log_sum = rank_sums.logsumexp(dim=0)
        rank_shares = torch.exp(rank_sums - log_sum).nan_to_num(0.0)
        start, end, total = _own_interval(rank_shares)
        target = uniform[0] * total
        is_own = (target >= start) & (target < end)
        keys = torch.full_like(target, PADDING, dtype=torch.long)
        scores = torch.full_like(target, -torch.inf)
        if len(self.keys):
            # The position of the first draw inside this rank's interval is uniform in [0, 1) again,
            # and chooses the block.
            inside = ((target - start) / (end - start)).nan_to_num(0.0)
            block_shares = torch.softmax(log_sums, dim=1).nan_to_num(0.0)
            block = inverse_cdf(block_shares, inside)
            own_keys, own_scores = self._draw_in_block(queries, hidden, block, uniform[1])
            keys = torch.where(is_own, own_keys, keys)
            scores = torch.where(is_own, own_scores, scores)
        # At most one rank has drawn for an anchor; the others contribute the minimum.
        keys = distributed.all_reduce(keys, "max")
        scores = distributed.all_reduce(scores, "max")
        log_mean = log_sum - self.num_negatives(hidden).clamp(min=1).log()
        return MemoryDraws(keys, scores.to(queries), log_mean.to(queries))

    def _block_log_sums(self, queries: Tensor, hidden: Tensor) -> Tensor:
        """Return (G, blocks of this rank) log of the sum of exp(s/τ) per block, in double."""
        # A rank without rows contributes no blocks.
        block_sums = [queries.new_zeros(len(queries), 0)]
        for rows in self._parts(queries):
            _, _, logits = self._logits(rows, queries, hidden)
            by_block = logits.unflatten(1, (-1, self.block_size))
            block_sums.append(by_block.logsumexp(dim=2))
        return torch.cat(block_sums, dim=1).double()

    @torch.no_grad()
    def attend(self, queries: Tensor, hidden: Tensor, slots: Tensor | None = None) -> Attention:
        """Compute the softmax over the memory.

        Args:
            queries: (G, D) anchors divided by τ.
            hidden: (G, K) items that an anchor does not see, padded with -1.
            slots: (n,) ascending slots to score; defaults to all.

        Returns:
            The weights of this rank's items, and the mean of each anchor.
        """

        def weigh(rows: Tensor) -> MemoryPart:
            items, embeddings, logits = self._logits(rows, queries, hidden)
            # The softmax of a row of -inf is NaN: an anchor that sees no item.
            shares = torch.softmax(logits, dim=1).nan_to_num_(0.0)
            # The largest weight is exp(0)/Σ exp(s/τ − peak), so the log-sum costs no second pass of
            # exponents.
            log_sum = logits.amax(dim=1) - shares.amax(dim=1).log()
            log_sum = log_sum.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
            return MemoryPart(items, embeddings, shares, log_sum)

        all_rows = self._parts(queries, slots)
        # A single part is kept for the second pass. Several would not fit in memory and are
        # recomputed.
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
            mean_of_part = part.shares @ part.embeddings  # (G, D)
            items.append(part.items)
            shares.append(share_of_part / num_seeing @ part.shares)
            mean += share_of_part[:, None] * mean_of_part
        mean = distributed.all_reduce(mean)
        return Attention(torch.cat(items), torch.cat(shares), mean, log_sum)

    def _parts(self, queries: Tensor, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        """Split this rank's rows of slots (or all) into ascending parts, in whole blocks if all."""
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
        """Score ascending rows (n,) of this rank.

        Returns:
            (n,) items; (n, D) embeddings; (G, n) s/τ plus the log of each item's multiplicity, -inf
            for hidden items and empty slots.
        """
        items = self._items_at(rows)
        embeddings = self._embeddings_at(rows, queries)
        # An item that counts c times adds log c to its logit; an empty slot adds log 0 = -inf.
        log_counts = self._counts_of(items).to(queries).log()
        logits = torch.addmm(log_counts, queries, embeddings.T)
        hidden_rows = hidden % self.num_slots - self._own_slots.start
        column = torch.searchsorted(rows, hidden_rows).clamp(max=len(rows) - 1)  # (G, K)
        is_hidden = (items[column] == hidden) & (hidden != PADDING)
        # Added rather than assigned: padding may share a column with a hidden item, and would
        # unhide it.
        penalty = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(is_hidden, -torch.inf)
        logits = logits.scatter_add_(1, column, penalty)
        return items, embeddings, logits

    def _draw_in_block(
        self, queries: Tensor, hidden: Tensor, block: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw an item from each anchor's block (G,) of this rank; return (G,) keys and scores."""
        # In chunks of anchors: (g, block size, D) embeddings are gathered at a time.
        drawn_rows = []
        drawn_scores = []
        in_block = torch.arange(self.block_size, device=block.device)
        anchors_per_chunk = max(1, PART_ENTRIES // (self.block_size * queries.shape[1]))
        anchors = torch.arange(len(queries), device=queries.device)
        for chunk in anchors.split(anchors_per_chunk):
            rows = block[chunk, None] * self.block_size + in_block  # (g, n)
            items = self._items_at(rows)
            embeddings = self._embeddings_at(rows, queries)  # (g, n, D)
            scores = torch.einsum("gd,gnd->gn", queries[chunk], embeddings)
            is_hidden = (items[:, :, None] == hidden[chunk, None, :]).any(dim=2)
            log_counts = self._counts_of(items).log().to(scores)
            logits = (scores + log_counts).masked_fill(is_hidden, -torch.inf)
            shares = logits.softmax(dim=1)
            column = inverse_cdf(shares.nan_to_num(0.0), uniform[chunk])[:, None]
            drawn_rows.append(rows.gather(1, column)[:, 0])
            drawn_scores.append(scores.gather(1, column)[:, 0])
        keys = self.keys[torch.cat(drawn_rows)]
        return keys, torch.cat(drawn_scores).double()

    def _count_all(self) -> None:
        """Count the items of this rank; `write` updates the number from then on."""
        items = self._items_at(slice(None))
        self.num_held.copy_(self._counts_of(items).sum())

    def _counts_of(self, items: Tensor) -> Tensor:
        """Return (…) the multiplicity of items (…); 0 for -1, an empty slot."""
        is_item = (items != PADDING).double()
        if self.counts is None:
            return is_item
        return is_item * self.counts[items.clamp(min=0)]

    def _items_at(self, rows: Tensor | slice) -> Tensor:
        """Return (…) items in rows (…) of this rank; -1 if empty, which floor division keeps."""
        keys = self.keys[rows]
        return keys if self.keys_per_item == 1 else keys // self.keys_per_item

    def _embeddings_at(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return (…, D) the embeddings in rows (…) of this rank."""
        # index_select is several times as fast as indexing.
        selected = self.embeddings.index_select(0, rows.flatten())
        return selected.view(*rows.shape, self.embeddings.shape[1]).to(like)

    def _find(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return (…) rows of items (…), any valid row if absent, and (…) True where present."""
        rows = items % self.num_slots - self._own_slots.start
        if not len(self.keys):
            return rows, torch.zeros_like(items, dtype=torch.bool)
        inside = rows.clamp(0, len(self.keys) - 1)
        return inside, (self._items_at(inside) == items) & (rows == inside)

    @property
    def _own_slots(self) -> slice:
        """Slots of this rank: whole blocks, the last of which may extend beyond `num_slots`."""
        blocks = distributed.rank_slice(self.num_blocks)
        return slice(blocks.start * self.block_size, blocks.stop * self.block_size)

    def get_extra_state(self) -> Tensor:
        """Return the numbers of rows seen and refreshes made, for the state dict."""
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
    """Base of the objectives with a memory bank of all items.

    The memory also gives the value of the loss, so `reports_loss` is False until as many pairs were
    seen as the data has.

    Args:
        **common: see `Objective`. num_left is required (and num_right, if it differs), and `encode`
            in `forward`.
    """

    memories: Sequence[EmbeddingMemory]  # for each direction's candidates

    needs_num_left = True
    needs_encode = True
    estimates_partition = True

    def __init__(self, **common: Unpack[CommonArguments]) -> None:
        super().__init__(**common)
        sizes = [self.corpus.num_items(direction) for direction in self.directions]
        self.memories = nn.ModuleList(map(EmbeddingMemory, sizes))  # type: ignore[assignment]
        self.draws = SharedRandom(self.seed)

    @property
    def reports_loss(self) -> bool:
        """True if the memories hold the whole corpus."""
        return all(memory.holds_corpus for memory in self.memories)

    def remember(self, anchors: Anchors, items: Tensor, embeddings: Tensor) -> None:
        """Write items (X, n), -1 for none, and embeddings (X, n, D); the batch comes first."""
        for x, direction in enumerate(anchors.directions):
            self.memories[direction].write(items[x], embeddings[x])
            # Draws and mined negatives do not count: the batches alone pass through the corpus.
            self.memories[direction].count(anchors.num_batch)


def draw_per_anchor(
    memories: Sequence[EmbeddingMemory], anchors: Anchors, uniform: Tensor
) -> MemoryDraws:
    """Draw from the memories for this rank's anchors; all tensors of the result are (X, A).

    Every rank draws for the global batch with the same uniform (2, directions, G), so that the
    draws do not depend on the number of ranks.
    """
    queries = anchors.gather(anchors.embeddings) / anchors.temperature  # (X, G, D)
    hidden = anchors.gather_lists(anchors.hidden_items)  # (X, G, K)
    draws = []
    for x, direction in enumerate(anchors.directions):
        memory = memories[direction]
        draw = memory.draw(queries[x], hidden[x], uniform[:, direction])
        draws.append(draw)
    by_field = [torch.stack(values) for values in zip(*draws, strict=True)]  # (X, G) each
    return MemoryDraws(*(values[:, anchors.batch_rows] for values in by_field))


def sample(attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
    """Draw (num_draws,) ascending items, the same on all ranks, by systematic sampling.

    Item z is drawn num_draws·share_z times, rounded up or down. A single number, uniform (1,) in
    [0, 1), places all draws at equal distances along the cumulative shares, which has less variance
    than independent draws. Each rank draws where its shares are, so that any number of ranks makes
    the same draws. All draws are -1 if all shares are 0.
    """
    # A dummy item of share 0 comes first, since this rank may have scored nothing.
    items = pad(attention.items, (1, 0), value=PADDING)
    cumulative = pad(attention.shares, (1, 0)).cumsum(dim=0, dtype=torch.float64)
    start, end, total = _own_interval(_by_rank(cumulative[-1]))
    steps = torch.arange(num_draws, device=uniform.device) + uniform.double()
    target = steps * (total / max(num_draws, 1))
    is_own = (target >= start) & (target < end)
    column = torch.searchsorted(cumulative, target - start, right=True)
    drawn = items[column.clamp(max=len(items) - 1)]
    return distributed.all_reduce(drawn.where(is_own, PADDING), "max")


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a column from each row of weights (…, C) ≥ 0; return (…) columns.

    Weights need not sum to 1, and rows of zeros give the last column. The draws, uniform (…) in [0,
    1), are scaled in double precision: no product with the sum then reaches a column of weight 0.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[..., None] * cumulative[..., -1:]
    column = torch.searchsorted(cumulative, target, right=True)[..., 0]
    return column.clamp(max=weights.shape[-1] - 1)


def _by_rank(value: Tensor) -> Tensor:
    """Return (ranks, …) the values (…) of all ranks."""
    return distributed.gather(value[None], [1] * distributed.world_size())


def _own_interval(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the cumulative sum of values (ranks, …) by rank.

    Returns:
        (…) start and (…) end of this rank's interval, and (…) the total.
    """
    ends = values.cumsum(dim=0)
    bounds = torch.cat([torch.zeros_like(ends[:1]), ends])
    rank = distributed.rank()
    start, end = bounds[rank : rank + 2]
    return start, end, ends[-1]
