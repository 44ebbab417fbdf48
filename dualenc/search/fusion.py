"""Rank fusion: several rankings of one query become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from dualenc.errors import DualencError

Fusion = Literal["rrf", "weighted"]
RRF_K = 60
"""The constant of reciprocal rank fusion that its authors chose."""
FUSION_DEPTH = 100
"""Candidates of each ranking that are fused, unless more results are requested."""


def fuse(
    rankings: Sequence[Sequence[tuple[str, float]]],
    method: Fusion = "rrf",
    *,
    weights: Sequence[float] | None = None,
) -> list[tuple[str, float]]:
    """Rank fusion: combine rankings of the same query, best first, with weights (R,), by default
    equal ones.

    "rrf" adds 1 / (60 + rank) over the R rankings, whatever the scores (Cormack, Clarke & Büttcher
    2009, SIGIR); each is multiplied by its weight, divided by the mean weight. "weighted" adds w ·
    (score − lowest) / (highest − lowest) of each ranking, by default with w = 1 / R (Bruch, Gai &
    Ingber 2023, arXiv 2210.11934). Ties are in descending order of ids, as trec_eval orders them.
    """
    weights = [1 / len(rankings)] * len(rankings) if weights is None else list(weights)
    are_good = (
        len(weights) == len(rankings)
        and all(w >= 0 for w in weights)
        and 0 < sum(weights) < float("inf")
    )
    if method not in get_args(Fusion) or not are_good:
        raise DualencError(
            f"fusion is {method!r} and weights are {weights} for {len(rankings)} rankings",
            fix=f"give {' or '.join(get_args(Fusion))}, and weights of 0 or more, not all 0",
        )
    mean_weight = sum(weights) / len(weights)
    fused: dict[str, float] = {}
    for ranking, weight in zip(rankings, weights):
        if method == "rrf":
            # Of equal weights, whatever their sum, the published sum.
            shares = [1 / (mean_weight * (RRF_K + rank)) for rank in range(1, len(ranking) + 1)]
        else:
            shares = _min_max([score for _, score in ranking])
        for (name, _), share in zip(ranking, shares):
            fused[name] = fused.get(name, 0.0) + weight * share
    return sorted(fused.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)


def _min_max(scores: list[float]) -> list[float]:
    """Min-max normalisation to [0, 1]; equal scores all become 1."""
    lowest = min(scores, default=0.0)
    spread = max(scores, default=0.0) - lowest
    return [(score - lowest) / spread if spread > 0 else 1.0 for score in scores]
