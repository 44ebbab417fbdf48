"""EmbeddingMemory: the latest embeddings of a corpus, and what anchors see in them.

Shapes: G anchors of all ranks of one direction, K hidden items of each, N items, n of them, D dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

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
        items, shares: (n,) the items that this rank holds and looked at, by slot, and the mean over all anchors of each
            one's share of their softmax; over all ranks shares sum to 1, or to 0 where no anchor sees anything.
        mean: (G, D) each anchor's mean of what it sees; 0 for nothing.
        log_sum: (G,) see `Draws`.
        hardest: (G, k) the items most similar to each anchor, padded with -1.
    """

    items: Tensor
    shares: Tensor
    mean: Tensor
    log_sum: Tensor
    hardest: Tensor


class EmbeddingMemory(nn.Module):
    """The latest embedding of each item, in half precision, divided among ranks; empty slots are never seen.

    Item k has slot k mod `num_slots`: with fewer slots than items, each holds the latest of its class. A *key* names an
    item, and where wanted the pair that it came with: item = key // keys_per_item. Rounding turns an embedding by 2e-4
    rad, less than a step of training does. Double precision is kept.

    The state dict holds all slots, whatever the number of ranks: `state_dict()` is collective.

    Args:
        num_items: N.
        num_slots: by default N.
        keys_per_item: see above.
        device: "auto" is where the objective is; "cpu" the CPU's memory, from which a step copies what it looks at.
    """

    keys: Tensor
    embeddings: Tensor

    def __init__(
        self,
        num_items: int,
        num_slots: int | None = None,
        keys_per_item: int = 1,
        device: Literal["auto", "cpu"] = "auto",
    ) -> None:
        super().__init__()
        self.num_items = num_items
        self.num_slots = num_items if num_slots is None else min(num_slots, num_items)
        self.keys_per_item = keys_per_item
        self.on_cpu = device == "cpu"
        self.block_size = max(64, -(-self.num_slots // MAX_BLOCKS))
        self.num_blocks = -(-self.num_slots // self.block_size)
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
    def holds_corpus(self) -> bool:
        """Whether every item has a slot, and the first pass over all of them is done."""
        return self.num_slots == self.num_items and self.num_seen >= self.num_expected

    def expect(self, num_rows: int) -> None:
        """Set how many rows the batches of an epoch bring: then, or at twice the slots of a sample, it is complete."""
        self.num_expected = num_rows if self.num_slots == self.num_items else min(num_rows, 2 * self.num_slots)

    def count(self, num_rows: int) -> bool:
        """Count rows of a batch; whether they complete the memory for the first time."""
        before, self.num_seen = self.num_seen, self.num_seen + num_rows
        return before < self.num_expected <= self.num_seen

    def write(self, keys: Tensor, embeddings: Tensor) -> None:
        """Remember embeddings (n, D) of keys (n,), the same on every rank; of a slot's duplicates the first counts."""
        if self.is_empty:
            self._allocate(embeddings)
        first = first_occurrence(keys // self.keys_per_item % self.num_slots)
        device = self.embeddings.device
        keys, embeddings = keys[first].to(device), embeddings.detach()[first].to(device)
        local = keys // self.keys_per_item % self.num_slots - self._first_slot
        if distributed.is_initialized():
            own = (local >= 0) & (local < len(self.keys))
            local, keys, embeddings = local[own], keys[own], embeddings[own]
        self.keys[local] = keys
        self.embeddings[local] = embeddings.to(self.embeddings.dtype)

    def due(self, share: float) -> Tensor:
        """(n,) the items to encode anew in this step, on the CPU: a share of all per step, in turn."""
        step, self.num_refreshes = self.num_refreshes, self.num_refreshes + 1
        start = int(step * share * self.num_items + 1e-9)
        stop = int((step + 1) * share * self.num_items + 1e-9)
        return torch.arange(start, stop) % self.num_items

    def recall(self, items: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) remembered embeddings of items (n,), the same on every rank, 0 where none; (n,) whether there is
        one."""
        found = like.new_zeros(len(items), like.shape[-1])
        is_known = torch.zeros_like(items)
        if len(self.keys):
            local = items % self.num_slots - self._first_slot
            inside = local.clamp(0, len(self.keys) - 1).to(self.keys.device)
            is_known = (self._items()[inside].to(items.device) == items) & (local == inside.to(items.device))
            found = self.embeddings[inside].to(like) * is_known[:, None]
        return distributed.all_reduce(found), distributed.all_reduce(is_known.long()) > 0

    def num_remembered(self, counts: Tensor | None = None) -> Tensor:
        """Scalar: items that have an embedding, each as often as counts (N,) say; all ranks ask together."""
        filled = self.keys != PADDING
        number = filled.double()
        if counts is not None:
            number = number * counts.to(number)[self._items().clamp(min=0)]
        return distributed.all_reduce(number.sum())

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
        for _, logits in self._runs(queries, hidden, counts):
            block_sums.append(logits.unflatten(1, (-1, self.block_size)).logsumexp(dim=2))
        own_sums = torch.cat(block_sums, dim=1).double()  # (G, blocks)
        rank_sums = distributed.gather(own_sums.logsumexp(dim=1)[None], [1] * distributed.world_size())
        log_sum = rank_sums.logsumexp(dim=0)
        # Each rank has an interval of the cumulative shares, and so the same items as with any other number of ranks.
        ends = torch.exp(rank_sums - log_sum).nan_to_num(0.0).cumsum(dim=0)
        end = ends[distributed.rank()]
        start = end - ends.diff(dim=0, prepend=torch.zeros_like(ends[:1]))[distributed.rank()]
        target = uniform[0] * ends[-1]
        is_own = (target >= start) & (target < end)

        keys = torch.full_like(is_own, PADDING, dtype=torch.long)
        scores = torch.full_like(log_sum, -torch.inf)
        if own_sums.shape[1]:
            inside = ((target - start) / (end - start)).nan_to_num(0.0)
            block = inverse_cdf(torch.softmax(own_sums, dim=1).nan_to_num(0.0), inside)
            found_keys, found_scores = self._draw_in_block(queries, hidden, block, uniform[1], counts)
            keys = keys.where(~is_own, found_keys)
            scores = scores.where(~is_own, found_scores)
        keys, scores = distributed.all_reduce(keys, "max"), distributed.all_reduce(scores, "max")
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

        def weighted() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
            for rows, logits in self._runs(queries, hidden, counts, slots):
                hardest = self._hardest(rows, logits, num_hardest)
                if slots is not None and log_weights is not None:
                    logits += log_weights[torch.searchsorted(slots, rows + self._first_slot)]
                peak = logits.amax(dim=1).nan_to_num(neginf=0.0)
                yield rows, logits.sub_(peak[:, None]).exp_(), peak, hardest

        log_sum = queries.new_full((len(queries),), -torch.inf)
        hardest = queries.new_zeros(len(queries), 0, 2, dtype=torch.float64)
        runs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for run in weighted():
            log_sum = torch.logaddexp(log_sum, run[1].sum(dim=1).log() + run[2])
            hardest = _topk(torch.cat([hardest, run[3]], dim=1), num_hardest)
            runs = [run] if not runs else [run, run]  # what fits into one run need not be computed again
        log_sum = distributed.gather(log_sum[None], [1] * distributed.world_size()).logsumexp(dim=0)
        sees = log_sum.isfinite()
        mean = torch.zeros_like(queries)
        items, shares = [hidden.new_zeros(0)], [queries.new_zeros(0)]
        for rows, weights, peak, _ in runs if len(runs) == 1 else weighted():
            scale = torch.exp(peak - log_sum).masked_fill(~sees, 0.0)
            items.append(self._items(rows).to(queries.device))
            shares.append(scale @ weights / sees.sum().clamp(min=1))
            mean += scale[:, None] * (weights @ self._embeddings_of(rows, queries))
        if num_hardest:
            padding = hardest.new_tensor([PADDING, -torch.inf]).expand(len(queries), num_hardest, 2)
            hardest = _topk(torch.cat([hardest, padding], dim=1), num_hardest)
            of_ranks = distributed.gather(hardest[None], [1] * distributed.world_size())
            hardest = _topk(of_ranks.transpose(0, 1).flatten(1, 2), num_hardest)
        return Attention(
            torch.cat(items), torch.cat(shares), distributed.all_reduce(mean), log_sum, hardest[..., 0].long()
        )

    def _hardest(self, rows: Tensor, logits: Tensor, number: int) -> Tensor:
        """(G, k, 2) items of the largest logits (G, n), and these; both are exact in double precision."""
        if not number:
            return logits.new_zeros(len(logits), 0, 2, dtype=torch.float64)
        best, place = logits.topk(min(number, logits.shape[1]), dim=1)
        items = self._items(rows[place]).to(best.device).masked_fill(best == -torch.inf, PADDING)
        return torch.stack([items.double(), best.double()], dim=-1)

    def _runs(
        self, queries: Tensor, hidden: Tensor, counts: Tensor | None = None, slots: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(n,) rows of this rank and (G, n) logits: s/τ plus the log of each item's count, -inf for what is not
        seen."""
        rows = torch.arange(len(self.keys), device=queries.device)
        if slots is not None:
            rows = slots - self._first_slot
            rows = rows[(rows >= 0) & (rows < len(self.keys))]
        blocks_per_run = max(1, RUN_ENTRIES // max(1, len(queries) * self.block_size))
        hidden_rows = hidden % self.num_slots - self._first_slot
        for run in rows.split(blocks_per_run * self.block_size) if len(rows) else ():
            items = self._items(run).to(queries.device)
            logits = queries @ self._embeddings_of(run, queries).T
            logits += self._log_counts(items, counts).to(logits)
            column = torch.searchsorted(run, hidden_rows).clamp(max=len(run) - 1)
            is_hidden = (items[column] == hidden) & (hidden != PADDING)
            logits.scatter_add_(
                1, column, torch.zeros_like(hidden, dtype=logits.dtype).masked_fill(is_hidden, -torch.inf)
            )
            yield run, logits

    def _draw_in_block(
        self, queries: Tensor, hidden: Tensor, block: Tensor, uniform: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(G,) keys and (G,) scores of an item drawn from each anchor's block (G,) of this rank."""
        keys, scores = [], []
        anchors_per_chunk = max(1, RUN_ENTRIES // (self.block_size * queries.shape[1]))
        for chunk in torch.arange(len(queries), device=queries.device).split(anchors_per_chunk):
            rows = block[chunk, None] * self.block_size + torch.arange(self.block_size, device=block.device)
            items = self._items(rows).to(queries.device)
            found = torch.einsum("gd,gnd->gn", queries[chunk], self._embeddings_of(rows, queries))
            is_hidden = (items[:, :, None] == hidden[chunk, None, :]).any(dim=2)
            logits = (found + self._log_counts(items, counts).to(found)).masked_fill(is_hidden, -torch.inf)
            place = inverse_cdf(logits.softmax(dim=1).nan_to_num(0.0), uniform[chunk])[:, None]
            keys.append(self.keys[rows.to(self.keys.device)].to(queries.device).gather(1, place)[:, 0])
            scores.append(found.gather(1, place)[:, 0].double())
        return torch.cat(keys), torch.cat(scores)

    def _log_counts(self, items: Tensor, counts: Tensor | None) -> Tensor:
        """Log of how often items count; -inf for an empty slot."""
        number = (items >= 0).double()
        if counts is not None:
            number = number * counts.to(number)[items.clamp(min=0)]
        return number.log()

    def _items(self, rows: Tensor | None = None) -> Tensor:
        """Items in rows of this rank; -1 for an empty one."""
        keys = self.keys if rows is None else self.keys[rows.to(self.keys.device)]
        return torch.where(keys < 0, keys, keys // self.keys_per_item)

    def _embeddings_of(self, rows: Tensor, like: Tensor) -> Tensor:
        if rows.dim() == 1 and len(rows) == len(self.keys):
            return self.embeddings.to(like)
        return self.embeddings[rows.to(self.embeddings.device)].to(like)

    @property
    def _blocks(self) -> slice:
        """The blocks of this rank."""
        return distributed.rank_slice(self.num_blocks)

    @property
    def _first_slot(self) -> int:
        return self._blocks.start * self.block_size

    def _allocate(self, like: Tensor) -> None:
        num_rows = (self._blocks.stop - self._blocks.start) * self.block_size
        dtype = like.dtype if like.dtype == torch.float64 else torch.float16
        device = torch.device("cpu") if self.on_cpu else like.device
        self.keys = torch.full((num_rows,), PADDING, device=device)
        self.embeddings = torch.zeros(num_rows, like.shape[1], dtype=dtype, device=device)

    def _apply(self, fn: Any, recurse: bool = True) -> EmbeddingMemory:
        """Move, but keep the precision; on the CPU, stay there."""
        device = torch.device("cpu") if self.on_cpu else fn(self.embeddings[:0]).device
        self.keys = self.keys.to(device)
        self.embeddings = self.embeddings.to(device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "progress"] = torch.tensor([self.num_seen, self.num_refreshes])
        destination[prefix + "keys"] = distributed.gather(self.keys)[: self.num_slots]
        destination[prefix + "embeddings"] = distributed.gather(self.embeddings)[: self.num_slots]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing_keys, _, _ = rest
        names = [prefix + name for name in ("progress", "keys", "embeddings")]
        missing_keys.extend(name for name in names if name not in state_dict)
        if any(name not in state_dict for name in names):
            return
        progress, keys, embeddings = (state_dict[name] for name in names)
        device = self.keys.device
        self.num_seen, self.num_refreshes = (int(number) for number in progress)
        self.keys, self.embeddings = keys.to(device, copy=True), embeddings.to(device, copy=True)
        if len(keys):
            self._allocate(embeddings.to(device))
            own = slice(self._first_slot, self._first_slot + len(self.keys))
            self.keys[: len(keys[own])] = keys[own].to(device)
            self.embeddings[: len(keys[own])] = embeddings[own].to(self.embeddings)


def sample(attention: Attention, num_draws: int, uniform: Tensor) -> Tensor:
    """(num_draws,) ascending items, the same on all ranks; item z is drawn num_draws·share_z times, rounded up or down.

    One number places all draws at equal distances along the cumulative shares (systematic sampling), which of all ways
    to draw with these expectations has little variance.

    Args:
        attention: of this rank.
        num_draws: how many; all are -1 where all shares are 0.
        uniform: (1,) a draw in [0, 1), the same on every rank.
    """
    cumulative = attention.shares.double().cumsum(dim=0)
    items = attention.items
    if not len(items):
        cumulative, items = cumulative.new_zeros(1), items.new_zeros(1)
    own = cumulative[-1:]
    ends = distributed.gather(own, [1] * distributed.world_size()).cumsum(dim=0)
    start = ends[distributed.rank()] - own
    places = (torch.arange(num_draws, device=own.device) + uniform.double()) / max(num_draws, 1) * ends[-1]
    is_own = (places >= start) & (places < start + own)
    drawn = torch.searchsorted(cumulative, places - start, right=True).clamp(max=len(items) - 1)
    return distributed.all_reduce(torch.where(is_own, items[drawn], PADDING), "max")


def _topk(scored: Tensor, number: int) -> Tensor:
    """(G, k, 2) those of items and scores (G, n, 2) with the largest scores."""
    place = scored[..., 1].topk(min(number, scored.shape[1]), dim=1).indices
    return scored.gather(1, place[..., None].expand(-1, -1, 2))


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(…) a column drawn from each row of weights (…, C) ≥ 0, which need not sum to 1; the last for rows of zeros.

    Args:
        uniform: (…) draws in [0, 1), in double precision: no product with the sum reaches a column of weight 0.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)
