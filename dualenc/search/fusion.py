"""Rank fusion: combine several rankings of the same query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from dualenc.errors import DualencError

Fusion = Literal["rrf", "weighted"]
RRF_K = 60
"""The constant of reciprocal rank fusion, as its authors chose it."""
FUSION_DEPTH = 100
"""Candidates of each ranking to fuse, unless more results are requested."""


def fuse(
    rankings: Sequence[Sequence[tuple[str, float]]],
    method: Fusion = "rrf",
    *,
    weights: Sequence[float] | None = None,
) -> list[tuple[str, float]]:
    """Combine R rankings of the same query.

    "rrf" sums 1 / (60 + rank) over the rankings and ignores their scores (Cormack, Clarke &
    Büttcher 2009, SIGIR); each term is multiplied by its weight divided by the mean weight.
    "weighted" sums w · (score − lowest) / (highest − lowest), by default with w = 1 / R (Bruch, Gai
    & Ingber 2023, arXiv 2210.11934).

        fuse([[("d1", 0.9), ("d2", 0.7)], [("d2", 11.0)]], "rrf")

    Args:
        rankings: R rankings of ids with scores, best first.
        method: "rrf" or "weighted".
        weights: (R,) weights; by default equal ones.

    Returns:
        Ids with fused scores, best first; ties by descending id, like trec_eval.

    Raises:
        DualencError: the method is unknown, or the weights are invalid.
    """
    weights = [1 / len(rankings)] * len(rankings) if weights is None else list(weights)
    # The bounds of the sum also reject NaN.
    are_good = (
        len(weights) == len(rankings)
        and all(weight >= 0 for weight in weights)
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
            # Divide by the mean weight, so that equal weights of any sum give the published score.
            shares = [1 / (mean_weight * (RRF_K + rank)) for rank in range(1, len(ranking) + 1)]
        else:
            shares = _min_max([score for _, score in ranking])
        for (name, _), share in zip(ranking, shares):
            fused[name] = fused.get(name, 0.0) + weight * share
    return sorted(fused.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)


def _min_max(scores: list[float]) -> list[float]:
    """Normalize scores to [0, 1] by minimum and maximum; equal scores all become 1."""
    lowest = min(scores, default=0.0)
    spread = max(scores, default=0.0) - lowest
    return [(score - lowest) / spread if spread > 0 else 1.0 for score in scores]
