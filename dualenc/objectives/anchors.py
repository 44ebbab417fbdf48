"""Anchors against candidates: the picture that every objective computes on.

Shapes: X directions (left anchors, then right ones; one alone for two views of an image), A anchors of this rank, G
anchors of all ranks, C candidates of all ranks, K known positives, P pairs of the global batch, b pairs of this rank, D
dimension. A leading X does both directions at once, so that no equation loops over sides.

An *item* is what a candidate is: an id of the candidates' side, or with views one view of an image, the left view of
image i as 2·i and the right one as 2·i + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from dualenc import distributed
from dualenc.objectives.guide import Guide

PADDING = -1
"""Fills lists of ids, and stands for "no item"."""

BLOCK_ENTRIES = 2**20
"""Entries of an (X, A, C) matrix that exist at a time; larger ones are computed in blocks of anchors, twice."""

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


@dataclass(frozen=True)
class Batch:
    """The pairs of a step, checked, in float32 or float64.

    Attributes:
        left, right: (b, D) embeddings of this rank's pairs, with gradient.
        left_id, right_id: (b,).
        left_positives, right_positives: (b, K) further positives of the opposite side, padded with -1; or None.
        all_left, all_right: (P, D) of all ranks, with gradient.
        all_left_id, all_right_id: (P,).
        negatives, negative_id: (n, D) and (n,) mined right items of all ranks.
        sizes: pairs on every rank.
        most_copies: most pairs of the batch that share one item.
        guide: a guide's vectors of left and right anchors against the candidates (X = 2, or 1 with views); or None.
    """

    left: Tensor
    right: Tensor
    left_id: Tensor
    right_id: Tensor
    left_positives: Tensor | None
    right_positives: Tensor | None
    all_left: Tensor
    all_right: Tensor
    all_left_id: Tensor
    all_right_id: Tensor
    negatives: Tensor
    negative_id: Tensor
    sizes: list[int]
    most_copies: int
    guide: list[Guide] | None = None


@dataclass(frozen=True)
class Anchors:
    """This rank's anchors and the candidates of the global batch.

    Attributes:
        directions: (X) 0 for left anchors against right candidates, and for views; 1 for right against left.
        rows: (X, A) the anchors' rows in per-item tables: left id, or num_left + right id.
        batch_rows: (A,) the anchors' places among the G anchors of their direction.
        sizes: anchors on every rank, per direction.
        embeddings: (X, A, D) with gradient.
        partners: (X, A, D) the anchors' own positives, with gradient.
        all_embeddings: (X, G, D) the anchors of all ranks, in the order of the batch, no gradient.
        candidates: (X, C, D) with gradient: those of the batch, then mined negatives.
        candidate_ids: (X, C).
        positive_column: (X, A) the candidate that is each anchor's own positive.
        positive_ids: (X, A, K) ascending ids of known positives: the anchor's own, listed ones, those of other pairs
            with the anchor's item; padded with -1, each id once.
        temperature: scalar τ.
        views: candidates are first all left, then all right views.
        guide: removes likely false negatives; None without one.
    """

    directions: tuple[int, ...]
    rows: Tensor
    batch_rows: Tensor
    sizes: list[int]
    embeddings: Tensor
    partners: Tensor
    all_embeddings: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    positive_column: Tensor
    positive_ids: Tensor
    temperature: Tensor
    views: bool = False
    guide: Guide | None = None

    @property
    def num_batch(self) -> int:
        """G, the anchors of all ranks per direction; and so many candidates are of the batch, not mined."""
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
        """(X, A, C) True where a candidate is a known positive, or a likely one by the guide."""
        known = is_listed(self.candidate_ids, self.positive_ids)
        return known if self.guide is None else known | self.guide.likely_positives

    @property
    def logits(self) -> Tensor:
        """(X, A, C) s/τ with gradient, -inf where a candidate is not a negative."""
        return self.scores.masked_fill(self.not_negative, -torch.inf)

    @property
    def num_negatives(self) -> Tensor:
        """(X, A)."""
        return (~self.not_negative).sum(dim=-1)

    @property
    def candidate_items(self) -> Tensor:
        """(X, C) the candidates as items."""
        return items_of_views(self.candidate_ids) if self.views else self.candidate_ids

    @property
    def hidden_items(self) -> Tensor:
        """(X, A, K) or with views (X, A, 2K), ascending: the known positives as items."""
        if not self.views:
            return self.positive_ids
        left_views = torch.where(self.positive_ids < 0, self.positive_ids, 2 * self.positive_ids)
        right_views = torch.where(self.positive_ids < 0, self.positive_ids, 2 * self.positive_ids + 1)
        return torch.cat([left_views, right_views], dim=-1).sort(dim=-1).values

    def gather(self, values: Tensor) -> Tensor:
        """(X, G, …) of all ranks in the order of the batch, without gradient, of values (X, A, …) of this one."""
        gathered = distributed.gather(values.transpose(0, 1).contiguous(), self.sizes).transpose(0, 1)
        if not self.views or len(self.sizes) == 1:
            return gathered
        # Each rank brings its left views, then its right ones; in the batch all left views come first.
        halves = gathered.split([size // 2 for size in self.sizes for _ in ("left", "right")], dim=1)
        return torch.cat([*halves[0::2], *halves[1::2]], dim=1)

    def gather_lists(self, values: Tensor) -> Tensor:
        """(X, G, K) likewise of lists (X, A, K) whose lengths may differ between ranks, padded in front with -1."""
        width = int(distributed.all_reduce(values.new_tensor(values.shape[-1]), "max"))
        return self.gather(pad(values, (width - values.shape[-1], 0), value=PADDING))

    def with_candidates(self, candidates: Tensor, candidate_ids: Tensor) -> Anchors:
        """The same anchors against other candidates (X, C, D) with ids (X, C), which need not hold the positives."""
        return replace(self, candidates=candidates, candidate_ids=candidate_ids)

    def of_direction(self, x: int) -> Anchors:
        """One direction alone (X = 1)."""
        one = slice(x, x + 1)
        guide = None if self.guide is None else Guide(*(vectors[one] for vectors in self.guide))
        return replace(
            self,
            directions=self.directions[one],
            all_embeddings=self.all_embeddings[one],
            candidates=self.candidates[one],
            candidate_ids=self.candidate_ids[one],
            guide=guide,
            **{name: getattr(self, name)[one] for name in _BY_ANCHOR},
        )

    def by_blocks(self, function: Callable[..., Result], *rows: Tensor, width: int | None = None) -> Result:
        """Apply a function to blocks of anchors, recomputed in the backward pass, so that (X, A, C) matrices stay
        small.

        Args:
            function: `function(block, *rows)` returns one tensor (X, a, …) or several. Must be pure and row-wise.
            rows: (X, A, …) each, handed on in blocks.
            width: entries that the function holds per anchor; by default C.

        Returns:
            What the function returns, of all anchors.
        """
        num_directions, num_anchors = self.rows.shape
        size = max(1, BLOCK_ENTRIES // max(1, num_directions * (width or self.candidates.shape[1])))
        if num_anchors <= size:
            return function(self, *rows)

        def block(start: int) -> Any:
            part = slice(start, start + size)
            own: dict[str, Any] = {name: getattr(self, name)[:, part] for name in _BY_ANCHOR}
            if self.guide is not None:
                own["guide"] = self.guide._replace(
                    anchors=self.guide.anchors[:, part], limits=self.guide.limits[:, part]
                )
            some = replace(self, batch_rows=self.batch_rows[part], **own)
            return function(some, *(tensor[:, part] for tensor in rows))

        starts = range(0, num_anchors, size)
        blocks = [checkpoint(block, start, use_reentrant=False, preserve_rng_state=False) for start in starts]
        if isinstance(blocks[0], Tensor):
            return torch.cat(blocks, dim=1)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True))


_BY_ANCHOR = ("rows", "embeddings", "partners", "positive_column", "positive_ids")
"""Attributes of shape (X, A, …)."""


def two_towers(batch: Batch, num_left: int, temperature: Tensor) -> Anchors:
    """Left anchors against all right items, and right anchors against all left items (X = 2).

    Args:
        num_left: where right items begin in per-item tables.
    """
    rows = torch.stack([batch.left_id, num_left + batch.right_id])
    embeddings = torch.stack([batch.left, batch.right])
    all_embeddings = torch.stack([batch.all_left, batch.all_right])
    all_ids = torch.stack([batch.all_left_id, batch.all_right_id])
    batch_rows = _batch_rows(batch)
    left_positives = known_positives(
        batch.left_id, batch.right_id, all_ids[0], all_ids[1], batch.most_copies, batch.left_positives
    )
    right_positives = known_positives(
        batch.right_id, batch.left_id, all_ids[1], all_ids[0], batch.most_copies, batch.right_positives
    )
    width = max(left_positives.shape[1], right_positives.shape[1])
    lists = [pad(ids, (width - ids.shape[1], 0), value=PADDING) for ids in (left_positives, right_positives)]
    return Anchors(
        directions=(0, 1),
        rows=rows,
        batch_rows=batch_rows,
        sizes=batch.sizes,
        embeddings=embeddings,
        partners=embeddings.flip(0),
        all_embeddings=all_embeddings.detach(),
        candidates=all_embeddings.flip(0),
        candidate_ids=all_ids.flip(0),
        positive_column=batch_rows.expand(2, -1),
        positive_ids=torch.stack(lists),
        temperature=temperature,
        guide=None if batch.guide is None else Guide(*map(torch.stack, zip(*batch.guide, strict=True))),
    )


def with_mined(batch: Batch, num_left: int, temperature: Tensor) -> list[Anchors]:
    """Both directions apart (X = 1 each), with mined negatives among the candidates of the left anchors."""
    both = two_towers(replace(batch, guide=None), num_left, temperature)
    left, right = both.of_direction(0), both.of_direction(1)
    left = replace(
        left,
        candidates=torch.cat([left.candidates, batch.negatives[None]], dim=1),
        candidate_ids=torch.cat([left.candidate_ids, batch.negative_id[None]], dim=1),
    )
    if batch.guide is None:
        return [left, right]
    guides = [Guide(*(vectors[None] for vectors in guide)) for guide in batch.guide]
    return [replace(left, guide=guides[0]), replace(right, guide=guides[1])]


def two_views(batch: Batch, temperature: Tensor) -> Anchors:
    """Both views of each image as anchors against the views of the global batch (X = 1, A = 2b, C = 2P)."""
    total, own = sum(batch.sizes), _batch_rows(batch)
    listed = [ids for ids in (batch.left_positives, batch.right_positives) if ids is not None]
    positives = known_positives(
        batch.left_id,
        batch.left_id,
        batch.all_left_id,
        batch.all_left_id,
        1,
        torch.cat(listed, dim=1) if listed else None,
    )
    candidates = torch.cat([batch.all_left, batch.all_right])[None]
    return Anchors(
        directions=(0,),
        rows=torch.cat([batch.left_id, batch.left_id])[None],
        batch_rows=torch.cat([own, own + total]),
        sizes=[2 * size for size in batch.sizes],
        embeddings=torch.cat([batch.left, batch.right])[None],
        partners=torch.cat([batch.right, batch.left])[None],
        all_embeddings=candidates.detach(),
        candidates=candidates,
        candidate_ids=torch.cat([batch.all_left_id, batch.all_left_id])[None],
        positive_column=torch.cat([own + total, own])[None],
        positive_ids=torch.cat([positives, positives])[None],
        temperature=temperature,
        views=True,
        guide=None if batch.guide is None else Guide(*(vectors[None] for vectors in batch.guide[0])),
    )


def known_positives(
    ids: Tensor, partners: Tensor, all_ids: Tensor, all_partners: Tensor, most_copies: int, listed: Tensor | None
) -> Tensor:
    """(A, K) ascending ids that are not negatives of the anchors, each once, padded in front with -1.

    Args:
        ids, partners: (A,) the anchors' items, and those that they are paired with.
        all_ids, all_partners: (P,) both items of every pair of the batch.
        most_copies: an item is in at most so many pairs, each of which names a positive.
        listed: (A, K) further positives, padded with -1; or None.
    """
    positives = partners[:, None]
    if most_copies > 1:
        # The pairs of an item stand side by side once pairs are sorted by it.
        ordered, order = all_ids.sort(stable=True)
        place = torch.searchsorted(ordered, ids)[:, None] + torch.arange(most_copies, device=ids.device)
        inside = place.clamp(max=len(ordered) - 1)
        shared = (ordered[inside] == ids[:, None]) & (place < len(ordered))
        positives = torch.where(shared, all_partners[order[inside]], PADDING)
    if listed is not None:
        positives = torch.cat([positives, listed], dim=1)
    if positives.shape[1] == 1:
        return positives
    positives = positives.sort(dim=1).values
    repeated = torch.zeros_like(positives, dtype=torch.bool)
    repeated[:, 1:] = positives[:, 1:] == positives[:, :-1]
    return positives.masked_fill(repeated, PADDING).sort(dim=1).values


def is_listed(ids: Tensor, lists: Tensor) -> Tensor:
    """(…, A, C) whether ids (…, C) or (…, A, C) are in each anchor's list (…, A, K), ascending; True for -1 at most."""
    if ids.dim() < lists.dim():
        ids = ids[..., None, :]
    if lists.shape[-1] == 1:
        return ids == lists
    ids = ids.expand(*lists.shape[:-1], ids.shape[-1]).contiguous()
    place = torch.searchsorted(lists.contiguous(), ids).clamp_(max=lists.shape[-1] - 1)
    return lists.gather(-1, place) == ids


def items_of_views(ids: Tensor) -> Tensor:
    """(…, 2P) items of ids (…, 2P), those of all left views first."""
    num_pairs = ids.shape[-1] // 2
    return torch.cat([2 * ids[..., :num_pairs], 2 * ids[..., num_pairs:] + 1], dim=-1)


def _batch_rows(batch: Batch) -> Tensor:
    """(b,) places of this rank's pairs in the global batch."""
    start = sum(batch.sizes[: distributed.rank()])
    return torch.arange(start, start + len(batch.left_id), device=batch.left.device)
