"""The background process that selects batches: `python -m dualenc.training.selection_worker JOB_FOLDER`.

A module of its own, started as a plain process: it never imports the user's script, owns no GPU, and when the
training is killed it finishes its one job and is gone.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

import numpy as np

from dualenc.batching.losses import batch_losses
from dualenc.batching.selector import BatchSelector
from dualenc.files import atomic_path, save_array, write_json
from dualenc.training.seeds import generator


def main(folder: Path) -> None:
    """Read selector.pickle, left.npy and right.npy; write batches.npy, then report.json."""
    if hasattr(os, "nice"):
        os.nice(10)  # the training comes first
    with open(folder / "selector.pickle", "rb") as stream:
        selector, epoch, seed = pickle.load(stream)
    left, right = (np.load(folder / f"{side}.npy") for side in ("left", "right"))
    batches, report = select(selector, epoch, left, right, seed)
    with atomic_path(folder / "batches.npy") as beside:
        save_array(beside, batches)
    write_json(folder / "report.json", report)


def select(
    selector: BatchSelector, epoch: int, left: np.ndarray, right: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Select the batches of an epoch and measure how hard they are.

    Args:
        selector: chooses the batches.
        epoch: for which epoch.
        left: (M, D) unit-norm embeddings in any floating type.
        right: (M, D) likewise.
        seed: of the random batches to compare with.

    Returns:
        (num_batches, B) pair indices; a report: seconds, loss of the selected batches and of random ones.
    """
    left, right = left.astype(np.float32), right.astype(np.float32)
    start = time.perf_counter()
    batches = np.asarray(selector.select(epoch, left, right), dtype=np.int64)
    seconds = time.perf_counter() - start
    order = np.resize(generator("compare", seed, epoch).permutation(len(left)), batches.shape)
    temperature = float(getattr(selector, "temperature", 0.1))
    report = {
        "seconds": seconds,
        "loss": mean_batch_loss(left, right, batches, temperature),
        "random_loss": mean_batch_loss(left, right, order, temperature),
    }
    return batches, report


def mean_batch_loss(
    left: np.ndarray, right: np.ndarray, batches: np.ndarray, temperature: float, at_most: int = 1024
) -> float:
    """Mean loss of batches at frozen embeddings, over at most so many evenly spaced ones.

    Args:
        left: (M, D).
        right: (M, D).
        batches: (num_batches, B) pair indices.
        temperature: τ.
        at_most: batches looked at.
    """
    chosen = np.unique(np.linspace(0, len(batches) - 1, min(at_most, len(batches))).astype(int))
    return float(batch_losses(left, right, batches[chosen], temperature).mean())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
