"""The objectives once more, as float64 loops over single anchors and candidates, straight from the papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
        return given


def padded(rows: list[list[int]]) -> Tensor:
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def make_case(seed: int, size: int, views: bool, dtype: torch.dtype = torch.float64) -> Case:
    """Random unit vectors; with pairs some queries and documents repeat and some are relevant across pairs."""
    draw = torch.Generator().manual_seed(seed)

    def unit() -> Tensor:
        vectors = torch.randn(size, 5, generator=draw, dtype=torch.float64)
        return torch.nn.functional.normalize(vectors, dim=1).to(dtype).requires_grad_()

    if views:
        ids = torch.randperm(20, generator=draw)[:size].tolist()
        return Case(unit(), unit(), ids, ids, views=True)
    left_id = torch.randint(0, 12, (size,), generator=draw).tolist()
    right_id = torch.randint(0, 12, (size,), generator=draw).tolist()
    relevant = {(left_id[i], right_id[(i * 3 + 1) % size]) for i in range(0, size, 3)}
    return Case(unit(), unit(), left_id, right_id, views=False, relevant=relevant)


def gradients(loss: Tensor, *leaves: Any) -> Tensor:
    """The gradients of a loss with respect to the left and right embeddings of a case, and of a corpus."""
    inputs = [tensor for embeddings in leaves for tensor in (embeddings.left, embeddings.right)]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return torch.cat([torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs)])


@dataclass
class Corpus:
    """An embedding per item and side: what `encode` looks up, with gradient, and what it was asked for."""

    left: Tensor
    right: Tensor
    asked: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def make(cls, seed: int, num_items: int = 20) -> Corpus:
        draw = torch.Generator().manual_seed(seed)
        tables = torch.randn(2, num_items, 5, generator=draw, dtype=torch.float64)
        return cls(*(torch.nn.functional.normalize(table, dim=1).requires_grad_() for table in tables))

    def encode(self, side: str, ids: Tensor) -> Tensor:
        self.asked.extend((side, int(i)) for i in ids)
        return (self.left if side == "left" else self.right)[ids]

    def batch(self, ids: list[int]) -> dict[str, Any]:
        """Arguments of `Objective.forward`: pairs of the corpus."""
        rows = torch.tensor(ids)
        return {"left": self.left[rows], "right": self.right[rows], "left_id": rows, "encode": self.encode}


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
        against_right = [case.left[i] @ case.right[j] for j in range(size) if _is_negative(case, i, j)]
        forward.append(Row("left", query, document, positive, against_right))
        against_left = [case.right[i] @ case.left[j] for j in range(size) if _is_negative(case, j, i)]
        backward.append(Row("right", document, query, positive, against_left))
    return [forward, backward]


def _others(case: Case, views: list[Tensor], anchor: int) -> list[Tensor]:
    """Similarities of a view with both views of all other images."""
    ids = case.left_id * 2
    return [views[anchor] @ view for view, item in zip(views, ids) if item != ids[anchor]]


def _is_negative(case: Case, query: int, document: int) -> bool:
    """Whether the left item of pair `query` and the right item of pair `document` are negatives."""
    positives = case.relevant | set(zip(case.left_id, case.right_id))
    return (case.left_id[query], case.right_id[document]) not in positives


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


Table = dict[tuple[str, int], float]


def _mean_by_item(rows: list[tuple[tuple[str, int], float]]) -> Table:
    grouped = defaultdict(list)
    for key, value in rows:
        grouped[key].append(value)
    return {key: sum(values) / len(values) for key, values in grouped.items()}


def sogclr_surrogate(case: Case, u: Table, tau: Tensor, gamma: float) -> Tensor:
    """Yuan et al. 2022, Algorithm 1: weights exp(s/τ)/(n·u_a); τ sees s − s⁺; updates u in place."""
    scale = float(tau.detach())

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        fixed_positive = row.positive.detach()
        if not row.negatives:
            return -row.positive / scale, None
        exps = [math.exp(float(s.detach()) / scale) for s in row.negatives]
        mean = sum(exps) / len(exps)
        old = u.get((row.table, row.item))
        own = mean if old is None else (1 - gamma) * old + gamma * mean
        weights = [e / (len(exps) * own) for e in exps]
        embeddings = (sum(w * s for w, s in zip(weights, row.negatives)) - row.positive) / scale
        temperature = sum(w * (s.detach() - fixed_positive) / tau for w, s in zip(weights, row.negatives))
        return embeddings + temperature, own

    return _run(case, u, anchor)


def isogclr_surrogate(case: Case, u: Table, taus: Table, slopes: Table, arguments: dict[str, float]) -> Tensor:
    """Qiu et al. 2023, Algorithm 1, scaled by 1/τ₀; updates u, the temperatures and their momentum in place."""
    start, gamma = arguments["temperature"], arguments["gamma"]
    gradients: list[tuple[tuple[str, int], float]] = []

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        key = (row.table, row.item)
        tau = taus.get(key, start)
        scores = [float(s.detach()) / tau for s in row.negatives]
        if not scores:
            return -row.positive / start, None
        mean = sum(map(math.exp, scores)) / len(scores)
        own = mean if key not in u else (1 - gamma) * u[key] + gamma * mean
        weights = [math.exp(s) / (len(scores) * own) for s in scores]
        positive = float(row.positive.detach()) / tau
        slope = math.log(own) - positive + arguments["radius"]
        slope -= sum(w * (s - positive) for w, s in zip(weights, scores))
        gradients.append((key, slope))
        return (sum(w * s for w, s in zip(weights, row.negatives)) - row.positive) / start, own

    loss = _run(case, u, anchor)
    for key, slope in _mean_by_item(gradients).items():
        momentum = arguments["temperature_momentum"]
        slopes[key] = momentum * slopes.get(key, 0.0) + (1 - momentum) * slope
        moved = taus.get(key, start) - arguments["temperature_rate"] * slopes[key]
        taus[key] = min(max(moved, arguments["min_temperature"]), arguments["max_temperature"])
    return loss


def saclr_surrogate(case: Case, inverse_scale: Table, tau: Tensor, alpha: float, rho: float, cauchy: bool) -> Tensor:
    """Eq. 11 with the scale of Eq. 4 after its update, every candidate a negative; τ sees kernels over that of the
    positive; updates 1/s in place."""
    total = case.num_items

    def kernel(similarity: Tensor) -> Tensor:
        distance = (1 - similarity) / tau
        return 1 / (1 + distance) if cauchy else (-distance).exp()

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        positive = kernel(row.positive)
        known = len(_positives(case, row))
        count = (total - known) * (2 if case.views else 1)
        mean = sum(kernel(s) for s in row.negatives) / len(row.negatives) if row.negatives else 0.0 * positive
        new = float(((alpha * total + 1 - alpha) * positive + (1 - alpha) * count * mean).detach())
        old = inverse_scale.get((row.table, row.item))
        update = new if old is None else rho * old + (1 - rho) * new
        repulsion = (positive + count * mean) / update
        return -positive.log() + repulsion + (1 - repulsion.detach()) * kernel(row.positive.detach()).log(), update

    return _run(case, inverse_scale, anchor)


def saclr_authors_surrogate(case: Case, scale: Table, tau: Tensor, alpha: float, rho: float) -> Tensor:
    """Algorithm 1 as the authors' program has it: 1/(s·n) from 0.01 on, used before its update; in place. τ sees
    kernels over that of the positive."""

    def kernel(similarity: Tensor) -> Tensor:
        return (-(1 - similarity) / tau).exp()

    def anchor(row: Row) -> tuple[Tensor, float | None]:
        positive = kernel(row.positive)
        mean = sum(kernel(s) for s in row.negatives) / len(row.negatives) if row.negatives else 0.0 * positive
        old = scale.get((row.table, row.item), 0.01)
        new = float((alpha * positive + (1 - alpha) * mean).detach())
        repulsion = mean / old + 0.0 * positive
        loss = -positive.log() + repulsion + (1 - repulsion.detach()) * kernel(row.positive.detach()).log()
        return loss, rho * old + (1 - rho) * new

    return _run(case, scale, anchor)


def _positives(case: Case, row: Row) -> set[int]:
    """Ids of the candidate side that the batch knows to be positive with the anchor."""
    if case.views:
        return {row.item}
    known = case.relevant | set(zip(case.left_id, case.right_id))
    if row.table == "left":
        return {r for q, r in known if q == row.item}
    return {q for q, r in known if r == row.item}


def _run(case: Case, table: Table, anchor: Callable[[Row], tuple[Tensor, float | None]]) -> Tensor:
    losses = []
    for rows in directions(case):
        results = [anchor(row) for row in rows]
        updates = [((r.table, r.item), new) for r, (_, new) in zip(rows, results) if new is not None]
        table.update(_mean_by_item(updates))
        losses.append(torch.stack([loss for loss, _ in results]).mean())
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class Item:
    """A corpus item: side and id; with views the side is the view."""

    side: str
    id: int


@dataclass
class Anchor:
    """An anchor with its embedding, its similarity with its positive, its own id and its partner's."""

    vector: Tensor
    positive: Tensor
    id: int
    partner: int
    side: str
    views: bool


def item_anchors(case: Case, side: str) -> list[Anchor]:
    """The anchors of a side, or of both views."""
    size = len(case.left_id)
    positive = [case.left[i] @ case.right[i] for i in range(size)]
    own = {"left": (case.left, case.left_id, case.right_id), "right": (case.right, case.right_id, case.left_id)}
    return [
        Anchor(own[view][0][i], positive[i], own[view][1][i], own[view][2][i], view, case.views)
        for view in (("left", "right") if side == "views" else (side,))
        for i in range(size)
    ]


def batch_items(case: Case, side: str) -> list[tuple[Item, Tensor]]:
    """The candidates of a side's anchors."""
    left = [(Item("left", i), v) for i, v in zip(case.left_id, case.left)]
    right = [(Item("right", i), v) for i, v in zip(case.right_id, case.right)]
    return left + right if side == "views" else right if side == "left" else left


def vector_of(case: Case, corpus: Corpus, side: str, item: Item) -> Tensor:
    """An item's embedding: the first in the batch, else the corpus's."""
    in_batch = [vector for other, vector in batch_items(case, side) if other == item]
    return in_batch[0] if in_batch else (corpus.left if item.side == "left" else corpus.right)[item.id]


def is_hidden(case: Case, anchor: Anchor, item: Item) -> bool:
    """Whether the item is a positive of the anchor: its partner, listed, or paired with it in the batch."""
    if anchor.views:
        return item.id == anchor.id
    if item.id == anchor.partner:
        return True
    pairs = set(zip(case.left_id, case.right_id)) | case.relevant
    return ((anchor.id, item.id) if anchor.side == "left" else (item.id, anchor.id)) in pairs
