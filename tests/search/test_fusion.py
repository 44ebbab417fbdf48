"""Fusion against slow loops from the formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.search.fusion import fuse

IDS = st.sampled_from([f"d{i}" for i in range(12)])
SCORES = st.floats(-100, 100, allow_subnormal=False)
RANKING = st.dictionaries(IDS, SCORES, max_size=12).map(
    lambda scores: sorted(scores.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)
)


@given(st.lists(RANKING, min_size=1, max_size=3))
def test_reciprocal_ranks(rankings: list[list[tuple[str, float]]]) -> None:
    slow = {}
    for name in {name for ranking in rankings for name, _ in ranking}:
        ranks = [
            [other for other, _ in ranking].index(name) + 1
            for ranking in rankings
            if name in dict(ranking)
        ]
        slow[name] = sum(1 / (60 + rank) for rank in ranks)
    found = fuse(rankings)
    assert dict(found) == pytest.approx(slow)
    for weight in (1.0, 1 / len(rankings)):
        assert dict(fuse(rankings, weights=[weight] * len(rankings))) == pytest.approx(slow)
    assert found == sorted(found, key=lambda pair: (pair[1], pair[0]), reverse=True)


def test_weights_of_reciprocal_ranks() -> None:
    """Cormack, Clarke & Büttcher 2009 have no weights: equal ones give their sum."""
    a, b = [("x", 3.0), ("y", 1.0)], [("y", 9.0)]
    assert dict(fuse([a, b])) == pytest.approx({"x": 1 / 61, "y": 1 / 62 + 1 / 61})
    assert dict(fuse([a, b], weights=[0.75, 0.25])) == pytest.approx(
        {"x": 1.5 / 61, "y": 1.5 / 62 + 0.5 / 61}
    )


@given(RANKING, RANKING, st.floats(0.01, 0.99))
def test_weighted_scores(
    a: list[tuple[str, float]], b: list[tuple[str, float]], weight: float
) -> None:
    def part(ranking: list[tuple[str, float]], name: str) -> float:
        scores = dict(ranking)
        if name not in scores:
            return 0.0
        width = max(scores.values()) - min(scores.values())
        return (scores[name] - min(scores.values())) / width if width > 0 else 1.0

    found = dict(fuse([a, b], "weighted", weights=[weight, 1 - weight]))
    assert found == pytest.approx(
        {n: weight * part(a, n) + (1 - weight) * part(b, n) for n in dict(a) | dict(b)}
    )


def test_mistakes() -> None:
    for weights in ([1.0], [-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(DualencError, match="weights are"):
            fuse([[], []], weights=weights)
    with pytest.raises(DualencError, match="give rrf or weighted"):
        fuse([[]], "max")  # type: ignore[arg-type]
