"""Who is compared with whom: gathering over ranks, both directions or both views, and the mask of positives.

An objective never sees ranks, directions or masks. It sees one or two `Anchors`: rows of this rank's anchors
against all candidates of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dualenc import distributed

Side = Literal["left", "right"]
PADDING = -1


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
    """This rank's anchors of one direction against the candidates of the global batch.

    Attributes:
        side: whose items the anchors are, and so whose state table they index ("left" also for two views).
        candidate_side: whose items the candidates are: what `encode` is asked for.
        ids: (A,) ids of the anchors.
        rows: (A,) positions of the anchors among all anchors of the global batch, for random draws shared by ranks.
        sizes: number of anchors on every rank, for gathering without asking again.
        num_global: number of anchors in the global batch.
        embeddings: (A, D) with gradient.
        positive_similarities: (A,) cosine with the anchor's own positive, with gradient.
        similarities: (A, C) cosines with every candidate, with gradient.
        allowed: (A, C) true where a candidate is a negative of the anchor.
        candidates: (C, D) embeddings of the candidates, with gradient.
        candidate_ids: (C,) ids of the candidates.
        positive_ids: (A, K) every id of the candidate side that is never a negative, padded with -1.
        temperature: scalar τ, with gradient when learned.
        num_in_batch: the first so many candidates are the batch itself; the rest are mined negatives.
        views: candidates are first all left, then all right views of the batch.
        positive_logits: (A,) s(x, y)/τ.
        logits: (A, C) s/τ, -inf where a candidate is no negative.
        num_negatives: (A,) how many candidates are negatives.
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
    similarities: Tensor
    allowed: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    positive_ids: Tensor
    temperature: Tensor
    num_in_batch: int
    views: bool = False

    positive_logits: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    num_negatives: Tensor = field(init=False)
    log_corpus_size: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.positive_logits = self.positive_similarities / self.temperature
        self.logits = (self.similarities / self.temperature).masked_fill(~self.allowed, -torch.inf)
        self.num_negatives = self.allowed.sum(dim=1)

    @cached_property
    def known_positives(self) -> Tensor:
        """(A, K) distinct ids that are no negatives: listed, or excluded in the batch; padded with -1."""
        excluded = torch.where(self.allowed, PADDING, self.candidate_ids[None, :])
        width = int((~self.allowed).sum(dim=1).max()) if self.allowed.numel() else 0
        ids = torch.cat([self.positive_ids, excluded.topk(width, dim=1).values], dim=1).sort(dim=1).values
        repeated = torch.zeros_like(ids, dtype=torch.bool)
        repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
        return ids.masked_fill(repeated, PADDING)

    def is_negative(self, ids: Tensor) -> Tensor:
        """Whether any items are negatives: shared ones, ids (n,) -> (A, n), or one per anchor, (A, 1) -> (A, 1)."""
        if ids.dim() == 1:
            return ~_listed(self.known_positives, ids)
        return ~(ids[:, :, None] == self.known_positives[:, None, :]).any(dim=2)

    def outside_logits(self, embeddings: Tensor) -> Tensor:
        """s/τ of items outside the batch: shared ones (n, D) -> (A, n), or one per anchor (A, 1, D) -> (A, 1)."""
        if embeddings.dim() == 2:
            return self.embeddings @ embeddings.T / self.temperature
        return torch.einsum("ad,and->an", self.embeddings, embeddings) / self.temperature


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


def pair_anchors(batch: Batch, temperature: Tensor) -> list[Anchors]:
    """Two towers: left anchors against all right items (and mined negatives), then right against left."""
    sizes = distributed.rank_sizes(len(batch.left_id), batch.left_id.device)
    left_id, right_id = (distributed.gather(ids, sizes) for ids in (batch.left_id, batch.right_id))
    left, right = (distributed.gather_with_grad(part, sizes) for part in (batch.left, batch.right))
    negatives, negative_id = _gathered_negatives(batch)
    rows = _own_rows(sizes, left_id)
    positive = (batch.left * batch.right).sum(dim=1)
    same_left = batch.left_id[:, None] == left_id[None, :]
    same_right = batch.right_id[:, None] == right_id[None, :]

    def direction(side: Side, embeddings: Tensor, ids: Tensor, positive_ids: Tensor, mined: bool) -> Anchors:
        candidates, candidate_ids = (right, right_id) if side == "left" else (left, left_id)
        excluded = same_left | same_right
        if mined and len(negative_id):
            candidates = torch.cat([candidates, negatives])
            candidate_ids = torch.cat([candidate_ids, negative_id])
            excluded = torch.cat([excluded, excluded.new_zeros(len(ids), len(negative_id))], dim=1)
        excluded = _all_copies(excluded, candidate_ids) | _listed(positive_ids, candidate_ids)
        return Anchors(
            side=side,
            candidate_side="right" if side == "left" else "left",
            ids=ids,
            rows=rows,
            sizes=sizes,
            num_global=sum(sizes),
            embeddings=embeddings,
            positive_similarities=positive,
            similarities=embeddings @ candidates.T,
            allowed=~excluded,
            candidates=candidates,
            candidate_ids=candidate_ids,
            positive_ids=positive_ids,
            temperature=temperature,
            num_in_batch=sum(sizes),
        )

    left_known = torch.cat([batch.left_positives, batch.right_id[:, None]], dim=1)
    right_known = torch.cat([batch.right_positives, batch.left_id[:, None]], dim=1)
    return [
        direction("left", batch.left, batch.left_id, left_known, mined=True),
        direction("right", batch.right, batch.right_id, right_known, mined=False),
    ]


def view_anchors(batch: Batch, temperature: Tensor) -> list[Anchors]:
    """Two views of each image: 2b anchors against the 2B views of the global batch."""
    sizes = distributed.rank_sizes(len(batch.left_id), batch.left_id.device)
    ids = distributed.gather(batch.left_id, sizes)
    candidate_ids = torch.cat([ids, ids])
    candidates = torch.cat([distributed.gather_with_grad(view, sizes) for view in (batch.left, batch.right)])
    rows = _own_rows(sizes, ids)
    anchor_ids = torch.cat([batch.left_id, batch.left_id])
    embeddings = torch.cat([batch.left, batch.right])
    positive = (batch.left * batch.right).sum(dim=1)
    known = torch.cat([batch.left_positives, batch.left_id[:, None]], dim=1)
    known = torch.cat([known, known])
    return [
        Anchors(
            side="left",
            candidate_side="left",
            ids=anchor_ids,
            rows=torch.cat([rows, rows + len(ids)]),
            sizes=[2 * size for size in sizes],
            num_global=2 * len(ids),
            embeddings=embeddings,
            positive_similarities=torch.cat([positive, positive]),
            similarities=embeddings @ candidates.T,
            allowed=~_listed(known, candidate_ids),
            candidates=candidates,
            candidate_ids=candidate_ids,
            positive_ids=known,
            temperature=temperature,
            num_in_batch=2 * len(ids),
            views=True,
        )
    ]


def _listed(listed_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """(A, C): whether a candidate's id stands in the anchor's list (A, K)."""
    listed = torch.zeros(len(listed_ids), len(candidate_ids), dtype=torch.bool, device=candidate_ids.device)
    for column in listed_ids.unbind(dim=1):
        listed |= column[:, None] == candidate_ids[None, :]
    return listed


def _all_copies(excluded: Tensor, candidate_ids: Tensor) -> Tensor:
    """(A, C): whether the candidate, or another one of the same id, is excluded: positives go by identity."""
    items, place = torch.unique(candidate_ids, return_inverse=True)
    if len(items) == len(candidate_ids):
        return excluded
    hits = torch.zeros(len(excluded), len(items), device=excluded.device).index_add_(1, place, excluded.float())
    return (hits > 0)[:, place]


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
