"""How far is an objective's gradient from that of the loss that it estimates?

    python eval/estimators.py bias --views false --epochs 200
    python eval/estimators.py bias --views true --batch_size 32 --embeddings pairs.npy
    python eval/estimators.py mixing --replicas 4
    python eval/estimators.py pool --replicas 3 --num_pairs 1000
    python eval/estimators.py drift --drifts "[0.01,0.05]" --warm_up 3 --runs 4
    python eval/estimators.py frozen --documents emb/corpus --queries emb/queries

Gradients are those in the embeddings; the exact one is that of the global loss over all pairs.
bias: distance of the mean gradient of an epoch from the exact one, relative, without the noise that
is left; 0 means that it cannot be told from unbiased. ±: its standard error. mean error: the same
distance with the noise. step error: distance of a step's gradient from the exact gradient of its
anchors. value: reported minus exact loss. encodes: items encoded outside the batch, per step.

Shapes: B batch, N items of a side, D dimension, M pairs, K known positives, Q queries.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import torch
from frame import command_line
from torch import Tensor
from torch.nn.functional import normalize

from dualenc import objectives
from dualenc.data.store.vector_shards import Embeddings
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import ISIR, ExactGlobal, FrozenCorpus, GlobalCache, Objective, SogCLR
from dualenc.objectives.anchors import Anchors
from dualenc.types import Side

Rows = list[dict[str, Any]]
Window = tuple[Tensor, dict[str, list[float]]]
"""(N_left + N_right, D) mean gradient of some epochs, and columns with a number of each step."""


@dataclass
class FrozenPairs:
    """Frozen embeddings and the pairs between them; with `views`, two views of the same images."""

    left: Tensor  # (N, D) unit-norm embeddings by id
    right: Tensor
    left_id: Tensor  # (M,) ids of each pair
    right_id: Tensor
    left_positives: Tensor | None = None  # (M, K) further positives, padded with -1
    right_positives: Tensor | None = None
    views: bool = False
    num_encoded: int = 0  # items outside the batch that the last step requested

    def __post_init__(self) -> None:
        self.left = self.left.detach().requires_grad_()
        self.right = self.right.detach().requires_grad_()

    @property
    def ids(self) -> dict[str, Tensor]:
        """The known ids, by the names that `Objective.forward` gives them."""
        names = ("left_id", "right_id", "left_positives", "right_positives")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @classmethod
    def one_to_one(cls, left: Tensor, right: Tensor, *, views: bool = False) -> FrozenPairs:
        """Pair row i of `left` (M, D) with row i of `right` (M, D)."""
        ids = torch.arange(len(left))
        return cls(left, right, ids, ids, views=views)

    def __len__(self) -> int:
        return len(self.left_id)

    def at(self, epoch: float) -> FrozenPairs:
        """Return the pairs at a time, in epochs."""
        return self

    def build(self, kind: Callable[..., Objective], tau: float, **options: Any) -> Objective:
        """Make an objective of these pairs; `kind` is its class, or a function in its place."""
        sizes = {"num_left": len(self.left), "num_right": len(self.right), "views": self.views}
        criterion = kind(**sizes, temperature=tau, **options)
        sides = ((self.left_id, self.left), (self.right_id, self.right))
        criterion.set_counts(*(torch.bincount(ids, minlength=len(side)) for ids, side in sides))
        return criterion

    def encode(self, side: Side, ids: Tensor) -> Tensor:
        """Return (n, D) embeddings by id."""
        self.num_encoded += len(ids)
        return getattr(self, side)[ids]

    def step(self, criterion: Any, rows: Tensor) -> tuple[Tensor, float]:
        """Return the (N_left + N_right, D) gradient of a batch, pairs `rows` (B,), and its loss."""
        ids = {name: each[rows] for name, each in self.ids.items()}
        left, right = self.left[ids["left_id"]], self.right[ids["right_id"]]
        self.num_encoded = 0
        loss = criterion(left, right, encode=self.encode, **ids).loss
        gradients = torch.autograd.grad(loss, [self.left, self.right])
        return torch.cat(gradients), float(loss.detach())

    def exact(self, temperature: float, **options: Any) -> tuple[Tensor, float]:
        """Return the (N_left + N_right, D) gradient of the global loss, and its value."""
        return self.step(self.build(ExactGlobal, temperature, **options), torch.arange(len(self)))


def near(vectors: Tensor, distance: float, draw: torch.Generator) -> Tensor:
    """Return (n, D) unit vectors, each about `distance` away from its own of `vectors`."""
    noise = torch.randn(vectors.shape, generator=draw) / vectors.shape[1] ** 0.5
    return normalize(vectors + distance * noise, dim=1)


def clusters(count: int, dimension: int, distance: float, draw: torch.Generator) -> Tensor:
    """Return (N, D) unit vectors in clusters of 20, one cluster after the other."""
    centers = normalize(torch.randn(count // 20, dimension, generator=draw), dim=1)
    return near(centers.repeat_interleave(20, 0), distance, draw)


def random_pairs(num_pairs: int, dimension: int, clustered: bool = False) -> FrozenPairs:
    """Draw pairs of unit vectors; in clusters, a few negatives of each anchor weigh most."""
    draw = torch.Generator().manual_seed(0)
    if not clustered:
        left = normalize(torch.randn(num_pairs, dimension, generator=draw), dim=1)
        return FrozenPairs.one_to_one(left, near(left, 0.5, draw))
    left = clusters(num_pairs, dimension, 0.5, draw)
    right = near(left, 0.4, draw)
    # Blocks of a cache hold consecutive ids, which must not be one cluster.
    order = torch.randperm(len(left), generator=draw)
    return FrozenPairs.one_to_one(left[order], right[order])


def moving_pairs(num_pairs: int, dimension: int, drift: float) -> Callable[[float], FrozenPairs]:
    """Return random pairs by time in epochs: each item turns by `drift` rad per epoch."""
    still = random_pairs(num_pairs, dimension)
    start = torch.stack([still.left, still.right]).detach().double()
    draw = torch.Generator().manual_seed(1)
    across = torch.randn(start.shape, generator=draw, dtype=torch.float64)
    across = normalize(across - (across * start).sum(dim=2, keepdim=True) * start, dim=2)
    return lambda epoch: FrozenPairs.one_to_one(
        *(math.cos(drift * epoch) * start + math.sin(drift * epoch) * across)
    )


def measure(
    at: Callable[[float], FrozenPairs],
    build: Callable[..., Any],
    batch_size: int,
    spans: Sequence[range],
    runs: int = 1,
    oracle: Objective | None = None,  # to compare steps of a span's first epoch with
    every: int = 1,
) -> list[list[Window]]:
    """Return what each run of an objective shows in disjoint spans of epochs, by time in epochs."""
    found: list[list[Window]] = [[] for _ in range(runs)]
    for seed, windows in enumerate(found):
        criterion = build(seed=seed)
        order = torch.Generator().manual_seed(seed)
        for epoch in range(spans[-1].stop):
            batches = torch.randperm(len(at(epoch)), generator=order).split(batch_size)
            span = next((span for span in spans if epoch in span), range(-1, -1))
            if epoch == span.start:
                windows.append((torch.zeros(()), defaultdict(list)))
            for step, rows in enumerate(batches):
                now = at(epoch + step / len(batches))
                gradient, value = now.step(criterion, rows)
                if not span:
                    continue
                mean, columns = windows[-1]
                windows[-1] = mean + gradient * (len(rows) / len(now) / len(span)), columns
                columns["value"].append(value)
                columns["encodes"].append(now.num_encoded)
                if oracle and epoch == span.start and step % every == 0:
                    exact = now.step(oracle, rows)[0]
                    if isinstance(criterion, BothRoles):
                        of_all = now.exact(criterion.tau)[0] * (len(now) / len(rows))
                        exact = of_all * (gradient != 0).any(dim=1, keepdim=True)
                    columns["step error"].append(relative(gradient, exact))
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the distance of a gradient from the exact one, relative to its length."""
    return float((found - exact).norm() / exact.norm())


def summary(found: Sequence[Window], exact: tuple[Tensor, float], gap: int = 0) -> dict[str, float]:
    """Return a row's columns, from stretches of one run or the same stretch of several runs."""
    means = [mean for mean, _ in found]
    row = dict(zip(("bias", "±"), bias_of(means, exact[0], gap), strict=True))
    row["mean error"] = relative(torch.stack(means).mean(dim=0), exact[0])
    for name in found[0][1]:
        row[name] = statistics.mean(number for _, columns in found for number in columns[name])
    return row | {"value": row["value"] - exact[1]}


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


class Repaired(Objective):
    """Losses weighed by 1 − P(positive) (Khrylchenko et al. 2025, arXiv:2507.09331)."""

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        log_odds = super().losses(anchors, plan, outside)  # (X, A) log(Z/e⁺)
        return log_odds * torch.sigmoid(log_odds.detach())


class RepairedCache(Repaired, GlobalCache):
    """GlobalCache with the repaired correction."""


class RepairedCorpus(Repaired, FrozenCorpus):
    """FrozenCorpus with the repaired correction."""


class NearestAlone(FrozenCorpus):
    """The sum over the searched documents, without the others."""

    def _sample(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        rows, log_weights = super()._sample(anchors)
        return rows[log_weights == 0], log_weights[log_weights == 0]


class BothRoles:
    """Remembered embeddings taken for what they are now, as candidates and as anchors.

    `corrected` uses them only for what the batch alone does not know (as SAGA does: Defazio, Bach
    and Lacoste-Julien 2014, arXiv:1407.0202).
    """

    def __init__(self, start: FrozenPairs, tau: float, corrected: bool, seed: int) -> None:
        self.memory = torch.stack([start.left, start.right]).detach()  # (2, N, D)
        self.tau, self.corrected = tau, corrected

    def __call__(self, left: Tensor, right: Tensor, left_id: Tensor, **ids: Any) -> SimpleNamespace:
        """Return a loss that has the estimate as its gradient."""
        batch = torch.stack([left, right])  # (2, B, D)
        new, old = batch.detach(), self.memory[:, left_id]
        before = self.gradient(self.memory)[:, left_id]
        self.memory[:, left_id] = new
        estimate = self.gradient(self.memory)[:, left_id]
        share = len(left) / self.memory.shape[1]
        if self.corrected:
            estimate = before + share * (self.gradient(new) - self.gradient(old))
        pull = new.flip(0) / (self.tau * len(left))
        return SimpleNamespace(loss=((estimate / share - pull) * batch).sum())

    def gradient(self, sides: Tensor) -> Tensor:
        """Return that of the mean log-partition of all anchors, in both sides (2, n, D)."""
        logits = (sides[0] @ sides[1].T / self.tau).fill_diagonal_(-torch.inf)
        weights = torch.softmax(logits, dim=1) + torch.softmax(logits, dim=0)
        weights /= 2 * self.tau * len(logits)
        return torch.stack([weights @ sides[1], weights.T @ sides[0]])


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": objectives.InfoNCE,
    "DCL": objectives.DCL,
    "HCL": objectives.HCL,
    "SigLIP": lambda **common: objectives.SigLIP(**common, learnable_temperature=False),
    "SogCLR γ=0.9": SogCLR,
    "SogCLR γ=0.1": partial(SogCLR, gamma=0.1),
    "ISogCLR": partial(objectives.ISogCLR, gamma=0.1, temperature_rate=0.0),
    "SACLR row": partial(objectives.SACLR, form="row"),
    "SACLR matrix": partial(objectives.SACLR, form="matrix", rho=0.99),
    "GlobalCache": GlobalCache,
    "GlobalCache, 2 encodes": partial(GlobalCache, extra_encodes=2.0),
    "NegativeCache": objectives.NegativeCache,
    "EMC2": objectives.EMC2,
    "EMC2 draws": objectives.EMC2,
    "ISIR": ISIR,
    "ISIR draws": ISIR,
    "ExactGlobal": ExactGlobal,
}


def bias(
    num_pairs: int = 200,
    batch_size: int = 40,
    dimension: int = 5,
    temperature: float = 0.07,
    views: bool = False,
    epochs: int = 400,
    warm_up: int = 40,
    embeddings: Path | None = None,
    repaired: bool = False,
) -> Rows:
    """Print a row per objective, from eight stretches of epochs after a warm-up.

    Args:
        embeddings: file of real unit vectors instead of random ones, .npy (2, N, D).
        repaired: compare GlobalCache and the repaired correction with both losses, in clusters.
    """
    pairs = random_pairs(num_pairs, dimension, clustered=repaired)
    if embeddings is not None:
        pairs = FrozenPairs.one_to_one(*torch.from_numpy(np.load(embeddings)).float())
    pairs.views = views
    length = max(1, epochs // 8)
    spans = [range(first, first + length) for first in range(warm_up, warm_up + 8 * length, length)]
    kinds = {"GlobalCache": GlobalCache, "repaired": RepairedCache} if repaired else OBJECTIVES
    rows = []
    for name, kind in kinds.items():
        options = {"proposals": batch_size} if "draws" in name else {}
        criterion = pairs.build(kind, temperature, seed=0, **options)
        oracle = pairs.build(ExactGlobal, temperature, positive_in_softmax=name == "repaired")
        build = partial(lambda made, seed: made, criterion)
        [found] = measure(pairs.at, build, batch_size, spans, oracle=oracle)
        # Counts of pairs belong to the data, not to the objective's memory.
        tables = [each for key, each in criterion.named_buffers() if "pair_counts" not in key]
        state = {"state, bytes per pair": sum(each.nbytes for each in tables) / len(pairs)}
        for positive in (False, True)[: 1 + repaired]:
            exact = pairs.exact(temperature, positive_in_softmax=positive)
            row = {"objective": name, "positive in softmax": positive}
            rows.append(row | summary(found, exact, gap=1) | state)
    print_table(Table(f"N = {len(pairs)}, B = {batch_size}, τ = {temperature}", rows))
    return rows


def mixing(num_pairs: int = 200, replicas: int = 4, after: Sequence[int] = (1, 3, 10, 30)) -> Rows:
    """Print the bias of ISIR by epochs, with chains that start on recent items, and cold ones."""
    pairs = random_pairs(num_pairs, 5)
    spans = [range(epoch, epoch + 1) for epoch in after]
    rows = []
    for tau, batch_size, recent in product((0.02, 0.05, 0.07), (4, 16, 32), (4096, 0)):
        build = partial(pairs.build, ISIR, tau, recent=recent)
        found = zip(after, *measure(pairs.at, build, batch_size, spans, replicas), strict=True)
        for epoch, *windows in found:
            cell = {"τ": tau, "B": batch_size, "recent": recent, "after epochs": epoch}
            rows.append(cell | summary(windows, pairs.exact(tau)))
    print_table(Table(f"ISIR, N = {num_pairs}, {replicas} runs", rows))
    return rows


def pool(num_pairs: int = 200, replicas: int = 3, after: Sequence[int] = (1, 4, 19)) -> Rows:
    """Print the bias of GlobalCache by epochs, with a pool of 1/16 of the items, in clusters."""
    pairs = random_pairs(num_pairs, 32, clustered=True)
    spans = [range(epoch, epoch + 1) for epoch in after]
    rows = []
    for tau, encodes in product((0.02, 0.07), (1.0, 2.0, 4.0)):
        options = {"extra_encodes": encodes, "pool": max(64, num_pairs // 16)}
        build = partial(pairs.build, GlobalCache, tau, **options)
        found = zip(after, *measure(pairs.at, build, 16, spans, replicas), strict=True)
        for epoch, *windows in found:
            cell = {"τ": tau, **options, "after epochs": epoch}
            rows.append(cell | summary(windows, pairs.exact(tau)))
    print_table(Table(f"GlobalCache, N = {num_pairs}, B = 16, {replicas} runs", rows))
    return rows


def drift(
    num_pairs: int = 512,
    dimension: int = 16,
    drifts: Sequence[float] = (0.0, 0.01, 0.05),
    temperatures: Sequence[float] = (0.02, 0.07, 0.5),
    batch_sizes: Sequence[int] = (4, 32, 256),
    warm_up: int = 5,
    runs: int = 6,
) -> Rows:
    """Print a row per drift ω (rad per epoch), τ, B and estimator, for the epoch after a warm-up.

    A step of "both roles" is compared with the exact gradient into its items.
    """
    names = ("DCL", "ISIR", "NegativeCache", "GlobalCache", "GlobalCache, 2 encodes")
    kinds = {name: OBJECTIVES[name] for name in names} | {"SogCLR": partial(SogCLR, gamma=0.5)}
    rows = []
    span = range(warm_up, warm_up + 1)
    for omega, tau, batch_size in product(drifts, temperatures, batch_sizes):
        at = moving_pairs(num_pairs, dimension, omega)
        oracle = at(0).build(ExactGlobal, tau)
        sizes = [len(batch) for batch in torch.arange(num_pairs).split(batch_size)]
        exact = torch.zeros(())
        for step, size in enumerate(sizes):
            exact = exact + at(warm_up + step / len(sizes)).exact(tau)[0] * (size / num_pairs)
        for name in [*kinds, "both roles", "both roles, corrected"]:
            build: Callable[..., Any] = partial(BothRoles, at(0), tau, "corrected" in name)
            if name in kinds:
                build = partial(at(0).build, kinds[name], tau)
            found = measure(at, build, batch_size, [span], runs, oracle, 1 + len(sizes) // 8)
            row = summary([windows[0] for windows in found], (exact, math.nan))
            del row["value"]
            rows.append({"ω": omega, "τ": tau, "B": batch_size, "objective": name, **row})
    print_table(Table(f"N = {num_pairs}, the epoch after {warm_up}, {runs} runs", rows))
    return rows


def frozen(
    rows: int = 100_000,
    num_queries: int = 256,
    batch_size: int = 32,
    nearest: int = 256,
    sampled: int = 8192,
    repeats: int = 4,
    documents: Path | None = None,
    queries: Path | None = None,
    repaired: bool = False,
) -> Rows:
    """Print the bias of FrozenCorpus above `max_exact`, in queries whose positive is the nearest.

    Args:
        repeats: draws that are averaged in each of eight independent means.
        documents, queries: embeddings folders instead of clusters.
        repaired: compare the repaired correction as well, and with both losses.
    """
    if documents and queries:
        folders = (Embeddings.open(documents).vectors, Embeddings.open(queries).vectors)
        arrays = (folders[0], folders[1][:num_queries])
        vectors, anchors = (normalize(torch.tensor(np.float32(own)), dim=1) for own in arrays)
    else:
        draw = torch.Generator().manual_seed(0)
        vectors = clusters(rows, 64, 0.7, draw)
        vectors = vectors[torch.randperm(len(vectors), generator=draw)]
        anchors = near(vectors[:num_queries], 0.7, draw)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors.numpy())
    right_id = torch.from_numpy(index.search(anchors.numpy(), 1)[1][:, 0])
    batches = torch.arange(len(anchors)).split(batch_size)

    def gradient(criterion: FrozenCorpus) -> Tensor:
        left = anchors.clone().requires_grad_()
        own = [(left[ids], vectors[right_id[ids]], ids, right_id[ids]) for ids in batches]
        return torch.autograd.grad(sum(criterion(*batch).loss for batch in own), left)[0]

    search = {"nearest": nearest, "search": lambda queries, k: index.search(queries, k)[1]}
    lines = []
    kinds = (FrozenCorpus, RepairedCorpus)[: 1 + repaired]
    for tau, kind in product((0.02, 0.05, 0.1), kinds):
        common = {"temperature": tau, "max_exact": 1, **search}
        criterion = kind(vectors, sampled=sampled, **common)
        draws = torch.stack([gradient(criterion) for _ in range(8 * repeats)])
        means = draws.unflatten(0, (8, repeats)).mean(dim=1)
        alone = gradient(NearestAlone(vectors, **common))
        for positive in (False, True)[: 1 + repaired]:
            exact = gradient(FrozenCorpus(vectors, temperature=tau, positive_in_softmax=positive))
            found, error = bias_of(means, exact)
            line = {"τ": tau, "objective": kind.__name__, "positive in softmax": positive}
            line |= {"bias": found, "±": error}
            line["step error"] = statistics.mean(relative(each, exact) for each in draws)
            lines.append(line | {"bias, nearest alone": relative(alone, exact)})
    title = f"N = {len(vectors):,}, B = {batch_size}, nearest = {nearest}, sampled = {sampled}"
    print_table(Table(title, lines))
    return lines


def check(folder: Path) -> None:
    """Run all at toy size: what is exact has no error, and each correction fits its own loss."""
    found = {row["objective"]: row for row in bias(16, batch_size=8, epochs=8, warm_up=1)}
    assert max(found["ExactGlobal"][name] for name in ("bias", "step error", "value")) < 1e-5
    assert found["InfoNCE"]["bias"] > 0.1
    assert len(mixing(8, replicas=2, after=[1])) == 18
    assert len(pool(80, replicas=2, after=[1])) == 6
    still = drift(24, 4, [0.0], [0.1], [8], warm_up=1, runs=3)
    assert max(row["step error"] for row in still if "both" in row["objective"]) < 1e-5
    present, other, wrong, repaired = frozen(2000, 32, 8, 16, 400, repaired=True)[-4:]
    assert max(present["bias"], repaired["bias"]) < 0.02 < min(other["bias"], wrong["bias"])
    assert present["bias"] < present["step error"] < present["bias, nearest alone"]


if __name__ == "__main__":
    command_line(bias, mixing, pool, drift, frozen, check=check)
