"""The bias of an objective's gradient at frozen embeddings: pairs, the exact gradient, and
estimates free of noise.

Gradients are taken with respect to the embeddings, and compared with that of the global loss over
all pairs (`ExactGlobal`). `estimator_bias.py`, `frozen_bias.py`, `moving_embeddings.py` and
`convergence.py` measure with it. Shapes: B batch, N items of a side, D dimension, M pairs, K known
positives, S stretches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dualenc.objectives import ExactGlobal, Objective
from dualenc.types import Side


@dataclass
class FrozenPairs:
    """Frozen embeddings and the pairs between them.

    Attributes:
        left, right: (N, D) unit-norm embeddings of the items, by id; N may differ between the
            sides.
        left_id, right_id: (M,) ids of each pair.
        left_positives, right_positives: (M, K) ids of positives of the pair's left or right item,
            padded with -1.
        views: left and right are two views of one image.
        num_encoded: items that the last step requested by id.
    """

    left: Tensor
    right: Tensor
    left_id: Tensor
    right_id: Tensor
    left_positives: Tensor | None = None
    right_positives: Tensor | None = None
    views: bool = False
    num_encoded: int = 0

    def __post_init__(self) -> None:
        self.left = self.left.detach().requires_grad_()
        self.right = self.right.detach().requires_grad_()
        for name, ids in self.ids.items():
            setattr(self, name, ids.to(self.left.device))

    @property
    def ids(self) -> dict[str, Tensor]:
        """The ids by the names that `Objective.forward` gives them, without those that are not
        known."""
        names = ("left_id", "right_id", "left_positives", "right_positives")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @classmethod
    def one_to_one(cls, left: Tensor, right: Tensor, *, views: bool = False) -> FrozenPairs:
        """Pairs of row i of `left` (M, D) and row i of `right` (M, D)."""
        ids = torch.arange(len(left))
        return cls(left, right, ids, ids, views=views)

    def __len__(self) -> int:
        return len(self.left_id)

    def build(
        self, kind: Callable[..., Objective], temperature: float, **options: Any
    ) -> Objective:
        """An objective of these pairs: `kind` is a class of objectives, or makes one from the same
        arguments."""
        sizes = {"num_left": len(self.left), "num_right": len(self.right)}
        criterion = kind(**sizes, temperature=temperature, views=self.views, **options)
        criterion.to(self.left.device).set_counts(
            torch.bincount(self.left_id, minlength=len(self.left)),
            torch.bincount(self.right_id, minlength=len(self.right)),
        )
        return criterion

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) embeddings of items by id; their gradients are sparse, with a row per requested
        id."""
        self.num_encoded += len(ids)
        return embedding(ids, getattr(self, side), sparse=True)

    def step(self, criterion: Objective, rows: Tensor) -> tuple[tuple[Tensor, Tensor], float]:
        """The sparse gradients of a batch, pairs `rows` (B,), on the left and the right items, and
        its loss."""
        ids = {name: each[rows] for name, each in self.ids.items()}
        left = self.encode("left", ids["left_id"])
        right = self.encode("right", ids["right_id"])
        # Only items outside the batch count as extra encodes.
        self.num_encoded = 0
        loss = criterion(left, right, encode=self.encode, **ids).loss
        on_left, on_right = torch.autograd.grad(loss, [self.left, self.right])
        return (on_left, on_right), float(loss.detach())

    def exact(self, temperature: float) -> tuple[Tensor, float]:
        """(N_left + N_right, D) gradient of the global loss, and its value."""
        gradient, value = self.step(self.build(ExactGlobal, temperature), torch.arange(len(self)))
        return self.dense(gradient), value

    def dense(self, gradient: tuple[Tensor, Tensor]) -> Tensor:
        """(N_left + N_right, D) of a step's gradient."""
        return torch.cat([part.to_dense() for part in gradient])

    def add_to(self, total: Tensor, gradient: tuple[Tensor, Tensor], weight: float) -> None:
        """Add a step's gradient, weighted, to a (N_left + N_right, D) sum, in place."""
        # In place and sparse: a dense gradient per step would cost as much as the corpus.
        for part, first in zip(gradient, (0, len(self.left))):
            total.index_add_(0, part._indices()[0] + first, part._values(), alpha=weight)


def epochs(num_pairs: int, batch_size: int, seed: int = 0) -> Iterator[list[Tensor]]:
    """For each epoch, endlessly, a random order of all pairs, cut into batches (B,)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield list(torch.randperm(num_pairs, generator=generator).split(batch_size))


class Bias(NamedTuple):
    """Squared relative bias of the mean gradient, estimated without the noise in it; and its
    standard error."""

    squared: float
    squared_error: float

    @property
    def value(self) -> float:
        """The bias; 0 where noise makes its square negative."""
        return math.sqrt(max(0.0, self.squared))

    @property
    def error(self) -> float:
        """Standard error of `value`: how far it moves if its square grows by one standard error."""
        return math.sqrt(max(0.0, self.squared) + self.squared_error) - self.value


def bias_of(stretches: Tensor, exact: Tensor, *, gap: int = 0) -> Bias:
    """Bias from independent means of a gradient.

    The expected product of the deviations of two independent means is the squared bias, without a
    noise term; the standard error is the jackknife's.

    Args:
        stretches, exact: (S, N, D) mean gradients of S stretches of a run, or of S runs, and the
            exact one (N, D).
        gap: distance up to which stretches are dependent: 0 for separate runs, 1 for neighbours in
            one run.
    """
    deviations = (stretches - exact).flatten(1)
    products = (deviations @ deviations.T).double() / float(exact.double().square().sum())
    numbers = torch.arange(len(stretches), device=products.device)
    # Products of dependent stretches contain noise, and their own squares do.
    apart = numbers[None, :] - numbers[:, None] > gap

    def mean(without: int) -> float:
        used = numbers != without
        return float(products[apart & used[:, None] & used[None, :]].mean())

    estimates = [mean(without) for without in range(len(stretches))]
    standard_error = math.sqrt((len(estimates) - 1) * statistics.pvariance(estimates))
    return Bias(mean(-1), standard_error)
