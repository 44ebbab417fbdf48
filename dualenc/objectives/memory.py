"""EmbeddingMemory: the latest embeddings of a corpus, and what anchors see in them.

Shapes: G anchors of all ranks of one direction, K hidden items of each, N items, n of them, D dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.objectives.anchors import PADDING
from dualenc.objectives.tables import first_occurrence

MAX_BLOCKS = 2**14
RUN_ENTRIES = 2**22
"""Entries of a (G, n) matrix that exist at a time."""


class Draws(NamedTuple):
    """One item per anchor, drawn from its softmax over the memory.

    Attributes:
        keys: (G,) -1 where an anchor sees nothing.
        scores: (G,) s/τ with the remembered embedding; -inf where an anchor sees nothing.
        log_sum: (G,) log of the sum of exp(s/τ) over what an anchor sees; -inf for nothing.
    """

    keys: Tensor
    scores: Tensor
    log_sum: Tensor


class Attention(NamedTuple):
    """The anchors' softmax over the memory.

    Attributes:
        items: (n,) the items that this rank holds and looked at, by slot.
        shares: (n,) the mean over all anchors of each item's share of their softmax; over all ranks they sum to 1, or
            to 0 where no anchor sees anything.
        mean: (G, D) each anchor's mean of what it sees; 0 for nothing.
        log_sum: (G,) see `Draws`.
        hardest: (G, k) the items most similar to each anchor, padded with -1.
    """

    items: Tensor
    shares: Tensor
    mean: Tensor
    log_sum: Tensor
    hardest: Tensor


class Run(NamedTuple):
    """A part of this rank's rows, small enough for a (G, n) matrix.

    Attributes:
        items: (n,).
        embeddings: (n, D).
        shares: (G, n) each anchor's softmax over these rows; 0 where it sees nothing.
        log_sum: (G,) of these rows, see `Draws`.
        hardest: (G, k, 2) the items most similar to each anchor, and their s/τ.
    """

    items: Tensor
    embeddings: Tensor
    shares: Tensor
    log_sum: Tensor
    hardest: Tensor


class EmbeddingMemory(nn.Module):
    """The latest embedding of each item, divided among ranks; empty slots are never seen.

    Item k has slot k mod `num_slots`: with fewer slots than items, each holds the latest of its class. A rank's *rows*
    are its slots, counted from its first. A *key* names an item, and where wanted the pair that it came with: item =
    key // keys_per_item.

    Embeddings are in half precision, which turns them by 2e-4 rad, less than a step of training does; on a CPU in
    single precision, which it multiplies without a copy; in double precision if they come so.

    The state dict holds all slots, whatever the number of ranks: `state_dict()` is collective.

    Args:
        num_items: N.
        num_slots: by default N.
        keys_per_item: see above.
    """

    keys: Tensor
    embeddings: Tensor

    def __init__(
        self,
        num_items: int,
        num_slots: int | None = None,
        keys_per_item: int = 1,
    ) -> None:
        super().__init__()
        self.num_items = num_items
        self.num_slots = num_items if num_slots is None else min(num_slots, num_items)
        self.keys_per_item = keys_per_item
        self.block_size = max(64, -(-self.num_slots // MAX_BLOCKS))
        self.num_blocks = -(-self.num_slots // self.block_size)
        self.stride = _stride(self.num_slots)
        # Allocated with the first write, when the dimension is known.
        self.register_buffer("keys", torch.full((0,), PADDING), persistent=False)
        self.register_buffer("embeddings", torch.zeros(0, 0), persistent=False)
        self.num_seen = 0
        self.num_refreshes = 0
        self.expect(num_items)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.embeddings.shape[1] == 0

    @property
    def has_every_slot(self) -> bool:
        """Whether every item has a slot of its own."""
        return self.num_slots == self.num_items

    @property
    def holds_corpus(self) -> bool:
        """Whether every item has a slot, and the first pass over all of them is done."""
        return self.has_every_slot and self.num_seen >= self.num_expected

    def expect(self, num_rows: int) -> None:
        """Set how many rows the batches of an epoch bring: then, or at twice the slots of a sample, it is complete."""
        self.num_expected = num_rows
        if self.num_slots < self.num_items:
            self.num_expected = min(num_rows, 2 * self.num_slots)

    def count(self, num_rows: int) -> bool:
        """Count rows of a batch; whether they complete the memory for the first time."""
        before = self.num_seen
        self.num_seen += num_rows
        return before < self.num_expected <= self.num_seen

    def write(self, keys: Tensor, embeddings: Tensor) -> None:
        """Remember embeddings (n, D) of keys (n,), the same on every rank; of a slot's duplicates the first counts."""
        if self.is_empty:
            self._allocate(embeddings)
        slots = keys // self.keys_per_item % self.num_slots
        first = first_occurrence(slots)
        keys = keys[first]
        embeddings = embeddings.detach()[first]
        rows = slots[first] - self._own_slots.start
        # A single process holds all rows, and selecting them would wait for the device.
        if distributed.is_initialized():
            is_own = (rows >= 0) & (rows < len(self.keys))
            rows = rows[is_own]
            keys = keys[is_own]
            embeddings = embeddings[is_own]
        self.keys[rows] = keys
        self.embeddings[rows] = embeddings.to(self.embeddings.dtype)

    def due(self, share: float) -> Tensor:
        """(n,) the items to encode anew in this step, on the CPU: a share of all per step, in turn."""
        step = self.num_refreshes
        self.num_refreshes += 1
        # The small number makes up for rounding: a hundred hundredths are the whole corpus.
        start = int(step * share * self.num_items + 1e-9)
        stop = int((step + 1) * share * self.num_items + 1e-9)
        return torch.arange(start, stop) % self.num_items

    def recall(self, items: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) remembered embeddings of items (n,), the same on every rank, 0 where none; (n,) whether there is
        one."""
        found = like.new_zeros(len(items), like.shape[-1])
        rows, is_known = self._find(items)
        if len(self.keys):
            found = self._embeddings_at(rows, like) * is_known[:, None]
        return distributed.all_reduce(found), distributed.all_reduce(is_known.long()) > 0

    def scattered(self, blocks: Tensor) -> Tensor:
        """(n,) slots in blocks (k,) of a fixed permutation, -1 beyond the last: slots of one block are far apart, since
        neighbouring ids are often of one topic."""
        places = blocks[:, None] * self.block_size + torch.arange(self.block_size, device=blocks.device)
        return torch.where(places < self.num_slots, places * self.stride % self.num_slots, PADDING).flatten()

    def num_remembered(self) -> Tensor:
        """Scalar: items that have an embedding; all ranks ask together."""
        return distributed.all_reduce((self.keys != PADDING).sum().double())

    def num_negatives(self, hidden: Tensor, counts: Tensor | None = None) -> Tensor:
        """(G,) remembered items that anchors see, each as often as counts (N,) say; `hidden` (G, K) see `draw`."""
        _, is_known = self._find(hidden)
        total = _counts_of(self.keys // self.keys_per_item, counts).sum()
        num_hidden = (_counts_of(hidden, counts) * is_known).sum(dim=1)
        return distributed.all_reduce((total - num_hidden).double())

    @torch.no_grad()
    def draw(self, queries: Tensor, hidden: Tensor, uniform: Tensor, counts: Tensor | None = None) -> Draws:
        """Draw an item per anchor from its softmax: first a block of items, then one of the block.

        Args:
            queries: (G, D) anchors over τ, the same on every rank.
            hidden: (G, K) items that an anchor does not see, padded with -1.
            uniform: (2, G) draws in [0, 1).
            counts: (N,) how often each item counts; by default once.
        """
        block_sums = [queries.new_full((len(queries), 0), -torch.inf)]
        for rows in self._split_rows(queries):
            _, _, logits = self._logits(rows, queries, hidden, counts)
            by_block = logits.unflatten(1, (-1, self.block_size))
            block_sums.append(by_block.logsumexp(dim=2))
        own_sums = torch.cat(block_sums, dim=1).double()  # (G, blocks of this rank)
        rank_sums = _by_rank(own_sums.logsumexp(dim=1))  # (ranks, G)
        log_sum = rank_sums.logsumexp(dim=0)
        rank_shares = torch.exp(rank_sums - log_sum).nan_to_num(0.0)
        start, end = _rank_bounds(rank_shares)
        target = uniform[0] * rank_shares.cumsum(dim=0)[-1]
        is_own = (target >= start) & (target < end)

        keys = torch.full_like(is_own, PADDING, dtype=torch.long)
        scores = torch.full_like(log_sum, -torch.inf)
        if own_sums.shape[1]:
            # What is left of the first draw places it among this rank's blocks.
            inside = (target - start) / (end - start)
            block_shares = torch.softmax(own_sums, dim=1).nan_to_num(0.0)
            block = inverse_cdf(block_shares, inside.nan_to_num(0.0))
            own_keys, own_scores = self._draw_in_block(queries, hidden, block, uniform[1], counts)
            keys = torch.where(is_own, own_keys, keys)
            scores = torch.where(is_own, own_scores, scores)
        # One rank has drawn for an anchor; the others bring less than any key or score.
        keys = distributed.all_reduce(keys, "max")
        scores = distributed.all_reduce(scores, "max")
        return Draws(keys, scores.to(queries), log_sum.to(queries))

    @torch.no_grad()
    def attend(
        self,
        queries: Tensor,
        hidden: Tensor,
        counts: Tensor | None = None,
        slots: Tensor | None = None,
        log_weights: Tensor | None = None,
        num_hardest: int = 0,
    ) -> Attention:
        """The anchors' softmax: the shares of items, and the mean that each anchor sees.

        Args:
            queries, hidden, counts: see `draw`.
            slots: (n,) ascending slots to look at, the same on every rank; by default all.
            log_weights: (n,) log of how many slots each of them stands for; by default 0.
            num_hardest: how many of the most similar items to return.
        """

        def weigh(rows: Tensor) -> Run:
            items, embeddings, logits = self._logits(rows, queries, hidden, counts)
            # Before weights come in: an item is no harder for standing for others.
            hardest = _hardest(items, logits, num_hardest)
            if slots is not None and log_weights is not None:
                # Rows of this rank are neighbours in `slots`, which are ascending.
                first = torch.searchsorted(slots, rows[:1] + self._own_slots.start)
                logits += log_weights[first + torch.arange(len(rows), device=rows.device)]
            # NaN for an anchor that sees nothing.
            shares = torch.softmax(logits, dim=1).nan_to_num_(0.0)
            # The largest share is 1/Σ exp(s/τ − peak): no second pass over all exponents.
            log_sum = logits.amax(dim=1) - shares.amax(dim=1).log()
            return Run(items, embeddings, shares, log_sum.nan_to_num(nan=-torch.inf, posinf=-torch.inf), hardest)

        parts = self._split_rows(queries, slots)
        # A single run is kept for the second pass; several would not fit, and are computed again.
        kept = [weigh(rows) for rows in parts] if len(parts) == 1 else None

        log_sum = queries.new_full((len(queries),), -torch.inf)
        hardest = [queries.new_zeros(len(queries), 0, 2, dtype=torch.float64)]
        for run in kept or map(weigh, parts):
            log_sum = torch.logaddexp(log_sum, run.log_sum)
            hardest.append(run.hardest)
        log_sum = _by_rank(log_sum).logsumexp(dim=0)

        sees = log_sum.isfinite()
        num_seeing = sees.sum().clamp(min=1)
        items = [hidden.new_zeros(0)]
        shares = [queries.new_zeros(0)]
        mean = torch.zeros_like(queries)
        for run in kept or map(weigh, parts):
            share_of_run = torch.exp(run.log_sum - log_sum).masked_fill(~sees, 0.0)  # (G,)
            items.append(run.items)
            shares.append(share_of_run / num_seeing @ run.shares)
            mean += share_of_run[:, None] * (run.shares @ run.embeddings)
        mean = distributed.all_reduce(mean)
        hardest_items = _hardest_of_all(torch.cat(hardest, dim=1), num_hardest)
        return Attention(torch.cat(items), torch.cat(shares), mean, log_sum, hardest_items)

    def _split_rows(self, queries: Tensor, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        """(n,) ascending rows of this rank in parts of whole blocks; of slots, or all."""
        rows = torch.arange(len(self.keys), device=queries.device)
        if slots is not None:
            rows = slots - self._own_slots.start
            rows = rows[(rows >= 0) & (rows < len(self.keys))]
        if not len(rows):
            return ()
        entries_per_block = max(1, len(queries) * self.block_size)
        num_blocks = max(1, RUN_ENTRIES // entries_per_block)
        return rows.split(num_blocks * self.block_size)

    def _logits(
        self, rows: Tensor, queries: Tensor, hidden: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) items and (n, D) embeddings of ascending rows, and (G, n) s/τ plus the log of each item's count, -inf
        for what is not seen."""
        items = self._items_at(rows)
        embeddings = self._embeddings_at(rows, queries)
        log_counts = _counts_of(items, counts).to(queries).log()
        logits = torch.addmm(log_counts, queries, embeddings.T)
        column = self._rows_of(hidden)  # (G, K)
        if not self._are_all(rows):
            column = torch.searchsorted(rows, column)
        column = column.clamp(0, len(rows) - 1)
        is_hidden = (items[column] == hidden) & (hidden != PADDING)
        # Added, not written: a column may be that of a hidden item and of padding at once.
        penalty = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(is_hidden, -torch.inf)
        return items, embeddings, logits.scatter_add_(1, column, penalty)

    def _draw_in_block(
        self, queries: Tensor, hidden: Tensor, block: Tensor, uniform: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(G,) keys and (G,) scores of an item drawn from each anchor's block (G,) of this rank."""
        drawn_rows = []
        drawn_scores = []
        in_block = torch.arange(self.block_size, device=block.device)
        anchors_per_chunk = max(1, RUN_ENTRIES // (self.block_size * queries.shape[1]))
        for chunk in torch.arange(len(queries), device=queries.device).split(anchors_per_chunk):
            rows = block[chunk, None] * self.block_size + in_block  # (g, n)
            items = self._items_at(rows)
            scores = torch.einsum("gd,gnd->gn", queries[chunk], self._embeddings_at(rows, queries))
            is_hidden = (items[:, :, None] == hidden[chunk, None, :]).any(dim=2)
            logits = scores + _counts_of(items, counts).log().to(scores)
            shares = logits.masked_fill(is_hidden, -torch.inf).softmax(dim=1)
            column = inverse_cdf(shares.nan_to_num(0.0), uniform[chunk])[:, None]
            drawn_rows.append(rows.gather(1, column)[:, 0])
            drawn_scores.append(scores.gather(1, column)[:, 0])
        return self.keys[torch.cat(drawn_rows)], torch.cat(drawn_scores).double()

    def _items_at(self, rows: Tensor) -> Tensor:
        """(…) the items in rows (…) of this rank; -1 for an empty one, which floor division keeps."""
        keys = self.keys if self._are_all(rows) else self.keys[rows]
        return keys // self.keys_per_item

    def _embeddings_at(self, rows: Tensor, like: Tensor) -> Tensor:
        """(…, D) the embeddings in rows (…) of this rank."""
        if self._are_all(rows):
            return self.embeddings.to(like)
        # Several times as fast as indexing with them.
        chosen = self.embeddings.index_select(0, rows.flatten())
        return chosen.view(*rows.shape, self.embeddings.shape[1]).to(like)

    def _are_all(self, rows: Tensor) -> bool:
        """Whether ascending rows are all of this rank: there is nothing to select, then."""
        return rows.dim() == 1 and len(rows) == len(self.keys)

    def _find(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """(…) rows of items (…), any row where this rank has none; (…) whether it has one."""
        rows = self._rows_of(items)
        if not len(self.keys):
            return rows, torch.zeros_like(items, dtype=torch.bool)
        inside = rows.clamp(0, len(self.keys) - 1)
        return inside, (self._items_at(inside) == items) & (rows == inside)

    def _rows_of(self, items: Tensor) -> Tensor:
        """(…) where this rank holds items (…); outside [0, rows) for those that other ranks hold."""
        return items % self.num_slots - self._own_slots.start

    @property
    def _own_slots(self) -> range:
        """The slots of this rank: whole blocks, the last of which may go beyond `num_slots`."""
        blocks = distributed.rank_slice(self.num_blocks)
        return range(blocks.start * self.block_size, blocks.stop * self.block_size)

    def _allocate(self, like: Tensor) -> None:
        """Empty rows for this rank's slots, of embeddings such as `like` (n, D)."""
        num_rows = len(self._own_slots)
        self.keys = torch.full((num_rows,), PADDING, device=like.device)
        self.embeddings = torch.zeros(
            num_rows, like.shape[1], dtype=_precision(like.dtype, like.device), device=like.device
        )

    def _apply(self, fn: Any, recurse: bool = True) -> EmbeddingMemory:
        """Move, but convert only between single and half precision."""
        device = fn(self.embeddings[:0]).device
        self.keys = self.keys.to(device)
        self.embeddings = self.embeddings.to(device, _precision(self.embeddings.dtype, device))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "progress"] = torch.tensor([self.num_seen, self.num_refreshes])
        destination[prefix + "keys"] = distributed.gather(self.keys)[: self.num_slots]
        destination[prefix + "embeddings"] = distributed.gather(self.embeddings)[: self.num_slots]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing_keys, _, _ = rest
        names = [prefix + name for name in ("progress", "keys", "embeddings")]
        missing = [name for name in names if name not in state_dict]
        missing_keys.extend(missing)
        if missing:
            return
        progress, keys, embeddings = (state_dict[name] for name in names)
        self.num_seen, self.num_refreshes = progress.long().tolist()
        device = self.keys.device
        if not len(keys):
            self.keys = keys.to(device, copy=True)
            self.embeddings = embeddings.to(device, copy=True)
            return
        self._allocate(embeddings.to(device))
        # This rank's last block may go beyond what was saved.
        own = slice(self._own_slots.start, self._own_slots.stop)
        num_saved = len(keys[own])
        self.keys[:num_saved] = keys[own].to(device)
        self.embeddings[:num_saved] = embeddings[own].to(self.embeddings)


def sample(attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
    """(num_draws,) ascending items, the same on all ranks; item z is drawn num_draws·share_z times, rounded up or down.

    One number places all draws at equal distances along the cumulative shares (systematic sampling), which of all ways
    to draw with these expectations has little variance.

    Args:
        attention: of this rank.
        num_draws: how many; all are -1 where all shares are 0.
        uniform: (1,) a draw in [0, 1), the same on every rank.
    """
    items = attention.items
    cumulative = attention.shares.cumsum(dim=0, dtype=torch.float64)
    if not len(items):
        # A rank that looked at nothing has an interval of length 0.
        items = items.new_zeros(1)
        cumulative = cumulative.new_zeros(1)
    rank_sums = _by_rank(cumulative[-1])
    start, end = _rank_bounds(rank_sums)
    steps = torch.arange(num_draws, device=items.device) + uniform.double()
    target = steps * (rank_sums.sum() / max(num_draws, 1))
    is_own = (target >= start) & (target < end)
    column = torch.searchsorted(cumulative, target - start, right=True)
    drawn = items[column.clamp(max=len(items) - 1)]
    return distributed.all_reduce(torch.where(is_own, drawn, PADDING), "max")


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(…) a column drawn from each row of weights (…, C) ≥ 0, which need not sum to 1; the last for rows of zeros.

    Args:
        uniform: (…) draws in [0, 1), in double precision: no product with the sum reaches a column of weight 0.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[..., None] * cumulative[..., -1:]
    column = torch.searchsorted(cumulative, target, right=True)[..., 0]
    return column.clamp(max=weights.shape[-1] - 1)


def _precision(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision in which embeddings of type `dtype` are remembered on a device."""
    if dtype == torch.float64:
        return dtype
    return torch.float32 if device.type == "cpu" else torch.float16


def _stride(number: int) -> int:
    """The first number above the golden section of `number` that has no divisor in common with it: its multiples mod
    `number` are a permutation, in which any stretch is spread evenly."""
    stride = round(number * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, number) > 1:
        stride += 1
    return stride


def _rank_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """(…) start and end of this rank in the cumulative sum of values (ranks, …), so that any number of ranks makes the
    same draws."""
    ends = values.cumsum(dim=0)
    bounds = torch.cat([torch.zeros_like(ends[:1]), ends])
    return bounds[distributed.rank()], bounds[distributed.rank() + 1]


def _by_rank(value: Tensor) -> Tensor:
    """(ranks, …) every rank's value (…)."""
    return distributed.gather(value[None], [1] * distributed.world_size())


def _counts_of(items: Tensor, counts: Tensor | None) -> Tensor:
    """(…) how often items (…) count, by counts (N,) or once; 0 for -1, an empty slot."""
    is_item = items != PADDING
    if counts is None:
        return is_item
    return is_item * counts.double()[items.clamp(min=0)]


def _hardest(items: Tensor, logits: Tensor, number: int) -> Tensor:
    """(G, k, 2) those of items (n,) with the largest logits (G, n), and these; exact in double precision."""
    if not number:
        return logits.new_zeros(len(logits), 0, 2, dtype=torch.float64)
    best, column = logits.topk(min(number, logits.shape[1]), dim=1)
    best_items = items[column].masked_fill(best == -torch.inf, PADDING)
    return torch.stack([best_items.double(), best.double()], dim=-1)


def _hardest_of_all(own: Tensor, number: int) -> Tensor:
    """(G, k) of items and logits (G, n, 2) of this rank and others, the items with the largest logits; -1 for none."""
    if not number:
        return own[..., 0].long()
    # No item at all, as often as there may be too few.
    own = torch.nn.functional.pad(own, (0, 0, 0, number), value=-torch.inf)
    best = own.gather(1, own[..., 1:].topk(number, dim=1).indices.expand(-1, -1, 2))
    of_ranks = _by_rank(best).transpose(0, 1).flatten(1, 2)  # (G, ranks·k, 2)
    items, logits = of_ranks.gather(1, of_ranks[..., 1:].topk(number, dim=1).indices.expand(-1, -1, 2)).unbind(dim=-1)
    return items.masked_fill(logits == -torch.inf, PADDING).long()
