"""Several rankings of one query as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from dualenc.errors import DualencError

Fusion = Literal["rrf", "weighted"]
RRF_K = 60
"""The constant of reciprocal rank fusion, as its authors chose it."""
FUSION_DEPTH = 100
"""So many of the best of each ranking are fused, or as many as are asked for."""


def fuse(
    rankings: Sequence[Sequence[tuple[str, float]]],
    how: Fusion = "rrf",
    *,
    weights: Sequence[float] | None = None,
    rrf_k: float = RRF_K,
) -> list[tuple[str, float]]:
    """Fuse rankings of the same query; what a ranking does not hold gets nothing from it.

    "rrf" adds w / (rrf_k + rank), the first rank being 1, whatever the scores (Cormack, Clarke & Büttcher 2009,
    "Reciprocal rank fusion outperforms Condorcet and individual rank learning methods", SIGIR). "weighted" adds
    w · (score − lowest) / (highest − lowest) of each ranking, the convex combination with min-max normalisation of
    Bruch, Gai & Ingber 2023 (arXiv 2210.11934); a ranking whose scores are all equal gives w to each.

    Args:
        rankings: (R,) lists of ids and scores, best first.
        how: "rrf" or "weighted".
        weights: (R,) w of each ranking; by default 1 / R.
        rrf_k: the larger, the less the first ranks stand out.

    Returns:
        Ids and fused scores, best first; among equals the higher id, as trec_eval orders them.

    Raises:
        DualencError: an unknown way, or weights that are negative, all zero, or not one for each ranking.
    """
    if how not in get_args(Fusion):
        raise DualencError(f"fusion is {how!r}; choose one of {', '.join(get_args(Fusion))}")
    shares = [1 / len(rankings)] * len(rankings) if weights is None else list(weights)
    if len(shares) != len(rankings) or not all(w >= 0 for w in shares) or not 0 < sum(shares) < float("inf"):
        raise DualencError(f"weights are {shares} for {len(rankings)} rankings; give each 0 or more, and not all 0")
    fused: dict[str, float] = {}
    for ranking, weight in zip(rankings, shares):
        scores = [score for _, score in ranking]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        for rank, (name, score) in enumerate(ranking, 1):
            share = 1 / (rrf_k + rank) if how == "rrf" else (score - low) / (high - low) if high > low else 1.0
            fused[name] = fused.get(name, 0.0) + weight * share
    return sorted(fused.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)
