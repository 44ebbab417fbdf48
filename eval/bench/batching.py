"""Batch selection: seconds, and mean contrastive loss of the selected batches (B = 32, τ = 0.1).

    python eval/bench/batching.py --sizes [5120,50000,1000000] --embeddings pairs.npy

Each method is compared with spectral clustering in groups of k = 40 in the same run. Then our
spectral clustering of one group of 1,280 pairs races scikit-learn's spectral embedding and k-means
with scipy's assignment.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from in_turn import in_turn
from jsonargparse import auto_cli
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.manifold import spectral_embedding

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches, batch_losses
from dualenc.batching.spectral import affinity, spectral_batches

B, TEMPERATURE, K = 32, 0.1, 40


def clustered_embeddings(
    num_pairs: int, clusters: int = 100, dim: int = 128, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Two times (N, D) unit vectors around random directions, noise as long as the signal, right
    near left."""
    draw = np.random.default_rng(seed)

    def unit_near(points: np.ndarray, noise: float) -> np.ndarray:
        points = points + np.float32(noise / dim**0.5) * draw.standard_normal(
            points.shape, dtype=np.float32
        )
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        return points

    centers = unit_near(np.zeros((clusters, dim), np.float32), 1)
    points = unit_near(centers[draw.integers(clusters, size=num_pairs)], 1)
    return unit_near(points, 0.5), unit_near(points, 0.5)


def methods(num_pairs: int) -> dict[str, BatchSelector]:
    """What is compared."""
    clustered = {
        name: SpectralBatches(num_pairs, B, method=name, temperature=TEMPERATURE, k=K)  # type: ignore[arg-type]
        for name in ("spectral", "bisection")
    }
    return {
        "spectral": clustered.pop("spectral"),
        "random": RandomBatches(num_pairs, B),
        **clustered,
    }


def measure(selector: BatchSelector, left: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Seconds of one selection, and the mean loss of what it selects."""
    start = time.perf_counter()
    batches = selector.select(0, left, right)
    seconds = time.perf_counter() - start
    return seconds, batch_losses(left, right, batches, TEMPERATURE).mean()


def measure_sample(left: np.ndarray, right: np.ndarray, groups: int) -> tuple[float, float]:
    """As `measure`, of spectral clustering, extrapolated from some of its groups: they are random
    and independent."""
    rows = np.random.default_rng(0).permutation(len(left))[: groups * K * B]
    seconds, loss = measure(methods(len(rows))["spectral"], left[rows], right[rows])
    return seconds * len(left) / len(rows), loss


def compare(data: str, left: np.ndarray, right: np.ndarray, spectral_up_to: int) -> None:
    """Print one line per method."""
    size = len(left)
    results = {}
    for name, selector in methods(size).items():
        sampled = name == "spectral" and size > spectral_up_to
        seconds, loss = (
            measure_sample(left, right, groups=20) if sampled else measure(selector, left, right)
        )
        results[name] = seconds, loss
        faster, harder = results["spectral"][0] / seconds, loss / results["spectral"][1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{data:10} {size:9,} {name:10} {'~' if sampled else ' '}{seconds:9.2f} {loss:8.4f} "
            f"{faster:12.1f}x {harder:9.2f}x {peak:8.1f}",
            flush=True,
        )


def scikit_learn_batches(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The same algorithm from scikit-learn's parts."""
    num_clusters = len(left) // B
    weights = affinity(left, right, B, TEMPERATURE)
    rows = spectral_embedding(weights, n_components=num_clusters, drop_first=False, random_state=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    centers = KMeans(num_clusters, n_init=1, random_state=0).fit(rows).cluster_centers_
    _, places = linear_sum_assignment(np.repeat(cdist(rows, centers), B, axis=1))
    return np.argsort(places).reshape(num_clusters, B)


def race(data: str, left: np.ndarray, right: np.ndarray, rounds: int = 7) -> None:
    """Print the median seconds of ours and of scikit-learn's, taken in turn, on one random
    group."""
    rows = np.random.default_rng(1).permutation(len(left))[: K * B]
    left, right = left[rows], right[rows]
    rivals: dict[str, Callable[[], np.ndarray]] = {
        "ours": lambda: spectral_batches(left, right, B, TEMPERATURE, 0),
        "scikit-learn": lambda: scikit_learn_batches(left, right),
    }
    seconds, batches = in_turn(rivals, rounds)
    losses = {
        name: batch_losses(left, right, found, TEMPERATURE).mean()
        for name, found in batches.items()
    }
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    found = ", ".join(f"{name} {medians[name]:.2f} s (loss {losses[name]:.4f})" for name in rivals)
    print(
        f"one spectral group of {K * B:,}, {data}: {found}; "
        f"ratio {medians['ours'] / medians['scikit-learn']:.2f}"
    )


def main(
    sizes: list[int] = [5120, 20_480, 50_000],  # noqa: B006 - a default for the command line, never changed
    embeddings: Path | None = None,
    spectral_up_to: int = 100_000,
    clusters: int = 100,
) -> None:
    """Print seconds, mean batch loss, both against spectral clustering, and the peak memory so far.

    Args:
        sizes: numbers of pairs N.
        embeddings: real ones to use as well: a .npy file of shape (2, N, D), left then right, unit
            norm.
        spectral_up_to: above this N, the seconds of spectral clustering are extrapolated from 20 of
            its groups.
        clusters: of the synthetic embeddings (D = 128).
    """
    print(
        f"{'data':10} {'N':>9} {'method':10} {'seconds':>10} "
        f"{'loss':>8} {'faster':>13} {'harder':>10} {'peak GB':>8}"
    )
    for size in sorted(sizes):
        compare("clustered", *clustered_embeddings(size, clusters), spectral_up_to)
    race("clustered", *clustered_embeddings(50_000, clusters))
    if embeddings is not None:
        left, right = np.load(embeddings)
        for size in sorted({min(size, len(left)) for size in sizes}):
            compare("real", left[:size], right[:size], spectral_up_to)
        race("real", left, right)


if __name__ == "__main__":
    auto_cli(main)
