"""How far objectives' gradients are from that of the global loss while embeddings move, at several
τ and batch sizes.

    python eval/moving_embeddings.py --drifts [0,0.01,0.05]

Every item of N synthetic pairs turns by ω rad per epoch, in a direction of its own, so that
similarities change as much as they can; batches are random, and each epoch has every pair once.
Runs with seeds of their own follow the same path. Two estimators stand beside the package's
objectives, which need no encodes besides the batch: "both roles" takes what is remembered for what
is, and "corrected" takes it to lower the noise of the batch's own softmax.

bias: distance of the mean gradient of an epoch, over runs, from the exact one, freed of noise (see
estimator_bias.py). epoch error: the same distance for one epoch of one run, noise included.
step error: distance of a step's gradient from what it estimates, relative: the exact gradient of
its anchors, or, for the two that have both roles, the exact gradient into its items.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from estimator_bias import synthetic
from gradient_bias import FrozenPairs, bias_of, epochs
from torch import Tensor
from tqdm import tqdm

from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import DCL, ISIR, ExactGlobal, GlobalCache, NegativeCache, Objective, SogCLR

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "DCL": DCL,
    "SogCLR": lambda **common: SogCLR(gamma=0.5, **common),
    "ISIR": ISIR,
    "NegativeCache": NegativeCache,
    "GlobalCache": GlobalCache,
    "GlobalCache, 2 encodes": lambda **common: GlobalCache(extra_encodes=2.0, **common),
}
BOTH_ROLES = {"both roles": False, "both roles, corrected": True}


class Drift:
    """Unit vectors of M pairs, each on a great circle of its own."""

    def __init__(self, num_pairs: int, dimension: int, drift: float) -> None:
        start = synthetic(num_pairs, dimension)
        self.start = torch.stack([start.left.detach(), start.right.detach()]).double()
        across = torch.randn(
            self.start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        across -= (across * self.start).sum(dim=2, keepdim=True) * self.start
        self.across, self.drift = torch.nn.functional.normalize(across, dim=2), drift

    def at(self, epoch: float) -> FrozenPairs:
        """The pairs as they are then."""
        angle = self.drift * epoch
        left, right = math.cos(angle) * self.start + math.sin(angle) * self.across
        return FrozenPairs.one_to_one(left, right)


def softmax_gradient(left: Tensor, right: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Of the mean log-partition of all anchors, into (n, D) left and (n, D) right; pair i is row i
    of both."""
    logits = (left @ right.T / temperature).fill_diagonal_(-torch.inf)
    weights = (torch.softmax(logits, dim=1) + torch.softmax(logits, dim=0)) / (
        2 * temperature * len(left)
    )
    return weights @ right, weights.T @ left


class BothRoles:
    """Each item of the batch as anchor of all that is remembered, and as candidate of all
    remembered anchors.

    Args:
        corrected: of this only what the batch alone does not know: the softmax within the batch, of
            which what it is on remembered embeddings is taken away (as SAGA does: Defazio, Bach and
            Lacoste-Julien 2014, arXiv:1407.0202).
    """

    def __init__(self, path: Drift, temperature: float, corrected: bool) -> None:
        self.left, self.right = (side.clone() for side in path.start)
        self.temperature, self.corrected = temperature, corrected

    def __call__(self, now: FrozenPairs, rows: Tensor) -> Tensor:
        """(2N, D) gradient of a batch, pairs `rows` (B,), on the left and the right items."""
        left, right, tau = now.left.detach()[rows], now.right.detach()[rows], self.temperature
        remembered = self.left[rows], self.right[rows]
        if not self.corrected:
            self.left[rows], self.right[rows] = left, right
        parts = [
            gradient[rows] * len(self.left) / len(rows)
            for gradient in softmax_gradient(self.left, self.right, tau)
        ]
        if self.corrected:
            fresh, old = softmax_gradient(left, right, tau), softmax_gradient(*remembered, tau)
            parts = [of_all + new - before for of_all, new, before in zip(parts, fresh, old)]
            self.left[rows], self.right[rows] = left, right
        pulls = right / (tau * len(rows)), left / (tau * len(rows))
        gradient = torch.zeros(2, *self.left.shape, dtype=left.dtype)
        for side, part, pull in zip(gradient, parts, pulls):
            side[rows] = part - pull
        return gradient.flatten(0, 1)


def gradient_by(criterion: Objective, now: FrozenPairs, rows: Tensor) -> Tensor:
    """(2N, D) likewise, of an objective."""
    return now.dense(now.step(criterion, rows)[0])


def measure(
    path: Drift, name: str, temperature: float, batch_size: int, warm_up: int, runs: int
) -> dict[str, float | str]:
    """Of the epoch that follows a warm-up, the same for all runs."""
    num_pairs, dimension = path.start.shape[1:]
    exact = torch.zeros(2 * num_pairs, dimension, dtype=torch.float64)
    oracle, has_both_roles = path.at(0).build(ExactGlobal, temperature), name in BOTH_ROLES
    epoch_gradients, step_errors = [], []
    for run in range(runs):
        if has_both_roles:
            gradient_of: Callable[[FrozenPairs, Tensor], Tensor] = BothRoles(
                path, temperature, BOTH_ROLES[name]
            )
        else:
            gradient_of = partial(
                gradient_by, path.at(0).build(OBJECTIVES[name], temperature, seed=run)
            )
        mean = torch.zeros_like(exact)
        for epoch, batches in zip(range(warm_up + 1), epochs(num_pairs, batch_size, seed=run)):
            for step, rows in enumerate(batches):
                now = path.at(epoch + step / len(batches))
                gradient = gradient_of(now, rows)
                if epoch < warm_up:
                    continue
                share = len(rows) / num_pairs
                mean += share * gradient
                if run == 0:
                    exact += share * now.exact(temperature)[0]
                if step % (1 + len(batches) // 8) == 0:
                    if has_both_roles:
                        of_others = (
                            torch.ones(num_pairs, dtype=torch.bool)
                            .index_fill(0, rows, False)
                            .repeat(2)
                        )
                        expected = (
                            now.exact(temperature)[0].masked_fill(of_others[:, None], 0.0) / share
                        )
                    else:
                        expected = gradient_by(oracle, now, rows)
                    step_errors.append(float((gradient - expected).norm() / expected.norm()))
        epoch_gradients.append(mean)
    bias = bias_of(torch.stack(epoch_gradients), exact)
    errors = [float((one - exact).norm() / exact.norm()) for one in epoch_gradients]
    return {
        "bias": f"{bias.value:.3f} ± {bias.error:.3f}",
        "epoch error": statistics.mean(errors),
        "step error": statistics.mean(step_errors),
    }


def main(
    num_pairs: int = 512,
    dimension: int = 16,
    drifts: Sequence[float] = (0.0, 0.01, 0.05),
    temperatures: Sequence[float] = (0.02, 0.07, 0.5),
    batch_sizes: Sequence[int] = (4, 32, 256),
    warm_up: int = 5,
    runs: int = 6,
) -> None:
    """Print one line per drift, τ, batch size and estimator.

    Args:
        num_pairs: N.
        dimension: D of the synthetic embeddings.
        drifts: ω, rad per epoch.
        temperatures: τ.
        batch_sizes: B.
        warm_up: epochs before the one that is measured.
        runs: with seeds of their own, at least three.
    """
    rows = []
    cells = list(product(drifts, temperatures, batch_sizes, [*OBJECTIVES, *BOTH_ROLES]))
    for drift, temperature, batch_size, name in tqdm(cells):
        found = measure(
            Drift(num_pairs, dimension, drift), name, temperature, batch_size, warm_up, runs
        )
        rows.append({"ω": drift, "τ": temperature, "B": batch_size, "objective": name, **found})
    print_table(
        Table(f"N = {num_pairs}, D = {dimension}, the epoch after {warm_up}, {runs} runs", rows)
    )


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
