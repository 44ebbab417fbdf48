"""Who is compared with whom: gathering over ranks, both directions or both views, and the mask of positives.

An objective never sees ranks, directions or masks. It sees `Anchors`: rows of this rank's anchors of one direction
against all candidates of the global batch, or a block of these rows.

Shapes: b pairs of this rank, P pairs of all ranks, A anchors, C candidates, D dimension, K known positives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualenc import distributed
from dualenc.types import Side

PADDING = -1


def partners(ids: Tensor, all_ids: Tensor, all_partners: Tensor, copies: int) -> Tensor:
    """(A, copies) the partners of each anchor's item in all pairs of the batch that it stands in, padded with -1.

    Args:
        ids: (A,) the anchors' items.
        all_ids, all_partners: (P,) both items of every pair.
        copies: an item stands in at most so many pairs.
    """
    ordered, order = all_ids.sort(stable=True)
    first = torch.searchsorted(ordered, ids)
    place = first[:, None] + torch.arange(copies, device=ids.device)
    inside = place.clamp(max=len(ordered) - 1)
    shared = (ordered[inside] == ids[:, None]) & (place < len(ordered))
    return torch.where(shared, all_partners[order[inside]], PADDING)


def listed(ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """(A, C): whether a candidate's id (C,) stands in the anchor's list (A, K); -1 stands for no id."""
    if ids.shape[1] == 1:
        return ids == candidate_ids
    if not len(candidate_ids):
        return torch.zeros(len(ids), 0, dtype=torch.bool, device=ids.device)
    # Every id of a list is looked up among the sorted candidates, and marks the first of its copies there.
    num_candidates = len(candidate_ids)
    ordered = candidate_ids.sort().values
    place = torch.searchsorted(ordered, ids).clamp(max=num_candidates - 1)
    place = torch.where(ordered[place] == ids, place, num_candidates)
    marked = torch.zeros(len(ids), num_candidates + 1, dtype=torch.bool, device=ids.device).scatter_(1, place, True)
    return marked[:, torch.searchsorted(ordered, candidate_ids)]


def distinct_ids(ids: Tensor) -> Tensor:
    """(A, K) lists padded with -1 -> the same, sorted, with a repeated id replaced by -1."""
    ids = ids.sort(dim=1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(repeated, PADDING)


Rows = TypeVar("Rows", bound=Tensor | tuple[Tensor, ...])

# Entries of a matrix that is held at once: 1024 anchors against 1024 candidates.
BLOCK_ENTRIES = 2**20


@dataclass(frozen=True)
class Batch:
    """A batch as it enters an objective, checked and in full precision: this rank's b pairs, and all P pairs.

    Attributes:
        left, right: (b, D) this rank's embeddings.
        left_id, right_id: (b,) their ids.
        left_positives, right_positives: (b, K) further ids of the opposite side that are positive with each row, padded
            with -1; None without any.
        all_left, all_right: (P, D) embeddings of all ranks.
        all_left_id, all_right_id: (P,) their ids.
        negatives, negative_id: (n, D) and (n,) mined right items of all ranks.
        sizes: number of pairs on every rank.
        left_copies, right_copies: how many pairs of the batch share one left item, at most; one right item.
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
    left_copies: int
    right_copies: int

    @property
    def rows(self) -> Tensor:
        """(b,) positions of this rank's pairs in the global batch."""
        start = sum(self.sizes[: distributed.rank()])
        return torch.arange(start, start + len(self.left_id), device=self.left_id.device)

    def detached(self, left: Tensor, right: Tensor) -> Batch:
        """The same without gradient, with copies (b, D) of this rank's embeddings."""
        alone = self.all_left is self.left
        return replace(
            self,
            left=left,
            right=right,
            all_left=left if alone else self.all_left.detach(),
            all_right=right if alone else self.all_right.detach(),
            negatives=self.negatives.detach(),
        )


@dataclass
class Anchors:
    """This rank's anchors of one direction against the candidates of the global batch; or some of its rows.

    Attributes:
        side: whose items the anchors are, and so whose state table they index ("left" also for two views).
        candidate_side: whose items the candidates are: what `encode` is asked for.
        ids: (A,) ids of the anchors.
        rows: (A,) positions of the anchors among all anchors of the global batch, for random draws shared by ranks.
        sizes: number of anchors on every rank, for gathering without asking again.
        num_global: number of anchors in the global batch.
        embeddings: (A, D) with gradient.
        partners: (A, D) embeddings of the anchors' own positives, with gradient.
        positive_column: (A,) the candidates that these are.
        candidates: (C, D) embeddings of the candidates, with gradient.
        candidate_ids: (C,) ids of the candidates.
        positive_ids: (A, K) distinct ids of the candidate side that are known to be no negatives: the anchor's own
            positive, listed ones, and those of other pairs with the anchor's item; padded with -1.
        temperature: scalar τ, with gradient when learned.
        num_in_batch: the first so many candidates are the batch itself; the rest are mined negatives.
        views: candidates are first all left, then all right views of the batch.
        distinct: no item comes twice and no further positives are listed: each anchor has its own pair as positive,
            and all other candidates as negatives.
        mirror: the same pairs' anchors of the other direction, where similarities with them are the transposed ones.
        with_grad: whether similarities carry a gradient, whoever asks for them first.
        log_corpus_size: (A,) kept here by `Objective.log_corpus_size` once it is asked for.
    """

    side: Side
    candidate_side: Side
    ids: Tensor
    rows: Tensor
    sizes: list[int]
    num_global: int
    embeddings: Tensor
    partners: Tensor
    positive_column: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    positive_ids: Tensor
    temperature: Tensor
    num_in_batch: int
    views: bool = False
    distinct: bool = False
    mirror: Anchors | None = None
    with_grad: bool = field(default_factory=torch.is_grad_enabled)
    log_corpus_size: Tensor | None = field(init=False, default=None)

    def by_rows(self, function: Callable[..., Rows], *tensors: Tensor, row_entries: int | None = None) -> Rows:
        """Apply a function to all rows at once where its matrices are small, else to one block of rows at a time.

        With gradient, a block's matrices are computed again in the backward pass. The function must be pure: equal
        results when called again, and each row's result its own.

        Args:
            function: takes the `Anchors` of some rows and those rows (a, ...) of the tensors; returns one tensor
                (a, ...) or several.
            tensors: (A, ...) each.
            row_entries: how many numbers the function holds per row; by default C.

        Returns:
            What the function returns, for all rows.
        """
        blocks = self._blocks(row_entries or len(self.candidate_ids))
        if len(blocks) == 1:
            return function(self, *tensors)

        def block(rows: slice) -> Rows:
            return function(self.take(rows), *(tensor[rows] for tensor in tensors))

        if not torch.is_grad_enabled():
            return _joined([block(rows) for rows in blocks])
        return _joined([checkpoint(block, rows, use_reentrant=False, preserve_rng_state=False) for rows in blocks])

    def take(self, rows: slice) -> Anchors:
        """Some of the rows; what rows share is not copied."""
        return replace(
            self,
            ids=self.ids[rows],
            rows=self.rows[rows],
            embeddings=self.embeddings[rows],
            partners=self.partners[rows],
            positive_column=self.positive_column[rows],
            positive_ids=self.positive_ids[rows],
            mirror=None,
            with_grad=torch.is_grad_enabled(),
        )

    @property
    def distinct_rows(self) -> bool:
        """Whether it is known that no anchor stands in two rows of the global batch."""
        return self.distinct and not self.views

    @cached_property
    def positive_similarities(self) -> Tensor:
        """(A,) cosine with the anchor's own positive, with gradient."""
        if self.mirror is not None:
            return self.mirror.positive_similarities
        with torch.set_grad_enabled(self.with_grad):
            return (self.embeddings * self.partners).sum(dim=1)

    @cached_property
    def positive_logits(self) -> Tensor:
        """(A,) s(x, y)/τ, with gradient."""
        if self.mirror is not None:
            return self.mirror.positive_logits
        with torch.set_grad_enabled(self.with_grad):
            return self.positive_similarities / self.temperature

    @cached_property
    def excluded(self) -> Tensor:
        """(A, C) true where a candidate is no negative of the anchor."""
        return listed(self.positive_ids, self.candidate_ids)

    @cached_property
    def allowed(self) -> Tensor:
        """(A, C) true where a candidate is a negative of the anchor."""
        return ~self.excluded

    @cached_property
    def similarities(self) -> Tensor:
        """(A, C) cosines with every candidate, with gradient."""
        with torch.set_grad_enabled(self.with_grad):
            if self._is_mirrored:
                assert self.mirror is not None
                return self.mirror.similarities.T
            return self.embeddings @ self.candidates.T

    @cached_property
    def scores(self) -> Tensor:
        """(A, C) s/τ with every candidate, with gradient."""
        with torch.set_grad_enabled(self.with_grad):
            if self._is_mirrored:
                assert self.mirror is not None
                return self.mirror.scores.T
            return self.similarities / self.temperature

    @cached_property
    def logits(self) -> Tensor:
        """(A, C) s/τ with gradient, -inf where a candidate is no negative."""
        with torch.set_grad_enabled(self.with_grad):
            return self.scores.masked_fill(self.excluded, -torch.inf)

    @property
    def logits_with_positive(self) -> Tensor:
        """(A, C) s/τ with gradient, -inf where a candidate is neither a negative nor the anchor's own positive."""
        if self.distinct and not self.views:
            return self.scores
        others = self.excluded.scatter(1, self.positive_column[:, None], False)
        with torch.set_grad_enabled(self.with_grad):
            return self.scores.masked_fill(others, -torch.inf)

    @cached_property
    def num_negatives(self) -> Tensor:
        """(A,) how many candidates are negatives."""
        if self.distinct:
            return torch.full_like(self.ids, self.num_in_batch - (2 if self.views else 1))
        with torch.no_grad():
            return self.by_rows(lambda block: block.excluded.shape[1] - block.excluded.sum(dim=1))

    @property
    def log_mean_exp(self) -> Tensor:
        """(A,) log of the mean of exp(s/τ) over the negatives, with gradient; -inf without any."""
        return log_mean_exp(self.logits, self.num_negatives)

    def is_negative(self, ids: Tensor) -> Tensor:
        """Whether any items are negatives: shared ones, ids (n,) -> (A, n), or one per anchor, (A, 1) -> (A, 1)."""
        if ids.dim() == 1:
            return ~listed(self.positive_ids, ids)
        return ~(ids == self.positive_ids).any(dim=1, keepdim=True)

    def outside_logits(self, embeddings: Tensor) -> Tensor:
        """s/τ of items outside the batch: shared ones (n, D) -> (A, n), or one per anchor (A, 1, D) -> (A, 1)."""
        if embeddings.dim() == 2:
            return self.embeddings @ embeddings.T / self.temperature
        return torch.einsum("ad,and->an", self.embeddings, embeddings) / self.temperature

    @property
    def _is_mirrored(self) -> bool:
        """Whether the other direction has the same similarities: one process, and no mined negatives."""
        mirror = self.mirror
        return mirror is not None and mirror.candidates is self.embeddings and mirror.embeddings is self.candidates

    def _blocks(self, row_entries: int) -> list[slice]:
        """Runs of rows whose matrices have at most BLOCK_ENTRIES entries."""
        size = max(1, BLOCK_ENTRIES // max(1, row_entries))
        return [slice(start, start + size) for start in range(0, max(1, len(self.ids)), size)]


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def log_mean_exp(logits: Tensor, count: Tensor) -> Tensor:
    """(A, C) -> (A,) log of the mean of exp over the `count` (A,) finite entries of a row; -inf for a row without."""
    return torch.logsumexp(logits, dim=1) - count.clamp(min=1).to(logits.dtype).log()


def weighted_sum(weights: Tensor, scores: Tensor) -> Tensor:
    """(A,) Σ_c weights·scores over candidates; its gradient is the weighted gradient of the scores.

    Args:
        weights: (A, C), used as constants, no gradient flows through a weight; zero where masked.
        scores: (A, C), finite everywhere.
    """
    return (weights.detach() * scores).sum(dim=1)


def pair_anchors(batch: Batch, temperature: Tensor) -> Iterator[Anchors]:
    """Two towers: left anchors against all right items (and mined negatives), then right against left."""
    rows, mined = batch.rows, len(batch.negative_id) > 0
    once = batch.left_copies <= 1 and batch.right_copies <= 1
    candidates = torch.cat([batch.all_right, batch.negatives]) if mined else batch.all_right
    candidate_ids = torch.cat([batch.all_right_id, batch.negative_id]) if mined else batch.all_right_id
    left = Anchors(
        side="left",
        candidate_side="right",
        ids=batch.left_id,
        rows=rows,
        sizes=batch.sizes,
        num_global=sum(batch.sizes),
        embeddings=batch.left,
        partners=batch.right,
        positive_column=rows,
        candidates=candidates,
        candidate_ids=candidate_ids,
        positive_ids=_known(batch, "left"),
        temperature=temperature,
        num_in_batch=sum(batch.sizes),
        distinct=once and not mined and batch.left_positives is None,
    )
    yield left
    yield replace(
        left,
        side="right",
        candidate_side="left",
        ids=batch.right_id,
        embeddings=batch.right,
        partners=batch.left,
        candidates=batch.all_left,
        candidate_ids=batch.all_left_id,
        positive_ids=_known(batch, "right"),
        distinct=once and batch.right_positives is None,
        mirror=left,
    )


def _known(batch: Batch, side: Side) -> Tensor:
    """(b, K) distinct ids that are no negatives of a side's anchors."""
    own, everyone = (batch.left_id, batch.right_id), (batch.all_left_id, batch.all_right_id)
    further, copies = batch.left_positives, batch.left_copies
    if side == "right":
        own, everyone, further, copies = own[::-1], everyone[::-1], batch.right_positives, batch.right_copies
    if copies <= 1:
        known = own[1][:, None]
        return known if further is None else distinct_ids(torch.cat([further, known], dim=1))
    known = partners(own[0], *everyone, copies)
    return distinct_ids(known if further is None else torch.cat([further, known], dim=1))


def view_anchors(batch: Batch, temperature: Tensor) -> Iterator[Anchors]:
    """Two views of each image: 2b anchors against the 2B views of the global batch."""
    rows, total = batch.rows, sum(batch.sizes)
    further = [ids for ids in (batch.left_positives, batch.right_positives) if ids is not None]
    known = batch.left_id[:, None]
    if further:
        known = distinct_ids(torch.cat([*further, known], dim=1))
    yield Anchors(
        side="left",
        candidate_side="left",
        ids=torch.cat([batch.left_id, batch.left_id]),
        rows=torch.cat([rows, rows + total]),
        sizes=[2 * size for size in batch.sizes],
        num_global=2 * total,
        embeddings=torch.cat([batch.left, batch.right]),
        partners=torch.cat([batch.right, batch.left]),
        positive_column=torch.cat([rows + total, rows]),
        candidates=torch.cat([batch.all_left, batch.all_right]),
        candidate_ids=torch.cat([batch.all_left_id, batch.all_left_id]),
        positive_ids=torch.cat([known, known]),
        temperature=temperature,
        num_in_batch=2 * total,
        views=True,
        distinct=batch.left_copies <= 1 and not further,
    )
