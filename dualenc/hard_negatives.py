"""The rule that chooses hard negatives; `dualenc mine --help` shows its arguments, so nothing heavy is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dualenc.errors import DualencError


@dataclass(frozen=True)
class Rule:
    """Selection of negatives among a query's nearest documents; of several score limits the lowest applies.

    Args:
        num_negatives: maximum per query.
        first_rank: first rank of the window, counted from 1 without the known positives; 11 skips the first ten.
        last_rank: last rank of the window.
        relative: maximum share of the positive's score: s ≤ s⁺ − (1 − relative)·|s⁺|, which is relative·s⁺ for a
            positive score. Moreira et al. 2024 (arXiv 2407.15831, TopK-PercPos) find 0.95 best.
        margin: minimum difference to the positive's score (their TopK-MarginPos).
        max_score: maximum score (their TopK-Abs).
        percentile: maximum score as a percentile, from 0 to 100, of the scores of all known pairs.
        against: which score to compare with if a query has several positives.
        pick: take the best of the remaining candidates, or a random sample.
        seed: of the random samples; they are drawn per query, and do not depend on the grouping into blocks.

    Raises:
        DualencError: a number out of range.
    """

    num_negatives: int = 8
    first_rank: int = 1
    last_rank: int = 100
    relative: float | None = 0.95
    margin: float | None = None
    max_score: float | None = None
    percentile: float | None = None
    against: Literal["lowest", "mean", "highest"] = "mean"
    pick: Literal["top", "random"] = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "num_negatives": (1, math.inf),
            "first_rank": (1, self.last_rank),
            "relative": (0, math.inf),
            "margin": (0, math.inf),
            "max_score": (-math.inf, math.inf),
            "percentile": (0, 100),
            "seed": (0, math.inf),
        }
        for name, (lowest, highest) in ranges.items():
            value = getattr(self, name)
            if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
                allowed = f"{lowest:g} up" if highest == math.inf else f"{lowest:g} to {highest:g}"
                raise DualencError(f"{name} is {value}; give a number from {allowed}")

    def ceiling_of_all(self, positives: np.ndarray) -> float:
        """The maximum score of all negatives, whatever their query.

        Args:
            positives: (M,) scores of all known pairs.
        """
        limits = [math.inf if self.max_score is None else self.max_score]
        if self.percentile is not None and len(positives) > 0:
            limits.append(float(np.percentile(positives, self.percentile)))
        return min(limits)

    def ceiling(self, positives: np.ndarray, ceiling_of_all: float = math.inf) -> float:
        """The maximum score of a query's negatives.

        Args:
            positives: (P,) scores of the query's positives, at least one.
            ceiling_of_all: what no negative of any query may exceed.
        """
        scores = {"lowest": positives.min(), "mean": positives.mean(), "highest": positives.max()}
        positive = float(scores[self.against])
        limits = [ceiling_of_all]
        if self.relative is not None:
            limits.append(positive - (1 - self.relative) * abs(positive))
        if self.margin is not None:
            limits.append(positive - self.margin)
        return min(limits)

    def window(self, excluded: np.ndarray) -> np.ndarray:
        """Positions, ascending, of the candidates in the window of ranks.

        Args:
            excluded: (L,) bool, which documents, sorted by score, are no candidates; they have no rank.
        """
        return np.flatnonzero(~excluded)[self.first_rank - 1 : self.last_rank]

    def choose(self, allowed: np.ndarray, query: int) -> np.ndarray:
        """Choose among candidates that are sorted by score; returns their positions, ascending.

        Args:
            allowed: (L,) bool, which candidates can be negatives.
            query: number of the query, which seeds its random sample.
        """
        places = np.flatnonzero(allowed)
        if self.pick == "random" and len(places) > self.num_negatives:
            generator = np.random.default_rng((self.seed, query))
            return np.sort(generator.choice(places, self.num_negatives, replace=False))
        return places[: self.num_negatives]
