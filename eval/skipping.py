"""Does it pay to leave unlikely documents out of the gradient of `FrozenCorpus`?

    python eval/skipping.py clustered 16000                 # and 100000 --steps 25
    python eval/skipping.py embedded DATA VECTORS medquad   # folders as in adapting.py
    python eval/adapting.py report --results eval/results/skipping.jsonl

A probe, after Cut-Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009, gradient filtering): log Z
is exact, but the mean document under the softmax, which is its gradient, leaves out blocks of
documents where the largest probability for a query of the batch is below 2^-12. A block of 1 leaves
out single documents. Equal steps at one τ and rate; seconds of one core, of the whole step.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapting import EXACT, Task, Training, write_task
from frame import RESULTS, Outcome, Settings, Store, command_line
from torch import Tensor
from torch.nn.functional import pad

from dualenc.objectives import FrozenCorpus
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.frozen_corpus import hide

STORE = RESULTS / "skipping.jsonl"
LEAST = 2**-12
VARIANTS = ((0, 0.0), (2048, 0.0), (2048, LEAST), (256, LEAST), (16, LEAST), (1, LEAST))
"""Blocks and the smallest probability that keeps one. Block 0 is the package's `FrozenCorpus`."""


class SkippedBlocks(FrozenCorpus):
    """`FrozenCorpus` whose gradient leaves out blocks of unlikely documents, on one process.

    `num_kept` counts the documents in the gradients so far.
    """

    def __init__(self, documents: Tensor, block: int, least: float, **common: Any) -> None:
        super().__init__(documents, **common)
        self.vectors, self.block, self.least, self.num_kept = documents, block, least, 0

    @torch.no_grad()
    def _softmax(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        scores = anchors.embeddings[0] / anchors.temperature @ self.vectors.T  # (A, N)
        number = len(self.vectors)
        hide(scores, torch.arange(number), anchors.positive_ids[0])
        log_partition = scores.logsumexp(dim=1, keepdim=True)
        # The probabilities are those of the loss, which has the positive in its softmax.
        log_total = torch.logaddexp(log_partition, anchors.positive_scores.mT)
        probabilities = scores.sub_(log_total).exp_()
        highest = pad(probabilities.amax(dim=0), (0, -number % self.block))
        is_likely = highest.view(-1, self.block).amax(dim=1) >= self.least
        kept = is_likely.repeat_interleave(self.block)[:number]
        self.num_kept += int(kept.sum())
        # Copying all documents would cost what is measured.
        rows = slice(None) if kept.all() else kept
        mean = probabilities[:, rows] @ self.vectors[rows]
        mean *= (log_total - log_partition).exp()
        return log_partition.mT, mean[None]


def measure(task: Task, store: Store, common: Settings, seeds: int) -> None:
    """Train with and without skipping, all variants of a seed after one another."""

    def run(settings: Settings) -> Outcome:
        options = {name: settings[name] for name in ("block", "least") if settings["block"]}
        options |= {"temperature": settings["temperature"], "positive_in_softmax": True}
        kind = SkippedBlocks if settings["block"] else FrozenCorpus
        objective = kind(task.documents, num_left=len(task.queries), **options)
        training = Training(task, settings, objective)
        training.train()
        found = task.grouped(task.scores(training.model))
        kept = getattr(objective, "num_kept", training.steps * len(task.documents))
        found["kept"] = kept / (training.steps * len(task.documents))
        return found | {"milliseconds": round(1000 * training.seconds / training.steps, 2)}

    base = {"method": EXACT, "map": "dense", "rate": 1e-3, "temperature": 0.02, **common}
    variants = product(range(seeds), VARIANTS)
    own = [{"seed": seed, "block": block, "least": least} for seed, (block, least) in variants]
    store.get([base | each for each in own], run)


def embedded(
    data: Path, vectors: Path, name: str, steps: int = 200, seeds: int = 3, results: Path = STORE
) -> None:
    """Measure on a task of `adapting.py`."""
    measure(Task(data, vectors, name), Store(results), {"task": name, "steps": steps}, seeds)


def clustered(documents: int, steps: int = 150, seeds: int = 3, results: Path = STORE) -> None:
    """Measure on synthetic documents in clusters."""
    common = {"task": f"{documents:,} in clusters", "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        measure(clusters(Path(folder), documents), Store(results), common, seeds)


def clusters(folder: Path, documents: int, dim: int = 128, queries: int = 9000) -> Task:
    """Write documents in clusters of 20, one after the other, and queries; open both.

    A query is its document with noise, through a linear map that training has to undo.
    """
    draw = np.random.default_rng(0)
    centers = draw.standard_normal((documents // 20, dim)).repeat(20, axis=0)
    vectors = centers + 0.6 * draw.standard_normal(centers.shape)
    rows = draw.choice(len(vectors), min(queries, len(vectors)), replace=False)
    noisy = vectors[rows] + 0.7 * draw.standard_normal((len(rows), dim))
    turned = noisy @ (np.eye(dim) + 2 * draw.standard_normal((dim, dim)) / dim**0.5)
    pairs = np.stack([np.arange(len(rows)), rows], axis=1)
    test = len(pairs) // 9
    return write_task(folder, vectors, turned, {"test": pairs[:test], "train": pairs[test:]})


def check(folder: Path) -> None:
    """Compare with the exact loss: all blocks give its gradient, and 2^-12 nearly so."""
    task = clusters(folder, documents=2100, dim=16, queries=90)
    settings = {"method": EXACT, "map": "linear", "rate": 1e-3, "steps": 3, "seed": 0}
    options = {"temperature": 0.05, "num_left": len(task.queries), "positive_in_softmax": True}
    maps = []
    for block, least in ((0, 0.0), (2048, 0.0), (16, 0.0), (1, LEAST), (2048, 2.0)):
        own = SkippedBlocks(task.documents, block, least, **options) if block else None
        training = Training(task, settings | {"temperature": 0.05}, own)
        training.train()
        maps.append(torch.cat([part.flatten() for part in training.model.left.parameters()]))
    exact, whole, blocks, likely, positives = maps
    assert torch.allclose(whole, exact, atol=1e-6)
    assert torch.allclose(blocks, exact, atol=1e-6)
    assert 0 < (likely - exact).abs().max() < 0.1 * (positives - exact).abs().max()


if __name__ == "__main__":
    command_line(clustered, embedded, check=check)
