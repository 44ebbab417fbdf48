"""The objectives once more, as float64 loops over single anchors and candidates, straight from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class GuideTable:
    """A guide's vectors of 20 items of each side, and its rule (Solatorio 2024) for one anchor and one item."""

    left: Tensor
    right: Tensor

    @classmethod
    def make(cls, seed: int) -> GuideTable:
        draw = torch.Generator().manual_seed(seed)
        tables = torch.nn.functional.normalize(torch.randn(2, 20, 3, generator=draw, dtype=torch.float64), dim=2)
        tables[1] = torch.nn.functional.normalize(tables[0] + tables[1], dim=1)
        return cls(tables[0], tables[1])

    def look_up(self, side: str, ids: Tensor) -> Tensor:
        return (self.left if side == "left" else self.right)[ids]

    def mistrusts(self, anchor: tuple[str, int], positive: tuple[str, int], item: tuple[str, int]) -> bool:
        """Whether the item, of a side and with an id, is more alike to the anchor than the positive."""
        own, partner, other = (self.look_up(side, torch.tensor(i)).tolist() for side, i in (anchor, positive, item))
        return sum(a * b for a, b in zip(own, other)) > sum(a * b for a, b in zip(own, partner))


@dataclass
class Case:
    """A batch with duplicate ids and shared positives: the input of an objective."""

    left: Tensor
    right: Tensor
    left_id: list[int]
    right_id: list[int]
    views: bool
    relevant: set[tuple[int, int]] = field(default_factory=set)
    num_items: int = 20
    guide: GuideTable | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `Objective.forward`."""
        given: dict[str, Any] = {
            "left": self.left,
            "right": self.right,
            "left_id": torch.tensor(self.left_id),
            "right_id": torch.tensor(self.right_id),
        }
        if self.relevant:
            given["left_positives"] = padded([[r for q, r in self.relevant if q == i] for i in self.left_id])
            given["right_positives"] = padded([[q for q, r in self.relevant if r == i] for i in self.right_id])
        if self.guide is not None:
            given["guide"] = self.guide.look_up
        return given


def padded(rows: list[list[int]]) -> Tensor:
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def make_case(
    seed: int, size: int, views: bool, dtype: torch.dtype = torch.float64, guide: GuideTable | None = None
) -> Case:
    """Random unit vectors; with pairs some queries and documents repeat and some are relevant across pairs."""
    draw = torch.Generator().manual_seed(seed)

    def unit() -> Tensor:
        vectors = torch.randn(size, 5, generator=draw, dtype=torch.float64)
        return torch.nn.functional.normalize(vectors, dim=1).to(dtype).requires_grad_()

    if views:
        ids = torch.randperm(20, generator=draw)[:size].tolist()
        return Case(unit(), unit(), ids, ids, views=True, guide=guide)
    left_id = torch.randint(0, 12, (size,), generator=draw).tolist()
    right_id = torch.randint(0, 12, (size,), generator=draw).tolist()
    relevant = {(left_id[i], right_id[(i * 3 + 1) % size]) for i in range(0, size, 3)}
    return Case(unit(), unit(), left_id, right_id, views=False, relevant=relevant, guide=guide)


def gradients(loss: Tensor, *of: Any) -> Tensor:
    """The gradients of a loss with respect to the left and right embeddings of a case, and of a corpus."""
    inputs = [tensor for embeddings in of for tensor in (embeddings.left, embeddings.right)]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return torch.cat([torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs)])


@dataclass
class Row:
    """One anchor: its table, its id and its partner's, the similarity with its positive and with its negatives."""

    table: str
    item: int
    partner: int
    positive: Tensor
    negatives: list[Tensor]


def directions(case: Case) -> list[list[Row]]:
    """Anchors of both directions (or of both views), their negatives decided pair by pair."""
    size = len(case.left_id)
    if case.views:
        views = [case.left[i] for i in range(size)] + [case.right[i] for i in range(size)]
        ids = case.left_id * 2
        return [
            [
                Row("left", ids[a], ids[a], views[a] @ views[(a + size) % (2 * size)], _others(case, views, a))
                for a in range(2 * size)
            ]
        ]
    forward, backward = [], []
    for i in range(size):
        query, document, positive = case.left_id[i], case.right_id[i], case.left[i] @ case.right[i]
        against_right = [case.left[i] @ case.right[j] for j in range(size) if _is_negative(case, i, j, "left")]
        forward.append(Row("left", query, document, positive, against_right))
        against_left = [case.right[i] @ case.left[j] for j in range(size) if _is_negative(case, j, i, "right")]
        backward.append(Row("right", document, query, positive, against_left))
    return [forward, backward]


def _others(case: Case, views: list[Tensor], anchor: int) -> list[Tensor]:
    """Similarities of a view with both views of all other images, but for those that a guide mistrusts."""
    size = len(case.left_id)
    names = [(side, i) for side in ("left", "right") for i in case.left_id]
    return [
        views[anchor] @ views[c]
        for c in range(2 * size)
        if names[c][1] != names[anchor][1]
        and not (case.guide and case.guide.mistrusts(names[anchor], names[(anchor + size) % (2 * size)], names[c]))
    ]


def _is_negative(case: Case, query: int, document: int, anchor: str) -> bool:
    """Whether the left item of pair `query` and the right item of pair `document`, of which that of the side `anchor`
    is the anchor, are negatives."""
    positives = case.relevant | set(zip(case.left_id, case.right_id))
    if (case.left_id[query], case.right_id[document]) in positives:
        return False
    left, right = ("left", case.left_id[query]), ("right", case.right_id[document])
    if anchor == "left":
        return not (case.guide and case.guide.mistrusts(left, ("right", case.right_id[query]), right))
    return not (case.guide and case.guide.mistrusts(right, ("left", case.left_id[document]), left))


def mean_loss(case: Case, anchor_loss: Callable[[Row], Tensor]) -> Tensor:
    """Mean over anchors, then over directions."""
    return torch.stack([torch.stack([anchor_loss(r) for r in rows]).mean() for rows in directions(case)]).mean()


def info_nce(row: Row, tau: float) -> Tensor:
    """SimCLR Eq. 1 / CLIP."""
    partition = (row.positive / tau).exp() + sum((s / tau).exp() for s in row.negatives)
    return -((row.positive / tau).exp() / partition).log()


def dcl(row: Row, tau: float) -> Tensor:
    """Yeh et al. 2022, Eq. 6; an anchor without negatives only pulls its positive."""
    if not row.negatives:
        return -row.positive / tau
    return -row.positive / tau + sum((s / tau).exp() for s in row.negatives).log()


def hcl(row: Row, tau: float, hardness: float, prior: float) -> Tensor:
    """Robinson et al. 2021 (arXiv:2010.04592), Eq. 2, importance exp(β_h·s/τ) normalised by its mean."""
    if not row.negatives:
        return row.positive * 0
    importance = [(hardness * s / tau).exp() for s in row.negatives]
    mean = sum(importance) / len(importance)
    total = sum(w / mean * (s / tau).exp() for w, s in zip(importance, row.negatives))
    count = len(row.negatives)
    positive = (row.positive / tau).exp()
    negatives = (total - count * prior * positive) / (1 - prior)
    if prior:
        negatives = negatives.clamp(min=count * math.exp(-1 / tau))
    return -(positive / (positive + negatives)).log()


def siglip(row: Row, tau: float, bias: float) -> Tensor:
    """Zhai et al. 2023, Algorithm 1."""
    loss = -torch.sigmoid(row.positive / tau + bias).log()
    return loss - sum(torch.sigmoid(-(s / tau + bias)).log() for s in row.negatives)
