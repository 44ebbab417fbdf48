"""EMC2 and ISIR once more: chains as Python loops over single anchors and proposals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from dualenc.objectives.state import SharedRandom
from torch import Tensor

from dualenc.objectives import ISIR
from dualenc.objectives.chains import ChainObjective
from tests.objectives.slow import Case

NUM_ITEMS = 20


@dataclass
class Corpus:
    """An embedding per item and side: what `encode` looks up, with gradient, and what it was asked for."""

    left: Tensor
    right: Tensor
    asked: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def make(cls, seed: int, num_items: int = NUM_ITEMS) -> Corpus:
        draw = torch.Generator().manual_seed(seed)
        tables = torch.randn(2, num_items, 5, generator=draw, dtype=torch.float64)
        return cls(*(torch.nn.functional.normalize(table, dim=1).requires_grad_() for table in tables))

    def encode(self, side: str, ids: Tensor) -> Tensor:
        self.asked.extend((side, int(i)) for i in ids)
        return (self.left if side == "left" else self.right)[ids]


@dataclass(frozen=True)
class Item:
    """A corpus item: side and id; with views the side is the view."""

    side: str
    id: int


Proposal = tuple[Item, Tensor, bool]


@dataclass
class Chain:
    """`partner` is the other id of the pair that the item came with; None where items do not come in pairs."""

    item: Item
    score: float
    partner: int | None = None


@dataclass
class SlowChains:
    """The same arguments and the same random numbers as the criterion under test."""

    temperature: float
    kind: type[ChainObjective]
    arguments: dict[str, Any]
    burn_in: float
    random: SharedRandom
    chains: dict[tuple[str, int], Chain] = field(default_factory=dict)

    def surrogate(self, case: Case, corpus: Corpus) -> Tensor:
        """The scalar whose gradient is the objective's; moves the chains."""
        sides = ["views"] if case.views else ["left", "right"]
        # One draw for the anchors of both directions, the left ones first, and one order for all. The first draw is for
        # where chains start, and nothing is remembered that they could start on.
        num_anchors = 2 * len(case.left_id)
        self.random.uniform(num_anchors, 1, like=case.left)
        columns = {side: self._columns(case, corpus, side) for side in sides}
        count = len(columns[sides[0]])
        if self.kind is ISIR:
            uniform = self.random.uniform(num_anchors, 1, like=case.left)
        else:
            uniform = (-self.random.exponential(num_anchors, count, like=case.left)).exp()
        order = []
        if self.kind is not ISIR:
            order = self.random.permutation(count, device=torch.device("cpu")).tolist()
        draws = zip(sides, uniform.split(num_anchors // len(sides)))
        losses = [self._direction(case, corpus, side, columns[side], draw, order) for side, draw in draws]
        return torch.stack(losses).mean()

    def _direction(
        self,
        case: Case,
        corpus: Corpus,
        side: str,
        columns: list[tuple[Item, Tensor]],
        uniform: Tensor,
        order: list[int],
    ) -> Tensor:
        anchors = _anchors(case, side)
        moves = {}
        losses = []
        for row, anchor in enumerate(anchors):
            key = ("left" if side == "views" else side, anchor.id)
            chain = self.chains.get(key)
            if chain is not None and _barred(case, anchor, chain.item):
                chain = None
            negatives = [(item, anchor.vector @ vector, not _barred(case, anchor, item)) for item, vector in columns]
            if self.kind is ISIR:
                partners: list[int] | None = None
                if "proposals" not in self.arguments and side != "views":
                    partners = case.left_id if side == "left" else case.right_id
                terms, chain = self._isir(case, negatives, partners, chain, anchor, corpus, float(uniform[row]))
            else:
                among = None if chain is None else next((s for i, s, _ in negatives if i == chain.item), None)
                ordered = [negatives[j] for j in order]
                terms, chain = self._mh(ordered, chain, among, anchor, corpus, uniform[row].tolist())
            if chain is not None:
                moves.setdefault(key, chain)
            losses.append((sum(w * s for w, s in terms) - anchor.positive) / self.temperature)
        self.chains.update(moves)
        return torch.stack(losses).mean()

    def _columns(self, case: Case, corpus: Corpus, side: str) -> list[tuple[Item, Tensor]]:
        if "proposals" not in self.arguments:
            return _batch(case, side)
        views, isir = case.views, self.kind is ISIR
        drawn = self.random.integers(NUM_ITEMS, self.arguments["proposals"], device=torch.device("cpu")).tolist()
        if views and isir:
            items = [Item(view, i) for view in ("left", "right") for i in drawn]
        elif views:
            second = self.random.integers(2, self.arguments["proposals"], device=torch.device("cpu")).tolist()
            items = [Item("right" if view else "left", i) for i, view in zip(drawn, second)]
        else:
            items = [Item("right" if side == "left" else "left", i) for i in drawn]
        return [(item, corpus.encode(item.side, torch.tensor([item.id]))[0]) for item in items]

    def _mh(
        self,
        proposals: list[Proposal],
        chain: Chain | None,
        among: Tensor | None,
        anchor: Anchor,
        corpus: Corpus,
        uniform: list[float],
    ) -> tuple[list[tuple[float, Tensor]], Chain | None]:
        """Algorithm 1 for one anchor; `among` is the similarity of the state where it is itself a proposal."""
        score = -math.inf
        if chain is not None:
            score = chain.score
            if self.arguments.get("score") == "fresh":
                similarity = anchor.vector @ _vector(corpus, chain.item) if among is None else among
                score = float(similarity.detach())
        current: tuple[Item, Tensor | None] | None = None if chain is None else (chain.item, among)
        num_valid = sum(allowed for _, _, allowed in proposals)
        burn_in, step, visits = int(self.burn_in * num_valid + 1e-9), 0, []
        for (item, similarity, allowed), u in zip(proposals, uniform):
            if not allowed:
                continue
            if math.log(u) < (float(similarity.detach()) - score) / self.temperature:
                current, score = (item, similarity), float(similarity.detach())
            step += 1
            if step > burn_in:
                visits.append(current)
        if not num_valid and current is not None:
            visits = [current]
        terms = []
        for item, similarity in visits:
            vector = anchor.vector @ _vector(corpus, item) if similarity is None else similarity
            terms.append((1 / len(visits), vector))
        return terms, None if current is None else Chain(current[0], score)

    def _isir(
        self,
        case: Case,
        proposals: list[Proposal],
        partners: list[int] | None,
        chain: Chain | None,
        anchor: Anchor,
        corpus: Corpus,
        uniform: float,
    ) -> tuple[list[tuple[float, Tensor]], Chain | None]:
        """Softmax over state and proposals for one anchor: every pair once, or every item where there are no pairs."""
        copies = [1 if partners else sum(j == i for j, _, _ in proposals) for i, _, _ in proposals]
        weighted, nexts = [], []
        for place, ((item, s, allowed), count) in enumerate(zip(proposals, copies)):
            if allowed:
                weighted.append((s, math.exp(float(s.detach()) / self.temperature) / count))
                nexts.append(Chain(item, 0.0, partners[place] if partners else None))
        if partners:
            there = chain is not None and (chain.item, chain.partner) in [
                (i, q) for (i, _, _), q in zip(proposals, partners)
            ]
        else:
            there = chain is not None and any(i.id == chain.item.id for i, _, _ in proposals)
        if chain is not None and not there:
            sides = ("left", "right") if anchor.views else (chain.item.side,)
            for item in (Item(side, chain.item.id) for side in sides):
                if _barred(case, anchor, item):
                    continue  # a guide may allow one view only
                copy = next((s for i, s, _ in proposals if i == item), None)
                s = anchor.vector @ _vector(corpus, item) if copy is None else copy
                weighted.append((s, math.exp(float(s.detach()) / self.temperature)))
                nexts.append(chain)
        total = sum(w for _, w in weighted)
        if not weighted:
            return [], None
        threshold = uniform * total
        drawn, summed = 0, weighted[0][1]
        while summed < threshold:
            drawn += 1
            summed += weighted[drawn][1]
        return [(w / total, s) for s, w in weighted], nexts[drawn]


@dataclass
class Anchor:
    vector: Tensor
    positive: Tensor
    id: int
    partner: int
    row: int
    side: str
    views: bool


def _vector(corpus: Corpus, item: Item) -> Tensor:
    return corpus.encode(item.side, torch.tensor([item.id]))[0]


def _anchors(case: Case, side: str) -> list[Anchor]:
    size = len(case.left_id)
    positive = [case.left[i] @ case.right[i] for i in range(size)]
    own = {"left": (case.left, case.left_id, case.right_id), "right": (case.right, case.right_id, case.left_id)}
    if side != "views":
        vectors, ids, partners = own[side]
        return [Anchor(vectors[i], positive[i], ids[i], partners[i], i, side, False) for i in range(size)]
    return [
        Anchor(own[view][0][i], positive[i], case.left_id[i], case.left_id[i], i, view, True)
        for view in ("left", "right")
        for i in range(size)
    ]


def _batch(case: Case, side: str) -> list[tuple[Item, Tensor]]:
    left = [(Item("left", i), v) for i, v in zip(case.left_id, case.left)]
    right = [(Item("right", i), v) for i, v in zip(case.right_id, case.right)]
    return left + right if side == "views" else right if side == "left" else left


def _barred(case: Case, anchor: Anchor, item: Item) -> bool:
    """Whether the item is a positive of the anchor: its partner, listed, paired with it in the batch, or one in the
    eyes of a guide."""
    if case.guide is not None:
        positive = ("right" if anchor.side == "left" else "left", anchor.partner)
        if case.guide.mistrusts((anchor.side, anchor.id), positive, (item.side, item.id)):
            return True
    if anchor.views:
        return item.id == anchor.id
    if item.id == anchor.partner:
        return True
    pairs = set(zip(case.left_id, case.right_id)) | case.relevant
    return ((anchor.id, item.id) if anchor.side == "left" else (item.id, anchor.id)) in pairs
