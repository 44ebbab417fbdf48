"""Batch selection: seconds, and mean contrastive loss of the selected batches (B = 32, τ = 0.1).

    python eval/bench/batching.py --sizes [5120,50000,1000000] --embeddings pairs.npy

Each method is compared with spectral clustering in groups of k = 40 in the same run. Then our
spectral clustering of one group of 1,280 pairs races scikit-learn's spectral embedding and k-means
with scipy's assignment.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.manifold import spectral_embedding

sys.path.insert(0, str(Path(__file__).parents[1]))

from frame import command_line
from in_turn import in_turn, rows_of
from vectors import around, near

from dualenc.batching import RandomBatches, SpectralBatches, batch_losses
from dualenc.batching.spectral import affinity, spectral_batches
from dualenc.evaluation.report_page import Table, print_table

B, TEMPERATURE, K = 32, 0.1, 40
SPECTRAL_UP_TO = 100_000
"""Pairs above which seconds of spectral clustering are extrapolated from 20 groups of K·B."""


def run(sizes: tuple[int, ...] = (5120, 20_480, 50_000), embeddings: Path | None = None) -> None:
    """Compare methods by number of pairs, on clustered unit vectors and on some in a file.

    Args:
        sizes: numbers of pairs N.
        embeddings: .npy file (2, N, D), left then right, to use as well.
    """
    for size in sorted(sizes):
        compare("clustered", *clustered(size))
    race("clustered", *clustered(50_000))
    if embeddings is not None:
        left, right = np.load(embeddings)
        for size in sorted({min(size, len(left)) for size in sizes}):
            compare("real", left[:size], right[:size])
        race("real", left, right)


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


def race(data: str, left: np.ndarray, right: np.ndarray, rounds: int = 7) -> None:
    """Print the seconds of scikit-learn and of ours, taken in turn, on one random group."""
    rows = np.random.default_rng(1).permutation(len(left))[: K * B]
    left, right = left[rows], right[rows]
    rivals = {
        "scikit-learn": lambda: scikit_learn_batches(left, right),
        "dualenc": lambda: spectral_batches(left, right, B, TEMPERATURE, 0),
    }
    times, found = in_turn(rivals, rounds)
    lines = [
        {**row, "loss": float(batch_losses(left, right, found[row["call"]], TEMPERATURE).mean())}
        for row in rows_of(times)
    ]
    print_table(Table(f"one spectral group of {len(left):,}, {data}", lines))


def scikit_learn_batches(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Select by the same algorithm, from scikit-learn's parts."""
    num_clusters = len(left) // B
    weights = affinity(left, right, B, TEMPERATURE)
    rows = spectral_embedding(weights, n_components=num_clusters, drop_first=False, random_state=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    centers = KMeans(num_clusters, n_init=1, random_state=0).fit(rows).cluster_centers_
    _, places = linear_sum_assignment(np.repeat(cdist(rows, centers), B, axis=1))
    return np.argsort(places).reshape(num_clusters, B)


def check(folder: Path) -> None:
    """Select random batches with the least loss, and race on few pairs."""
    left, right = clustered(2560)
    spectral, random, bisection = (row["loss"] for row in compare("clustered", left, right))
    assert random < 0.03 < 0.2 < spectral < bisection
    race("clustered", left, right, rounds=1)


if __name__ == "__main__":
    command_line(run, check=check)
