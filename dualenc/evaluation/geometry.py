"""The shape of an embedding: alignment, uniformity, effective rank, and histograms of similarities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.knn import Features, Labels, check_labels, unit_rows

_BLOCK = 1024
BIN_EDGES: npt.NDArray[np.float64] = np.linspace(-1, 1, 101)


def alignment(left: Features, right: Features, power: float = 2) -> float:
    """Mean of ‖x − y‖^α over positive pairs of unit vectors (Wang & Isola 2020, Eq. 7); 0 is perfect.

    Args:
        left: (M, D) embeddings; scaled to unit norm here.
        right: (M, D) embedding of the positive of each.
        power: α.

    Raises:
        DualencError: the shapes differ.
    """
    if left.shape != right.shape:
        raise DualencError(f"left has shape {left.shape}, right {right.shape}; row i of each must be a pair")
    difference = unit_rows(left, "left embeddings") - unit_rows(right, "right embeddings")
    return float(np.mean(np.linalg.norm(difference.astype(np.float64), axis=1) ** power))


def uniformity(embeddings: Features, temperature: float = 2) -> float:
    """log of the mean of exp(−t‖x − y‖²) over pairs of different rows (Wang & Isola 2020, Eq. 8); lower is more even.

    Args:
        embeddings: (N, D), N ≥ 2; scaled to unit norm here.
        temperature: t.

    Raises:
        DualencError: fewer than two rows.
    """
    rows = unit_rows(embeddings, "embeddings")
    if len(rows) < 2:
        raise DualencError(f"{len(rows)} embedding; uniformity needs two or more")
    total = sum(
        float(np.exp(-temperature * (2 - 2 * similarities.astype(np.float64))).sum())
        for _, similarities in _similarity_blocks(rows)
    )
    # A row with itself adds exp(0) = 1 to the sum.
    return math.log((total - len(rows)) / (len(rows) * (len(rows) - 1)))


def effective_rank(embeddings: Features) -> float:
    """exp of the entropy of the normalised singular values (RankMe: Garrido et al. 2023, Eq. 1–2); D at most.

    Args:
        embeddings: (N, D), as they are: neither centred nor scaled.

    Raises:
        DualencError: not a matrix, or not finite.
    """
    rows = np.asarray(embeddings, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all():
        raise DualencError(f"embeddings of shape {rows.shape} have no rank; a matrix of finite numbers is needed")
    # The singular values of a tall matrix, through its (D, D) Gram matrix where that is much smaller.
    small = rows if min(rows.shape) == rows.shape[0] else np.linalg.qr(rows, mode="r")
    values = np.linalg.svd(small, compute_uv=False)
    if values.sum() == 0:
        return 0.0
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float(np.exp(-np.sum(shares * np.log(shares))))


@dataclass(frozen=True)
class SimilarityHistogram:
    """How often each similarity occurs among positive and among negative pairs.

    Attributes:
        edges: (K + 1,) edges of the bins on [−1, 1].
        positives: (K,) number of positive pairs in each bin.
        negatives: (K,) number of negative pairs in each bin.
        positive_mean: mean cosine of the positive pairs.
        negative_mean: mean cosine of the negative pairs.
    """

    edges: npt.NDArray[np.float64]
    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]
    positive_mean: float
    negative_mean: float

    @property
    def overlap(self) -> float:
        """Common area of the two histograms, each scaled to area 1: 0 if told apart, 1 if alike."""
        positives, negatives = self.positives / self.positives.sum(), self.negatives / self.negatives.sum()
        return float(np.minimum(positives, negatives).sum())

    def to_plain(self) -> dict[str, Any]:
        """The same as numbers and lists, for JSON."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SimilarityHistogram:
        """What `to_plain` was called on."""
        arrays: dict[str, Any] = {name: np.asarray(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**arrays)


def pair_similarities(
    left: Features,
    right: Features,
    left_id: Labels | None = None,
    right_id: Labels | None = None,
    left_positives: Labels | None = None,
) -> SimilarityHistogram:
    """Cosines of row i of `left` with row i of `right` (positives) and with every other row (negatives).

    Args:
        left: (M, D) embeddings; scaled to unit norm here.
        right: (M, D) embedding of the positive of each.
        left_id: (M,) ids: items of one id are never negatives of one another's partners. Rows differ by default.
        right_id: (M,) ids of the right side, in the same way.
        left_positives: (M, K) right ids that are positive with each left item, padded with −1.

    Raises:
        DualencError: the shapes differ, or there is no negative pair.
    """
    if left.shape != right.shape:
        raise DualencError(f"left has shape {left.shape}, right {right.shape}; row i of each must be a pair")
    rows, columns = unit_rows(left, "left embeddings"), unit_rows(right, "right embeddings")
    groups = [np.arange(len(rows)) if ids is None else np.asarray(ids) for ids in (left_id, right_id)]
    listed = np.empty((len(rows), 0), np.int64) if left_positives is None else np.asarray(left_positives)
    counts = _Counts()
    counts.add("positive", np.sum(rows * columns, axis=1))
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        same = (groups[0][block, None] == groups[0]) | (groups[1][block, None] == groups[1])
        for column in listed[block].T:
            same |= column[:, None] == groups[1]
        counts.add("negative", (rows[block] @ columns.T)[~same])
    return counts.histogram()


def label_similarities(embeddings: Features, labels: Labels) -> SimilarityHistogram:
    """Cosines of all pairs of different images, of equal label (positives) and of different label (negatives).

    These are the histograms of hard-negatives.txt, Figures 3 and 4.

    Args:
        embeddings: (N, D); scaled to unit norm here.
        labels: (N,) class numbers from 0.

    Raises:
        DualencError: lengths differ, or there is no pair of one kind.
    """
    classes = check_labels(embeddings, labels, "test")
    rows = unit_rows(embeddings, "embeddings")
    counts = _Counts()
    for start, similarities in _similarity_blocks(rows):
        numbers = np.arange(start, start + len(similarities))
        later = np.arange(len(rows))[None, :] > numbers[:, None]  # every pair once
        same = classes[numbers][:, None] == classes[None, :]
        counts.add("positive", similarities[later & same])
        counts.add("negative", similarities[later & ~same])
    return counts.histogram()


class _Counts:
    """Similarities counted into bins, block by block."""

    def __init__(self) -> None:
        self.bins = {kind: np.zeros(len(BIN_EDGES) - 1, np.int64) for kind in ("positive", "negative")}
        self.sums = {"positive": 0.0, "negative": 0.0}

    def add(self, kind: str, similarities: Features) -> None:
        # Rounding takes a cosine beyond ±1, out of the last bin.
        self.bins[kind] += np.histogram(np.clip(similarities, -1, 1), BIN_EDGES)[0]
        self.sums[kind] += float(similarities.sum(dtype=np.float64))

    def histogram(self) -> SimilarityHistogram:
        totals = {kind: int(bins.sum()) for kind, bins in self.bins.items()}
        for kind, total in totals.items():
            if total == 0:
                raise DualencError(f"there is no {kind} pair among these embeddings; give more images or classes")
        means = {kind: self.sums[kind] / totals[kind] for kind in totals}
        return SimilarityHistogram(
            BIN_EDGES, self.bins["positive"], self.bins["negative"], means["positive"], means["negative"]
        )


def _similarity_blocks(rows: npt.NDArray[np.float32]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """(n, N) cosines of consecutive unit rows with all of them, with the number of the first."""
    for start in range(0, len(rows), _BLOCK):
        yield start, rows[start : start + _BLOCK] @ rows.T
