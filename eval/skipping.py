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
from dualenc.objectives.frozen_corpus import exp_difference, hide

STORE = RESULTS / "skipping.jsonl"
PART = 2048
"""Number of documents whose scores are computed at once."""
LEAST = 2**-12
VARIANTS = ((0, 0.0), (PART, 0.0), (PART, LEAST), (256, LEAST), (16, LEAST), (1, LEAST))
"""Blocks and the smallest probability that keeps one. Block 0 is the package's `FrozenCorpus`."""


class SkippedBlocks(FrozenCorpus):
    """`FrozenCorpus` whose gradient leaves out blocks of unlikely documents, on one process.

    Args:
        documents: (N, D) unit vectors.
        block: number of documents in a block, a divisor of `PART`.
        least: smallest probability that keeps a block; 0 keeps all.

    Attributes:
        num_kept: documents in the gradients so far.
    """

    def __init__(self, documents: Tensor, block: int, least: float = LEAST, **common: Any) -> None:
        super().__init__(documents, **common)
        self.parts = documents.split(PART)
        self.block = block
        self.least = least
        self.num_kept = 0

    @torch.no_grad()
    def _softmax(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        queries = anchors.embeddings[0] / anchors.temperature  # (A, D)
        peaks, sums, weights = [], [], []  # of each part: (A, 1), (A, 1) and (A, n)
        for number, part in enumerate(self.parts):
            scores = queries @ part.T  # (A, n)
            rows = torch.arange(number * PART, number * PART + len(part))
            hide(scores, rows, anchors.positive_ids[0])
            peaks.append(scores.amax(dim=1, keepdim=True))
            weights.append(exp_difference(scores, peaks[-1]))
            sums.append(weights[-1].sum(dim=1, keepdim=True))
        peak = torch.cat(peaks, dim=1)  # (A, parts)
        log_partition = (peak + torch.cat(sums, dim=1).log()).logsumexp(dim=1, keepdim=True)
        # The probabilities are those of the loss, which has the positive in its softmax.
        log_total = torch.logaddexp(log_partition, anchors.positive_scores.mT)
        scales = (peak - log_total).exp()  # (A, parts)
        mean = torch.zeros_like(queries)
        for number, part in enumerate(self.parts):
            shares = weights[number].mul_(scales[:, number, None])  # (A, n) probabilities
            blocks = pad(shares.amax(dim=0), (0, -len(part) % self.block)).view(-1, self.block)
            is_likely = blocks.amax(dim=1) >= self.least
            kept = is_likely.repeat_interleave(self.block)[: len(part)]
            self.num_kept += int(kept.sum())
            if kept.all():
                mean.addmm_(shares, part)
            elif kept.any():
                mean.addmm_(shares[:, kept], part[kept])
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

    base = {"method": EXACT, "map": "dense", "rate": 1e-3} | common
    wanted = [
        {**base, "seed": seed, "block": block, "least": least}
        for seed in range(seeds)
        for block, least in VARIANTS
    ]
    store.get(wanted, run)


def embedded(
    data: Path, vectors: Path, name: str, steps: int = 200, seeds: int = 3, results: Path = STORE
) -> None:
    """Measure on a task of `adapting.py`."""
    common = {"task": name, "steps": steps, "temperature": 0.02}
    measure(Task(data, vectors, name), Store(results), common, seeds)


def clustered(documents: int, steps: int = 150, seeds: int = 3, results: Path = STORE) -> None:
    """Measure on synthetic documents in clusters."""
    common = {"task": f"{documents:,} in clusters", "steps": steps, "temperature": 0.02}
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
    for block, least in ((0, 0.0), (PART, 0.0), (16, 0.0), (1, LEAST), (PART, 2.0)):
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
