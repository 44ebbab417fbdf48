"""Anchors against candidates: the view of a batch that every objective computes on.

Shapes: X directions (left anchors, then right ones; a single one for two views of an image), A
anchors of this rank, G anchors of all ranks, C candidates of all ranks, K known positives, P pairs
of the global batch, b pairs of this rank, D dimension. The leading X computes both directions at
once, so that no equation loops over sides.

An *item* is an id of the candidates' side or, with views, one view of an image: the left view of
image i is item 2·i, the right one 2·i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from dualenc import distributed

Result = TypeVar("Result")  # a tensor (X, A, …), or several
PADDING = -1  # pads lists of ids, and stands for "no item"
# Largest (X, A, C) matrix in memory, in entries. Larger ones are computed in blocks of anchors,
# once in the forward pass and again in the backward pass.
BLOCK_ENTRIES = 2**20


@dataclass(frozen=True)
class Anchors:
    """This rank's anchors and the candidates of the global batch."""

    # (X) 0: left anchors against right candidates, or views; 1: right anchors against left ones
    directions: tuple[int, ...]
    rows: Tensor  # (X, A) the anchors' rows in per-item tables: left id, or num_left + right id
    batch_rows: Tensor  # (A,) the anchors' positions among the G anchors of their direction
    sizes: list[int]  # anchors on every rank, per direction
    embeddings: Tensor  # (X, A, D) with gradient
    partners: Tensor  # (X, A, D) the anchors' own positives, with gradient
    candidates: Tensor  # (X, C, D) with gradient: the batch, then mined negatives
    candidate_ids: Tensor  # (X, C)
    positive_column: Tensor  # (X, A) the candidate that is each anchor's own positive
    positive_ids: Tensor  # (X, A, K) ascending ids of known positives, each once, padded with -1
    temperature: Tensor  # scalar τ
    # (X, G, D) embeddings of the batch by the momentum encoder, without gradient
    keys: Tensor | None = None
    views: bool = False  # candidates are all left views, then all right views

    @property
    def num_batch(self) -> int:
        """G: anchors per direction, and candidates that are not mined."""
        return sum(self.sizes)

    @property
    def similarities(self) -> Tensor:
        """(X, A, C) cosines with every candidate, with gradient."""
        return self.embeddings @ self.candidates.mT

    @property
    def scores(self) -> Tensor:
        """(X, A, C) s/τ with gradient."""
        return self.similarities / self.temperature

    @property
    def positive_similarities(self) -> Tensor:
        """(X, A) cosines with the anchors' own positives, with gradient."""
        return (self.embeddings * self.partners).sum(dim=-1)

    @property
    def positive_scores(self) -> Tensor:
        """(X, A) s/τ of the anchors' own positives, with gradient."""
        return self.positive_similarities / self.temperature

    @property
    def not_negative(self) -> Tensor:
        """(X, A, C) True where a candidate is a known positive."""
        return is_listed(self.candidate_ids, self.positive_ids)

    @property
    def logits(self) -> Tensor:
        """(X, A, C) s/τ with gradient, -inf where a candidate is not a negative."""
        return self.scores.masked_fill(self.not_negative, -torch.inf)

    @property
    def num_negatives(self) -> Tensor:
        """(X, A) candidates that are negatives."""
        return (~self.not_negative).sum(dim=-1)

    @cached_property
    def candidate_items(self) -> Tensor:
        """(X, C) candidates as items."""
        if not self.views:
            return self.candidate_ids
        left_ids, right_ids = self.candidate_ids.chunk(2, dim=-1)
        return torch.cat([2 * left_ids, 2 * right_ids + 1], dim=-1)

    @cached_property
    def hidden_items(self) -> Tensor:
        """(X, A, K), or (X, A, 2K) with views: known positives as items, ascending."""
        ids = self.positive_ids
        if not self.views:
            return ids
        # Padding stays -1: 2·(-1) and 2·(-1) + 1 would be different numbers.
        left_views = torch.where(ids < 0, ids, 2 * ids)
        right_views = torch.where(ids < 0, ids, 2 * ids + 1)
        return torch.cat([left_views, right_views], dim=-1).sort(dim=-1).values

    def gather(self, values: Tensor) -> Tensor:
        """Gather values (X, A, …) over ranks to (X, G, …), in batch order and without gradient."""
        # Ranks differ in A, and collectives concatenate the first dimension.
        by_anchor = values.transpose(0, 1).contiguous()  # (A, X, …)
        gathered = distributed.gather(by_anchor, self.sizes).transpose(0, 1)
        if not self.views or len(self.sizes) == 1:
            return gathered
        # Each rank contributes its left views, then its right ones, whereas the batch has all left
        # views first.
        half_sizes = [size // 2 for size in self.sizes for _ in ("left", "right")]
        halves = gathered.split(half_sizes, dim=1)
        return torch.cat([*halves[0::2], *halves[1::2]], dim=1)

    def gather_lists(self, lists: Tensor) -> Tensor:
        """Gather lists (X, A, K) over ranks to (X, G, K'), padded in front with -1."""
        if len(self.sizes) == 1:
            return lists
        [lengths] = distributed.rank_numbers([lists.shape[-1]], lists.device)
        missing = max(lengths) - lists.shape[-1]
        return self.gather(pad(lists, (missing, 0), value=PADDING))

    def per_direction(self, numbers: Iterable[float]) -> Tensor:
        """Return (X, 1) a number for each direction.

        It is filled in on the device: copying a list there would wait for the queue of an
        accelerator.
        """
        return torch.stack([self.embeddings.new_full((1,), number) for number in numbers])

    def with_candidates(self, candidates: Tensor, candidate_ids: Tensor) -> Anchors:
        """Replace the candidates by (X, C, D) with ids (X, C), with or without the positives."""
        return replace(self, candidates=candidates, candidate_ids=candidate_ids)

    def of_direction(self, x: int) -> Anchors:
        """Return one direction on its own (X = 1)."""
        only = slice(x, x + 1)
        names = ("directions", "candidates", "candidate_ids", *_BY_ANCHOR)
        by_direction = {name: getattr(self, name)[only] for name in names}
        keys = None if self.keys is None else self.keys[only]
        return replace(self, keys=keys, **by_direction)

    def in_blocks(
        self, function: Callable[..., Result], *rows: Any, width: int | None = None
    ) -> Result:
        """Apply a function to blocks of anchors, so that (X, A, C) matrices stay small.

        Blocks are recomputed in the backward pass (gradient checkpointing).

        Args:
            function: `function(block, *rows)` returns one tensor (X, a, …) or several. Must be pure
                and row-wise.
            rows: tensors (X, A, …), or named tuples of such, which are sliced in the same way.
            width: entries that the function holds per anchor; defaults to C.

        Returns:
            The results of all blocks, concatenated over anchors.
        """
        num_directions, num_anchors = self.rows.shape
        entries_per_anchor = num_directions * (width or self.candidates.shape[1])
        size = max(1, BLOCK_ENTRIES // max(1, entries_per_anchor))
        if num_anchors <= size:
            return function(self, *rows)

        def compute(start: int) -> Any:
            part = slice(start, start + size)
            by_anchor = {name: getattr(self, name)[:, part] for name in _BY_ANCHOR}
            block = replace(self, batch_rows=self.batch_rows[part], **by_anchor)
            return function(block, *(_sliced(values, part) for values in rows))

        blocks: list[Any] = []
        for start in range(0, num_anchors, size):
            blocks.append(checkpoint(compute, start, use_reentrant=False, preserve_rng_state=False))
        if isinstance(blocks[0], Tensor):
            return torch.cat(blocks, dim=1)  # type: ignore[return-value]
        return tuple(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True))  # type: ignore[return-value]


# The fields of `Anchors` with shape (X, A, …).
_BY_ANCHOR = ("rows", "embeddings", "partners", "positive_column", "positive_ids")


def _sliced(values: Any, part: slice) -> Any:
    if isinstance(values, Tensor):
        return values[:, part]
    return type(values)(*(tensor[:, part] for tensor in values))


def is_listed(ids: Tensor, lists: Tensor) -> Tensor:
    """Return (…, A, C) True where ids (…, C) or (…, A, C) occur in ascending lists (…, A, K).

    An id of -1 may match padding.
    """
    if ids.dim() < lists.dim():
        ids = ids[..., None, :]
    *rows, length = lists.shape
    if length == 1:
        return ids == lists
    ids = ids.expand(*rows, -1).contiguous()  # (…, A, C)
    # Binary search: comparing with every entry would take an (…, A, C, K) mask.
    column = torch.searchsorted(lists.contiguous(), ids)
    column.clamp_(max=length - 1)
    return lists.gather(-1, column) == ids


def find(items: Tensor, sought: Tensor) -> tuple[Tensor, Tensor]:
    """Find sought items (X, …) among items (X, C).

    Returns:
        (X, …) True if an item was found; (X, …) the first column with it, or any valid column if
        not.
    """
    # Without candidates no column is valid for a later `gather`.
    num_candidates = items.shape[1]
    if not num_candidates:
        return torch.zeros_like(sought, dtype=torch.bool), torch.zeros_like(sought)
    # Binary search, because comparing all pairs would be a second (X, A, C) matrix. The sort is
    # stable, so that the first copy is found.
    ordered, order = items.sort(dim=1, stable=True)
    flat = sought.flatten(1)
    place = torch.searchsorted(ordered, flat)
    place = place.clamp(max=num_candidates - 1)
    is_equal = ordered.gather(1, place) == flat
    is_found = is_equal & (flat != PADDING)
    column = order.gather(1, place)
    return is_found.view_as(sought), column.view_as(sought)


def log_count(mask: Tensor, like: Tensor) -> Tensor:
    """Return (X, A) log of the number of True entries per row of mask (X, A, C); 0 for none.

    The result has the precision of `like`.
    """
    return mask.sum(dim=-1).clamp(min=1).to(like.dtype).log()


def log_mean(logits: Tensor) -> Tensor:
    """Return (X, A) log of the mean of exp over the finite logits (X, A, C), or -inf."""
    log_sum = logits.logsumexp(dim=-1)
    return log_sum - log_count(logits > -torch.inf, like=logits)
