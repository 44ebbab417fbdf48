"""Geometry of embeddings: uniformity, effective rank, and cosines of positive and negative pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.probe import unit_rows
from dualenc.types import Integers, Vectors

BLOCK_ROWS = 1024
EDGES: npt.NDArray[np.float64] = np.linspace(-1, 1, 101)


def uniformity(embeddings: Vectors, temperature: float = 2) -> float:
    """log of the mean of exp(−t‖x − y‖²) over pairs of different rows (Wang & Isola 2020, Eq. 8); lower is more even.

    The embeddings (N, D), N ≥ 2, are scaled to unit norm here.
    """
    rows = unit_rows(embeddings, "embeddings")
    if len(rows) < 2:
        raise DualencError(f"{len(rows)} embedding; uniformity needs two or more")
    total = 0.0
    for _, similarities in _similarity_blocks(rows):
        squared_distances = 2 - 2 * similarities.astype(np.float64)
        total += float(np.exp(-temperature * squared_distances).sum())
    # A row with itself adds exp(0) = 1 to the sum.
    return math.log((total - len(rows)) / (len(rows) * (len(rows) - 1)))


def effective_rank(embeddings: Vectors) -> float:
    """exp of the entropy of the normalised singular values of (N, D) embeddings (RankMe: Garrido et al. 2023, Eq. 1–2).

    They are neither centred nor scaled here; the rank is at most D.
    """
    rows = np.asarray(embeddings, dtype=np.float64)
    # The triangular factor of a tall matrix has the same singular values.
    small = rows if min(rows.shape) == rows.shape[0] else np.linalg.qr(rows, mode="r")
    values = np.linalg.svd(small, compute_uv=False)
    if values.sum() == 0:
        return 0.0
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float(np.exp(-np.sum(shares * np.log(shares))))


class Similarities(NamedTuple):
    """Mean cosines of positive and of negative pairs, and the common area of their histograms: 0 apart, 1 equal."""

    positive_mean: float
    negative_mean: float
    overlap: float


def label_similarities(embeddings: Vectors, labels: Integers) -> Similarities:
    """Cosines of all pairs of different images, of equal label (positives) and of different label (negatives).

    The histograms have 100 equal bins on [−1, 1] (Robinson et al. 2021, arXiv:2010.04592, Figures 3 and 4). The
    embeddings (N, D) are scaled to unit norm here.
    """
    rows = unit_rows(embeddings, "embeddings")
    counts = np.zeros((2, len(EDGES) - 1), np.int64)
    sums = np.zeros(2)
    for start, similarities in _similarity_blocks(rows):
        numbers = np.arange(start, start + len(similarities))
        # Every pair once.
        later = np.arange(len(rows))[None, :] > numbers[:, None]
        same = labels[numbers][:, None] == labels[None, :]
        for place, mask in enumerate((later & same, later & ~same)):
            # Rounding takes a cosine beyond ±1, out of the last bin.
            cosines = np.clip(similarities[mask], -1, 1)
            counts[place] += np.histogram(cosines, EDGES)[0]
            sums[place] += similarities[mask].sum(dtype=np.float64)
    totals = counts.sum(axis=1)
    if totals.min() == 0:
        kind = "positive" if totals[0] == 0 else "negative"
        raise DualencError(f"there is no {kind} pair among these embeddings; give more images or classes")
    shares = counts / totals[:, None]
    means = sums / totals
    return Similarities(float(means[0]), float(means[1]), float(shares.min(axis=0).sum()))


def _similarity_blocks(rows: Vectors) -> Iterator[tuple[int, Vectors]]:
    """(n, N) cosines of consecutive unit rows with all of them, with the number of the first."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield start, rows[start : start + BLOCK_ROWS] @ rows.T
