"""The objectives once more, as float64 loops over single anchors and candidates, straight from the
papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


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

    @property
    def sides(self) -> list[str]:
        """The sides that have anchors of their own."""
        return ["views"] if self.views else ["left", "right"]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `Objective.forward`."""
        given: dict[str, Any] = {"left": self.left, "right": self.right}
        given |= {"left_id": torch.tensor(self.left_id), "right_id": torch.tensor(self.right_id)}
        if self.relevant:
            given["left_positives"] = padded(
                [[r for q, r in self.relevant if q == i] for i in self.left_id]
            )
            given["right_positives"] = padded(
                [[q for q, r in self.relevant if r == i] for i in self.right_id]
            )
        return given


def padded(rows: list[list[int]]) -> Tensor:
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def make_case(seed: int, size: int, views: bool) -> Case:
    """Random unit vectors; with pairs some queries and documents repeat and some are relevant
    across pairs."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        normalize(torch.randn(size, 5, generator=draw, dtype=torch.float64), dim=1).requires_grad_()
        for _ in range(2)
    )
    if views:
        ids = torch.randperm(20, generator=draw)[:size].tolist()
        return Case(left, right, ids, ids, views=True)
    left_id = torch.randint(0, 12, (size,), generator=draw).tolist()
    right_id = torch.randint(0, 12, (size,), generator=draw).tolist()
    relevant = {(left_id[i], right_id[(i * 3 + 1) % size]) for i in range(0, size, 3)}
    return Case(left, right, left_id, right_id, views=False, relevant=relevant)


def gradients(loss: Tensor, *leaves: Any) -> Tensor:
    """The gradients of a loss with respect to the left and right embeddings of a case, and of a
    corpus."""
    inputs = [tensor for embeddings in leaves for tensor in (embeddings.left, embeddings.right)]
    return torch.cat(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))


@dataclass
class Corpus:
    """An embedding per item and side: what `encode` looks up, with gradient, and what it was asked
    for."""

    left: Tensor
    right: Tensor
    asked: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def make(cls, seed: int, num_items: int = 20) -> Corpus:
        draw = torch.Generator().manual_seed(seed)
        tables = torch.randn(2, num_items, 5, generator=draw, dtype=torch.float64)
        return cls(*(normalize(table, dim=1).requires_grad_() for table in tables))

    def encode(self, side: str, ids: Tensor) -> Tensor:
        self.asked.extend((side, int(i)) for i in ids)
        return (self.left if side == "left" else self.right)[ids]

    def batch(self, ids: list[int]) -> dict[str, Any]:
        """Arguments of `Objective.forward`: pairs of the corpus."""
        rows = torch.tensor(ids)
        return {
            "left": self.left[rows],
            "right": self.right[rows],
            "left_id": rows,
            "encode": self.encode,
        }


class Item(NamedTuple):
    """A corpus item: side and id; with views the side is the view."""

    side: str
    id: int

    @classmethod
    def of_number(cls, number: int, side: str, views: bool) -> Item:
        """The item that an objective knows by a number."""
        return cls(("left", "right")[number % 2], number // 2) if views else cls(side, number)


@dataclass
class Anchor:
    """An anchor with its side (with views: the view), ids of its own and of its partner, and
    similarities with its positive and with its negatives in the batch."""

    side: str
    id: int
    partner: int
    vector: Tensor
    positive: Tensor
    views: bool
    negatives: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Its row in a table with one per item, or with views one per image."""
        return ("left" if self.views else self.side, self.id)


def item_anchors(case: Case, side: str) -> list[Anchor]:
    """The anchors of a side, or of both views."""
    anchors = []
    for own in ("left", "right") if side == "views" else (side,):
        for i in range(len(case.left_id)):
            ids = (case.left_id[i], case.right_id[i])
            vectors = (case.left[i], case.right[i])
            here = 0 if own == "left" else 1
            anchors.append(
                Anchor(
                    own,
                    ids[here],
                    ids[1 - here],
                    vectors[here],
                    case.left[i] @ case.right[i],
                    case.views,
                )
            )
    for anchor in anchors:
        candidates = batch_items(case, side)
        anchor.negatives = [
            anchor.vector @ v for item, v in candidates if not is_hidden(case, anchor, item)
        ]
    return anchors


def batch_items(case: Case, side: str) -> list[tuple[Item, Tensor]]:
    """The candidates of a side's anchors."""
    left = [(Item("left", i), v) for i, v in zip(case.left_id, case.left)]
    right = [(Item("right", i), v) for i, v in zip(case.right_id, case.right)]
    return left + right if side == "views" else right if side == "left" else left


def vector_of(case: Case, corpus: Corpus, side: str, item: Item) -> Tensor:
    """An item's embedding: the first in the batch, else the corpus's."""
    in_batch = [vector for other, vector in batch_items(case, side) if other == item]
    return (
        in_batch[0] if in_batch else (corpus.left if item.side == "left" else corpus.right)[item.id]
    )


def is_hidden(case: Case, anchor: Anchor, item: Item) -> bool:
    """Whether the item is a positive of the anchor: its partner, listed, or paired with it in the
    batch."""
    if anchor.views:
        return item.id == anchor.id
    pairs = set(zip(case.left_id, case.right_id)) | case.relevant
    return ((anchor.id, item.id) if anchor.side == "left" else (item.id, anchor.id)) in pairs


def directions(case: Case) -> list[list[Anchor]]:
    """Anchors of both directions, or of both views in one."""
    return [item_anchors(case, side) for side in case.sides]


def mean_loss(case: Case, anchor_loss: Callable[[Anchor], Tensor]) -> Tensor:
    """Mean over anchors, then over directions."""
    return torch.stack(
        [torch.stack([anchor_loss(a) for a in anchors]).mean() for anchors in directions(case)]
    ).mean()


def info_nce(anchor: Anchor, tau: float) -> Tensor:
    """SimCLR Eq. 1 / CLIP."""
    positive = (anchor.positive / tau).exp()
    return -(positive / (positive + sum((s / tau).exp() for s in anchor.negatives))).log()


def dcl(anchor: Anchor, tau: float) -> Tensor:
    """Yeh et al. 2022, Eq. 6; an anchor without negatives only pulls its positive."""
    if not anchor.negatives:
        return -anchor.positive / tau
    return -anchor.positive / tau + sum((s / tau).exp() for s in anchor.negatives).log()


def hcl(anchor: Anchor, tau: float, hardness: float, prior: float) -> Tensor:
    """Robinson et al. 2021 (arXiv:2010.04592), Eq. 2, importance exp(β_h·s/τ) normalised by its
    mean."""
    if not anchor.negatives:
        return anchor.positive * 0
    count = len(anchor.negatives)
    importance = [(hardness * s / tau).exp() for s in anchor.negatives]
    mean = sum(importance) / count
    total = sum(w / mean * (s / tau).exp() for w, s in zip(importance, anchor.negatives))
    positive = (anchor.positive / tau).exp()
    negatives = (total - count * prior * positive) / (1 - prior)
    if prior:
        negatives = negatives.clamp(min=count * math.exp(-1 / tau))
    return -(positive / (positive + negatives)).log()


def siglip(anchor: Anchor, tau: float, bias: float) -> Tensor:
    """Zhai et al. 2023, Algorithm 1."""
    loss = -torch.sigmoid(anchor.positive / tau + bias).log()
    return loss - sum(torch.sigmoid(-(s / tau + bias)).log() for s in anchor.negatives)


Table = dict[tuple[str, int], float]


def _mean_by_item(values: list[tuple[tuple[str, int], float]]) -> Table:
    grouped = defaultdict(list)
    for key, value in values:
        grouped[key].append(value)
    return {key: sum(found) / len(found) for key, found in grouped.items()}


def _run(
    case: Case, table: Table, of_anchor: Callable[[Anchor], tuple[Tensor, float | None]]
) -> Tensor:
    """Mean of a surrogate over anchors; writes the mean of the new values of each item into the
    table."""
    losses = []
    for anchors in directions(case):
        results = [of_anchor(anchor) for anchor in anchors]
        table.update(
            _mean_by_item(
                [(a.key, new) for a, (_, new) in zip(anchors, results) if new is not None]
            )
        )
        losses.append(torch.stack([loss for loss, _ in results]).mean())
    return torch.stack(losses).mean()


def sogclr_surrogate(case: Case, u: Table, tau: Tensor, gamma: float) -> Tensor:
    """Yuan et al. 2022, Algorithm 1: weights exp(s/τ)/(n·u_a); τ sees s − s⁺; updates u in
    place."""
    scale = float(tau.detach())

    def of_anchor(anchor: Anchor) -> tuple[Tensor, float | None]:
        if not anchor.negatives:
            return -anchor.positive / scale, None
        exps = [math.exp(float(s.detach()) / scale) for s in anchor.negatives]
        mean = sum(exps) / len(exps)
        own = (1 - gamma) * u.get(anchor.key, mean) + gamma * mean
        weights = [e / (len(exps) * own) for e in exps]
        embeddings = (
            sum(w * s for w, s in zip(weights, anchor.negatives)) - anchor.positive
        ) / scale
        margins = [s.detach() - anchor.positive.detach() for s in anchor.negatives]
        return embeddings + sum(w * margin / tau for w, margin in zip(weights, margins)), own

    return _run(case, u, of_anchor)


def isogclr_surrogate(
    case: Case, u: Table, taus: Table, slopes: Table, arguments: dict[str, float]
) -> Tensor:
    """Qiu et al. 2023, Algorithm 1, scaled by 1/τ₀; updates u, the temperatures and their momentum
    in place."""
    start, gamma = arguments["temperature"], arguments["gamma"]
    own_slopes: list[tuple[tuple[str, int], float]] = []

    def of_anchor(anchor: Anchor) -> tuple[Tensor, float | None]:
        tau = taus.get(anchor.key, start)
        scores = [float(s.detach()) / tau for s in anchor.negatives]
        if not scores:
            return -anchor.positive / start, None
        mean = sum(map(math.exp, scores)) / len(scores)
        own = (1 - gamma) * u.get(anchor.key, mean) + gamma * mean
        weights = [math.exp(s) / (len(scores) * own) for s in scores]
        positive = float(anchor.positive.detach()) / tau
        slope = math.log(own) - positive + arguments["radius"]
        own_slopes.append(
            (anchor.key, slope - sum(w * (s - positive) for w, s in zip(weights, scores)))
        )
        return (
            sum(w * s for w, s in zip(weights, anchor.negatives)) - anchor.positive
        ) / start, own

    loss = _run(case, u, of_anchor)
    momentum = arguments["temperature_momentum"]
    for key, slope in _mean_by_item(own_slopes).items():
        slopes[key] = momentum * slopes.get(key, 0.0) + (1 - momentum) * slope
        moved = taus.get(key, start) - arguments["temperature_rate"] * slopes[key]
        taus[key] = min(max(moved, arguments["min_temperature"]), arguments["max_temperature"])
    return loss


def saclr_surrogate(case: Case, table: Table, tau: Tensor, alpha: float, rho: float) -> Tensor:
    """Eq. 11 with the scale of Eq. 4 after its update, every candidate a negative. τ sees kernels
    over that of the positive. Updates the table of 1/s in place."""
    total = case.num_items

    def kernel(similarity: Tensor) -> Tensor:
        return ((similarity - 1) / tau).exp()

    def of_anchor(anchor: Anchor) -> tuple[Tensor, float | None]:
        positive = kernel(anchor.positive)
        mean = 0.0 * positive
        if anchor.negatives:
            mean = sum(kernel(s) for s in anchor.negatives) / len(anchor.negatives)
        others = [Item("right" if anchor.side == "left" else "left", i) for i in range(total)]
        known = sum(is_hidden(case, anchor, item) for item in others)
        count = (total - known) * (2 if case.views else 1)
        new = float(((alpha * total + 1 - alpha) * positive + (1 - alpha) * count * mean).detach())
        update = rho * table.get(anchor.key, new) + (1 - rho) * new
        repulsion = (positive + count * mean) / update
        loss = (
            -positive.log()
            + repulsion
            + (1 - repulsion.detach()) * kernel(anchor.positive.detach()).log()
        )
        return loss, update

    return _run(case, table, of_anchor)
