"""Geometry of embeddings: uniformity and effective rank."""

from __future__ import annotations

import math

import numpy as np

from dualenc.errors import DualencError
from dualenc.evaluation.probe import unit_rows
from dualenc.types import Vectors

BLOCK_ROWS = 1024


def uniformity(embeddings: Vectors, temperature: float = 2) -> float:
    """log of the mean of exp(−t‖x − y‖²) over pairs of different rows (Wang & Isola 2020, Eq. 8);
    lower is more even.

    The embeddings (N, D), N ≥ 2, are scaled to unit norm here.
    """
    rows = unit_rows(embeddings, "embeddings")
    if len(rows) < 2:
        raise DualencError(f"{len(rows)} embedding; uniformity needs two or more")
    total = 0.0
    for start in range(0, len(rows), BLOCK_ROWS):
        similarities = rows[start : start + BLOCK_ROWS] @ rows.T
        squared_distances = 2 - 2 * similarities.astype(np.float64)
        total += float(np.exp(-temperature * squared_distances).sum())
    # A row with itself adds exp(0) = 1 to the sum.
    return math.log((total - len(rows)) / (len(rows) * (len(rows) - 1)))


def effective_rank(embeddings: Vectors) -> float:
    """exp of the entropy of the normalised singular values of (N, D) embeddings (RankMe: Garrido et
    al. 2023, Eq. 1–2).

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
