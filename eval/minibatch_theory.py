"""The theory of "Mini-Batch Optimization of Contrastive Loss" (Cho et al.), reproduced.

    python eval/minibatch_theory.py --output runs/minibatch_theory

Prints what the paper states and what is found here, and saves four figures:
optima.png (Fig. 4a–d), convergence.png (Fig. 4e), toy.png (Fig. 2b), histogram.png (Fig. 3).
Embeddings are optimised directly, as in the paper: gradient steps, each followed by scaling to unit
norm; τ = 1. Takes a minute on one core; --only runs one part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches, batch_losses

N, B = 8, 2
EVERY_BATCH = list(itertools.combinations(range(N), B))


class Row(NamedTuple):
    """One statement of the paper."""

    what: str
    expected: str
    found: str
    holds: bool


Part = tuple[Any, list[Row]]  # a matplotlib figure and the statements that it shows


def contrastive_losses(left: Tensor, right: Tensor, batches: Tensor) -> Tensor:
    """(num_batches,): Eq. 2 at τ = 1 for each batch (num_batches, B) of rows of the embeddings (N,
    D)."""
    logits = left[batches] @ right[batches].mT
    targets = torch.arange(batches.shape[1]).expand(len(batches), -1)
    directions = [cross_entropy(side, targets, reduction="none") for side in (logits.mT, logits)]
    return (directions[0] + directions[1]).mean(dim=1)


def random_embeddings(dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two times N unit vectors in random directions."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(N, dim, generator=draw, dtype=torch.float64) for _ in range(2))
    return normalize(left), normalize(right)


def descend(left: Tensor, right: Tensor, batches: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """One gradient step on the mean loss of the batches, then unit norm again."""
    left, right = left.requires_grad_(), right.requires_grad_()
    loss = contrastive_losses(left, right, batches).mean()
    left_grad, right_grad = torch.autograd.grad(loss, (left, right))
    return normalize((left - rate * left_grad).detach()), normalize(
        (right - rate * right_grad).detach()
    )


def pairings(items: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """All ways to pair items up."""
    if not items:
        yield []
    for other in items[1:]:
        rest = tuple(item for item in items[1:] if item != other)
        for pairs in pairings(rest):
            yield [(items[0], other), *pairs]


@lru_cache
def optimal_grams(dim: int) -> Tensor:
    """(optima, N, N) products u_i·v_j: the simplex ETF if N ≤ d + 1; if N = 2d, a cross-polytope
    for each pairing."""
    if dim + 1 >= N:
        return (torch.eye(N).double() * N - 1)[None] / (N - 1)
    grams = []
    for pairs in pairings(tuple(range(N))):
        gram = torch.eye(N).double()
        for i, j in pairs:
            gram[i, j] = gram[j, i] = -1
        grams.append(gram)
    return torch.stack(grams)


def distance_to_optimum(left: Tensor, right: Tensor) -> float:
    """Frobenius norm of the difference between the products u_i·v_j and the nearest optimum's."""
    return float((optimal_grams(left.shape[1]) - left @ right.T).flatten(1).norm(dim=1).min())


# ---- Fig. 4 (a)–(d): which sets of batches have the full batch's optimum
# -------------------------------------------

PROBLEMS: dict[str, list[tuple[int, ...]]] = {
    "full batch": [tuple(range(N))],
    "all C(8, 2) batches": EVERY_BATCH,
    "4 disjoint batches": [(i, i + 1) for i in range(0, N, B)],
    "all batches but one": EVERY_BATCH[:-1],
}


def optima(steps: int = 1000, rate: float = 5.0, seed: int = 0) -> Part:
    """Minimise the loss of four sets of batches from one random start, by steps ten times the
    paper's."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(15, 6), layout="constrained")
    rows = []
    for line, (dim, shape) in enumerate([(16, "simplex ETF"), (4, "cross-polytope")]):
        grams = {f"optimum, d = {dim}": optimal_grams(dim)[0]}
        for problem, batches in PROBLEMS.items():
            left, right = minimise(dim, batches, steps, rate, seed)
            grams[problem] = left @ right.T
            distance = distance_to_optimum(left, right)
            reaches = problem in ("full batch", "all C(8, 2) batches")
            expected = f"{shape}: distance 0" if reaches else "another optimum: distance > 0"
            holds = distance < 0.01 if reaches else distance > 0.2
            rows.append(Row(f"d = {dim}, {problem}", expected, f"{distance:.3f}", holds))
        for axis, (title, gram) in zip(axes[line], grams.items()):
            axis.imshow(gram, vmin=-1, vmax=1, cmap="coolwarm")
            axis.set_title(title)
    return figure, rows


def minimise(
    dim: int, batches: list[tuple[int, ...]], steps: int, rate: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Gradient descent on the mean loss of fixed batches."""
    left, right = random_embeddings(dim, seed)
    for _ in range(steps):
        left, right = descend(left, right, torch.tensor(batches), rate)
    return left, right


# ---- Fig. 4 (e): how fast three ways to choose batches get there
# ----------------------------------------------------


class HardestBatch(BatchSelector):
    """OSGD with k = C(N, B) and q = 1 (Algorithm 5): of all batches the one with the largest
    loss."""

    def select(
        self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None
    ) -> np.ndarray:
        assert left is not None
        assert right is not None
        every = np.array(EVERY_BATCH)
        losses = batch_losses(
            left.astype(np.float32), right.astype(np.float32), every, temperature=1.0
        )
        return every[[losses.argmax()]]


def selectors(seed: int) -> dict[str, BatchSelector]:
    """SGD without replacement, OSGD with the hardest of all batches, and spectral clustering."""
    return {
        "SGD": RandomBatches(N, B, seed),
        "OSGD": HardestBatch(N, B, seed),
        "SC": SpectralBatches(N, B, seed, method="spectral", temperature=1.0),
    }


def distances(selector: BatchSelector, dim: int, updates: int, seed: int) -> np.ndarray:
    """(updates,) distance to the optimum after each update on one batch that the selector chose."""
    left, right = random_embeddings(dim, seed)
    found: list[float] = []
    while len(found) < updates:
        for batch in selector.select(len(found), left.numpy(), right.numpy()):
            left, right = descend(left, right, torch.from_numpy(batch[None]), rate=0.5)
            found.append(distance_to_optimum(left, right))
    return np.array(found[:updates])


def convergence(updates: int = 500, seeds: int = 3) -> Part:
    """Distance to the optimum over updates, mean over random starts."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rows = []
    for axis, dim in zip(axes, (16, 4)):
        ends = {}
        for name in selectors(0):
            runs = [distances(selectors(seed)[name], dim, updates, seed) for seed in range(seeds)]
            curve = np.mean(runs, axis=0)
            axis.plot(curve, label=name)
            ends[name] = curve[-updates // 10 :].mean()
        axis.set(
            title=f"N = {N}, B = {B}, d = {dim}",
            xlabel="updates",
            ylabel="distance to the optimum",
            yscale="log",
        )
        axis.legend()
        for name in ("OSGD", "SC"):
            what = f"d = {dim}, distance after {updates} updates, {name}"
            rows.append(
                Row(
                    what,
                    "below SGD",
                    f"{ends[name]:.3f} (SGD {ends['SGD']:.3f})",
                    ends[name] < ends["SGD"],
                )
            )
    return figure, rows


# ---- Fig. 2: the toy example of §5.1
# --------------------------------------------------------------------------------

TOY_BATCHES = torch.tensor(list(itertools.combinations(range(4), 2)))


def toy_embeddings(angles: Tensor) -> Tensor:
    """(4, 2): four vectors in four quadrants, each at its angle from the horizontal axis."""
    signs = torch.tensor([[1, 1], [1, -1], [-1, -1], [-1, 1]])
    return signs * torch.stack([angles.cos(), angles.sin()], dim=1)


def toy_curve(
    choose: Callable[[Tensor], Tensor], steps: int, rate: float, start: float
) -> np.ndarray:
    """(steps,) full-batch loss when each step takes the batches that `choose` picks, given the loss
    of all six."""
    angles = torch.full((4,), start, dtype=torch.float64)
    curve = []
    for _ in range(steps):
        points = toy_embeddings(angles.requires_grad_())
        losses = contrastive_losses(points, points, TOY_BATCHES)
        (gradient,) = torch.autograd.grad(losses[choose(losses.detach())].mean(), angles)
        curve.append(
            float(contrastive_losses(points.detach(), points.detach(), torch.arange(4)[None]))
        )
        angles = (angles - rate * gradient).detach()
    return np.array(curve)


def toy(steps: int = 1200, rate: float = 0.03, start: float = 0.05, seeds: int = 4) -> Part:
    """Loss of OSGD, SGD (mean over seeds) and gradient descent on all batches."""
    from matplotlib import pyplot as plt

    draw = torch.Generator().manual_seed(0)
    curves = {
        "OSGD": toy_curve(lambda losses: losses.argmax()[None], steps, rate, start),
        "all batches": toy_curve(lambda _: torch.arange(6), steps, rate, start),
    }
    sgd = [
        toy_curve(lambda _: torch.randint(6, (1,), generator=draw), steps, rate, start)
        for _ in range(seeds)
    ]
    curves["SGD"] = np.mean(sgd, axis=0)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        axis.plot(curve, label=name)
    axis.axhline(1.253, linestyle=":", color="black", label="optimum 1.253")
    axis.set(xlabel="updates", ylabel="full-batch loss", title="N = 4, B = 2, d = 2")
    axis.legend()
    lowest = {name: curve.min() for name, curve in curves.items()}
    rows = [
        Row(
            f"toy example, loss reached by {name}",
            "1.253",
            f"{loss:.4f}",
            abs(loss - 1.253) < 0.005,
        )
        for name, loss in lowest.items()
    ]
    arrival = {
        name: int(np.argmax(np.append(curve < 1.253 * 1.01, True)))
        for name, curve in curves.items()
    }
    found = ", ".join(f"{name} {step}" for name, step in arrival.items())
    rows.append(
        Row("updates to within 1%", "OSGD before SGD", found, arrival["OSGD"] < arrival["SGD"])
    )
    return figure, rows


# ---- Fig. 3: losses of chosen batches
# --------------------------------------------------------------------------------


def clustered_embeddings(num_pairs: int, dim: int = 128, seed: int = 0) -> np.ndarray:
    """(2, N, D) unit vectors around 100 directions, right near left: a stand-in for a trained
    encoder's."""
    draw = torch.Generator().manual_seed(seed)
    centers = normalize(torch.randn(100, dim, generator=draw))
    points = centers[torch.randint(100, (num_pairs,), generator=draw)]
    points = normalize(points + torch.randn(num_pairs, dim, generator=draw) / dim**0.5)
    return normalize(
        points + 0.5 * torch.randn(2, num_pairs, dim, generator=draw) / dim**0.5, dim=2
    ).numpy()


def histogram(num_pairs: int = 8000, batch_size: int = 20) -> Part:
    """Histogram of batch losses at τ = 1: random batches, Algorithm 1 in groups of 40,
    bisection."""
    from matplotlib import pyplot as plt

    left, right = clustered_embeddings(num_pairs)
    chosen: dict[str, BatchSelector] = {
        "random": RandomBatches(num_pairs, batch_size),
        "SC": SpectralBatches(num_pairs, batch_size, method="spectral", temperature=1.0),
        "bisection (ours)": SpectralBatches(num_pairs, batch_size, method="bisection"),
    }
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    means = {}
    for name, selector in chosen.items():
        losses = 2 * batch_losses(
            left, right, selector.select(0, left, right), 1.0
        )  # Eq. 2 sums the directions
        axis.hist(losses, bins=40, alpha=0.6, label=name)
        means[name] = losses.mean()
    axis.set(
        xlabel="contrastive loss of a batch (τ = 1)",
        ylabel="batches",
        title=f"N = {num_pairs}, B = {batch_size}",
    )
    axis.legend()
    found = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    return figure, [Row("mean batch loss", "SC above random", found, means["SC"] > means["random"])]


PARTS: dict[str, Callable[[], Part]] = {
    "optima": optima,
    "convergence": convergence,
    "toy": toy,
    "histogram": histogram,
}


def main(
    output: Path = Path("runs/minibatch_theory"),
    only: Literal["optima", "convergence", "toy", "histogram"] | None = None,
) -> None:
    """Run the parts, print the table, save the figures.

    Args:
        output: folder for the figures.
        only: run one part alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    print(f"{'statement':45} {'paper':30} {'found':50} holds")
    for name in [only] if only else PARTS:
        figure, rows = PARTS[name]()
        figure.savefig(output / f"{name}.png", dpi=150)
        for row in rows:
            print(
                f"{row.what:45} {row.expected:30} {row.found:50} {'yes' if row.holds else 'NO'}",
                flush=True,
            )


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
