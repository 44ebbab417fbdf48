"""Batch selection: seconds, and mean contrastive loss of the selected batches (B = 32, τ = 0.1).

    python eval/bench/batching.py --sizes [5120,50000,1000000] --embeddings pairs.npy

The methods are spectral clustering in groups of k = 40 batches, bisection and random batches.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from in_turn import memory_of_process, shown
from search import around, near

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import Outcome, Settings, command_line

from dualenc.batching import RandomBatches, SpectralBatches, batch_losses

B, TEMPERATURE, K = 32, 0.1, 40
SPECTRAL_UP_TO = 100_000
"""Pairs above which seconds of spectral clustering are extrapolated from 20 groups of K·B."""


def run(
    sizes: list[int] = [5120, 50_000],  # noqa: B006 - a default for the command line, never changed
    embeddings: Path | None = None,
) -> list[Outcome]:
    """Compare methods on N clustered unit vectors, or on those of a file (2, N, D), left first."""
    real = np.load(embeddings) if embeddings else None
    sizes = [len(real[0])] if real is not None else sizes

    def select(settings: Settings) -> Outcome:
        size, method = settings["N"], settings["method"]
        left, right = clustered(size) if real is None else real
        if method == "spectral" and size > SPECTRAL_UP_TO:
            # Groups are random and independent.
            some = np.random.default_rng(0).permutation(size)[: 20 * K * B]
            left, right = left[some], right[some]
        selector = RandomBatches(len(left), B)
        if method != "random":
            selector = SpectralBatches(len(left), B, method=method, temperature=TEMPERATURE, k=K)
        begun = time.perf_counter()
        batches = selector.select(0, left, right)
        seconds = (time.perf_counter() - begun) * size / len(left)
        loss = float(batch_losses(left, right, batches, TEMPERATURE).mean())
        return {"seconds": seconds, "loss": loss, "peak, MiB": memory_of_process("VmHWM")}

    methods = ("spectral", "random", "bisection")
    wanted = [{"N": size, "method": method} for size in sizes for method in methods]
    return shown(str(embeddings or "100 clusters"), wanted, select)


def clustered(num_pairs: int, dim: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Return two times (N, D) unit vectors near 100 random directions, right near left."""
    draw, length = np.random.default_rng(0), dim**-0.5
    centers = near(np.zeros((100, dim), np.float32), length, draw)
    points = around(centers, num_pairs, length, draw)
    return near(points, length / 2, draw), near(points, length / 2, draw)


def check(folder: Path) -> None:
    """Select batches of planted clusters: harder than random ones, and known from earlier runs."""
    np.save(folder / "pairs.npy", clustered(320))
    run(embeddings=folder / "pairs.npy")
    spectral, random, bisection = (found["loss"] for found in run([2560]))
    assert random < 0.03 < 0.2 < spectral < bisection


if __name__ == "__main__":
    command_line(run, check=check)
