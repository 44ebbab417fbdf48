"""What each objective's gradient estimates, at frozen embeddings: bias, error of a single step,
cost and memory.

    python eval/estimator_bias.py --out runs/estimator_bias.png
    python eval/estimator_bias.py --views true --batch_size 32 --embeddings pairs.npy
    python eval/estimator_bias.py --mixing 8
    python eval/estimator_bias.py --pool 3 --num_pairs 1000

Gradients are taken with respect to the embeddings themselves and compared with the gradient of the
global loss (`gradient_bias.py`).

bias: distance of the mean gradient of an epoch from the exact one, relative; freed of the noise
that is left after so many epochs (products of independent stretches of the run), so 0 means: not to
be told from unbiased. ±: its standard error.
mean error: the same distance with the noise left in, which more epochs would lower to the bias.
step error: distance of a single step's gradient from the exact gradient of the same anchors,
relative. With --mixing: how the bias of the chains' gradient falls with the epochs, for chains that
start on recent items and for chains that start cold.
With --pool: GlobalCache that looks at 6 % of what is remembered per step, by epochs.
value: mean of the reported loss minus the exact loss. encodes: out-of-batch items encoded per step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gradient_bias import Bias, FrozenPairs, bias_of, epochs

from dualenc.evaluation.report_page import Table, print_table
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
    "GlobalCache": GlobalCache,
    "GlobalCache, 2 encodes": lambda **common: GlobalCache(extra_encodes=2.0, **common),
    "NegativeCache": NegativeCache,
    "EMC2": EMC2,
    "EMC2 draws": lambda batch_size, **common: EMC2(proposals=batch_size, **common),
    "ISIR": ISIR,
    "ISIR draws": lambda batch_size, **common: ISIR(proposals=batch_size, **common),
    "ExactGlobal": ExactGlobal,
}
STRETCHES = 8


class Found(NamedTuple):
    """What one long run of an objective shows.

    Attributes:
        bias: of the mean gradient of an epoch, relative to the exact gradient.
        step_errors: relative distance of a step's gradient from the exact gradient of the same
            anchors, for a sample.
        encodes: items requested by id per pair.
        state_bytes: size of the objective's tables.
        mean_errors: of the running mean gradient after each epoch.
        values, seconds: reported loss and time of each step.
    """

    bias: Bias
    step_errors: list[float]
    encodes: float
    state_bytes: int
    mean_errors: list[float]
    values: list[float]
    seconds: list[float]


def measure_stretches(
    frozen: FrozenPairs,
    kind: Callable[..., Objective],
    temperature: float,
    batch_size: int,
    *,
    warm_up: int,
    stretch: int,
    seed: int = 0,
) -> Found:
    """Measure an objective in one long run, whose stretches are independent unless they are
    neighbours.

    Args:
        frozen, kind, temperature, batch_size: the pairs, the objective as `frozen.build` takes it,
            τ and B.
        warm_up: epochs before anything counts, in which averages and chains settle.
        stretch: epochs of each of eight stretches.
        seed: of the order of the pairs and of the objective's draws.
    """
    oracle = frozen.build(ExactGlobal, temperature)
    criterion = frozen.build(kind, temperature, seed=seed)
    exact, _ = frozen.exact(temperature)
    order = epochs(len(frozen), batch_size, seed)
    for _ in range(warm_up):
        for rows in next(order):
            frozen.step(criterion, rows)
    sums = torch.zeros(STRETCHES, *exact.shape).to(exact)
    step_errors, mean_errors, values, seconds, num_encoded = [], [], [], [], 0
    for number, total in enumerate(sums, start=1):
        for epoch in range(stretch):
            for rows in next(order):
                start = time.perf_counter()
                gradient, value = frozen.step(criterion, rows)
                seconds.append(time.perf_counter() - start)
                values.append(value)
                num_encoded += frozen.num_encoded
                frozen.add_to(total, gradient, len(rows) / len(frozen))
                # Comparing every step would double the cost: only the first epoch of each stretch
                # is compared.
                if epoch == 0:
                    expected = frozen.dense(frozen.step(oracle, rows)[0])
                    step_errors.append(
                        float((frozen.dense(gradient) - expected).norm() / expected.norm())
                    )
            error = (sums.sum(dim=0) / ((number - 1) * stretch + epoch + 1) - exact).norm()
            mean_errors.append(float(error / exact.norm()))
    encodes = num_encoded / (STRETCHES * stretch * len(frozen))
    bias = bias_of(sums / stretch, exact, gap=1)
    return Found(bias, step_errors, encodes, state_bytes(criterion), mean_errors, values, seconds)


def state_bytes(criterion: Objective) -> int:
    """Size of an objective's tables."""
    # Counts of pairs belong to the data, not to the objective's memory.
    tables = dict(criterion.named_buffers()).items()
    return sum(table.nbytes for name, table in tables if not name.endswith("pair_counts"))


def synthetic(num_pairs: int, dimension: int) -> FrozenPairs:
    """Random unit vectors in few dimensions, right near left: some negatives are much nearer than
    most."""
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
    """Relative bias of the mean gradient of the epoch that follows so many. Replicas are
    independent runs."""
    exact, _ = frozen.exact(temperature)
    means = {look: torch.zeros(replicas, *exact.shape) for look in looks}
    for replica in range(replicas):
        criterion = frozen.build(kind, temperature, seed=replica, **how)
        for epoch, order in zip(
            range(max(looks) + 1), epochs(len(frozen), batch_size, seed=replica)
        ):
            for rows in order:
                gradient, _ = frozen.step(criterion, rows)
                if epoch in means:
                    frozen.add_to(means[epoch][replica], gradient, len(rows) / len(frozen))
    return {look: bias_of(mean, exact).value for look, mean in means.items()}


def mixing_table(
    frozen: FrozenPairs, replicas: int, kinds: Sequence[type[EMC2] | type[ISIR]] = (ISIR,)
) -> Table:
    """A row per objective, τ, B and start."""
    rows = []
    for kind, temperature, batch_size in product(kinds, (0.02, 0.05, 0.07), (4, 16, 32)):
        for start, recent in (("recent items", 4096), ("cold", 0)):
            found = mixing(kind, frozen, temperature, batch_size, replicas, recent=recent)
            named = {f"bias after {look}": bias for look, bias in found.items()}
            rows.append(
                {
                    "objective": kind.__name__,
                    "τ": temperature,
                    "B": batch_size,
                    "start": start,
                    **named,
                }
            )
    return Table(f"N = {len(frozen.left)}; bias of the epoch after so many, {replicas} runs", rows)


def clustered(num_pairs: int, dimension: int = 32, of_a_cluster: int = 20) -> FrozenPairs:
    """Pairs in clusters, one after the other: of each anchor a few negatives weigh most."""
    draw, normalize = (
        torch.Generator().manual_seed(0),
        partial(torch.nn.functional.normalize, dim=1),
    )
    centres = normalize(torch.randn(num_pairs // of_a_cluster, dimension, generator=draw))

    def near(vectors: torch.Tensor, distance: float) -> torch.Tensor:
        noise = torch.randn(vectors.shape, generator=draw) / dimension**0.5
        return normalize(vectors + distance * noise)

    left = near(centres.repeat_interleave(of_a_cluster, 0), 0.5)
    right = near(left, 0.4)
    # Blocks of a cache hold neighbouring ids, so that clusters must not.
    order = torch.randperm(len(left), generator=draw)
    return FrozenPairs.one_to_one(left[order], right[order])


def pool_table(
    frozen: FrozenPairs, replicas: int, looks: Sequence[int] = (2, 5, 20), batch_size: int = 16
) -> Table:
    """A row per τ and number of encodes: bias and error of the value in an epoch, with a pool of
    1/16 of the items."""
    rows, pool = [], max(64, len(frozen) // 16)
    for temperature, encodes in product((0.02, 0.07), (1.0, 2.0, 4.0)):
        (exact, value), kind = (
            frozen.exact(temperature),
            partial(GlobalCache, extra_encodes=encodes, pool=pool),
        )
        means = {look: torch.zeros(replicas, *exact.shape) for look in looks}
        values: dict[int, list[float]] = {look: [] for look in looks}
        for replica in range(replicas):
            criterion = frozen.build(kind, temperature, seed=replica)
            for epoch, order in zip(
                range(1, max(looks) + 1), epochs(len(frozen), batch_size, seed=replica)
            ):
                for rows_of_batch in order:
                    gradient, found = frozen.step(criterion, rows_of_batch)
                    if epoch in means:
                        frozen.add_to(
                            means[epoch][replica], gradient, len(rows_of_batch) / len(frozen)
                        )
                        values[epoch].append(found)
        row: dict[str, Any] = {"τ": temperature, "encodes": encodes}
        for look in looks:
            row[f"bias, epoch {look}"] = bias_of(means[look], exact).value
            row[f"value, epoch {look}"] = statistics.mean(values[look]) - value
        rows.append(row)
    return Table(f"N = {len(frozen)}, pool = {pool}, B = {batch_size}, {replicas} runs", rows)


def draw(results: dict[str, Found], out: Path, title: str) -> None:
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
    bars.barh(
        names[::-1],
        [statistics.mean(results[name].step_errors) for name in names[::-1]],
        color="tab:gray",
    )
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
    pool: int = 0,
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
        pool: show instead what GlobalCache gives with a pool, by epochs, from so many independent
            runs.
        out: a PNG file to draw to.
    """
    if pool:
        print_table(pool_table(clustered(num_pairs), pool))
        return
    frozen = synthetic(num_pairs, dimension)
    if embeddings is not None:
        frozen = FrozenPairs.one_to_one(
            *(torch.from_numpy(side).float() for side in np.load(embeddings))
        )
        num_pairs = len(frozen)
    frozen.views = views and not mixing
    if mixing:
        print_table(mixing_table(frozen, mixing))
        return
    _, exact_value = frozen.exact(temperature)
    how: dict[str, Any] = {"warm_up": warm_up, "stretch": max(1, epochs // STRETCHES)}
    results, rows = {}, []
    for name, build in OBJECTIVES.items():
        kind = partial(build, batch_size=batch_size) if "draws" in name else build
        found = results[name] = measure_stretches(frozen, kind, temperature, batch_size, **how)
        rows.append(
            {
                "objective": name,
                "bias": found.bias.value,
                "±": found.bias.error,
                "mean error": found.mean_errors[-1],
                "step error": statistics.mean(found.step_errors),
                "value": statistics.mean(found.values) - exact_value,
                "ms": 1000 * statistics.median(found.seconds),
                "encodes": found.encodes * batch_size,
                "state, bytes per pair": found.state_bytes / num_pairs,
            }
        )
    what = "views" if views else "pairs"
    averaged = STRETCHES * how["stretch"]
    title = (
        f"N = {num_pairs} {what}, B = {batch_size}, τ = {temperature}, {averaged} epochs; "
        f"loss {exact_value:.3f}"
    )
    print_table(Table(title, rows))
    if out is not None:
        draw(results, out, title)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
