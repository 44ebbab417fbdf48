"""Gradient estimators: bias, error per step, cost and memory of each objective, at frozen embeddings.

Gradients are taken with respect to the embeddings, and compared with that of the global loss over all pairs
(`ExactGlobal`). Shapes: B batch, N items of a side, D dimension, M pairs, K known positives, S stretches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dualenc.objectives import (
    DCL,
    EMC2,
    ISIR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SogCLR,
)
from dualenc.types import Side

ESTIMATORS: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "DCL": DCL,
    "SogCLR": SogCLR,
    "SogCLR-0.1": lambda **common: SogCLR(gamma=0.1, **common),
    "ISogCLR": lambda **common: ISogCLR(temperature_rate=0.0, **common),
    "GlobalCache": GlobalCache,
    "NegativeCache": NegativeCache,
    "EMC2": EMC2,
    "ISIR": ISIR,
}
"""Objectives that estimate the global loss, by name, with their defaults; SogCLR also with γ = 0.1, and all
temperatures fixed."""

MAX_COMPARED_STEPS = 64
MIN_FOUND_FIRST = 0.5
"""A model that finds a larger share of the positives first has been trained for the task."""


@dataclass
class FrozenPairs:
    """Frozen embeddings and the pairs between them.

    Attributes:
        left, right: (N, D) unit-norm embeddings of the items, by id; N may differ between the sides.
        left_id, right_id: (M,) ids of each pair.
        left_positives, right_positives: (M, K) ids of positives of the pair's left or right item, padded with -1.
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
        """The ids by the names that `Objective.forward` gives them, without those that are not known."""
        names = ("left_id", "right_id", "left_positives", "right_positives")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @classmethod
    def one_to_one(cls, left: Tensor, right: Tensor, *, views: bool = False) -> FrozenPairs:
        """Pairs of row i of `left` (M, D) and row i of `right` (M, D)."""
        ids = torch.arange(len(left))
        return cls(left, right, ids, ids, views=views)

    def __len__(self) -> int:
        return len(self.left_id)

    def build(self, kind: Callable[..., Objective], temperature: float, **options: Any) -> Objective:
        """An objective of these pairs: `kind` is a class of objectives, or makes one from the same arguments."""
        sizes = {"num_left": len(self.left), "num_right": len(self.right)}
        criterion = kind(**sizes, temperature=temperature, views=self.views, **options)
        criterion.to(self.left.device).set_counts(
            torch.bincount(self.left_id, minlength=len(self.left)),
            torch.bincount(self.right_id, minlength=len(self.right)),
        )
        return criterion

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) embeddings of items by id; their gradients are sparse, with a row per requested id."""
        self.num_encoded += len(ids)
        return embedding(ids, getattr(self, side), sparse=True)

    def step(self, criterion: Objective, rows: Tensor) -> tuple[tuple[Tensor, Tensor], float]:
        """The sparse gradients of a batch, pairs `rows` (B,), on the left and the right items, and its loss."""
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
    """Squared relative bias of the mean gradient, estimated without the noise in it; and its standard error."""

    squared: float
    squared_error: float

    @property
    def value(self) -> float:
        """The bias; 0 where noise makes its square negative."""
        return math.sqrt(max(0.0, self.squared))

    @property
    def is_significant(self) -> bool:
        """Whether the value is more than two standard errors from 0."""
        return self.squared > 2 * self.squared_error

    @property
    def error(self) -> float:
        """Standard error of `value`: how far it moves if its square grows by one standard error."""
        return math.sqrt(max(0.0, self.squared) + self.squared_error) - self.value

    @property
    def limit(self) -> float:
        """Upper limit of the bias, by two standard errors."""
        return math.sqrt(max(0.0, self.squared) + 2 * self.squared_error)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}" if self.is_significant else f"< {self.limit:.3f}"


def bias_of(stretches: Tensor, exact: Tensor, *, gap: int = 0) -> Bias:
    """Bias from independent means of a gradient.

    The expected product of the deviations of two independent means is the squared bias, without a noise term; the
    standard error is the jackknife's.

    Args:
        stretches, exact: (S, N, D) mean gradients of S stretches of a run, or of S runs, and the exact one (N, D).
        gap: distance up to which stretches are dependent: 0 for separate runs, 1 for neighbours in one run.
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


class Measured(NamedTuple):
    """Measurements of one objective.

    Attributes:
        bias: of the mean gradient of an epoch, relative to the exact gradient.
        epochs: number of averaged epochs, over all runs.
        step_errors: relative distance of a step's gradient from the exact gradient of the same anchors, for a sample.
        encodes, state_bytes: items requested by id, per pair, and size of the objective's tables.
    """

    bias: Bias
    epochs: int
    step_errors: list[float]
    encodes: float = 0.0
    state_bytes: int = 0

    @property
    def step_error(self) -> float:
        """Mean error of a step."""
        return statistics.mean(self.step_errors)

    @property
    def step_error_error(self) -> float:
        """Standard error of `step_error`."""
        if len(self.step_errors) < 2:
            return 0.0
        return statistics.stdev(self.step_errors) / math.sqrt(len(self.step_errors))


class ObjectiveRun:
    """A run of an objective through epochs in random order.

    The gradients of its first steps are compared with those of `oracle`, `ExactGlobal` of the same pairs.
    """

    def __init__(
        self, frozen: FrozenPairs, criterion: Objective, oracle: Objective, batch_size: int, seed: int
    ) -> None:
        self.frozen = frozen
        self.criterion = criterion
        self.oracle = oracle
        self.order = epochs(len(frozen), batch_size, seed)
        self.step_errors: list[float] = []
        self.num_encoded = 0

    def warm_up(self, num_epochs: int) -> None:
        """Run epochs that are not measured, so that averages and chains settle."""
        for _ in range(num_epochs):
            for rows in next(self.order):
                self.frozen.step(self.criterion, rows.to(self.frozen.left_id.device))

    def add_epoch(self, total: Tensor, compared: int) -> None:
        """Add the mean gradient of an epoch to a sum; so many steps of the run are compared with the exact gradient."""
        for batch in next(self.order):
            rows = batch.to(total.device)
            gradient, _ = self.frozen.step(self.criterion, rows)
            self.num_encoded += self.frozen.num_encoded
            self.frozen.add_to(total, gradient, len(rows) / len(self.frozen))
            if len(self.step_errors) < compared:
                exact = self.frozen.dense(self.frozen.step(self.oracle, rows)[0])
                error = (self.frozen.dense(gradient) - exact).norm() / exact.norm()
                self.step_errors.append(float(error))


def state_bytes(criterion: Objective) -> int:
    """Size of an objective's tables."""
    # Counts of pairs belong to the data, not to the objective's memory.
    tables = dict(criterion.named_buffers()).items()
    return sum(table.nbytes for name, table in tables if not name.endswith("pair_counts"))


def measure_objective(
    frozen: FrozenPairs,
    kind: Callable[..., Objective],
    temperature: float,
    batch_size: int,
    *,
    warm_up: int = 10,
    bound: float = 0.02,
    max_epochs: int = 64,
    num_runs: int = 6,
    seed: int = 0,
) -> Measured:
    """Measure an objective over uniform batches until the standard error of its bias is below a bound.

    Independent runs, each with its own order, draws and state, advance together, doubling the epochs while the standard
    error is above the bound.

    Args:
        frozen, kind, temperature, batch_size: the pairs, the objective as `frozen.build` takes it, and B.
        warm_up, max_epochs: epochs of each run before measurement, and the most after that.
        bound: standard error of the bias at which to stop.
        num_runs, seed: how many, at least three, and the seed of the first; the others take the numbers after it.
    """
    oracle = frozen.build(ExactGlobal, temperature)
    exact, _ = frozen.exact(temperature)
    runs = []
    for own_seed in range(seed, seed + num_runs):
        criterion = frozen.build(kind, temperature, seed=own_seed)
        run = ObjectiveRun(frozen, criterion, oracle, batch_size, own_seed)
        run.warm_up(warm_up)
        runs.append(run)
    sums = torch.zeros(num_runs, *exact.shape).to(exact)
    done = 0
    further = 1
    # Doubling: the last round costs as much as all before it together.
    while True:
        for total, run in zip(sums, runs):
            for _ in range(further):
                run.add_epoch(total, compared=-(-MAX_COMPARED_STEPS // num_runs))
        done += further
        bias = bias_of(sums / done, exact)
        if bias.error <= bound or 2 * done > max_epochs:
            break
        further = done
    errors = [error for run in runs for error in run.step_errors]
    encodes = sum(run.num_encoded for run in runs) / (num_runs * done * len(frozen))
    return Measured(bias, num_runs * done, errors, encodes, state_bytes(criterion))


def found_first(frozen: FrozenPairs, batches: Iterable[Tensor]) -> float:
    """The share of the pairs of batches (B,) whose right item is nearer to the left one than every negative."""
    is_first = []
    for batch in batches:
        rows = batch.to(frozen.left_id.device)
        own = frozen.right_id[rows, None]  # (B, 1)
        listed = own if frozen.left_positives is None else frozen.left_positives[rows]  # (B, K)
        scores = frozen.left.detach()[frozen.left_id[rows]] @ frozen.right.detach().T  # (B, N)
        # Padding stands for the pair's own item, which is no negative either.
        negatives = scores.scatter(1, torch.where(listed < 0, own, listed), -torch.inf)
        hardest = negatives.scatter(1, own, -torch.inf).amax(dim=1)
        is_first.append(scores.gather(1, own)[:, 0] > hardest)
    return float(torch.cat(is_first).float().mean())


def advice(measured: dict[str, Measured], batch_size: int, first: float) -> str:
    """The gradient that in-batch losses miss at this batch size, the estimators nearest to it, and what to train with.

    Estimators without a significant bias are level, and the smaller error of a step decides between them. A model that
    finds most positives `first` is fine-tuned, and a loss without the positive in its softmax would keep pushing there.
    """

    def missed(name: str, below: str) -> str:
        bias = measured[name].bias
        return f"{bias.value:.0%}" if bias.is_significant else f"{below} {bias.limit:.0%}"

    def rank(name: str) -> tuple[float, float]:
        bias = measured[name].bias
        return round(bias.value, 2) if bias.is_significant else 0.0, measured[name].step_error

    parts = []
    if "InfoNCE" in measured:
        parts.append(f"InfoNCE misses {missed('InfoNCE', 'less than')} of the gradient")
    others = sorted((name for name in measured if name != "InfoNCE"), key=rank)
    without_encodes = [name for name in others if not measured[name].encodes]
    for name in dict.fromkeys([*without_encodes[:1], *others[:1]]):
        encodes = measured[name].encodes
        cost = f"for {encodes:.1f} extra encodes per pair" if encodes else "without extra encodes"
        parts.append(f"{name} {missed(name, 'below')} {cost}")
    gradients = f"at B={batch_size} " + "; ".join(parts)
    if first <= MIN_FOUND_FIRST:
        return gradients
    return (
        f"{gradients}. The model finds {first:.0%} of the positives first: to fine-tune such a model, keep the "
        "positive in the softmax (positive_in_softmax=true, or InfoNCE)"
    )
