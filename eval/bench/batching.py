"""Batch selection: seconds, and mean contrastive loss of the selected batches (B = 32, τ = 0.1).

    python eval/bench/batching.py --sizes [5120,50000,1000000] --embeddings pairs.npy

The methods are spectral clustering in groups of k = 40 batches, bisection and random batches.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from frame import command_line
from search import around, near

from dualenc.batching import RandomBatches, SpectralBatches, batch_losses
from dualenc.evaluation.report_page import Table, print_table

B, TEMPERATURE, K = 32, 0.1, 40
SPECTRAL_UP_TO = 100_000
"""Pairs above which seconds of spectral clustering are extrapolated from 20 groups of K·B."""


def run(sizes: tuple[int, ...] = (5120, 20_480, 50_000), embeddings: Path | None = None) -> None:
    """Compare methods on N clustered unit vectors, and on those of a file (2, N, D), left first."""
    for size in sorted(sizes):
        compare("clustered", *clustered(size))
    if embeddings is not None:
        left, right = np.load(embeddings)
        for size in sorted({min(size, len(left)) for size in sizes}):
            compare("real", left[:size], right[:size])


def clustered(num_pairs: int, dim: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Return two times (N, D) unit vectors near 100 random directions, right near left."""
    draw, length = np.random.default_rng(0), dim**-0.5
    centers = near(np.zeros((100, dim), np.float32), length, draw)
    points = around(centers, num_pairs, length, draw)
    return near(points, length / 2, draw), near(points, length / 2, draw)


def compare(data: str, left: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Print and return seconds and mean loss of each method, and the peak memory so far."""
    rows: list[dict[str, Any]] = []
    for name in ("spectral", "random", "bisection"):
        some = slice(None)
        if name == "spectral" and len(left) > SPECTRAL_UP_TO:
            # Groups are random and independent.
            some = np.random.default_rng(0).permutation(len(left))[: 20 * K * B]
        pairs = left[some], right[some]
        selector = RandomBatches(len(pairs[0]), B)
        if name != "random":
            selector = SpectralBatches(len(pairs[0]), B, method=name, temperature=TEMPERATURE, k=K)
        begun = time.perf_counter()
        batches = selector.select(0, *pairs)
        seconds = (time.perf_counter() - begun) * len(left) / len(pairs[0])
        loss = float(batch_losses(*pairs, batches, TEMPERATURE).mean())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        measured = {"of N": len(pairs[0]), "seconds": seconds, "loss": loss, "peak GB": peak}
        rows.append({"method": name, **measured})
    print_table(Table(f"{data}, N = {len(left):,}", rows))
    return rows


def check(folder: Path) -> None:
    """Select batches of planted clusters: harder than random ones, and known from earlier runs."""
    np.save(folder / "pairs.npy", clustered(320))
    run(sizes=(320,), embeddings=folder / "pairs.npy")
    spectral, random, bisection = (row["loss"] for row in compare("clustered", *clustered(2560)))
    assert random < 0.03 < 0.2 < spectral < bisection


if __name__ == "__main__":
    command_line(run, check=check)
