"""How near to a stationary point of the exact global loss does plain SGD come?

    python eval/claims/stationary.py run CIFAR10 --seeds 3
    python eval/claims/stationary.py report --figure docs/figures/stationary.svg
    python eval/claims/stationary.py checkpoints runs/mine PAIRS --pairs 500 --temperature 0.07

The set is that of Yau et al. 2024 (arXiv:2404.10575, §4.5 and Figure 7): 500 images with two stored
augmentations, at b = 4. The network is so small that 200,000 steps take minutes, and that it cannot
tell all images apart: principal components of the pixels, one hidden layer, 32 numbers. The rate
falls to zero along a cosine, so that what is left of the gradient is bias and not noise. It is
chosen for each objective by the exact loss after --tune_steps, past any edge.

`checkpoints` measures a run of `dualenc train` on pairs that share no item, or on images, of which
two of SimCLR's augmentations are a pair.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import gmean
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualenc.batching import RandomBatches
from dualenc.data import ImageViews, TableViews, open_corpus, open_pairs
from dualenc.data.views import SimCLR
from dualenc.encoders import ImageEncoder, load_model
from dualenc.encoders.dual import SIDES, unit_norm
from dualenc.evaluation import plots
from dualenc.evaluation.corrupted import SimCLRPrepare
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import EMC2, ISIR, InfoNCE, NegativeCache, Objective, SogCLR
from dualenc.training import Trainer
from dualenc.training.checkpoint import Checkpoints
from dualenc.training.loader import augmentation_seeds
from dualenc.types import Inputs, Side
from dualenc.workflows.labeled_images import random_rows

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from estimators import FrozenPairs
from frame import RESULTS, Outcome, Settings, Store, choose, command_line, most_seeds, repeat
from tasks import open_parts

FOUND = RESULTS / "stationary.jsonl"
COMPONENTS = 64
POINTS = 24
"""Steps at which the exact loss is measured, evenly spaced in log steps."""
CHUNK = 64
"""Items that `checkpoints` encodes at once."""
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "SimCLR": InfoNCE,
    "SogCLR": SogCLR,
    "NegativeCache": partial(NegativeCache, refresh=0.1),
    "EMC2": EMC2,
    "ISIR": ISIR,
}


def exact_gradient(
    model: nn.Module,
    encode: Callable[[Side, Any], Tensor],
    chunks: Mapping[Side, Sequence[Any]],
    temperature: float,
    views: bool = False,
) -> tuple[float, float]:
    """Return the exact loss L(θ), and ‖∇L(θ)‖² with respect to trainable weights.

    L(θ) is the mean of −s(x, y)/τ + log Σ_z exp(s(x, z)/τ) over all anchors x, z being their
    negatives. To save memory, each chunk is encoded again in the backward pass.
    """
    left, right = (
        torch.cat([checkpoint(encode, side, own, use_reentrant=False) for own in chunks[side]])
        for side in SIDES
    )
    on_embeddings, loss = FrozenPairs(left.double(), right.double(), views).exact(temperature)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    both = torch.cat([left, right])
    gradients = torch.autograd.grad(both, weights, on_embeddings.to(both), allow_unused=True)
    return loss, sum(float(own.double().square().sum()) for own in gradients if own is not None)


@cache
def stored_views(folder: Path, images: int) -> Tensor:
    """Return two augmentations of each image, as principal components (M, 2, 64)."""
    train, _, _ = open_parts(str(folder), images, 1)
    augment = SimCLR(16, min_area=0.2)
    views = [augment(train[row].left, seed) for row in range(images) for seed in (0, 1)]
    # In steps of a byte, from −1 to 1.
    rows = torch.stack(views).mul(255).round().div(127.5).sub(1).flatten(1).double()
    centered = rows - rows.mean(dim=0)
    directions = torch.linalg.eigh(centered.T @ centered).eigenvectors.flip(1)[:, :COMPONENTS]
    components = centered @ directions
    return (components / components.std()).float().unflatten(0, (images, 2))


def descend(settings: Settings, folder: Path) -> Outcome:
    """Train on the stored views by plain SGD, and measure the exact loss on the way."""
    images, steps, seed = settings["images"], settings["steps"], settings["seed"]
    views = stored_views(folder, images)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(COMPONENTS, 64), nn.GELU(), nn.Linear(64, 32))
    shared = {"num_left": images, "temperature": settings["temperature"], "views": True}
    objective = OBJECTIVES[settings["objective"]](seed=seed, **shared)
    optimizer = torch.optim.SGD(network.parameters(), lr=settings["rate"])
    batches = RandomBatches(images, settings["batch_size"], seed=seed)
    sides: dict[Side, Tensor] = {"left": views[:, 0], "right": views[:, 1]}
    chunks = {side: [torch.arange(images)] for side in SIDES}
    measured_at = {int(step) for step in np.geomspace(min(100, steps), steps, POINTS)}

    def encode(side: Side, rows: Tensor) -> Tensor:
        return unit_norm(network(sides[side][rows]))

    def measure(step: int) -> tuple[int, float, float]:
        return step, *exact_gradient(network, encode, chunks, settings["temperature"], views=True)

    curve = [measure(0)]
    begun = time.process_time()
    for step in range(steps):
        epoch, position = divmod(step, batches.num_batches)
        if position == 0:
            order = torch.from_numpy(batches.select(epoch))
        rows = order[position]
        for group in optimizer.param_groups:
            group["lr"] = settings["rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        left, right = unit_norm(network(views[rows].transpose(0, 1).flatten(0, 1))).chunk(2)
        loss = objective(left, right, rows, encode=encode).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 in measured_at:
            curve.append(measure(step + 1))
    seconds = round(time.process_time() - begun, 1)
    _, value, squared = curve[-1]
    return {"loss": value, "squared_gradient": squared, "curve": curve, "seconds": seconds}


def run(
    folder: Path,
    images: int = 500,
    steps: int = 200_000,
    rates: Sequence[float] = (0.1, 0.3),
    tune_steps: int = 20_000,
    seeds: int = 3,
    results: Path = FOUND,
) -> None:
    """Choose the rate of each objective, and train with all seeds.

    Args:
        folder: folder with train.parquet and test.parquet.
        images: size M of the set.
        steps: steps of each run.
        rates: learning rates to choose from; a single one is taken as it is.
        tune_steps: steps of a run that is to choose a rate, with the first seed.
        seeds: number of seeds.
        results: file of finished runs.
    """
    store, once = Store(results), partial(descend, folder=folder)
    common = {"network": "components", "images": images, "batch_size": 4, "temperature": 0.2}
    trials = {name: {**common, "steps": tune_steps, "objective": name} for name in OBJECTIVES}
    lowest = {"quality": lambda found: -found["loss"], "beyond_edge": 4}
    chosen = choose(store, once, trials, {"rate": rates}, **lowest)
    wanted = {name: {**own, "steps": steps, **chosen[name]} for name, own in trials.items()}
    repeat(store, once, wanted, seeds)
    report(results, images)


def report(results: Path = FOUND, images: int = 500, figure: Path | None = None) -> None:
    """Print where each objective ends, and draw its curve.

    Args:
        results: file of finished runs.
        images: size M of the set.
        figure: svg file to write.
    """
    store, own_set = Store(results), {"network": "components", "images": images}
    longest = max(each.settings["steps"] for each in store.where(**own_set))
    rows, curves = [], {}
    for name in OBJECTIVES:
        runs = store.where(**own_set, objective=name, steps=longest)
        if not runs:
            continue
        runs = most_seeds(runs)
        own = [each.outcome for each in runs]
        losses = [each["loss"] for each in own]
        squared = sorted(each["squared_gradient"] for each in own)
        row: dict[str, Any] = {"objective": name, "rate": runs[0].settings["rate"]}
        row["exact loss"] = statistics.mean(losses)
        row["±"] = statistics.stdev(losses) if len(losses) > 1 else 0.0
        row["squared gradients"] = " ".join(f"{each:.1e}" for each in squared)
        seconds = round(statistics.mean(each["seconds"] for each in own))
        rows.append({**row, "seeds": len(own), "seconds": seconds})
        points = np.array([each["curve"][1:] for each in own])  # (seeds, points, 3)
        curves[name] = points[0, :, 0].tolist(), gmean(points[:, :, 2], axis=0).tolist()
    title = f"{images} images with two stored views, {longest:,} steps of plain SGD"
    print_table(Table(title, rows))
    if figure is not None:
        drawn = plots.lines(curves, xlabel="steps", ylabel="squared gradient of the exact loss")
        drawn.axes[0].set(xscale="log", yscale="log")
        figure.write_text(plots.as_svg(drawn), encoding="utf-8")


def checkpoints(run: Path, data: str, pairs: int = 500, temperature: float = 0.07) -> None:
    """Measure every checkpoint of a run, and print a table.

    Args:
        run: output folder of a training.
        data: pairs or images.
        pairs: random pairs to measure on.
        temperature: τ of the loss.
    """
    model = load_model(str(run / "model"), device="cpu").eval()
    views = model.kind == "image"
    items = ImageViews(open_corpus(data, modality="image").items) if views else open_pairs(data)
    rows = random_rows(len(items), pairs, seed=0)
    for side in SIDES:  # the item of another pair may be a positive
        rows = rows[np.unique(items.item_ids(side)[rows], return_index=True)[1]]
    chunks: dict[Side, list[Inputs]] = {"left": [], "right": []}
    for side, start in product(SIDES, range(0, len(rows), CHUNK)):
        own, prepare = rows[start : start + CHUNK], model.tower(side).prepare
        raw = [items.item(side, int(row)) for row in items.item_ids(side)[own]]
        seeds = augmentation_seeds(0, 0, own.tolist(), side)
        chunks[side].append(SimCLRPrepare(prepare)(raw, seeds) if views else prepare(raw))
    lines = []
    for step, folder in Checkpoints(run / "checkpoints").finished():
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        loss, squared = exact_gradient(model, model, chunks, temperature, views)
        # Gradient norms fall by orders of magnitude.
        lines.append({"step": step, "loss": loss, "squared gradient": f"{squared:.3e}"})
    print_table(Table(f"{run} on {len(rows)} pairs of {data}", lines))


def check(folder: Path) -> None:
    """Descend on twelve images, and measure the checkpoints of a run on them."""
    images = toys.images(folder / "toy", size=32)
    results = folder / "stationary.jsonl"
    run(images, images=12, steps=30, tune_steps=5, seeds=1, results=results)
    report(results, images=12, figure=folder / "figure.svg")
    for each in Store(results).runs:
        assert each.outcome["loss"] < each.outcome["curve"][0][1]
    model = ImageEncoder("test_resnet", image_size=32, projector_dim=16)
    views = TableViews(images / "train.parquet")
    objective = InfoNCE(num_left=len(views), temperature=0.2, views=True)
    run_of = {"output": folder / "run", "batch_size": 8, "max_steps": 4, "save_every": 2}
    Trainer(progress=False, **run_of).fit(model, views, objective)
    checkpoints(folder / "run", str(images / "train.parquet"), pairs=12)


if __name__ == "__main__":
    command_line(run, report, checkpoints, check=check)
