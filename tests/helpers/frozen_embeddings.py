"""Frozen embeddings, on which averages over many steps show what an objective estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualenc.objectives import ExactGlobal, Objective

TAU = 0.07


@dataclass
class Frozen:
    """N pairs of unit vectors: some of an anchor's negatives are much nearer than most.

    With right_id (N,) pair i is left item i with right item right_id[i]: several pairs may share
    one.
    """

    left: Tensor
    right: Tensor
    views: bool = False
    right_id: Tensor | None = None
    tau: float = TAU

    @classmethod
    def make(
        cls, num_pairs: int = 200, dimension: int = 5, noise: float = 0.5, views: bool = False
    ) -> Frozen:
        draw = torch.Generator().manual_seed(0)
        left = torch.nn.functional.normalize(
            torch.randn(num_pairs, dimension, generator=draw), dim=1
        )
        near = left + noise * torch.randn(num_pairs, dimension, generator=draw) / dimension**0.5
        return cls(
            left.requires_grad_(),
            torch.nn.functional.normalize(near, dim=1).requires_grad_(),
            views,
        )

    @classmethod
    def zipf(cls, num_pairs: int = 200, num_documents: int = 40, tau: float = 0.5) -> Frozen:
        """Queries whose documents are shared as in Zipf's law: the first is in some 50 pairs, the
        last in one."""
        frozen = cls.make(num_pairs)
        share = 1 / torch.arange(1, num_documents + 1)
        draws = torch.multinomial(
            share, num_pairs, True, generator=torch.Generator().manual_seed(0)
        )
        right = frozen.right.detach()[:num_documents].requires_grad_()
        return cls(frozen.left, right, right_id=draws, tau=tau)

    @property
    def counts(self) -> tuple[Tensor, Tensor]:
        """How many pairs each left and each right item is in."""
        if self.right_id is None:
            return (torch.ones(len(self.left)),) * 2
        return torch.ones(len(self.left)), torch.bincount(
            self.right_id, minlength=len(self.right)
        ).float()

    def build(self, kind: type[Objective], **arguments: Any) -> Objective:
        """An objective for these pairs, with how often they share items."""
        sizes = {"num_left": len(self.left), "num_right": len(self.right)}
        criterion = kind(**sizes, temperature=self.tau, views=self.views, **arguments)
        criterion.set_counts(*self.counts)
        return criterion

    def encode(self, side: str, ids: Tensor) -> Tensor:
        return (self.left if side == "left" else self.right)[ids]

    def loss(self, criterion: Objective, ids: Tensor) -> Tensor:
        if self.right_id is None:
            left, right = self.left[ids], self.right[ids]
            keys = (
                {}
                if criterion.momentum is None
                else {"keys_left": left.detach(), "keys_right": right.detach()}
            )
            return criterion(left, right, ids, encode=self.encode, **keys).loss
        own = self.right_id[ids]
        known = (own[:, None] == self.right_id[None, :]).long()
        queries = torch.where(known > 0, torch.arange(len(self.left)), -1)
        queries = queries.sort(dim=1, descending=True).values[:, : int(known.sum(dim=1).max())]
        return criterion(
            self.left[ids], self.right[own], ids, own, encode=self.encode, right_positives=queries
        ).loss

    def gradient(self, criterion: Objective, ids: Tensor) -> Tensor:
        return torch.cat(torch.autograd.grad(self.loss(criterion, ids), [self.left, self.right]))

    def exact(self) -> tuple[float, Tensor]:
        """The global loss and its gradient."""
        oracle = self.build(ExactGlobal)
        ids = torch.arange(len(self.left))
        return float(self.loss(oracle, ids).detach()), self.gradient(oracle, ids)

    def softmax(self, side: str) -> Tensor:
        """(N, N) the law of each anchor's negatives."""
        similarities = self.left @ self.right.T if side == "left" else self.right @ self.left.T
        return torch.softmax(
            (similarities.detach().double() / TAU).fill_diagonal_(-torch.inf), dim=1
        )


def batches(
    num_pairs: int, batch_size: int, num_epochs: int, seed: int = 0
) -> Iterator[list[Tensor]]:
    """For each epoch, a random order cut into batches."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(num_epochs):
        yield list(torch.randperm(num_pairs, generator=draw).split(batch_size))


def averaged_bias(
    frozen: Frozen, criterion: Objective, batch_size: int, warm_up: int, num_epochs: int
) -> float:
    """Relative distance of the mean gradient of an epoch to the exact one, freed of its own noise.

    With d₁ and d₂ the deviations of two independent means, E⟨d₁, d₂⟩ = ‖bias‖²: the noise of a
    single mean, which would take very long to average out, does not enter. The mean is over pairs
    of stretches of the run that do not touch.
    """
    _, exact = frozen.exact()
    stretches = [torch.zeros_like(exact) for _ in range(8)]
    length = num_epochs // len(stretches)
    for epoch, order in enumerate(
        batches(len(frozen.left), batch_size, warm_up + length * len(stretches))
    ):
        for ids in order:
            gradient = frozen.gradient(criterion, ids) * len(ids) / len(frozen.left)
            if epoch >= warm_up:
                stretches[(epoch - warm_up) // length] += gradient / length
    deviations = [stretch - exact for stretch in stretches]
    products = [
        float((deviations[i] * deviations[j]).sum())
        for i in range(8)
        for j in range(8)
        if abs(i - j) > 1
    ]
    return max(0.0, sum(products) / len(products)) ** 0.5 / float(exact.norm())
