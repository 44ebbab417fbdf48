"""The theory of "Mini-Batch Optimization of Contrastive Loss" (Cho et al.), reproduced.

    python eval/claims/minibatch_theory.py

Prints which sets of batches have the full batch's optimum (Theorems 4 and 5, Fig. 4 a–d).
Embeddings are optimized directly, as in the paper: gradient steps, each followed by scaling to unit
norm; τ = 1.
"""

from __future__ import annotations

import itertools
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

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
STRICT_SUBSETS = ("4 disjoint batches", "all batches but one")


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


def optima(steps: int = 1000) -> list[float]:
    """Print the distance to the optimum that four sets of batches reach from one random start.

    Args:
        steps: gradient steps, with ten times the paper's rate.
    """
    shapes = {16: "simplex ETF", 4: "cross-polytope"}
    rows, distances = [], []
    for (dim, shape), (problem, batches) in itertools.product(shapes.items(), PROBLEMS.items()):
        left, right = random_embeddings(dim, seed=0)
        for _ in range(steps):
            left, right = descend(left, right, torch.tensor(batches), rate=5.0)
        distances.append(distance_to_optimum(left, right))
        expected = "> 0" if problem in STRICT_SUBSETS else "0"
        row = {"d": dim, "batches": problem, "optimum": shape, "distance in theory": expected}
        rows.append({**row, "found": distances[-1]})
    print_table(Table("Distance to the optimum of the full batch", rows))
    return distances


def check(folder: Path) -> None:
    """Descend in short; all batches would need long for the cross-polytope."""
    full, every, *subsets, full_polytope, _, disjoint, but_one = optima(steps=200)
    assert max(full, every, full_polytope) < 0.01
    assert min(*subsets, disjoint, but_one) > 0.2


if __name__ == "__main__":
    command_line(optima, check=check)
