"""The rule that chooses hard negatives. `dualenc mine --help` shows it, so import nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dualenc.errors import DualencError


@dataclass(frozen=True)
class Rule:
    """Which of a query's nearest documents become its negatives.

    A window of ranks limits how hard they are, and a score limit drops likely false negatives.

        Rule(num_negatives=4, first_rank=11, relative=0.95, pick="random")

    Args:
        num_negatives: maximum number of negatives per query.
        first_rank: first rank of the window, counted from 1 without the known positives; 11 skips
            the first ten.
        last_rank: last rank of the window.
        relative: highest score of a negative, relative to the mean score s⁺ of the query's
            positives: s ≤ s⁺ − (1 − relative)·|s⁺|, which is relative·s⁺ for a positive score.
            Moreira et al. 2024 (arXiv 2407.15831, TopK-PercPos) find 0.95 best. null: no limit.
        pick: take the best of the remaining candidates ("top"), or a random sample ("random").
        seed: random seed of the samples, which are drawn per query.

    Raises:
        DualencError: a number is out of range.
    """

    num_negatives: int = 8
    first_rank: int = 1
    last_rank: int = 100
    relative: float | None = 0.95
    pick: Literal["top", "random"] = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "num_negatives": (1, math.inf),
            "first_rank": (1, self.last_rank),
            "relative": (0, math.inf),
            "seed": (0, math.inf),
        }
        for name, (lowest, highest) in ranges.items():
            value = getattr(self, name)
            if value is not None and not (lowest <= value <= highest and math.isfinite(value)):
                allowed = f"{lowest:g} up" if highest == math.inf else f"{lowest:g} to {highest:g}"
                raise DualencError(f"{name} is {value}", fix=f"give a number from {allowed}")

    def ceiling(self, positives: np.ndarray) -> float:
        """Return the highest allowed score of a query's negatives.

        Args:
            positives: (P,) scores of the query's positives, P ≥ 1.
        """
        if self.relative is None:
            return math.inf
        positive = float(positives.mean())
        return positive - (1 - self.relative) * abs(positive)


class Negatives(NamedTuple):
    """A query's negatives, best first, and counts of what was dropped.

    The arrays have the same length n, at most `Rule.num_negatives`.

        negatives = choose_negatives(query, ids, scores, positives, excluded, groups, Rule())
        print(negatives.ids, negatives.num_too_high)

    Attributes:
        ids: (n,) right ids.
        scores: (n,) their scores.
        ranks: (n,) ranks, counted from 1 without the excluded documents.
        num_candidates: number of documents in the window of ranks.
        num_excluded: number of excluded documents up to the end of the window.
        num_too_high: number of candidates above the score limit, which are likely relevant.
        num_repeated: number of candidates with the same contents as a better one.
    """

    ids: np.ndarray
    scores: np.ndarray
    ranks: np.ndarray
    num_candidates: int
    num_excluded: int
    num_too_high: int
    num_repeated: int


def search_depth(excluded: Iterable[np.ndarray], rule: Rule) -> int:
    """Return how many documents fill every window even if all excluded ones rank above it.

    Args:
        excluded: excluded right ids (E,) of each query.
        rule: the rule with the window.
    """
    return rule.last_rank + max(map(len, excluded))


def choose_negatives(
    query: int,
    ids: np.ndarray,
    scores: np.ndarray,
    positives: np.ndarray,
    excluded: np.ndarray,
    groups: np.ndarray,
    rule: Rule,
) -> Negatives:
    """Choose the negatives of a query.

    Args:
        query: left id of the query, which seeds its random sample.
        ids: (n,) right ids of the nearest documents, best first, `search_depth` of them.
        scores: (n,) their scores.
        positives: (P,) scores of the query's positives.
        excluded: (E,) right ids that cannot be negatives.
        groups: (num_right,) content group of each document; copies share one.
        rule: which of the other documents become negatives.
    """
    is_excluded = np.isin(ids, excluded)
    # Excluded documents take no rank, so the window moves down by their number.
    ranks = np.cumsum(~is_excluded)
    end = np.searchsorted(ranks, rule.last_rank) + 1
    in_window = ~is_excluded & (ranks >= rule.first_rank) & (ranks <= rule.last_rank)
    ids = ids[in_window]
    scores = scores[in_window]
    # Too similar to be wrong: most of these are relevant and unjudged.
    is_too_high = scores > rule.ceiling(positives)
    is_repeated = _repeats(groups[ids])
    places = np.flatnonzero(~is_too_high & ~is_repeated)
    # Seeded per query, so that the sample does not depend on blocks or processes.
    if rule.pick == "random" and len(places) > rule.num_negatives:
        generator = np.random.default_rng((rule.seed, query))
        places = np.sort(generator.choice(places, rule.num_negatives, replace=False))
    places = places[: rule.num_negatives]
    return Negatives(
        ids=ids[places],
        scores=scores[places],
        ranks=rule.first_rank + places,
        num_candidates=len(ids),
        num_excluded=int(is_excluded[:end].sum()),
        num_too_high=int(is_too_high.sum()),
        num_repeated=int((is_repeated & ~is_too_high).sum()),
    )


def _repeats(groups: np.ndarray) -> np.ndarray:
    """Return which entries (n,) bool occur earlier in the array."""
    is_repeat = np.ones(len(groups), bool)
    # `np.unique` returns the first place of each group.
    is_repeat[np.unique(groups, return_index=True)[1]] = False
    return is_repeat
