"""How far is an objective's gradient from that of the loss that it estimates?

    python eval/estimators.py bias --views true
    python eval/estimators.py mixing --replicas 4
    python eval/estimators.py pool --replicas 3 --num_pairs 1000
    python eval/estimators.py drift
    python eval/estimators.py frozen

Gradients are those in the embeddings; the exact one is that of the global loss over all pairs.
bias: distance of the mean gradient of an epoch from the exact one, relative, without the noise that
is left; 0 means that it cannot be told from unbiased. ±: its standard error. mean error: the same
distance with the noise. step error: distance of a step's gradient from the exact gradient of its
anchors. value: reported minus exact loss. encodes: items encoded outside the batch, per step.

Shapes: B batch, N pairs, or documents, D dimension, Q queries.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import faiss
import torch
from frame import RESULTS, Outcome, Settings, Store, command_line
from torch import Tensor
from torch.nn.functional import normalize

from dualenc import objectives
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import ExactGlobal, FrozenCorpus, Objective
from dualenc.objectives.anchors import Anchors
from dualenc.types import Side

FOUND = RESULTS / "estimators.jsonl"
COMPARED: list[tuple[str, Settings]] = [
    ("InfoNCE", {}),
    ("DCL", {}),
    ("HCL", {}),
    ("SigLIP", {"learnable_temperature": False}),
    ("SogCLR", {"gamma": 0.9}),
    ("SogCLR", {"gamma": 0.1}),
    ("ISogCLR", {"gamma": 0.1, "temperature_rate": 0.0}),
    ("SACLR", {"form": "row"}),
    ("SACLR", {"form": "matrix", "rho": 0.99}),
    ("GlobalCache", {}),
    ("GlobalCache", {"extra_encodes": 2.0}),
    ("NegativeCache", {}),
    ("EMC2", {}),
    ("ISIR", {}),
    ("ExactGlobal", {}),
]
MOVED = ("DCL", "ISIR", "NegativeCache", "GlobalCache")
DRIFTING = [*(each for each in COMPARED if each[0] in MOVED), ("SogCLR", {"gamma": 0.5})]
Rows = list[dict[str, Any]]
Pairs = Callable[[float], "FrozenPairs"]
"""Pairs by time in epochs."""
Window = tuple[Tensor, dict[str, list[float]]]
"""(2N, D) mean gradient of some epochs, and columns with a number of each step."""


@dataclass
class FrozenPairs:
    """Frozen embeddings, row i paired with row i; with `views`, two views of the same images."""

    left: Tensor  # (N, D) unit-norm embeddings
    right: Tensor
    views: bool = False
    num_encoded: int = 0  # items outside the batch that the last step requested

    def __post_init__(self) -> None:
        self.left = self.left.detach().requires_grad_()
        self.right = self.right.detach().requires_grad_()

    def __len__(self) -> int:
        return len(self.left)

    def build(self, kind: Callable[..., Objective], tau: float, **options: Any) -> Objective:
        """Make an objective of these pairs; `kind` is its class."""
        sizes = {"num_left": len(self), "num_right": len(self), "views": self.views}
        criterion = kind(**sizes, temperature=tau, **options)
        criterion.set_counts(*torch.ones(2, len(self)))
        return criterion

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """Return (n, D) embeddings by id."""
        self.num_encoded += len(ids)
        return getattr(self, side)[ids]

    def step(self, criterion: Objective, rows: Tensor) -> tuple[Tensor, float]:
        """Return the (2N, D) gradient of a batch, pairs `rows` (B,), and its loss."""
        self.num_encoded = 0
        loss = criterion(self.left[rows], self.right[rows], rows, encode=self.encode).loss
        gradients = torch.autograd.grad(loss, [self.left, self.right])
        return torch.cat(gradients), float(loss.detach())

    def exact(self, temperature: float) -> tuple[Tensor, float]:
        """Return the (2N, D) gradient of the global loss, and its value."""
        return self.step(self.build(ExactGlobal, temperature), torch.arange(len(self)))


def near(vectors: Tensor, distance: float, draw: torch.Generator) -> Tensor:
    """Return (n, D) unit vectors, each about `distance` away from its own of `vectors`."""
    noise = torch.randn(vectors.shape, generator=draw) / vectors.shape[1] ** 0.5
    return normalize(vectors + distance * noise, dim=1)


def clusters(count: int, dimension: int, distance: float, draw: torch.Generator) -> Tensor:
    """Return (N, D) unit vectors in clusters of 20, one cluster after the other."""
    centers = normalize(torch.randn(count // 20, dimension, generator=draw), dim=1)
    return near(centers.repeat_interleave(20, 0), distance, draw)


def pairs_of(settings: Settings) -> Pairs:
    """Return pairs of random unit vectors.

    In clusters, a few negatives of each anchor weigh most. Each item turns by `drift` rad per
    epoch, in a direction of its own.
    """
    draw, shape = torch.Generator().manual_seed(0), (settings["num_pairs"], settings["dimension"])
    if settings["vectors"] == "clusters":
        left = clusters(*shape, 0.5, draw)
        right = near(left, 0.4, draw)
        # Blocks of a cache hold consecutive ids, which must not be one cluster.
        order = torch.randperm(len(left), generator=draw)
        left, right = left[order], right[order]
    else:
        left = normalize(torch.randn(shape, generator=draw), dim=1)
        right = near(left, 0.5, draw)
    still = FrozenPairs(left, right, views=settings["views"])
    if not settings["drift"]:
        return lambda epoch: still
    start = torch.stack([left, right]).double()
    draw = torch.Generator().manual_seed(1)
    across = torch.randn(start.shape, generator=draw, dtype=torch.float64)
    across = normalize(across - (across * start).sum(dim=2, keepdim=True) * start, dim=2)

    def turned(epoch: float) -> FrozenPairs:
        angle = settings["drift"] * epoch
        return FrozenPairs(*(math.cos(angle) * start + math.sin(angle) * across))

    return turned


def run(settings: Settings) -> Outcome:
    """Measure an objective's gradient in `stretches` of `epochs` after a warm-up, in each run.

    Means are those of the stretches of one run, or of the same stretch of several runs.
    """
    at, tau, first = pairs_of(settings), settings["temperature"], settings["warm_up"]
    kind = getattr(objectives, settings["objective"])
    windows: list[Window] = []
    for seed in range(settings["runs"]):
        criterion = at(0).build(kind, tau, seed=seed, **settings["options"])
        windows += windows_of(criterion, at, seed, settings)
    steps = math.ceil(len(at(0)) / settings["batch_size"]) if settings["drift"] else 1
    moments = [at(first + step / steps).exact(tau) for step in range(steps)]
    exact = torch.stack([gradient for gradient, _ in moments]).mean(dim=0)
    means = [mean for mean, _ in windows]
    found, error = bias_of(means, exact, gap=int(settings["stretches"] > 1))
    outcome = {"bias": found, "±": error}
    outcome["mean error"] = relative(torch.stack(means).mean(dim=0), exact)
    for name in windows[0][1]:
        outcome[name] = statistics.mean(number for _, own in windows for number in own[name])
    outcome["value"] -= statistics.mean(value for _, value in moments)
    # Counts of pairs belong to the data, not to the objective's memory.
    tables = [each for key, each in criterion.named_buffers() if "pair_counts" not in key]
    return outcome | {"state, bytes per pair": sum(each.nbytes for each in tables) / len(at(0))}


def windows_of(criterion: Objective, at: Pairs, seed: int, settings: Settings) -> list[Window]:
    """Return what an objective shows in each stretch; steps are compared in its first epoch."""
    first, length = settings["warm_up"], settings["epochs"]
    oracle = at(0).build(ExactGlobal, settings["temperature"])
    order = torch.Generator().manual_seed(seed)
    windows: list[Window] = []
    for epoch in range(first + length * settings["stretches"]):
        batches = torch.randperm(len(at(0)), generator=order).split(settings["batch_size"])
        begins = epoch >= first and (epoch - first) % length == 0
        if begins:
            windows.append((torch.zeros(()), defaultdict(list)))
        for step, rows in enumerate(batches):
            now = at(epoch + step / len(batches))
            gradient, value = now.step(criterion, rows)
            if not windows:
                continue
            mean, columns = windows[-1]
            windows[-1] = mean + gradient * (len(rows) / len(now) / length), columns
            columns["value"].append(value)
            columns["encodes"].append(now.num_encoded)
            if begins and step % (1 + len(batches) // 8) == 0:
                columns["step error"].append(relative(gradient, now.step(oracle, rows)[0]))
    return windows


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the distance of a gradient from the exact one, relative to its length."""
    return float((found - exact).norm() / exact.norm())


def bias_of(means: Sequence[Tensor], exact: Tensor, gap: int = 0) -> tuple[float, float]:
    """Return the relative bias of mean gradients, 0 where noise hides it, and its standard error.

    The expected product of the deviations of two independent means is the squared bias, without a
    noise term. The error is how far the bias moves if its square grows by one standard error, which
    is the jackknife's. Means up to `gap` apart are dependent: 1 for stretches of one run.
    """
    deviations = torch.stack([(mean - exact).flatten() for mean in means])
    products = (deviations @ deviations.T).double() / float(exact.double().square().sum())
    numbers = torch.arange(len(means))
    # Products of dependent stretches contain noise, and so do squares.
    apart = numbers[None, :] - numbers[:, None] > gap

    def mean(without: int) -> float:
        used = numbers != without
        return float(products[apart & used[:, None] & used[None, :]].mean())

    estimates = [mean(without) for without in range(len(means))]
    squared, spread = max(0.0, mean(-1)), statistics.pvariance(estimates) * (len(means) - 1)
    return math.sqrt(squared), math.sqrt(squared + math.sqrt(spread)) - math.sqrt(squared)


def show(title: str, wanted: Sequence[Settings], varied: Sequence[str], results: Path) -> Rows:
    """Run what is missing, and print a row of each: settings that vary, and what came out."""
    common: Settings = {"vectors": "random", "dimension": 5, "views": False, "drift": 0.0}
    common |= {"options": {}, "epochs": 1, "stretches": 1, "runs": 1}
    wanted = [{**common, **each} for each in wanted]
    rows = []
    for settings, outcome in zip(wanted, Store(results).get(wanted, run), strict=True):
        options = [f"{name}={value}" for name, value in settings["options"].items()]
        row = {"objective": " ".join([settings["objective"], *options])}
        rows.append(row | {name: settings[name] for name in varied} | outcome)
    print_table(Table(title, rows))
    return rows


def bias(
    num_pairs: int = 200,
    batch_size: int = 40,
    epochs: int = 200,
    views: bool = False,
    results: Path = FOUND,
) -> Rows:
    """Print a row per objective, from eight stretches of epochs after a warm-up."""
    common = {"num_pairs": num_pairs, "batch_size": batch_size, "temperature": 0.07, "views": views}
    common |= {"warm_up": epochs // 5, "epochs": max(1, epochs // 8), "stretches": 8}
    draws = {"proposals": batch_size}
    compared = [*COMPARED, ("EMC2", draws), ("ISIR", draws)]
    wanted = [{**common, "objective": name, "options": options} for name, options in compared]
    return show(f"B = {batch_size}, τ = 0.07, views: {views}", wanted, [], results)


def mixing(num_pairs: int = 200, replicas: int = 4, results: Path = FOUND) -> Rows:
    """Print the bias of ISIR by epochs, with chains that start on recent items, and cold ones."""
    common = {"num_pairs": num_pairs, "runs": replicas, "objective": "ISIR"}
    cells = product((0.02, 0.05, 0.07), (4, 16, 32), (4096, 0), (1, 3, 10, 30))
    wanted = [
        {**common, "temperature": tau, "batch_size": size, "options": {"recent": recent}}
        | {"warm_up": after}
        for tau, size, recent, after in cells
    ]
    return show(f"N = {num_pairs}", wanted, ["temperature", "batch_size", "warm_up"], results)


def pool(num_pairs: int = 200, replicas: int = 3, results: Path = FOUND) -> Rows:
    """Print the bias of GlobalCache by epochs, with a pool of 1/16 of the items, in clusters."""
    common = {"vectors": "clusters", "num_pairs": num_pairs, "dimension": 32, "batch_size": 16}
    common |= {"runs": replicas, "objective": "GlobalCache"}
    own = {"pool": max(64, num_pairs // 16)}
    wanted = [
        {**common, "temperature": tau, "options": {"extra_encodes": encodes, **own}}
        | {"warm_up": after}
        for tau, encodes, after in product((0.02, 0.07), (1.0, 2.0, 4.0), (1, 4, 19))
    ]
    return show(f"N = {num_pairs}, B = 16", wanted, ["temperature", "warm_up"], results)


def drift(
    num_pairs: int = 512, drifts: Sequence[float] = (0.01, 0.05), results: Path = FOUND
) -> Rows:
    """Print a row per drift (rad per epoch), τ, B and estimator, for the epoch after three."""
    common = {"num_pairs": num_pairs, "dimension": 16, "warm_up": 3, "runs": 4}
    cells = product(drifts, (0.02, 0.07, 0.5), (4, 32, 256), DRIFTING)
    wanted = [
        {**common, "drift": omega, "temperature": tau, "batch_size": size}
        | {"objective": name, "options": options}
        for omega, tau, size, (name, options) in cells
    ]
    return show(f"N = {num_pairs}", wanted, ["drift", "temperature", "batch_size"], results)


class NearestAlone(FrozenCorpus):
    """The sum over the searched documents, without the others."""

    def _sample(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        rows, log_weights = super()._sample(anchors)
        return rows[log_weights == 0], log_weights[log_weights == 0]


def run_frozen(settings: Settings) -> Outcome:
    """Measure FrozenCorpus above `max_exact`, by eight means of four draws each."""
    draw = torch.Generator().manual_seed(0)
    vectors = clusters(settings["documents"], 64, 0.7, draw)
    vectors = vectors[torch.randperm(len(vectors), generator=draw)]
    anchors = near(vectors[: settings["queries"]], 0.7, draw)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors.numpy())
    right_id = torch.from_numpy(index.search(anchors.numpy(), 1)[1][:, 0])
    batches = torch.arange(len(anchors)).split(settings["batch_size"])

    def gradient(kind: type[FrozenCorpus], **options: Any) -> Iterator[Tensor]:
        criterion = kind(vectors, temperature=settings["temperature"], **options)
        while True:
            left = anchors.clone().requires_grad_()
            own = [(left[ids], vectors[right_id[ids]], ids, right_id[ids]) for ids in batches]
            yield torch.autograd.grad(sum(criterion(*batch).loss for batch in own), left)[0]

    search = {"max_exact": 1, "nearest": settings["nearest"]}
    search["search"] = lambda queries, k: index.search(queries, k)[1]
    exact = next(gradient(FrozenCorpus))
    sampled = gradient(FrozenCorpus, sampled=settings["sampled"], **search)
    draws = torch.stack([next(sampled) for _ in range(32)])
    found, error = bias_of(draws.unflatten(0, (8, 4)).mean(dim=1), exact)
    errors = statistics.mean(relative(each, exact) for each in draws)
    alone = relative(next(gradient(NearestAlone, **search)), exact)
    return {"bias": found, "±": error, "step error": errors, "bias, nearest alone": alone}


def frozen(
    documents: int = 100_000, nearest: int = 256, sampled: int = 8192, results: Path = FOUND
) -> Rows:
    """Print the bias of FrozenCorpus above `max_exact`, in queries whose positive is the nearest.

    Args:
        documents: vectors in clusters.
        nearest, sampled: documents of the sum, for each query and in each step.
        results: file of finished runs.
    """
    common = {"documents": documents, "queries": 256, "batch_size": 32}
    common |= {"nearest": nearest, "sampled": sampled}
    wanted = [{**common, "temperature": tau} for tau in (0.02, 0.05, 0.1)]
    rows = [
        {"τ": settings["temperature"], **outcome}
        for settings, outcome in zip(wanted, Store(results).get(wanted, run_frozen), strict=True)
    ]
    print_table(Table(f"N = {documents:,}, nearest = {nearest}, sampled = {sampled}", rows))
    return rows


def check(folder: Path) -> None:
    """Run all at toy size: what is exact has no error, and a sampled sum no bias."""
    results = folder / "estimators.jsonl"
    found = {row["objective"]: row for row in bias(16, 8, epochs=8, results=results)}
    assert max(found["ExactGlobal"][name] for name in ("bias", "step error", "value")) < 1e-5
    assert found["InfoNCE"]["bias"] > 0.1
    assert len(mixing(8, replicas=2, results=results)) == 72
    assert len(pool(80, replicas=2, results=results)) == 18
    assert len(drift(24, [0.01], results)) == 54
    sampled = frozen(2000, nearest=16, sampled=400, results=results)[-1]
    assert sampled["bias"] < 0.02 < sampled["step error"] < sampled["bias, nearest alone"]


if __name__ == "__main__":
    command_line(bias, mixing, pool, drift, frozen, check=check)
