"""What each objective's gradient estimates, at frozen embeddings: bias, error of a single step, cost and memory.

    python eval/estimator_bias.py --out runs/estimator_bias.png
    python eval/estimator_bias.py --views true --batch_size 32 --embeddings pairs.npy
    python eval/estimator_bias.py --mixing 8

Gradients are taken with respect to the embeddings themselves and compared with the gradient of the global loss
(`dualenc.evaluation.objectives`; `dualenc evaluate objectives` does the same on a model and pairs).

bias: distance of the mean gradient of an epoch from the exact one, relative; freed of the noise that is left after so
many epochs (products of independent stretches of the run), so 0 means: not to be told from unbiased.
±: its standard error.
mean error: the same distance with the noise left in, which more epochs would lower to the bias.
step error: distance of a single step's gradient from the exact gradient of the same anchors, relative.
With --mixing: how the bias of the chains' gradient falls with the epochs, for chains that start on recent items and
for chains that start cold.
value: mean of the reported loss minus the exact loss. encodes: out-of-batch items encoded per step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualenc.evaluation.objectives import (
    ESTIMATORS,
    STRETCHES,
    FrozenPairs,
    Measured,
    bias_of,
    epochs,
    measure_stretches,
)
from dualenc.evaluation.report import Table, print_table
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
    SogCLR,
)

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "DCL": DCL,
    "HCL": HCL,
    "SigLIP": ESTIMATORS["SigLIP"],
    "SogCLR γ=0.9": SogCLR,
    "SogCLR γ=0.1": ESTIMATORS["SogCLR-0.1"],
    "ISogCLR": lambda **common: ISogCLR(gamma=0.1, temperature_rate=0.0, **common),
    "SACLR row": lambda **common: SACLR(form="row", **common),
    "SACLR matrix": lambda **common: SACLR(form="matrix", rho=0.99, **common),
    "GlobalCache": GlobalCache,
    "GlobalCache α=1": lambda **common: GlobalCache(control=1.0, **common),
    "GlobalCache, 2 encodes": lambda **common: GlobalCache(extra_encodes=2.0, **common),
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


def synthetic(num_pairs: int, dimension: int) -> FrozenPairs:
    """Random unit vectors in few dimensions, right near left: some negatives are much nearer than most."""
    draw = torch.Generator().manual_seed(0)
    left = torch.nn.functional.normalize(torch.randn(num_pairs, dimension, generator=draw), dim=1)
    near = left + 0.5 * torch.randn(num_pairs, dimension, generator=draw) / dimension**0.5
    return FrozenPairs.one_to_one(left, torch.nn.functional.normalize(near, dim=1))


def mixing(
    kind: type[EMC2] | type[ISIR],
    frozen: FrozenPairs,
    temperature: float,
    batch_size: int,
    replicas: int,
    looks: Sequence[int] = (1, 3, 10, 30),
    **how: Any,
) -> dict[int, float]:
    """Relative bias of the mean gradient of the epoch that follows so many. Replicas are independent runs."""
    exact, _ = frozen.exact(temperature)
    means = {look: torch.zeros(replicas, *exact.shape) for look in looks}
    for replica in range(replicas):
        criterion = frozen.build(kind, temperature, seed=replica, **how)
        for epoch, order in zip(range(max(looks) + 1), epochs(len(frozen), batch_size, seed=replica)):
            for rows in order:
                gradient, _ = frozen.step(criterion, rows)
                if epoch in means:
                    frozen.add_to(means[epoch][replica], gradient, len(rows) / len(frozen))
    return {look: bias_of(mean, exact).value for look, mean in means.items()}


def mixing_table(frozen: FrozenPairs, replicas: int, kinds: Sequence[type[EMC2] | type[ISIR]] = (ISIR,)) -> Table:
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
    bars.barh(names[::-1], [results[name].step_error for name in names[::-1]], color="tab:gray")
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
        epochs: over which gradients are averaged: eight stretches of equal length.
        warm_up: epochs before that.
        embeddings: real ones instead: a .npy file of shape (2, N, D), left then right, unit norm.
        mixing: show instead how fast chains mix, from so many independent runs, at several τ and B.
        out: a PNG file to draw to.
    """
    frozen = synthetic(num_pairs, dimension)
    if embeddings is not None:
        frozen = FrozenPairs.one_to_one(*(torch.from_numpy(side).float() for side in np.load(embeddings)))
        num_pairs = len(frozen)
    frozen.views = views and not mixing
    if mixing:
        print_table(mixing_table(frozen, mixing))
        return
    _, exact_value = frozen.exact(temperature)
    how: dict[str, Any] = {"warm_up": warm_up, "stretch": max(1, epochs // STRETCHES)}
    results, rows = {}, []
    for name, build in (OBJECTIVES | (VIEWS_ONLY if views else {})).items():
        kind = partial(build, batch_size=batch_size) if "draws" in name else build
        found = results[name] = measure_stretches(frozen, kind, temperature, batch_size, **how)
        rows.append(
            {
                "objective": name,
                "bias": found.bias.value,
                "±": found.bias.error,
                "mean error": found.mean_errors[-1],
                "step error": found.step_error,
                "value": statistics.mean(found.values) - exact_value,
                "ms": 1000 * statistics.median(found.seconds),
                "encodes": found.encodes * batch_size,
                "state, bytes per pair": found.state_bytes / num_pairs,
            }
        )
    what = "views" if views else "pairs"
    averaged = results["ExactGlobal"].epochs
    title = f"N = {num_pairs} {what}, B = {batch_size}, τ = {temperature}, {averaged} epochs; loss {exact_value:.3f}"
    print_table(Table(title, rows))
    if out is not None:
        draw(results, out, title)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
