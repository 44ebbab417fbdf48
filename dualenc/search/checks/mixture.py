"""Two models in one index: canaries that split, or two groups that share no axes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dualenc.search.checks.canaries import Canaries, where_deviating
from dualenc.search.checks.findings import Finding, alarm, ok, skipped
from dualenc.search.checks.stored import Sample, Stored

NAME = "mixture"
SAMPLED = 4000
"""Vectors that are compared with one another."""
MIN_SAMPLED = 400
MIN_SHARE = 0.05
"""Share of canaries, or of vectors, that the smaller of two groups has at least."""
STARTS = 4
"""Random starts of the search for two groups."""
STEPS = 30
MAX_MEAN_COSINE = 0.5
"""Cosine of the two groups' mean vectors below which they may be of two models."""
MAX_CROSSING = 0.05
"""Share of nearest neighbors in the other group up to which the groups count as separate."""
MIN_SIGMAS = 4.0
"""Standard deviations by which an agreement of halves must exceed chance to be usable."""
MAX_RATIO = 0.65
"""Agreement of two groups relative to that of halves of one, below which they are two models.
Groups of one model had 0.77 to 1.12, of two models 0.04 to 0.57 (MiniLM-L6, MiniLM-L3, E5)."""


class Groups(NamedTuple):
    """Two groups of vectors, and how alike they are.

    Attributes:
        share: share of the smaller one.
        crossing: share of nearest neighbors that are in the other group.
        mean_cosine: cosine of their mean vectors.
        within: agreement of the scales of axes between halves of one group, the lower of both.
        between: the same between the groups.
        dim: number of axes.
    """

    share: float
    crossing: float
    mean_cosine: float
    within: float
    between: float
    dim: int

    @property
    def are_two_models(self) -> bool:
        """True if two separate groups have their own axes."""
        chance = 1 / np.sqrt(self.dim)
        return (
            self.share >= MIN_SHARE
            and self.crossing <= MAX_CROSSING
            and self.mean_cosine < MAX_MEAN_COSINE
            and self.within >= MIN_SIGMAS * chance
            and self.between <= MAX_RATIO * self.within
        )


def check_mixture(stored: Stored, sample: Sample, canaries: Canaries | None) -> Finding:
    """Return an alarm if the vectors are of two models of one dimension.

    Args:
        stored: the vectors.
        sample: those that were read.
        canaries: texts that were embedded again; None without any.
    """
    if stored.provenance.mapped:
        return skipped(NAME, f"{stored.provenance.mapped:,} vectors are mapped from another model")
    if canaries is not None and (found := _split_canaries(stored, canaries)) is not None:
        return found
    if not stored.is_exact:
        return skipped(NAME, "codes blur the axes, and canaries do not split")
    is_usable = np.isfinite(sample.vectors).all(axis=1) & sample.vectors.any(axis=1)
    places = np.flatnonzero(is_usable)
    if len(places) < MIN_SAMPLED:
        return skipped(NAME, f"{len(places)} vectors are too few, and canaries do not split")
    random = np.random.default_rng(0)
    places = random.choice(places, min(SAMPLED, len(places)), replace=False)
    vectors = sample.vectors[places]
    groups = compare_groups(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    numbers = {name: round(float(value), 4) for name, value in groups._asdict().items()}
    if groups.are_two_models:
        line = (
            f"{groups.share:.0%} of the vectors share neither neighbors nor axes with the others: "
            "they are of two models"
        )
        return alarm(NAME, line, **numbers)
    return ok(NAME, f"no two groups of {len(vectors):,} vectors have their own axes", **numbers)


def _split_canaries(stored: Stored, canaries: Canaries) -> Finding | None:
    """Return an alarm if a part of the canaries deviates; None if the canaries do not tell."""
    share = float(canaries.deviate.mean()) if len(canaries.deviate) else 0.0
    if not MIN_SHARE <= share <= 1 - MIN_SHARE or canaries.is_cause_of_all:
        return None
    count, of = int(canaries.deviate.sum()), len(canaries.deviate)
    place = where_deviating(stored, canaries) or "all over the collection"
    how = "another model" if canaries.cause is None else canaries.cause.line
    line = f"mixed vectors: {count} of {of} canaries deviate, {place}: {how}"
    return alarm(NAME, line, deviating=count, texts=of)


def compare_groups(vectors: np.ndarray) -> Groups:
    """Divide unit vectors into two groups, and compare them.

    Each model has its own axes: how much neighboring vectors differ in each component is a
    property of the model and hardly of the texts. Halves of one group agree on it, and so do groups
    of one model, however far apart their topics are.

    Args:
        vectors: (n, D) float32 of length one.
    """
    is_second = _two_means(vectors)
    share = float(min(is_second.mean(), 1 - is_second.mean()))
    parts = [vectors[~is_second], vectors[is_second]]
    dim = vectors.shape[1]
    if min(map(len, parts)) < 4:
        return Groups(share, 1.0, 1.0, 0.0, 0.0, dim)
    nearest = _nearest(vectors)
    crossing = float((is_second[nearest] != is_second).mean())
    means = [part.mean(axis=0) for part in parts]
    lengths = np.linalg.norm(means, axis=1)
    mean_cosine = float(means[0] @ means[1] / max(lengths.prod(), 1e-30))
    within = min(_agreement(part[::2], part[1::2]) for part in parts)
    return Groups(share, crossing, mean_cosine, within, _agreement(*parts), dim)


def _two_means(vectors: np.ndarray) -> np.ndarray:
    """Return which vectors (n,) belong to the second of two groups, by spherical k-means."""
    random = np.random.default_rng(0)
    best, best_sum = np.zeros(len(vectors), bool), -np.inf
    for _ in range(STARTS):
        centers = vectors[random.choice(len(vectors), 2, replace=False)]
        for _ in range(STEPS):
            scores = vectors @ centers.T
            is_second = scores[:, 1] > scores[:, 0]
            if is_second.all() or not is_second.any():
                break
            centers = np.stack([vectors[~is_second].mean(axis=0), vectors[is_second].mean(axis=0)])
            centers /= np.maximum(np.linalg.norm(centers, axis=1, keepdims=True), 1e-30)
        if (total := float(scores.max(axis=1).sum())) > best_sum:
            best, best_sum = is_second, total
    return best


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """Return the row of the nearest other vector (n,)."""
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    return scores.argmax(axis=1)


def _agreement(left: np.ndarray, right: np.ndarray) -> float:
    """Return the correlation of the scales of axes of two sets of vectors."""
    # Scales that do not differ at all have no correlation.
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.corrcoef(_scales(left), _scales(right))[0, 1]
    return float(np.nan_to_num(correlation))


def _scales(vectors: np.ndarray) -> np.ndarray:
    """Return the log mean square (D,) of the differences of nearest vectors."""
    differences = vectors - vectors[_nearest(vectors)]
    return np.log(np.square(differences).mean(axis=0) + 1e-12)
