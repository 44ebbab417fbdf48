"""What the gradient of each objective estimates, at frozen embeddings: bias, error of a step, cost and memory.

Gradients are taken with respect to the embeddings themselves, and compared with that of the global loss over all pairs
(`ExactGlobal`). Shapes: A anchors, B batch, N items of a side, D dimension, M pairs, K known positives, S stretches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dualenc.errors import DualencError
from dualenc.objectives import (
    DCL,
    EMC2,
    HCL,
    ISIR,
    SACLR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SigLIP,
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
    "HCL": HCL,
    "SACLR": SACLR,
    "SigLIP": lambda **common: SigLIP(**common | {"learnable_temperature": False}),
}
"""What can be measured, by name, all with their defaults; SogCLR also with γ = 0.1, temperatures as they are given."""
OTHER_LOSSES = ("HCL", "SACLR", "SigLIP")
"""Their gradients are not meant to be that of the global loss: what is measured is how far apart the two losses are."""

STRETCHES = 8
STEPS_COMPARED = 64


@dataclass
class FrozenPairs:
    """Embeddings that stay as they are, and the pairs between them; counts the items that are asked for by id.

    Attributes:
        left, right: (N, D) unit-norm embeddings of the items, by id; N may differ between the sides.
        left_id, right_id: (M,) ids of each pair.
        left_positives, right_positives: (M, K) ids known to be positive with the pair's left or right item, padded
            with -1.
        views: left and right are two views of one image.
        num_encoded: items that were asked for by id since this was last set to 0.
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
        self.left, self.right = self.left.detach().requires_grad_(), self.right.detach().requires_grad_()

    @classmethod
    def one_to_one(cls, left: Tensor, right: Tensor, *, views: bool = False) -> FrozenPairs:
        """Row i of `left` (M, D) belongs to row i of `right` (M, D), and every item to one pair."""
        ids = torch.arange(len(left), device=left.device)
        return cls(left, right, ids, ids, views=views)

    def __len__(self) -> int:
        return len(self.left_id)

    def counts(self, side: Side) -> Tensor:
        """(N,) how many pairs each item of a side is in."""
        ids, items = (self.left_id, self.left) if side == "left" else (self.right_id, self.right)
        return torch.bincount(ids, minlength=len(items))

    def build(self, kind: Callable[..., Objective], temperature: float, **how: Any) -> Objective:
        """An objective of these pairs: `kind` is a class of objectives, or makes one from the same arguments."""
        sizes = {"num_left": len(self.left), "num_right": len(self.right)}
        criterion = kind(**sizes, temperature=temperature, views=self.views, **how).to(self.left.device)
        criterion.set_counts(self.counts("left"), self.counts("right"))
        return criterion

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """(n, D) embeddings of items by id; their gradients are sparse, as many rows as were asked for."""
        self.num_encoded += len(ids)
        return embedding(ids, self.left if side == "left" else self.right, sparse=True)

    def step(self, criterion: Objective, rows: Tensor) -> tuple[tuple[Tensor, Tensor], float]:
        """The (sparse) gradient of a batch, pairs `rows` (B,), on the left and the right items; and the loss."""
        left_id, right_id = self.left_id[rows], self.right_id[rows]
        left, right = self.encode("left", left_id), self.encode("right", right_id)
        self.num_encoded = 0
        known = {"left_positives": self.left_positives, "right_positives": self.right_positives}
        listed = {name: some[rows] for name, some in known.items() if some is not None}
        loss = criterion(left, right, left_id, right_id, encode=self.encode, **listed).loss
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
        for part, first in zip(gradient, (0, len(self.left))):
            total.index_add_(0, part._indices()[0] + first, part._values(), alpha=weight)


def epochs(num_pairs: int, batch_size: int, seed: int = 0) -> Iterator[list[Tensor]]:
    """For each epoch, without end, a random order of all pairs, cut into batches (B,)."""
    draw = torch.Generator().manual_seed(seed)
    for _ in count():
        yield list(torch.randperm(num_pairs, generator=draw).split(batch_size))


class Bias(NamedTuple):
    """Squared distance of the mean gradient from the exact one, relative, freed of noise; and its standard error."""

    squared: float
    squared_error: float

    @property
    def value(self) -> float:
        """The distance itself; 0 where noise makes its square negative."""
        return math.sqrt(max(0.0, self.squared))

    @property
    def is_told(self) -> bool:
        """Whether it can be told from 0: two standard errors away."""
        return self.squared > 2 * self.squared_error

    @property
    def error(self) -> float:
        """Standard error of `value`: how far it moves if its square grows by one standard error."""
        return math.sqrt(max(0.0, self.squared) + self.squared_error) - self.value

    @property
    def limit(self) -> float:
        """What the bias does not exceed, by two standard errors."""
        return math.sqrt(max(0.0, self.squared) + 2 * self.squared_error)

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}" if self.is_told else f"< {self.limit:.3f}"


def bias_of(stretches: Tensor, exact: Tensor, *, gap: int = 0) -> Bias:
    """The bias that independent means of a gradient show.

    The mean product of the deviations of two of them has no noise in it, so it estimates the squared bias; its standard
    error is the jackknife's, over the stretches.

    Args:
        stretches: (S, N, D) means over so many stretches of a run, or over so many runs.
        exact: (N, D) the exact gradient.
        gap: stretches so near one another are not independent: 0 for runs of their own, 1 for neighbours in one run.
    """
    deviations = (stretches - exact).flatten(1)
    products = (deviations @ deviations.T).double() / float(exact.double().square().sum())
    numbers = torch.arange(len(stretches), device=products.device)
    apart = numbers[None, :] - numbers[:, None] > gap

    def mean(without: int) -> float:
        kept = apart & (numbers != without)[:, None] & (numbers != without)[None, :]
        return float(products[kept].mean())

    leaves = [mean(without) for without in range(len(stretches))]
    spread = math.sqrt((len(leaves) - 1) * statistics.pvariance(leaves))
    return Bias(mean(-1), spread)


@dataclass
class Measured:
    """What a run of one objective shows.

    Attributes:
        bias: of the mean gradient of an epoch, relative to the exact gradient.
        epochs: how many were averaged, those of all runs together.
        step_errors: distance of a step's gradient from the exact gradient of the same anchors, relative, of some steps.
        mean_errors: the distance of the mean gradient so far, noise included: at every look, or after every epoch.
        values: the loss that each step reports.
        seconds: that each step took.
        encodes: items asked for by id, per pair.
        state_bytes: of the objective's tables.
    """

    bias: Bias = field(default_factory=lambda: Bias(0.0, math.inf))
    epochs: int = 0
    step_errors: list[float] = field(default_factory=list)
    mean_errors: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    encodes: float = 0.0
    state_bytes: int = 0

    @property
    def step_error(self) -> float:
        """Mean error of a step."""
        return statistics.mean(self.step_errors)

    def to_plain(self) -> dict[str, Any]:
        """As JSON, without the loss and the time of every step, of which there are many."""
        return {**vars(self), "bias": list(self.bias), "values": [], "seconds": []}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Measured:
        """What `to_plain` gave."""
        return cls(**{**plain, "bias": Bias(*plain["bias"])})

    @property
    def step_error_error(self) -> float:
        """Standard error of `step_error`."""
        return statistics.stdev(self.step_errors) / math.sqrt(len(self.step_errors)) if self.step_errors[1:] else 0.0


@dataclass
class _Run:
    """An objective on its way through epochs, each in an order of its own; what is seen goes to `found`."""

    frozen: FrozenPairs
    criterion: Objective
    oracle: Objective
    batch_size: int
    seed: int
    found: Measured
    num_compared: int = 0

    def __post_init__(self) -> None:
        self.order = epochs(len(self.frozen), self.batch_size, self.seed)

    def warm_up(self, num_epochs: int) -> None:
        """Let averages and chains settle."""
        for _ in range(num_epochs):
            for rows in next(self.order):
                self.frozen.step(self.criterion, rows.to(self.frozen.left_id.device))

    def add_to(self, total: Tensor, num_epochs: int, *, compared: int) -> None:
        """Add the mean gradient of each of some epochs to a sum; the first few steps are compared."""
        for _ in range(num_epochs):
            for rows in next(self.order):
                rows, start = rows.to(total.device), time.perf_counter()
                gradient, value = self.frozen.step(self.criterion, rows)
                self.found.seconds.append(time.perf_counter() - start)
                self.found.values.append(value)
                self.found.encodes += self.frozen.num_encoded
                self.frozen.add_to(total, gradient, len(rows) / len(self.frozen))
                if self.num_compared < compared:
                    own = self.frozen.dense(self.frozen.step(self.oracle, rows)[0])
                    self.found.step_errors.append(float((self.frozen.dense(gradient) - own).norm() / own.norm()))
                    self.num_compared += 1
        self.found.epochs += num_epochs

    def conclude(self) -> Measured:
        """What all runs have found, the last of which this is."""
        self.found.encodes /= self.found.epochs * len(self.frozen)
        tables = [table for name, table in self.criterion.named_buffers() if not name.endswith("pair_counts")]
        self.found.state_bytes = sum(table.numel() * table.element_size() for table in tables)
        return self.found


def measure(
    frozen: FrozenPairs,
    kind: Callable[..., Objective],
    temperature: float,
    batch_size: int,
    *,
    warm_up: int = 10,
    bound: float = 0.02,
    max_epochs: int = 64,
    runs: int = 6,
    seed: int = 0,
) -> Measured:
    """Run an objective over uniform batches until its bias is known, and compare with the exact gradient.

    Independent runs, each with its own order, draws and state, go on together, for twice as many epochs whenever the
    standard error of the bias is still above the bound. What a run's state keeps for long, such as a chain that hardly
    moves, is noise of that run and no bias.

    Args:
        frozen: M pairs.
        kind: the objective, as `frozen.build` takes it.
        temperature: τ.
        batch_size: B.
        warm_up: epochs of each run before anything counts, in which averages and chains settle.
        bound: standard error of the bias that is good enough.
        max_epochs: the most epochs of a run after its warm-up, at least one.
        runs: how many, at least three.
        seed: of the first run; the others take the numbers after it.
    """
    found, oracle, (exact, _) = Measured(), frozen.build(ExactGlobal, temperature), frozen.exact(temperature)
    seeds = range(seed, seed + runs)
    going = [_Run(frozen, frozen.build(kind, temperature, seed=own), oracle, batch_size, own, found) for own in seeds]
    for run in going:
        run.warm_up(warm_up)
    sums, done, further = torch.zeros(runs, *exact.shape).to(exact), 0, 1
    while True:
        for total, run in zip(sums, going):
            run.add_to(total, further, compared=-(-STEPS_COMPARED // runs))
        done += further
        found.bias = bias_of(sums / done, exact)
        found.mean_errors.append(float((sums.mean(dim=0) / done - exact).norm() / exact.norm()))
        if found.bias.error <= bound or 2 * done > max_epochs:
            return going[-1].conclude()
        further = done


def measure_stretches(
    frozen: FrozenPairs,
    kind: Callable[..., Objective],
    temperature: float,
    batch_size: int,
    *,
    warm_up: int,
    stretch: int,
    seed: int = 0,
) -> Measured:
    """The same from one long run: its stretches that are no neighbours are taken for independent.

    Args:
        frozen, kind, temperature, batch_size, warm_up, seed: see `measure`.
        stretch: epochs of each of eight stretches.
    """
    found, oracle, (exact, _) = Measured(), frozen.build(ExactGlobal, temperature), frozen.exact(temperature)
    run = _Run(frozen, frozen.build(kind, temperature, seed=seed), oracle, batch_size, seed, found)
    run.warm_up(warm_up)
    sums = torch.zeros(STRETCHES, *exact.shape).to(exact)
    for number, total in enumerate(sums, start=1):
        for epoch in range(stretch):
            # The steps of the first epoch of each stretch.
            run.add_to(total, 1, compared=10**9 if epoch == 0 else 0)
            error = (sums.sum(dim=0) / ((number - 1) * stretch + epoch + 1) - exact).norm()
            found.mean_errors.append(float(error / exact.norm()))
    found.bias = bias_of(sums / stretch, exact, gap=1)
    return run.conclude()


def softmax_shares(frozen: FrozenPairs, temperature: float, batches: Iterable[Tensor]) -> Tensor:
    """(A,) for every anchor of some batches (B,), the share of its softmax over the corpus that its batch holds.

    The corpus counts an item as often as it stands in a pair, and the batch as often as it stands in one of its own.

    Raises:
        DualencError: a pair has no negative in the corpus, since every item is its positive.
    """
    shares = []
    sides: tuple[tuple[Side, Side], ...] = (("left", "right"), ("right", "left"))
    for rows in batches:
        rows = rows.to(frozen.left_id.device)
        for side, other in sides:
            ids, partners, listed = frozen.left_id, frozen.right_id, frozen.left_positives
            anchors, items = frozen.left.detach(), frozen.right.detach()
            if side == "right":
                ids, partners, listed = frozen.right_id, frozen.left_id, frozen.right_positives
                anchors, items = items, anchors
            barred = partners[rows, None] if listed is None else torch.cat([partners[rows, None], listed[rows]], dim=1)
            of_corpus, of_batch = frozen.counts(other), torch.bincount(partners[rows], minlength=len(items))
            if frozen.views:
                items = torch.cat([items, anchors])
                of_corpus, of_batch = of_corpus.repeat(2), of_batch.repeat(2)
                barred = torch.cat([barred, torch.where(barred < 0, barred, barred + len(anchors))], dim=1)
            logits = anchors[ids[rows]] @ items.T / temperature
            # Padding is put into one more column, which is dropped.
            padded = torch.cat([logits, logits[:, :1]], dim=1)
            padded.scatter_(1, torch.where(barred < 0, len(items), barred), -torch.inf)
            logits = padded[:, :-1]
            total = torch.logsumexp(logits + of_corpus.to(logits).log(), dim=1)
            if bool(torch.isneginf(total).any()):
                row = int(rows[torch.isneginf(total)][0])
                raise DualencError(f"pair {row} has no negative here: all others are its positives; give more pairs")
            shares.append(torch.exp(torch.logsumexp(logits + of_batch.to(logits).log(), dim=1) - total))
    return torch.cat(shares)


def advice(found: dict[str, Measured], batch_size: int) -> str:
    """One line: what in-batch losses miss at this batch size, and which estimators are nearest to the gradient.

    Estimators whose bias cannot be told from 0 are level, and the smallest error of a step decides between them.
    """
    measured = {name: some for name, some in found.items() if name not in OTHER_LOSSES}
    if not measured:
        return f"at B={batch_size}: none of these estimates the global loss; measure InfoNCE and ISIR to compare"

    def told(name: str) -> str:
        some = measured[name]
        bias = f"{some.bias.value:.0%}" if some.bias.is_told else f"below {some.bias.limit:.0%}"
        if not some.encodes:
            return f"{name} {bias} without extra encodes"
        return f"{name} {bias} for {some.encodes:.1f} extra encodes per pair"

    def rank(name: str) -> tuple[float, float]:
        some = measured[name]
        return round(some.bias.value, 2) if some.bias.is_told else 0.0, some.step_error

    parts = []
    if "InfoNCE" in measured:
        bias = measured["InfoNCE"].bias
        much = f"{bias.value:.0%}" if bias.is_told else f"less than {bias.limit:.0%}"
        parts.append(f"InfoNCE misses {much} of the gradient")
    others = [name for name in measured if name != "InfoNCE"]
    free = min((name for name in others if not measured[name].encodes), key=rank, default=None)
    best = min(others, key=rank, default=None)
    parts += [told(name) for name in dict.fromkeys((free, best)) if name is not None]
    return f"at B={batch_size} " + "; ".join(parts)
