"""How near to a stationary point of the exact global loss does plain SGD come?

    python eval/claims/stationary.py run CIFAR10 --steps 200000 --seeds 3
    python eval/claims/stationary.py report --figure docs/figures/stationary.svg
    python eval/claims/stationary.py checkpoints runs/mine PAIRS --pairs 500 --temperature 0.07

The set is that of Yau et al. 2024 (arXiv:2404.10575, §4.5 and Figure 7): 500 images with two stored
augmentations, at b = 4. The network `components` is so small that 200,000 steps take minutes, and
that it cannot tell all images apart: principal components of the pixels, one hidden layer, 32
numbers. `convolutions` is that of `augmented.py`. The rate falls to zero along a cosine, so that
what is left of the gradient is bias and not noise. It is chosen for each objective by the exact
loss after --tune_steps, past any edge.

`checkpoints` measures a run of `dualenc train` on pairs, or on images, of which two of SimCLR's
augmentations are a pair.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import gmean
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualenc.batching import RandomBatches
from dualenc.data import Corpus, PairDataset, TableViews, open_corpus, open_pairs
from dualenc.encoders import DualEncoder, ImageEncoder, load_model
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
from augmented import SmallEncoder, chosen_by, scaled, views_of
from estimators import FrozenPairs
from frame import RESULTS, Outcome, Settings, Store, command_line, tune
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
Network = Literal["components", "convolutions"]
AXES = {
    "components": (2, "squared gradient of the exact loss", "log", gmean),
    "convolutions": (1, "exact global loss, mean over seeds", "linear", np.mean),
}
"""What is drawn of (step, loss, squared gradient): number, name, scale, and mean over seeds."""


def exact_gradient(
    model: nn.Module,
    encode: Callable[[Side, Any], Tensor],
    chunks: Mapping[Side, Sequence[Any]],
    pairs: Callable[[Tensor, Tensor], FrozenPairs],
    temperature: float,
) -> tuple[float, float, FrozenPairs]:
    """Return the exact loss L(θ), ‖∇L(θ)‖² with respect to trainable weights, and the embeddings.

    L(θ) is the mean of −s(x, y)/τ + log Σ_z exp(s(x, z)/τ) over all anchors x, z being their
    negatives. To save memory, each chunk is encoded again in the backward pass.
    """
    left, right = (
        torch.cat([checkpoint(encode, side, own, use_reentrant=False) for own in chunks[side]])
        for side in SIDES
    )
    frozen = pairs(left.double(), right.double())
    on_embeddings, loss = frozen.exact(temperature)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    both = torch.cat([left, right])
    gradients = torch.autograd.grad(both, weights, on_embeddings.to(both), allow_unused=True)
    squared = sum(float(own.double().square().sum()) for own in gradients if own is not None)
    return loss, squared, frozen


def convolutions(pixels: Tensor) -> nn.Module:
    """Return `SmallEncoder`'s layers with the fixed statistics of BatchNorm on (M, 3, S, S)."""
    tower = SmallEncoder(None).left
    for layer in tower.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.momentum = 1.0
    network = nn.Sequential(tower.backbone, tower.projector)
    with torch.no_grad():
        network.train()(pixels)
    return network.eval()


@cache
def stored_views(folder: Path, images: int, network: Network) -> Tensor:
    """Return two augmentations of each image: pixels (M, 2, 3, S, S) or components (M, 2, 64)."""
    train, _, _ = open_parts(str(folder), images, 1)
    views = scaled(views_of([train[row].left.copy() for row in range(images)], [(0, 1)] * images))
    if network == "convolutions":
        return views
    rows = views.flatten(2).flatten(0, 1).double()
    centered = rows - rows.mean(dim=0)
    directions = torch.linalg.eigh(centered.T @ centered).eigenvectors.flip(1)[:, :COMPONENTS]
    components = centered @ directions
    return (components / components.std()).float().unflatten(0, (images, 2))


def descend(settings: Settings, folder: Path) -> Outcome:
    """Train on the stored views by plain SGD, and measure the exact loss on the way."""
    images, steps, seed = settings["images"], settings["steps"], settings["seed"]
    views = stored_views(folder, images, settings["network"])
    torch.manual_seed(seed)
    if settings["network"] == "components":
        network = nn.Sequential(nn.Linear(COMPONENTS, 64), nn.GELU(), nn.Linear(64, 32))
    else:
        network = convolutions(views.flatten(0, 1))
    shared = {"num_left": images, "temperature": settings["temperature"], "views": True}
    objective = OBJECTIVES[settings["objective"]](seed=seed, **shared)
    optimizer = torch.optim.SGD(network.parameters(), lr=settings["rate"])
    batches = RandomBatches(images, settings["batch_size"], seed=seed)
    sides: dict[Side, Tensor] = {"left": views[:, 0], "right": views[:, 1]}
    chunks = {side: [torch.arange(images)] for side in SIDES}
    pairs = partial(FrozenPairs.one_to_one, views=True)
    measured_at = {int(step) for step in np.geomspace(min(100, steps), steps, POINTS)}

    def encode(side: Side, rows: Tensor) -> Tensor:
        return unit_norm(network(sides[side][rows]))

    def measure(step: int) -> tuple[int, float, float]:
        point = exact_gradient(network, encode, chunks, pairs, settings["temperature"])
        return step, *point[:2]

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
    network: Network = "components",
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
        network: network to train.
        images: size M of the set.
        steps: steps of each run.
        rates: learning rates to choose from; a single one is taken as it is.
        tune_steps: steps of a run that is to choose a rate, with the first seed.
        seeds: number of seeds.
        results: file of finished runs.
    """
    store, once = Store(results), partial(descend, folder=folder)
    common = {"network": network, "images": images, "batch_size": 4, "temperature": 0.2}

    def negative_losses(tried: list[tuple[str, float]]) -> list[float]:
        trial = {**common, "steps": tune_steps, "seed": 0}
        wanted = [{**trial, "objective": name, "rate": rate} for name, rate in tried]
        return [-found["loss"] for found in store.get(wanted, once)]

    chosen = tune(list(OBJECTIVES), rates, negative_losses, beyond_edge=4)
    wanted = [
        {**common, "steps": steps, "seed": seed, "objective": name, "rate": rate}
        for name, rate in chosen.items()
        for seed in range(seeds)
    ]
    store.get(wanted, once)
    report(results, network, images)


def report(
    results: Path = FOUND,
    network: Network = "components",
    images: int = 500,
    figure: Path | None = None,
) -> None:
    """Print where each objective ends, and draw its curve.

    Args:
        results: file of finished runs.
        network: network that was trained.
        images: size M of the set.
        figure: svg file to write.
    """
    store, own_set = Store(results), {"network": network, "images": images}
    longest = max(each.settings["steps"] for each in store.where(**own_set))
    rows, curves = [], {}
    value, ylabel, scale, mean = AXES[network]
    for name in OBJECTIVES:
        runs = store.where(**own_set, objective=name, steps=longest)
        if not runs:
            continue
        rate, own = chosen_by(runs, "rate")
        losses = [each["loss"] for each in own]
        squared = sorted(each["squared_gradient"] for each in own)
        row = {"objective": name, "rate": rate, "exact loss": statistics.mean(losses)}
        row["±"] = statistics.stdev(losses) if len(losses) > 1 else 0.0
        row["squared gradients"] = " ".join(f"{each:.1e}" for each in squared)
        seconds = round(statistics.mean(each["seconds"] for each in own))
        rows.append({**row, "seeds": len(own), "seconds": seconds})
        points = np.array([each["curve"][1:] for each in own])  # (seeds, points, 3)
        curves[name] = points[0, :, 0].tolist(), mean(points[:, :, value], axis=0).tolist()
    title = f"{images} images with two stored views, {longest:,} steps of plain SGD"
    print_table(Table(title, rows))
    if figure is not None:
        drawn = plots.lines(curves, xlabel="steps", ylabel=ylabel)
        drawn.axes[0].set(xscale=scale, yscale=scale)
        figure.write_text(plots.as_svg(drawn), encoding="utf-8")


def prepared(
    model: DualEncoder, data: Corpus | PairDataset, rows: np.ndarray
) -> tuple[dict[Side, list[Inputs]], Callable[..., FrozenPairs]]:
    """Prepare each item of the pairs `rows` once, or two augmentations of each image."""
    prepare: dict[Side, Any] = {side: model.tower(side).prepare for side in SIDES}
    if not isinstance(data, PairDataset):
        parts = torch.from_numpy(rows).split(CHUNK)

        def augmented(side: Side, ids: list[int]) -> Inputs:
            seeds = augmentation_seeds(0, 0, ids, side)
            return SimCLRPrepare(prepare[side])([data[row] for row in ids], seeds)

        chunks = {side: [augmented(side, part.tolist()) for part in parts] for side in SIDES}
        return chunks, partial(FrozenPairs.one_to_one, views=True)
    chunks, known = {}, {}
    ids = {side: data.item_ids(side)[rows] for side in SIDES}
    for side, other in zip(SIDES, reversed(SIDES)):
        items, own = np.unique(ids[side], return_inverse=True)
        parts = torch.from_numpy(items).split(CHUNK)
        chunks[side] = [prepare[side]([data.item(side, int(i)) for i in part]) for part in parts]
        listed, others = data.positives(side, ids[side]), np.unique(ids[other])
        places = np.where(np.isin(listed, others), np.searchsorted(others, listed), -1)
        known |= {
            f"{side}_id": torch.from_numpy(own),
            f"{side}_positives": torch.from_numpy(places),
        }
    return chunks, partial(FrozenPairs, **known)


def uniformity(vectors: Tensor) -> float:
    """Return log of the mean of exp(−2‖x − y‖²) over pairs of rows (Wang & Isola 2020, Eq. 8)."""
    return float(torch.pdist(vectors).square().mul(-2).exp().mean().log())


def overlap(positives: Tensor, negatives: Tensor) -> float:
    """Return the common area of two histograms of cosines: 0 if disjoint, 1 if equal."""
    counts = [own.clamp(-1, 1).histc(100, -1, 1) / len(own) for own in (positives, negatives)]
    return float(torch.minimum(*counts).sum())


def geometry(pairs: FrozenPairs) -> dict[str, float]:
    """Describe how the embeddings of pairs lie to one another."""
    left, right = pairs.left.detach()[pairs.left_id], pairs.right.detach()[pairs.right_id]
    listed = pairs.right_id[:, None] if pairs.left_positives is None else pairs.left_positives
    is_positive = (listed[:, :, None] == pairs.right_id).any(dim=1)
    cosines = left @ right.T
    return {
        "uniformity": (uniformity(left) + uniformity(right)) / 2,
        "overlap": overlap(cosines.diagonal(), cosines[~is_positive]),
    }


def checkpoints(run: Path, data: str, pairs: int = 500, temperature: float = 0.07) -> None:
    """Measure every checkpoint of a run, and print a table.

    Args:
        run: output folder of a training.
        data: pairs or images.
        pairs: random pairs to measure on.
        temperature: τ of the loss.
    """
    model = load_model(str(run / "model"), device="cpu").eval()
    is_image = model.kind == "image"
    items = open_corpus(data, modality="image") if is_image else open_pairs(data)
    chunks, as_pairs = prepared(model, items, random_rows(len(items), pairs, seed=0))
    rows = []
    for step, folder in Checkpoints(run / "checkpoints").finished():
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        loss, squared, embedded = exact_gradient(model, model, chunks, as_pairs, temperature)
        # Gradient norms fall by orders of magnitude.
        row = {"step": step, "loss": loss, "squared gradient": f"{squared:.3e}"}
        rows.append(row | geometry(embedded))
    print_table(Table(f"{run} on {len(embedded)} pairs of {data}", rows))


def check(folder: Path) -> None:
    """Descend on twelve images, and measure the checkpoints of a run on them."""
    images = toys.images(folder / "toy", size=32)
    small = {"images": 12, "steps": 30, "tune_steps": 5, "seeds": 1}
    for network, rates in (("components", [0.1, 0.3]), ("convolutions", [0.01])):
        results = folder / f"{network}.jsonl"
        run(images, network, rates=rates, results=results, **small)
        report(results, network, images=12, figure=folder / "figure.svg")
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
