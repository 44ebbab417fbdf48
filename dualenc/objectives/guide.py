"""A guide's rule, the one place where it is applied: a likely false negative is no negative of an anchor.

A *guide* is a model whose embeddings are known beforehand. What it finds more alike to an anchor than the anchor's own
positive is left out of the anchor's negatives: in the batch by the vectors that come with it, outside the batch (states
of chains, draws, whatever is remembered) by vectors that are looked up by id. Nothing is encoded for it.

Source: Solatorio 2024, "GISTEmbed: Guided in-sample selection of training negatives for text embedding fine-tuning",
arXiv 2402.16829, Algorithm 1. What is compared is what an objective compares: with two towers anchors with items of the
other side; with views an image's views with both views of all others, so anchors with anchors and positives with
positives as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.types import Side

LookUp = Callable[[Side, Tensor], Tensor]
"""`guide(side, ids (n,)) -> (n, G)`: a guide's unit vectors of items by id, on the device of the ids; NaN where it has
none. No other process is asked."""

# Copies of the positive are as alike to the anchor as it is, however the products are rounded.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Judgement:
    """What a guide says of some anchors, A of one direction, and items of their candidates' side.

    Without a vector nobody is judged: a NaN is above nothing.

    Attributes:
        vectors: (A, G) of the anchors.
        limits: (A,) how alike to an anchor a negative may be.
        candidates: (C, G) of the candidates of the batch.
        side: the candidates' side.
        views: an item is one view of an image: the left one of image i is item 2·i, the right one item 2·i + 1.
        look_up: vectors of items by id; None where nothing outside the batch is compared.
    """

    vectors: Tensor
    limits: Tensor
    candidates: Tensor
    side: Side
    views: bool
    look_up: LookUp | None

    def of_candidates(self) -> Tensor:
        """(A, C) true where a candidate of the batch is taken for a positive."""
        return self.vectors @ self.candidates.T > self.limits[:, None]

    def of_items(self, items: Tensor) -> Tensor:
        """(A, n) likewise of items (n,) of the whole side; of -1, which stands for none, anything."""
        return self.vectors @ self._vectors_of(items).T > self.limits[:, None]

    def of_each(self, items: Tensor) -> Tensor:
        """(A, …) likewise of items (A, …) that are each anchor's own."""
        found = self._vectors_of(items.flatten()).unflatten(0, items.shape)
        alike = torch.einsum("ag,a...g->a...", self.vectors, found)
        return alike > self.limits.view(-1, *[1] * (items.dim() - 1))

    def rows(self, some: slice | Tensor) -> Judgement:
        """The same of some of the anchors."""
        return replace(self, vectors=self.vectors[some], limits=self.limits[some])

    def of_all_ranks(self, sizes: list[int]) -> Judgement:
        """The same of the anchors of all ranks, so many on each of them."""
        vectors, limits = (distributed.gather(of, sizes) for of in (self.vectors, self.limits))
        return replace(self, vectors=vectors, limits=limits)

    def _vectors_of(self, items: Tensor) -> Tensor:
        assert self.look_up is not None
        items = items.clamp(min=0)
        if not self.views:
            return self.look_up(self.side, items).to(self.vectors)
        left, right = (self.look_up(side, items // 2).to(self.vectors) for side in ("left", "right"))
        return torch.where((items % 2 == 0)[:, None], left, right)


@dataclass(frozen=True)
class PairGuide:
    """What a guide says of the pairs of a batch.

    Attributes:
        left, right: (b, G) vectors of this rank's pairs.
        all_left, all_right: (P, G) of the pairs of all ranks.
        mined: (n, G) of the mined negatives of all ranks.
        limits: (b,) how alike to a pair's items their negatives may be.
        look_up: see `Judgement`.
    """

    left: Tensor
    right: Tensor
    all_left: Tensor
    all_right: Tensor
    mined: Tensor
    limits: Tensor
    look_up: LookUp | None

    def of_side(self, side: Side) -> Judgement:
        """Of a side's items as anchors, against all items of the other side and, of left ones, mined negatives."""
        if side == "left":
            candidates = torch.cat([self.all_right, self.mined]) if len(self.mined) else self.all_right
            return Judgement(self.left, self.limits, candidates, "right", False, self.look_up)
        return Judgement(self.right, self.limits, self.all_left, "left", False, self.look_up)

    def of_views(self) -> Judgement:
        """Of both views of each image as anchors, against all views."""
        vectors, candidates = torch.cat([self.left, self.right]), torch.cat([self.all_left, self.all_right])
        return Judgement(vectors, self.limits.repeat(2), candidates, "left", True, self.look_up)

    def without_mined(self) -> PairGuide:
        """The same, as if no negatives were mined."""
        return replace(self, mined=self.mined[:0])


def limits(left: Tensor, right: Tensor, margin: float, relative: float) -> Tensor:
    """(b,) s⁺ − (1 − relative)·|s⁺| − margin of a guide's vectors (b, G) of pairs, where s⁺ is how alike a pair's two
    items are."""
    positive = (left * right).sum(dim=1)
    return positive - (1 - relative) * positive.abs() - margin + ROUNDING
