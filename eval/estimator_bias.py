"""What each objective's gradient estimates, at frozen embeddings: bias, error of a single step, cost and memory.

    python eval/estimator_bias.py --out runs/estimator_bias.png
    python eval/estimator_bias.py --views true --batch_size 32 --embeddings pairs.npy
    python eval/estimator_bias.py --mixing 8

Gradients are taken with respect to the embeddings themselves and compared with the gradient of the global loss.

bias: distance of the mean gradient of an epoch from the exact one, relative; freed of the noise that is left after so
many epochs (products of independent stretches of the run), so 0 means: not to be told from unbiased.
mean error: the same distance with the noise left in, which more epochs would lower to the bias.
step error: distance of a single step's gradient from the exact gradient of the same anchors, relative.
With --mixing: how the bias of the chains' gradient falls with the epochs, for chains that start on recent items and
for chains that start cold.
value: mean of the reported loss minus the exact loss. encodes: out-of-batch items encoded per step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualenc.evaluation.report import Table, print_table
from dualenc.objectives import (
    DCL,
    EMC2,
    HCL,
    ISIR,
    SACLR,
    ExactGlobal,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SigLIP,
    SogCLR,
)

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "DCL": DCL,
    "HCL": HCL,
    "SigLIP": lambda **common: SigLIP(**common | {"learnable_temperature": False}),
    "SogCLR γ=0.9": SogCLR,
    "SogCLR γ=0.1": lambda **common: SogCLR(gamma=0.1, **common),
    "ISogCLR": lambda **common: ISogCLR(gamma=0.1, temperature_rate=0.0, **common),
    "SACLR row": lambda **common: SACLR(form="row", **common),
    "SACLR matrix": lambda **common: SACLR(form="matrix", rho=0.99, **common),
    "NegativeCache": NegativeCache,
    "EMC2 stored": EMC2,
    "EMC2 fresh": lambda **common: EMC2(score="fresh", **common),
    "EMC2 fresh draws": lambda batch_size, **common: EMC2(score="fresh", proposals=batch_size, **common),
    "ISIR": ISIR,
    "ISIR draws": lambda batch_size, **common: ISIR(proposals=batch_size, **common),
    "ExactGlobal": ExactGlobal,
}
VIEWS_ONLY: dict[str, Callable[..., Objective]] = {
    "ISIR shared chain": lambda **common: ISIR(shared_chain=True, **common),
    "EMC2 shared chain": lambda **common: EMC2(shared_chain=True, **common),
}
STRETCHES = 8


@dataclass
class Frozen:
    """N pairs of embeddings (N, D) that stay as they are; counts the out-of-batch items that are encoded."""

    left: Tensor
    right: Tensor
    num_encoded: int = 0

    def encode(self, side: str, ids: Tensor) -> Tensor:
        self.num_encoded += len(ids)
        return (self.left if side == "left" else self.right)[ids]

    def step(self, criterion: Objective, ids: Tensor) -> tuple[Tensor, float]:
        """(2N, D) gradient with respect to all embeddings, and the loss."""
        loss = criterion(self.left[ids], self.right[ids], ids, encode=self.encode).loss
        return torch.cat(torch.autograd.grad(loss, [self.left, self.right])), float(loss.detach())


@dataclass
class Measured:
    """What a run of one objective shows."""

    stretches: list[Tensor]
    step_errors: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    mean_errors: list[float] = field(default_factory=list)
    encodes: float = 0.0
    state_bytes: int = 0


def synthetic(num_pairs: int, dimension: int) -> Frozen:
    """Random unit vectors in few dimensions, right near left: some negatives are much nearer than most."""
    draw = torch.Generator().manual_seed(0)
    left = torch.nn.functional.normalize(torch.randn(num_pairs, dimension, generator=draw), dim=1)
    near = left + 0.5 * torch.randn(num_pairs, dimension, generator=draw) / dimension**0.5
    return Frozen(left.requires_grad_(), torch.nn.functional.normalize(near, dim=1).requires_grad_())


def epochs(num_pairs: int, batch_size: int, count: int, seed: int = 0) -> Iterator[list[Tensor]]:
    """For each epoch a random order of all pairs, cut into batches."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield list(torch.randperm(num_pairs, generator=draw).split(batch_size))


def measure(
    frozen: Frozen, criterion: Objective, oracle: Objective, batch_size: int, warm_up: int, count: int
) -> Measured:
    """Run an objective for some epochs and compare with the oracle."""
    num_pairs = len(frozen.left)
    exact, _ = frozen.step(oracle, torch.arange(num_pairs))
    found = Measured([torch.zeros_like(exact) for _ in range(STRETCHES)])
    total, num_encoded = torch.zeros_like(exact), 0
    for epoch, order in enumerate(epochs(num_pairs, batch_size, warm_up + count)):
        for ids in order:
            frozen.num_encoded, start = 0, time.perf_counter()
            gradient, value = frozen.step(criterion, ids)
            if epoch < warm_up:
                continue
            found.seconds.append(time.perf_counter() - start)
            found.values.append(value)
            num_encoded += frozen.num_encoded
            total += gradient * len(ids) / num_pairs
            found.stretches[(epoch - warm_up) * STRETCHES // count] += gradient * len(ids) / num_pairs
            if (epoch - warm_up) % max(1, count // STRETCHES) == 0:
                own, _ = frozen.step(oracle, ids)
                found.step_errors.append(float((gradient - own).norm() / own.norm()))
        if epoch >= warm_up:
            found.mean_errors.append(float((total / (epoch - warm_up + 1) - exact).norm() / exact.norm()))
    found.stretches = [stretch * STRETCHES / count - exact for stretch in found.stretches]
    found.encodes = num_encoded / len(found.values)
    found.state_bytes = sum(buffer.numel() * buffer.element_size() for buffer in criterion.buffers())
    return found


def relative_bias(products: Iterable[tuple[Tensor, Tensor]], exact: Tensor) -> float:
    """Relative norm of the bias: the mean product of independent deviations has no noise in it."""
    return max(0.0, statistics.mean(float((a * b).sum()) for a, b in products)) ** 0.5 / float(exact.norm())


def mixing(
    kind: type[EMC2] | type[ISIR],
    frozen: Frozen,
    temperature: float,
    batch_size: int,
    replicas: int,
    looks: Sequence[int] = (1, 3, 10, 30),
    **how: Any,
) -> dict[int, float]:
    """Relative bias of the mean gradient of the epoch that follows so many. Replicas are independent runs."""
    num_pairs = len(frozen.left)
    common = {"num_left": num_pairs, "temperature": temperature}
    exact, _ = frozen.step(ExactGlobal(**common), torch.arange(num_pairs))
    deviations: dict[int, list[Tensor]] = {look: [] for look in looks}
    for replica in range(replicas):
        criterion = kind(seed=replica, **common, **how)
        for epoch, order in enumerate(epochs(num_pairs, batch_size, max(looks) + 1, seed=replica)):
            mean = sum(frozen.step(criterion, ids)[0] * len(ids) / num_pairs for ids in order)
            if epoch in deviations:
                deviations[epoch].append(mean - exact)
    return {look: relative_bias(combinations(several, 2), exact) for look, several in deviations.items()}


def mixing_table(frozen: Frozen, replicas: int, kinds: Sequence[type[EMC2] | type[ISIR]] = (ISIR,)) -> Table:
    """A row per objective, τ, B and start."""
    rows = []
    for kind, temperature, batch_size in product(kinds, (0.02, 0.05, 0.07), (4, 16, 32)):
        for start, recent in (("recent items", 4096), ("cold", 0)):
            found = mixing(kind, frozen, temperature, batch_size, replicas, recent=recent)
            named = {f"bias after {look}": bias for look, bias in found.items()}
            rows.append({"objective": kind.__name__, "τ": temperature, "B": batch_size, "start": start, **named})
    return Table(f"N = {len(frozen.left)}; bias of the epoch after so many, {replicas} runs", rows)


def draw(results: dict[str, Measured], out: Path, title: str) -> None:
    """Error of the mean gradient as epochs add up, and error of a single step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    names = [name for name in results if name != "ExactGlobal"]
    for color, name in zip(colors, names):
        errors = results[name].mean_errors
        curves.loglog(range(1, len(errors) + 1), errors, color=color, label=name)
    curves.set(xlabel="epochs averaged", ylabel="error of the mean gradient, relative", title=title)
    curves.legend(fontsize=8, ncols=2)
    bars.barh(names[::-1], [statistics.mean(results[name].step_errors) for name in names[::-1]], color="tab:gray")
    bars.set(xlabel="error of a single step, relative to the exact gradient of its anchors")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def main(
    num_pairs: int = 200,
    batch_size: int = 40,
    dimension: int = 5,
    temperature: float = 0.07,
    views: bool = False,
    epochs: int = 400,
    warm_up: int = 40,
    embeddings: Path | None = None,
    mixing: int = 0,
    out: Path | None = None,
) -> None:
    """Print one line per objective.

    Args:
        num_pairs: N of the synthetic embeddings, the size of the corpus.
        batch_size: B, and the number of draws where proposals are drawn.
        dimension: of the synthetic embeddings.
        temperature: τ.
        views: the pairs are two views of an image.
        epochs: over which gradients are averaged.
        warm_up: epochs before that.
        embeddings: real ones instead: a .npy file of shape (2, N, D), left then right, unit norm.
        mixing: show instead how fast chains mix, from so many independent runs, at several τ and B.
        out: a PNG file to draw to.
    """
    frozen = synthetic(num_pairs, dimension)
    if embeddings is not None:
        left, right = (torch.from_numpy(side).float().requires_grad_() for side in np.load(embeddings))
        frozen = Frozen(left, right)
        num_pairs = len(frozen.left)
    if mixing:
        print_table(mixing_table(frozen, mixing))
        return
    common: dict[str, Any] = {"num_left": num_pairs, "temperature": temperature, "views": views}
    oracle = ExactGlobal(**common)
    exact, exact_value = frozen.step(oracle, torch.arange(num_pairs))
    results, rows = {}, []
    for name, build in (OBJECTIVES | (VIEWS_ONLY if views else {})).items():
        given = common | ({"batch_size": batch_size} if "draws" in name else {})
        found = results[name] = measure(frozen, build(**given), oracle, batch_size, warm_up, epochs)
        # Stretches that do not touch are independent.
        apart = [(a, b) for i, a in enumerate(found.stretches) for b in found.stretches[i + 2 :]]
        rows.append(
            {
                "objective": name,
                "bias": relative_bias(apart, exact),
                "mean error": found.mean_errors[-1],
                "step error": statistics.mean(found.step_errors),
                "value": statistics.mean(found.values) - exact_value,
                "ms": 1000 * statistics.median(found.seconds),
                "encodes": found.encodes,
                "state, bytes per pair": found.state_bytes / num_pairs,
            }
        )
    what = "views" if views else "pairs"
    title = f"N = {num_pairs} {what}, B = {batch_size}, τ = {temperature}, {epochs} epochs; loss {exact_value:.3f}"
    print_table(Table(title, rows))
    if out is not None:
        draw(results, out, title)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
