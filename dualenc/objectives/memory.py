"""The latest embeddings of a corpus, what anchors see in them, and the base of GlobalCache and NegativeCache.

Shapes: X directions, A anchors of one direction, K hidden items of each, N items, n of them, D dimension.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import Objective
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.tables import first_occurrence

MAX_BLOCKS = 2**14
PART_ENTRIES = 2**22  # of an (A, n) matrix that exist at a time


class MemoryDraws(NamedTuple):
    """One item per anchor, drawn from its softmax over the memory."""

    keys: Tensor  # (A,) -1 where an anchor sees nothing
    scores: Tensor  # (A,) s/τ with the remembered embedding; -inf where an anchor sees nothing
    log_sum: Tensor  # (A,) log of the sum of exp(s/τ) over what an anchor sees; -inf for nothing


class Attention(NamedTuple):
    """The anchors' softmax over the memory."""

    items: Tensor  # (n,) by slot
    shares: Tensor  # (n,) each item's share of their softmax, averaged over the anchors of all ranks that see anything
    mean: Tensor  # (A, D) each anchor's mean of what it sees; 0 for nothing
    log_sum: Tensor  # (A,) see `MemoryDraws`
    hardest: Tensor  # (A, k) the items most similar to each anchor, padded with -1


class MemoryPart(NamedTuple):
    """Rows of the memory, few enough for an (A, n) matrix."""

    items: Tensor  # (n,)
    embeddings: Tensor  # (n, D)
    shares: Tensor  # (A, n) each anchor's softmax over these rows; 0 where it sees nothing
    log_sum: Tensor  # (A,) of these rows, see `MemoryDraws`
    hardest: Tensor  # (A, k, 2) the items most similar to each anchor, and their s/τ


class EmbeddingMemory(nn.Module):
    """The latest embedding of each item, the same on every rank; empty slots are never seen.

    Item k has slot k mod `num_slots`: with fewer slots than items, each holds the latest of its class. A *key* names an
    item, and where wanted the pair that it came with: item = key // keys_per_item. Embeddings are in double precision
    if they come so, else in single precision on a CPU and in half precision on an accelerator.

    Args:
        num_items: N.
        num_slots: by default N.
        keys_per_item: see above.
    """

    keys: Tensor
    embeddings: Tensor

    def __init__(self, num_items: int, num_slots: int | None = None, keys_per_item: int = 1) -> None:
        super().__init__()
        self.num_items = num_items
        self.num_slots = num_items if num_slots is None else min(num_slots, num_items)
        self.has_every_slot = self.num_slots == num_items
        self.keys_per_item = keys_per_item
        self.block_size = max(64, math.ceil(self.num_slots / MAX_BLOCKS))
        self.num_blocks = math.ceil(self.num_slots / self.block_size)
        self.stride = _stride(self.num_slots)
        # Whole blocks, allocated with the first write, when the dimension is known.
        self.register_buffer("keys", torch.full((0,), PADDING))
        self.register_buffer("embeddings", torch.zeros(0, 0))
        self.num_seen = 0
        self.num_refreshes = 0
        self.expect(num_items)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return len(self.keys) == 0

    @property
    def holds_corpus(self) -> bool:
        """Whether every item has a slot, and the first pass over all of them is done."""
        return self.has_every_slot and self.num_seen >= self.num_expected

    def expect(self, num_rows: int) -> None:
        """Set after how many rows of batches it is complete: those of an epoch, or twice the slots of a sample."""
        self.num_expected = num_rows
        if not self.has_every_slot:
            self.num_expected = min(num_rows, 2 * self.num_slots)

    def count(self, num_rows: int) -> bool:
        """Count rows of a batch; whether they complete the memory for the first time."""
        before = self.num_seen
        self.num_seen += num_rows
        return before < self.num_expected <= self.num_seen

    def write(self, keys: Tensor, embeddings: Tensor) -> None:
        """Remember embeddings (n, D) of keys (n,), the same on every rank; of a slot's duplicates the first counts."""
        if self.is_empty:
            num_rows = self.num_blocks * self.block_size
            precision = _precision(embeddings)
            self.keys = torch.full((num_rows,), PADDING, device=keys.device)
            self.embeddings = torch.zeros(num_rows, embeddings.shape[1], dtype=precision, device=keys.device)
        slots = keys // self.keys_per_item % self.num_slots
        first = first_occurrence(slots)
        self.keys[slots] = keys[first]
        self.embeddings[slots] = embeddings.detach()[first].to(self.embeddings)

    def due(self, share: float) -> Tensor:
        """(n,) the items to encode anew in this step, on the CPU: a share of all per step, in turn."""
        step = self.num_refreshes
        self.num_refreshes += 1
        # Epsilon, so that 100 steps of 1 % cover the corpus despite rounding.
        start = int(step * share * self.num_items + 1e-9)
        stop = int((step + 1) * share * self.num_items + 1e-9)
        return torch.arange(start, stop) % self.num_items

    def recall(self, items: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) remembered embeddings of items (n,), 0 where none; (n,) whether there is one."""
        if self.is_empty:
            return like.new_zeros(len(items), like.shape[-1]), torch.zeros_like(items, dtype=torch.bool)
        is_known = self._knows(items)
        return self._embeddings_at(items % self.num_slots, like) * is_known[:, None], is_known

    def scattered(self, blocks: Tensor) -> Tensor:
        """(n,) slots in blocks (k,) of a fixed permutation, -1 beyond the last: slots of one block are far apart, since
        neighbouring ids are often of one topic."""
        position = blocks[:, None] * self.block_size + torch.arange(self.block_size, device=blocks.device)
        return torch.where(position < self.num_slots, position * self.stride % self.num_slots, PADDING).flatten()

    def num_remembered(self) -> Tensor:
        """Scalar: items that have an embedding."""
        return (self.keys != PADDING).sum().double()

    def num_negatives(self, hidden: Tensor, counts: Tensor | None = None) -> Tensor:
        """(A,) remembered items that anchors see, each as often as counts (N,) say; `hidden` (A, K) see `draw`."""
        if self.is_empty:
            return torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        total = _counts_of(self._items_at(slice(None)), counts).sum()
        num_hidden = (_counts_of(hidden, counts) * self._knows(hidden)).sum(dim=1)
        return (total - num_hidden).double()

    @torch.no_grad()
    def draw(self, queries: Tensor, hidden: Tensor, uniform: Tensor, counts: Tensor | None = None) -> MemoryDraws:
        """Draw an item per anchor from its softmax: first a block of items, then one of the block.

        Args:
            queries: (A, D) anchors over τ.
            hidden: (A, K) items that an anchor does not see, padded with -1.
            uniform: (2, A) draws in [0, 1).
            counts: (N,) how often each item counts; by default once.
        """
        if self.is_empty:
            nothing = queries.new_full((len(queries),), -torch.inf)
            return MemoryDraws(torch.full_like(nothing, PADDING, dtype=torch.long), nothing, nothing)
        block_sums = []
        for rows in self._parts(queries):
            _, _, logits = self._logits(rows, queries, hidden, counts)
            by_block = logits.unflatten(1, (-1, self.block_size))
            block_sums.append(by_block.logsumexp(dim=2))
        log_sums = torch.cat(block_sums, dim=1).double()  # (A, blocks)
        log_sum = log_sums.logsumexp(dim=1)
        block = inverse_cdf(torch.softmax(log_sums, dim=1).nan_to_num(0.0), uniform[0])
        keys, scores = self._draw_in_block(queries, hidden, block, uniform[1], counts)
        sees = log_sum > -torch.inf
        keys = keys.where(sees, PADDING)
        scores = scores.where(sees, -torch.inf)
        return MemoryDraws(keys, scores.to(queries), log_sum.to(queries))

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
        """The anchors' softmax: the shares of items (collective), and the mean that each anchor sees.

        Args:
            queries, hidden, counts: see `draw`.
            slots: (n,) ascending slots to look at, the same on every rank; by default all.
            log_weights: (n,) log of how many slots each of them stands for; by default 0.
            num_hardest: how many of the most similar items to return.
        """

        def weigh(rows: Tensor) -> MemoryPart:
            items, embeddings, logits = self._logits(rows, queries, hidden, counts)
            # Before weights come in: an item is no harder for standing for others.
            hardest = _hardest(items, logits, num_hardest)
            if slots is not None and log_weights is not None:
                logits += log_weights[torch.searchsorted(slots, rows)]
            # NaN for an anchor that sees nothing.
            shares = torch.softmax(logits, dim=1).nan_to_num_(0.0)
            # The largest share is 1/Σ exp(s/τ − peak): no second pass over all exponents.
            log_sum = logits.amax(dim=1) - shares.amax(dim=1).log()
            log_sum = log_sum.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
            return MemoryPart(items, embeddings, shares, log_sum, hardest)

        all_rows = self._parts(queries, slots)
        # A single part is kept for the second pass; several would not fit, and are computed again.
        single = [weigh(all_rows[0])] if len(all_rows) == 1 else None
        log_sum = queries.new_full((len(queries),), -torch.inf)
        hardest = [queries.new_zeros(len(queries), 0, 2, dtype=torch.float64)]
        for part in single or map(weigh, all_rows):
            log_sum = torch.logaddexp(log_sum, part.log_sum)
            hardest.append(part.hardest)

        sees = log_sum.isfinite()
        num_seeing = distributed.all_reduce(sees.sum()).clamp(min=1)
        items = [hidden.new_zeros(0)]
        shares = [queries.new_zeros(0)]
        mean = torch.zeros_like(queries)
        for part in single or map(weigh, all_rows):
            share_of_part = torch.exp(part.log_sum - log_sum).masked_fill(~sees, 0.0)  # (A,)
            items.append(part.items)
            shares.append(share_of_part / num_seeing @ part.shares)
            mean += share_of_part[:, None] * (part.shares @ part.embeddings)
        hardest_items = _hardest_of_all(torch.cat(hardest, dim=1), num_hardest)
        return Attention(torch.cat(items), distributed.all_reduce(torch.cat(shares)), mean, log_sum, hardest_items)

    def _parts(self, queries: Tensor, slots: Tensor | None = None) -> tuple[Tensor, ...]:
        """Ascending rows (n,), of slots or all, in parts of whole blocks."""
        if self.is_empty:
            return ()
        rows = torch.arange(len(self.keys), device=queries.device) if slots is None else slots
        entries_per_block = max(1, len(queries) * self.block_size)
        num_blocks = max(1, PART_ENTRIES // entries_per_block)
        return rows.split(num_blocks * self.block_size)

    def _logits(
        self, rows: Tensor, queries: Tensor, hidden: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) items and (n, D) embeddings of ascending rows, and (A, n) s/τ plus the log of each item's count, -inf
        for what is not seen."""
        items = self._items_at(rows)
        embeddings = self._embeddings_at(rows, queries)
        log_counts = _counts_of(items, counts).to(queries).log()
        logits = torch.addmm(log_counts, queries, embeddings.T)
        column = torch.searchsorted(rows, hidden % self.num_slots).clamp(max=len(rows) - 1)  # (A, K)
        is_hidden = (items[column] == hidden) & (hidden != PADDING)
        # Added, not written: a column may be that of a hidden item and of padding at once.
        penalty = torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(is_hidden, -torch.inf)
        return items, embeddings, logits.scatter_add_(1, column, penalty)

    def _draw_in_block(
        self, queries: Tensor, hidden: Tensor, block: Tensor, uniform: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(A,) keys and (A,) scores of an item drawn from each anchor's block (A,)."""
        drawn_rows = []
        drawn_scores = []
        in_block = torch.arange(self.block_size, device=block.device)
        anchors_per_chunk = max(1, PART_ENTRIES // (self.block_size * queries.shape[1]))
        for chunk in torch.arange(len(queries), device=queries.device).split(anchors_per_chunk):
            rows = block[chunk, None] * self.block_size + in_block  # (a, n)
            items = self._items_at(rows)
            scores = torch.einsum("gd,gnd->gn", queries[chunk], self._embeddings_at(rows, queries))
            is_hidden = (items[:, :, None] == hidden[chunk, None, :]).any(dim=2)
            logits = scores + _counts_of(items, counts).log().to(scores)
            shares = logits.masked_fill(is_hidden, -torch.inf).softmax(dim=1)
            column = inverse_cdf(shares.nan_to_num(0.0), uniform[chunk])[:, None]
            drawn_rows.append(rows.gather(1, column)[:, 0])
            drawn_scores.append(scores.gather(1, column)[:, 0])
        return self.keys[torch.cat(drawn_rows)], torch.cat(drawn_scores).double()

    def _items_at(self, rows: Tensor | slice) -> Tensor:
        """(…) the items in rows (…); -1 for an empty one, which floor division keeps."""
        return self.keys[rows] // self.keys_per_item

    def _embeddings_at(self, rows: Tensor, like: Tensor) -> Tensor:
        """(…, D) the embeddings in rows (…)."""
        # Several times as fast as indexing with them.
        selected = self.embeddings.index_select(0, rows.flatten())
        return selected.view(*rows.shape, self.embeddings.shape[1]).to(like)

    def _knows(self, items: Tensor) -> Tensor:
        """(…) whether items (…) have an embedding."""
        return self._items_at(items % self.num_slots) == items

    def get_extra_state(self) -> Tensor:
        """Rows seen and refreshes made, for the state dict."""
        return torch.tensor([self.num_seen, self.num_refreshes])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        self.num_seen, self.num_refreshes = state.long().tolist()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("keys", "embeddings"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, saved.new_zeros(saved.shape, device=self.keys.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class MemoryObjective(Objective):
    """Base of the objectives that remember the latest embedding of every item, from which the value of the loss is
    taken; `reports_loss` is False until every pair was seen once.

    Args:
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True
    estimates_partition = True

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        # By direction: left anchors look at right items.
        self.memories = nn.ModuleList(
            EmbeddingMemory(self.corpus.num_items(direction)) for direction in self.directions
        )
        self.draws = SharedRandom(self.seed)

    @property
    def reports_loss(self) -> bool:
        return all(self.memory_of(direction).holds_corpus for direction in self.directions)

    def memory_of(self, direction: int) -> EmbeddingMemory:
        """The memory of a direction's candidates."""
        memory = self.memories[direction]
        assert isinstance(memory, EmbeddingMemory)
        return memory

    def remember(self, anchors: Anchors, items: Tensor, embeddings: Tensor) -> None:
        """Write items (X, n) and their embeddings (X, n, D), the batch's first; -1 for none."""
        is_item = items != PADDING
        for x, direction in enumerate(anchors.directions):
            memory = self.memory_of(direction)
            memory.write(items[x][is_item[x]], embeddings[x][is_item[x]])
            # The rest does not count: batches alone pass through the corpus.
            memory.count(anchors.num_batch)

    def num_remembered(self, anchors: Anchors) -> Tensor:
        """(X, A) how many negatives of each anchor are remembered."""
        numbers = [
            self.memory_of(direction).num_negatives(anchors.hidden_items[x], self.corpus.item_counts(direction))
            for x, direction in enumerate(anchors.directions)
        ]
        return torch.stack(numbers).to(anchors.embeddings)

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the mean of exp(s/τ) over the corpus, and what share of all items is remembered."""
        memories = [self.memory_of(direction) for direction in self.directions]
        remembered = torch.stack([memory.num_remembered() for memory in memories]).sum()
        total = sum(memory.num_items for memory in memories)
        return self.spread("log_mean_exp") | {"remembered": remembered / total}


def sample(attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
    """(num_draws,) ascending items, the same on all ranks; item z is drawn num_draws·share_z times, rounded up or down.

    One number, uniform (1,) in [0, 1), places all draws at equal distances along the cumulative shares (systematic
    sampling); all are -1 where all shares are 0.
    """
    if not len(attention.items):
        return attention.items.new_full((num_draws,), PADDING)
    cumulative = attention.shares.cumsum(dim=0, dtype=torch.float64)
    steps = torch.arange(num_draws, device=uniform.device) + uniform.double()
    target = steps * (cumulative[-1] / max(num_draws, 1))
    column = torch.searchsorted(cumulative, target, right=True)
    drawn = attention.items[column.clamp(max=len(attention.items) - 1)]
    return drawn.where(target < cumulative[-1], PADDING)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(…) a column drawn from each row of weights (…, C) ≥ 0, which need not sum to 1; the last for rows of zeros. By
    draws (…) in [0, 1), in double precision: no product with the sum reaches a column of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[..., None] * cumulative[..., -1:]
    column = torch.searchsorted(cumulative, target, right=True)[..., 0]
    return column.clamp(max=weights.shape[-1] - 1)


def _precision(embeddings: Tensor) -> torch.dtype:
    """The precision in which embeddings are remembered."""
    if embeddings.dtype == torch.float64:
        return torch.float64
    return torch.float32 if embeddings.device.type == "cpu" else torch.float16


def _stride(number: int) -> int:
    """The first number above the golden section of `number` that has no divisor in common with it: its multiples mod
    `number` are a permutation, in which any stretch is spread evenly."""
    stride = round(number * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, number) > 1:
        stride += 1
    return stride


def _counts_of(items: Tensor, counts: Tensor | None) -> Tensor:
    """(…) how often items (…) count, by counts (N,) or once; 0 for -1, an empty slot."""
    is_item = items != PADDING
    if counts is None:
        return is_item
    return is_item * counts.double()[items.clamp(min=0)]


def _hardest(items: Tensor, logits: Tensor, number: int) -> Tensor:
    """(A, k, 2) those of items (n,) with the largest logits (A, n), and these; exact in double precision."""
    best, column = logits.topk(min(number, logits.shape[1]), dim=1)
    best_items = items[column].masked_fill(best == -torch.inf, PADDING)
    return torch.stack([best_items.double(), best.double()], dim=-1)


def _hardest_of_all(hardest: Tensor, number: int) -> Tensor:
    """(A, k) of items and logits (A, n, 2) the items with the largest logits; -1 for none."""
    # Pad with -1, so that topk always finds `number` entries.
    hardest = pad(hardest, (0, 0, 0, number), value=-torch.inf)
    best, column = hardest[..., 1].topk(number, dim=1)
    return hardest[..., 0].gather(1, column).masked_fill(best == -torch.inf, PADDING).long()
