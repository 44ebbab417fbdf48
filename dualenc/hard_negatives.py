"""The rule that chooses hard negatives; `dualenc mine --help` shows its arguments, so nothing heavy is imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.search.mining import Exclusions


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
        seed: of the random samples, which are drawn per query.
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
        """The maximum score of all negatives, from the scores (M,) of all known pairs."""
        limits = [math.inf if self.max_score is None else self.max_score]
        if self.percentile is not None and len(positives) > 0:
            limits.append(float(np.percentile(positives, self.percentile)))
        return min(limits)

    def ceiling(self, positives: np.ndarray, ceiling_of_all: float = math.inf) -> float:
        """The maximum score of a query's negatives, from the scores (P,) of its positives, at least one."""
        scores = {"lowest": positives.min(), "mean": positives.mean(), "highest": positives.max()}
        positive = float(scores[self.against])
        limits = [ceiling_of_all]
        if self.relative is not None:
            limits.append(positive - (1 - self.relative) * abs(positive))
        if self.margin is not None:
            limits.append(positive - self.margin)
        return min(limits)

    def choose(self, allowed: np.ndarray, query: int) -> np.ndarray:
        """Positions, ascending, of a query's negatives among its candidates; those in `allowed` (L,) can be one."""
        positions = np.flatnonzero(allowed)
        if self.pick == "random" and len(positions) > self.num_negatives:
            generator = np.random.default_rng((self.seed, query))
            return np.sort(generator.choice(positions, self.num_negatives, replace=False))
        return positions[: self.num_negatives]


class Ranking(NamedTuple):
    """A query's documents, best first."""

    ids: np.ndarray
    scores: np.ndarray


class Negatives(NamedTuple):
    """A query's negatives, best first, and what was dropped.

    Attributes:
        ranks: (n,) from 1, without the excluded documents; of the first search.
        too_high: scores of the candidates above the limit, likely relevant.
        num_candidates: documents in the window of ranks.
        num_excluded: excluded documents up to the end of the window.
        num_repeated: candidates with the contents of a better one.
    """

    ids: np.ndarray
    scores: np.ndarray
    ranks: np.ndarray
    too_high: np.ndarray
    num_candidates: int
    num_excluded: int
    num_repeated: int


def search_depth(queries: Sequence[int], exclusions: Exclusions, rule: Rule) -> int:
    """Number of documents that fills the window of each query even if all excluded ones rank above it."""
    return rule.last_rank + max(len(exclusions.of_query(query)) for query in queries)


def choose_negatives(
    queries: Sequence[int],
    rankings: Sequence[Ranking],
    positives: Sequence[np.ndarray],
    exclusions: Exclusions,
    rule: Rule,
    ceiling_of_all: float = math.inf,
    rescore: Callable[[list[np.ndarray]], list[tuple[np.ndarray, np.ndarray]]] | None = None,
) -> list[Negatives]:
    """Choose the negatives of n queries.

    Args:
        queries: (n,) ids.
        rankings: the nearest documents of each, `search_depth` of them.
        positives: the scores of each query's positives.
        exclusions: documents that cannot be negatives.
        rule: which of the others become negatives.
        ceiling_of_all: `Rule.ceiling_of_all`.
        rescore: from the candidates in the window of each query to their order and their scores in that order.
    """
    windows = []
    nums_excluded = []
    for query, ranking in zip(queries, rankings):
        is_excluded = np.isin(ranking.ids, exclusions.of_query(query))
        ranks = np.cumsum(~is_excluded)
        end = np.searchsorted(ranks, rule.last_rank) + 1
        nums_excluded.append(int(is_excluded[:end].sum()))
        in_window = ~is_excluded & (ranks >= rule.first_rank) & (ranks <= rule.last_rank)
        windows.append(Ranking(ranking.ids[in_window], ranking.scores[in_window]))
    if rescore is not None:
        rescored = rescore([window.ids for window in windows])
        windows = [
            Ranking(window.ids[order], scores) for window, (order, scores) in zip(windows, rescored)
        ]
    chosen = []
    for query, window, own, num_excluded in zip(queries, windows, positives, nums_excluded):
        is_too_high = window.scores > rule.ceiling(own, ceiling_of_all)
        is_repeated = exclusions.repeats(window.ids)
        places = rule.choose(~is_too_high & ~is_repeated, query)
        negatives = Negatives(
            ids=window.ids[places],
            scores=window.scores[places],
            ranks=rule.first_rank + places,
            too_high=window.scores[is_too_high],
            num_candidates=len(window.ids),
            num_excluded=num_excluded,
            num_repeated=int((is_repeated & ~is_too_high).sum()),
        )
        chosen.append(negatives)
    return chosen
