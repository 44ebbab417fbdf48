"""Who is compared with whom: gathering over ranks, both directions or both views, and the mask of positives.

An objective never sees ranks, directions or masks. It sees one or two `Anchors`: rows of this rank's anchors
against all candidates of the global batch. What it does with (A, C) matrices it does `by_rows`: for a large batch they
exist for one block of rows at a time, forward and backward, so that memory grows with the batch and not its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualenc import distributed
from dualenc.objectives.positives import PADDING, Positives, distinct_ids, listed

Side = Literal["left", "right"]
Rows = TypeVar("Rows", Tensor, tuple[Tensor, ...])

# Entries of a matrix that is held at once: 1024 anchors against 1024 candidates.
BLOCK_ENTRIES = 2**20


@dataclass(frozen=True)
class Batch:
    """This rank's part of a batch as it enters an objective, checked and in full precision.

    Shapes: left, right (b, D); left_id, right_id (b,); left_positives, right_positives (b, K) padded with -1, the
    opposite side's ids that are positive with each row; negatives (n, D) with negative_id (n,): mined right items.
    """

    left: Tensor
    right: Tensor
    left_id: Tensor
    right_id: Tensor
    left_positives: Tensor
    right_positives: Tensor
    negatives: Tensor
    negative_id: Tensor


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
        positive_similarities: (A,) cosine with the anchor's own positive, with gradient.
        candidates: (C, D) embeddings of the candidates, with gradient.
        candidate_ids: (C,) ids of the candidates.
        positives: which candidates are no negatives.
        temperature: scalar τ, with gradient when learned.
        num_in_batch: the first so many candidates are the batch itself; the rest are mined negatives.
        views: candidates are first all left, then all right views of the batch.
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
    positive_similarities: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    positives: Positives
    temperature: Tensor
    num_in_batch: int
    views: bool = False
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

    @torch.no_grad()
    def statistics(self, function: Callable[..., Rows], *tensors: Tensor, row_entries: int | None = None) -> Rows:
        """`by_rows` without gradient."""
        return self.by_rows(function, *tensors, row_entries=row_entries)

    def take(self, rows: slice) -> Anchors:
        """Some of the rows; what rows share is not copied."""
        part = replace(
            self,
            ids=self.ids[rows],
            rows=self.rows[rows],
            embeddings=self.embeddings[rows],
            positive_similarities=self.positive_similarities[rows],
            positives=self.positives.take(rows),
            with_grad=torch.is_grad_enabled(),
        )
        for name in ("num_negatives", "known_positives"):
            if name in self.__dict__:
                part.__dict__[name] = self.__dict__[name][rows]
        return part

    @property
    def positive_ids(self) -> Tensor:
        """(A, K) every id of the candidate side that is known to be no negative, padded with -1."""
        return self.positives.ids

    @property
    def positive_logits(self) -> Tensor:
        """(A,) s(x, y)/τ."""
        return self.positive_similarities / self.temperature

    @cached_property
    def allowed(self) -> Tensor:
        """(A, C) true where a candidate is a negative of the anchor."""
        return ~self.positives.excluded(self.candidate_ids)

    @cached_property
    def similarities(self) -> Tensor:
        """(A, C) cosines with every candidate, with gradient."""
        with torch.set_grad_enabled(self.with_grad):
            return self.embeddings @ self.candidates.T

    @cached_property
    def logits(self) -> Tensor:
        """(A, C) s/τ, -inf where a candidate is no negative."""
        with torch.set_grad_enabled(self.with_grad):
            return (self.similarities / self.temperature).masked_fill(~self.allowed, -torch.inf)

    @cached_property
    def num_negatives(self) -> Tensor:
        """(A,) how many candidates are negatives."""
        return self.statistics(_count_allowed)

    @cached_property
    def known_positives(self) -> Tensor:
        """(A, K) distinct ids that are no negatives: listed, or excluded in the batch; padded with -1."""
        num_excluded = len(self.candidate_ids) - self.num_negatives
        width = int(num_excluded.max()) if self.ids.numel() else 0

        def excluded_ids(anchors: Anchors) -> Tensor:
            return torch.where(anchors.allowed, PADDING, anchors.candidate_ids[None, :]).topk(width, dim=1).values

        return distinct_ids(torch.cat([self.positive_ids, self.statistics(excluded_ids)], dim=1))

    def is_negative(self, ids: Tensor) -> Tensor:
        """Whether any items are negatives: shared ones, ids (n,) -> (A, n), or one per anchor, (A, 1) -> (A, 1)."""
        if ids.dim() == 1:
            return ~listed(self.known_positives, ids)
        return ~(ids[:, :, None] == self.known_positives[:, None, :]).any(dim=2)

    def outside_logits(self, embeddings: Tensor) -> Tensor:
        """s/τ of items outside the batch: shared ones (n, D) -> (A, n), or one per anchor (A, 1, D) -> (A, 1)."""
        if embeddings.dim() == 2:
            return self.embeddings @ embeddings.T / self.temperature
        return torch.einsum("ad,and->an", self.embeddings, embeddings) / self.temperature

    def _blocks(self, row_entries: int) -> list[slice]:
        """Runs of rows whose matrices have at most BLOCK_ENTRIES entries."""
        size = max(1, BLOCK_ENTRIES // max(1, row_entries))
        return [slice(start, start + size) for start in range(0, max(1, len(self.ids)), size)]


def _count_allowed(anchors: Anchors) -> Tensor:
    return anchors.allowed.sum(dim=1)


def _joined(parts: list[Rows]) -> Rows:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def log_mean_exp(logits: Tensor) -> Tensor:
    """(A, C) -> (A,) log of the mean of exp over the finite entries of a row; -inf for a row without any."""
    count = torch.isfinite(logits).sum(dim=1)
    return torch.logsumexp(logits, dim=1) - count.clamp(min=1).to(logits.dtype).log()


def weighted_sum(weights: Tensor, logits: Tensor) -> Tensor:
    """(A,) Σ_c weights·logits over negatives; its gradient is the weighted gradient of the logits.

    Args:
        weights: (A, C), used as constants: no gradient flows through a weight.
        logits: (A, C), -inf where masked; there the weight must be zero and does not count.
    """
    return (weights.detach() * logits.masked_fill(torch.isneginf(logits), 0.0)).sum(dim=1)


def pair_anchors(batch: Batch, temperature: Tensor) -> Iterator[Anchors]:
    """Two towers: left anchors against all right items (and mined negatives), then right against left."""
    sizes = distributed.rank_sizes(len(batch.left_id), batch.left_id.device)
    own = torch.stack([batch.left_id, batch.right_id], dim=1)
    pairs = distributed.gather(own, sizes)
    left, right = (distributed.gather_with_grad(part, sizes) for part in (batch.left, batch.right))
    negatives, negative_id = _gathered_negatives(batch)
    rows = _own_rows(sizes, own)
    positive = (batch.left * batch.right).sum(dim=1)

    def direction(side: Side, embeddings: Tensor, candidates: Tensor, candidate_ids: Tensor, known: Tensor) -> Anchors:
        return Anchors(
            side=side,
            candidate_side="right" if side == "left" else "left",
            ids=own[:, 0 if side == "left" else 1],
            rows=rows,
            sizes=sizes,
            num_global=sum(sizes),
            embeddings=embeddings,
            positive_similarities=positive,
            candidates=candidates,
            candidate_ids=candidate_ids,
            positives=Positives.of_pairs(known, own, pairs, candidate_ids),
            temperature=temperature,
            num_in_batch=sum(sizes),
        )

    known = torch.cat([batch.left_positives, batch.right_id[:, None]], dim=1)
    with_mined = torch.cat([right, negatives]), torch.cat([pairs[:, 1], negative_id])
    yield direction("left", batch.left, *with_mined, known)
    known = torch.cat([batch.right_positives, batch.left_id[:, None]], dim=1)
    yield direction("right", batch.right, left, pairs[:, 0], known)


def view_anchors(batch: Batch, temperature: Tensor) -> Iterator[Anchors]:
    """Two views of each image: 2b anchors against the 2B views of the global batch."""
    sizes = distributed.rank_sizes(len(batch.left_id), batch.left_id.device)
    ids = distributed.gather(batch.left_id, sizes)
    rows = _own_rows(sizes, ids)
    positive = (batch.left * batch.right).sum(dim=1)
    known = torch.cat([batch.left_positives, batch.left_id[:, None]], dim=1)
    yield Anchors(
        side="left",
        candidate_side="left",
        ids=torch.cat([batch.left_id, batch.left_id]),
        rows=torch.cat([rows, rows + len(ids)]),
        sizes=[2 * size for size in sizes],
        num_global=2 * len(ids),
        embeddings=torch.cat([batch.left, batch.right]),
        positive_similarities=torch.cat([positive, positive]),
        candidates=torch.cat([distributed.gather_with_grad(view, sizes) for view in (batch.left, batch.right)]),
        candidate_ids=torch.cat([ids, ids]),
        positives=Positives.of_views(torch.cat([known, known])),
        temperature=temperature,
        num_in_batch=2 * len(ids),
        views=True,
    )


def _gathered_negatives(batch: Batch) -> tuple[Tensor, Tensor]:
    """Mined negatives of all ranks, and their ids."""
    sizes = distributed.rank_sizes(len(batch.negative_id), batch.negative_id.device)
    if not any(sizes):
        return batch.negatives, batch.negative_id
    return distributed.gather_with_grad(batch.negatives, sizes), distributed.gather(batch.negative_id, sizes)


def _own_rows(sizes: list[int], ids: Tensor) -> Tensor:
    """Positions of this rank's pairs in the global batch."""
    start = sum(sizes[: distributed.rank()])
    return torch.arange(start, start + sizes[distributed.rank()], device=ids.device)
