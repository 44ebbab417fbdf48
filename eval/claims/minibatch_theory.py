"""The theory of "Mini-Batch Optimization of Contrastive Loss" (Cho et al.), reproduced.

    python eval/claims/minibatch_theory.py
    python eval/claims/minibatch_theory.py --only optima

Prints what the paper states and what is found: which sets of batches have the full batch's optimum
(Fig. 4 a–d), how fast three ways to choose batches get there (Fig. 4e), the toy example (Fig. 2)
and the losses of chosen batches (Fig. 3). Embeddings are optimized directly, as in the paper:
gradient steps, each followed by scaling to unit norm; τ = 1. Takes a minute on one core.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches, batch_losses
from dualenc.evaluation.report_page import Table, print_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import command_line

N, B = 8, 2
EVERY_BATCH = list(itertools.combinations(range(N), B))
PROBLEMS = {
    "full batch": [tuple(range(N))],
    "all C(8, 2) batches": EVERY_BATCH,
    "4 disjoint batches": [(i, i + 1) for i in range(0, N, B)],
    "all batches but one": EVERY_BATCH[:-1],
}
Row = tuple[str, str, str, bool]  # a statement, what is expected and found, and whether it holds
TOY_BATCHES = torch.tensor(list(itertools.combinations(range(4), 2)))
TOY_OPTIMUM = 4 * math.log(1 + math.exp(-1))


def contrastive_losses(left: Tensor, right: Tensor, batches: Tensor) -> Tensor:
    """Return Eq. 2 for each batch of rows (num_batches, B) of the embeddings (N, D)."""
    logits = left[batches] @ right[batches].mT
    targets = torch.arange(batches.shape[1]).expand(len(batches), -1)
    losses = [cross_entropy(own, targets, reduction="none") for own in (logits.mT, logits)]
    return (losses[0] + losses[1]).mean(dim=1)


def random_embeddings(dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two times N unit vectors in random directions."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(N, dim, generator=draw, dtype=torch.float64) for _ in range(2))
    return normalize(left), normalize(right)


def descend(left: Tensor, right: Tensor, batches: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Make one gradient step on the mean loss of the batches, and scale to unit norm again."""
    both = left.requires_grad_(), right.requires_grad_()
    gradients = torch.autograd.grad(contrastive_losses(*both, batches).mean(), both)
    left, right = (
        normalize((own - rate * gradient).detach()) for own, gradient in zip(both, gradients)
    )
    return left, right


@cache
def optimal_grams(dim: int) -> Tensor:
    """Return the products u_i·v_j (optima, N, N): the simplex ETF, or all cross-polytopes."""
    identity = torch.eye(N).double()
    if dim + 1 >= N:
        return (identity * N - 1)[None] / (N - 1)
    # A cross-polytope for each way to pair the items up, if N = 2d.
    orders = torch.tensor(list(itertools.permutations(range(N))))
    partner = orders.unflatten(1, (-1, 2)).flip(2).flatten(1)
    partners = torch.zeros_like(orders).scatter_(1, orders, partner).unique(dim=0)
    return identity - identity[partners]


def distance_to_optimum(left: Tensor, right: Tensor) -> float:
    """Return the Frobenius norm between the products u_i·v_j and those of the nearest optimum."""
    return float((optimal_grams(left.shape[1]) - left @ right.T).flatten(1).norm(dim=1).min())


def optima(steps: int = 1000) -> Iterator[Row]:
    """Compare four sets of batches from one random start, with ten times the paper's rate."""
    shapes = {16: "simplex ETF", 4: "cross-polytope"}
    for (dim, shape), (problem, batches) in itertools.product(shapes.items(), PROBLEMS.items()):
        left, right = random_embeddings(dim, seed=0)
        for _ in range(steps):
            left, right = descend(left, right, torch.tensor(batches), rate=5.0)
        distance = distance_to_optimum(left, right)
        reaches = problem in ("full batch", "all C(8, 2) batches")
        expected = f"{shape}: distance 0" if reaches else "another optimum: distance > 0"
        holds = distance < 0.01 if reaches else distance > 0.2
        yield f"d = {dim}, {problem}", expected, f"{distance:.3f}", holds


class HardestBatch(BatchSelector):
    """OSGD with k = C(N, B) and q = 1 (Algorithm 5): the batch with the largest loss of all."""

    def select(self, epoch: int, left: Any = None, right: Any = None) -> np.ndarray:
        every = np.array(EVERY_BATCH)
        losses = batch_losses(left.astype(np.float32), right.astype(np.float32), every, 1.0)
        return every[[losses.argmax()]]


def distances(selector: BatchSelector, dim: int, updates: int) -> list[float]:
    """Return the distance to the optimum after each update on a batch that the selector chose."""
    left, right = random_embeddings(dim, selector.seed)
    found: list[float] = []
    while len(found) < updates:
        for batch in selector.select(len(found), left.numpy(), right.numpy()):
            left, right = descend(left, right, torch.from_numpy(batch[None]), rate=0.5)
            found.append(distance_to_optimum(left, right))
    return found[:updates]


def convergence(updates: int = 500, seeds: int = 3) -> Iterator[Row]:
    """Compare three selections by the mean distance over the last tenth of the updates."""
    selectors: dict[str, Callable[..., BatchSelector]] = {
        "SGD": RandomBatches,
        "OSGD": HardestBatch,
        "SC": partial(SpectralBatches, method="spectral", temperature=1.0),
    }
    for dim in (16, 4):
        ends = {}
        for name, new in selectors.items():
            curves = [distances(new(N, B, seed), dim, updates) for seed in range(seeds)]
            ends[name] = np.mean(curves, axis=0)[-updates // 10 :].mean()
        for name in ("OSGD", "SC"):
            what = f"d = {dim}, distance after {updates} updates, {name}"
            found = f"{ends[name]:.3f} (SGD {ends['SGD']:.3f})"
            yield (what, "below SGD", found, ends[name] < ends["SGD"])


def toy_curve(choose: Callable[[Tensor], Tensor], steps: int, rate: float) -> np.ndarray:
    """Return the full batch's loss before each step on the batches that `choose` takes.

    Four vectors are in four quadrants, each at an angle from the horizontal axis.
    """
    signs = torch.tensor([[1, 1], [1, -1], [-1, -1], [-1, 1]])
    angles = torch.full((4,), 0.05, dtype=torch.float64)
    curve = []
    for _ in range(steps):
        angles.requires_grad_()
        points = signs * torch.stack([angles.cos(), angles.sin()], dim=1)
        losses = contrastive_losses(points, points, TOY_BATCHES)
        (gradient,) = torch.autograd.grad(losses[choose(losses.detach())].mean(), angles)
        points = points.detach()
        curve.append(float(contrastive_losses(points, points, torch.arange(4)[None])))
        angles = (angles - rate * gradient).detach()
    return np.array(curve)


def toy(steps: int = 1200, rate: float = 0.03, seeds: int = 4) -> Iterator[Row]:
    """Compare OSGD, SGD (mean over seeds) and gradient descent on all batches (§5.1)."""
    draw = torch.Generator().manual_seed(0)
    chosen: dict[str, Callable[[Tensor], Tensor]] = {
        "OSGD": lambda losses: losses.argmax()[None],
        "all batches": lambda _: torch.arange(6),
        "SGD": lambda _: torch.randint(6, (1,), generator=draw),
    }
    curves = {
        name: np.mean([toy_curve(choose, steps, rate) for _ in range(seeds)], axis=0)
        for name, choose in chosen.items()
    }
    arrival = {}
    for name, curve in curves.items():
        lowest = curve.min()
        holds = abs(lowest - TOY_OPTIMUM) < 0.005
        yield (f"toy example, loss reached by {name}", "1.253", f"{lowest:.4f}", holds)
        arrival[name] = int(np.argmax(np.append(curve < TOY_OPTIMUM * 1.01, True)))
    found = ", ".join(f"{name} {step}" for name, step in arrival.items())
    holds = arrival["OSGD"] < arrival["SGD"]
    yield ("updates to within 1%", "OSGD before SGD", found, holds)


def clustered_embeddings(num_pairs: int, dim: int = 128) -> np.ndarray:
    """Return (2, N, D) unit vectors around 100 directions, right near left, as of an encoder."""
    draw = torch.Generator().manual_seed(0)
    centers = normalize(torch.randn(100, dim, generator=draw))
    points = centers[torch.randint(100, (num_pairs,), generator=draw)]
    points = normalize(points + torch.randn(num_pairs, dim, generator=draw) / dim**0.5)
    noise = torch.randn(2, num_pairs, dim, generator=draw) / dim**0.5
    return normalize(points + 0.5 * noise, dim=2).numpy()


def histogram(num_pairs: int = 8000, batch_size: int = 20) -> Iterator[Row]:
    """Compare batch losses: random batches, Algorithm 1 in groups of 40, bisection."""
    left, right = clustered_embeddings(num_pairs)
    selectors: dict[str, BatchSelector] = {
        "random": RandomBatches(num_pairs, batch_size),
        "SC": SpectralBatches(num_pairs, batch_size, method="spectral", temperature=1.0),
        "bisection": SpectralBatches(num_pairs, batch_size),
    }
    # Eq. 2 sums the directions.
    means = {
        name: 2 * batch_losses(left, right, selector.select(0, left, right), 1.0).mean()
        for name, selector in selectors.items()
    }
    found = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    yield ("mean batch loss", "SC above random", found, means["SC"] > means["random"])


PARTS = {part.__name__: part for part in (optima, convergence, toy, histogram)}


def run(only: str | None = None) -> None:
    """Print what the paper states and what is found.

    Args:
        only: one of optima, convergence, toy and histogram; all of them by default.
    """
    torch.set_num_threads(1)
    for name in [only] if only else PARTS:
        rows = [dict(zip(("statement", "paper", "found", "holds"), row)) for row in PARTS[name]()]
        print_table(Table(name, rows))


def check(folder: Path) -> None:
    """Run every part in short; what the paper proves has to hold."""
    # Seven statements hold soon; all batches need long for the cross-polytope.
    assert sum(holds for *_, holds in optima(steps=200)) >= 7
    assert all(holds for *_, holds in convergence(updates=100, seeds=1))
    assert abs(toy_curve(lambda losses: losses.argmax()[None], 200, 0.05)[-1] - TOY_OPTIMUM) < 2e-3
    assert all(holds for *_, holds in histogram(num_pairs=800))


if __name__ == "__main__":
    command_line(run, check=check)
