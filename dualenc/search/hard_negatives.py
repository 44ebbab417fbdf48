"""The rule that chooses hard negatives; `dualenc mine --help` shows its arguments, so nothing heavy
is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.search.mining import Exclusions


@dataclass(frozen=True)
class Rule:
    """Selection of negatives among a query's nearest documents.

    Args:
        num_negatives: maximum per query.
        first_rank: first rank of the window, counted from 1 without the known positives; 11 skips
            the first ten.
        last_rank: last rank of the window.
        relative: maximum share of the mean score of the query's positives: s ≤ s⁺ − (1 −
            relative)·|s⁺|, which is relative·s⁺ for a positive score. Moreira et al. 2024 (arXiv
            2407.15831, TopK-PercPos) find 0.95 best.
            null: no limit.
        pick: take the best of the remaining candidates, or a random sample.
        seed: of the random samples, which are drawn per query.
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
        """The maximum score of a query's negatives, from the scores (P,) of its positives, at least
        one."""
        if self.relative is None:
            return math.inf
        positive = float(positives.mean())
        return positive - (1 - self.relative) * abs(positive)


class Negatives(NamedTuple):
    """A query's negatives, best first, and what was dropped.

    Attributes:
        ranks: (n,) from 1, without the excluded documents.
        num_candidates: documents in the window of ranks.
        num_excluded: excluded documents up to the end of the window.
        num_too_high: candidates above the limit, likely relevant.
        num_repeated: candidates with the contents of a better one.
    """

    ids: np.ndarray
    scores: np.ndarray
    ranks: np.ndarray
    num_candidates: int
    num_excluded: int
    num_too_high: int
    num_repeated: int


def search_depth(queries: Sequence[int], exclusions: Exclusions, rule: Rule) -> int:
    """Number of documents that fills the window of each query even if all excluded ones rank above
    it."""
    return rule.last_rank + max(len(exclusions.of_query(query)) for query in queries)


def choose_negatives(
    query: int,
    ids: np.ndarray,
    scores: np.ndarray,
    positives: np.ndarray,
    exclusions: Exclusions,
    rule: Rule,
) -> Negatives:
    """Choose the negatives of a query.

    Args:
        query: its id.
        ids: (n,) the nearest documents, best first, `search_depth` of them.
        scores: (n,) their scores.
        positives: (P,) the scores of the query's positives.
        exclusions: documents that cannot be negatives.
        rule: which of the others become negatives.
    """
    is_excluded = np.isin(ids, exclusions.of_query(query))
    ranks = np.cumsum(~is_excluded)
    end = np.searchsorted(ranks, rule.last_rank) + 1
    in_window = ~is_excluded & (ranks >= rule.first_rank) & (ranks <= rule.last_rank)
    ids = ids[in_window]
    scores = scores[in_window]
    is_too_high = scores > rule.ceiling(positives)
    is_repeated = exclusions.repeats(ids)
    places = np.flatnonzero(~is_too_high & ~is_repeated)
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
