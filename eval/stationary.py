"""How near to a stationary point of the exact global loss does plain SGD come? (Yau et al. 2024,
Figure 7)

    python eval/stationary.py run CIFAR10 --steps 200000 --seeds 3
    python eval/stationary.py report --figure docs/figures/stationary.svg

The paper's set is 500 images with two stored augmentations, at b = 4 (arXiv:2404.10575, §4.5). The
network here is so small that 200,000 steps take minutes, and that it cannot tell all images apart:
principal components of the pixels, one hidden layer, 32 numbers. The rate falls to zero along a
cosine, so that what is left of the gradient is bias and not noise. It is chosen for each objective
from --rates, by the exact loss after --tune_steps, past any edge.

CIFAR10 is a folder with train.parquet and test.parquet. One line per run is added to --results, and
a run that is there already is not made again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from claims import scaled, views_of
from comparison_table import Runs, Settings, in_processes
from convergence import exact_gradient
from estimators import FrozenPairs
from quality import open_parts
from torch import Tensor, nn

from dualenc.batching import RandomBatches
from dualenc.encoders.dual import unit_norm
from dualenc.evaluation import plots
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import (
    DCL,
    EMC2,
    ISIR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    NegativeCache,
    Objective,
    SogCLR,
)
from dualenc.types import Inputs, Side

RESULTS = Path("eval/results/stationary.jsonl")
IMAGES = 500
COMPONENTS, HIDDEN, DIM = 64, 64, 32
POINTS = 24
"""At which the exact loss is measured, evenly in log steps."""
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "SimCLR": InfoNCE,
    "DCL": DCL,
    "SogCLR": partial(SogCLR, gamma=0.9),
    "NegativeCache": partial(NegativeCache, refresh=0.1),
    "EMC2": EMC2,
    "ISIR": ISIR,
    "GlobalCache": GlobalCache,
    "ExactGlobal": ExactGlobal,
}
BEYOND_EDGE = 4
"""How often the rate is moved beyond the edge of what was to be tried."""


class Network(nn.Module):
    """Components (n, 64) of images to unit vectors (n, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(COMPONENTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)
        )

    def forward(self, components: Tensor) -> Tensor:
        return unit_norm(self.layers(components))


@cache
def stored_views(folder: Path) -> Tensor:
    """(500, 2, 64) principal components of two augmentations of each image, of variance one
    together."""
    images, _, _ = open_parts(str(folder), IMAGES, 1)
    pixels = scaled(views_of([images[row].left.copy() for row in range(IMAGES)], [(0, 1)] * IMAGES))
    rows = pixels.flatten(2).flatten(0, 1).double()
    centred = rows - rows.mean(dim=0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :COMPONENTS]
    components = centred @ directions
    return (components / components.std()).float().unflatten(0, (IMAGES, 2))


def train(settings: Settings, folder: Path) -> tuple[Settings, dict[str, Any]]:
    """Plain SGD on the stored views; the exact loss and its squared gradient on the way."""
    torch.set_num_threads(1)
    views, steps, seed, temperature = (
        stored_views(folder),
        settings["steps"],
        settings["seed"],
        settings["temperature"],
    )
    torch.manual_seed(seed)
    network = Network()
    objective = OBJECTIVES[settings["objective"]](
        num_left=IMAGES, temperature=temperature, views=True, seed=seed
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=settings["rate"])
    batches = RandomBatches(IMAGES, settings["batch_size"], seed=seed)
    sides: dict[Side, Tensor] = {"left": views[:, 0], "right": views[:, 1]}
    chunks: dict[Side, list[Inputs]] = {side: [{"image": items}] for side, items in sides.items()}
    measured_at = {int(step) for step in np.geomspace(min(100, steps), steps, POINTS)}

    def encode(side: Side, rows: Tensor) -> Tensor:
        return network(sides[side][rows])

    def measure(step: int) -> tuple[int, float, float]:
        pairs = partial(FrozenPairs.one_to_one, views=True)
        point = exact_gradient(
            network, lambda _, inputs: network(inputs["image"]), chunks, pairs, temperature
        )
        return step, point.loss, point.squared_gradient_norm

    curve = [measure(0)]
    begun = time.process_time()
    for step in range(steps):
        epoch, position = divmod(step, batches.num_batches)
        if position == 0:
            order = torch.from_numpy(batches.select(epoch))
        rows = order[position]
        for group in optimizer.param_groups:
            group["lr"] = settings["rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        left, right = network(views[rows].transpose(0, 1).flatten(0, 1)).chunk(2)
        loss = objective(left, right, rows, encode=encode).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 in measured_at:
            curve.append(measure(step + 1))
    _, value, squared = curve[-1]
    seconds = round(time.process_time() - begun, 1)
    return settings, {
        "loss": value,
        "squared_gradient": squared,
        "curve": curve,
        "seconds": seconds,
    }


def run(
    folder: Path,
    objectives: Sequence[str] = tuple(OBJECTIVES),
    steps: int = 200_000,
    batch_size: int = 4,
    temperature: float = 0.2,
    rates: Sequence[float] = (0.1, 0.3),
    tune_steps: int = 20_000,
    seeds: int = 3,
    processes: int = 1,
    results: Path = RESULTS,
) -> None:
    """Choose the rate of each objective, and train with all seeds.

    Args:
        folder: with train.parquet and test.parquet.
        objectives: names of `OBJECTIVES`.
        steps: of each run.
        batch_size: images in a step, b.
        temperature: τ.
        rates: to choose from.
        tune_steps: of a run that is to choose a rate, with the first seed.
        seeds: how many.
        processes: trainings at once.
        results: where finished runs are kept.
    """
    compute = in_processes(partial(train, folder=folder), processes)
    stored_views(folder)  # processes inherit them
    runs = Runs(results)
    common = {"batch_size": batch_size, "temperature": temperature}
    for name in objectives:
        tuning = {"objective": name, "steps": tune_steps, "seed": 0, **common}
        tried = sorted(rates)
        for _ in range(1 + BEYOND_EDGE):
            found = runs.get([{**tuning, "rate": rate} for rate in tried], compute)
            best = min(zip(tried, found, strict=True), key=lambda pair: pair[1]["loss"])[0]
            if best == tried[-1]:
                tried.append(round(3 * best, 3))
            elif best == tried[0]:
                tried.insert(0, round(best / 3, 3))
            else:
                break
        wanted = [{**tuning, "steps": steps, "seed": seed, "rate": best} for seed in range(seeds)]
        ends = runs.get(wanted, compute)
        found = [(round(one["loss"], 4), one["squared_gradient"]) for one in ends]
        print(f"{name}, rate {best}: {found}", flush=True)


def report(results: Path = RESULTS, figure: Path | None = None) -> None:
    """Print where each objective ends, and draw the squared gradients on the way.

    Args:
        results: finished runs.
        figure: svg to write.
    """
    runs = list(Runs(results).found.values())
    longest = max(one["settings"]["steps"] for one in runs)
    rows, curves = [], {}
    for name in OBJECTIVES:
        final = [
            one
            for one in runs
            if one["settings"]["objective"] == name and one["settings"]["steps"] == longest
        ]
        by_rate: dict[float, list[Any]] = {}
        for one in final:
            by_rate.setdefault(one["settings"]["rate"], []).append(one)
        # Of trial runs that were as long, the rate that was chosen has all seeds.
        own = max(by_rate.values(), key=len, default=[])
        if not own:
            continue
        losses, squared = ([one[key] for one in own] for key in ("loss", "squared_gradient"))
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        row = {
            "objective": name,
            "rate": own[0]["settings"]["rate"],
            "exact loss": statistics.mean(losses),
            "±": spread,
        }
        row |= {"squared gradients": " ".join(f"{one:.1e}" for one in sorted(squared))}
        rows.append(
            row
            | {"seeds": len(own), "seconds": round(statistics.mean(one["seconds"] for one in own))}
        )
        points = np.array([one["curve"][1:] for one in own])  # (seeds, points, 3)
        curves[name] = (
            points[0, :, 0].tolist(),
            np.exp(np.log(points[:, :, 2]).mean(axis=0)).tolist(),
        )
    print_table(Table(f"500 images with two stored views, {longest:,} steps of plain SGD", rows))
    if figure is not None:
        drawn = plots.lines(curves, xlabel="steps", ylabel="squared gradient of the exact loss")
        drawn.axes[0].set(xscale="log", yscale="log")
        figure.write_text(plots.as_svg(drawn), encoding="utf-8")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, report])
