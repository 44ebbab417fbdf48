"""Scores of single queries: which are shown, and what comes back from JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.evaluation.query_scores import QueryScores, best_and_worst, query_scores, rank_rows


def test_json_brings_them_back() -> None:
    scores = {f"q{number}": number / 1000 for number in range(1200)}
    before = query_scores("ndcg@10", scores, dict.fromkeys(scores, "words " * 100))
    assert len(before.scores) == 1000
    assert len(before.texts) == 20
    assert all(len(text) <= 202 for text in before.texts.values())
    assert QueryScores.from_plain(json.loads(json.dumps(before.to_plain()))) == before


@pytest.mark.parametrize("plain", [{}, {"queries": 3}, {"queries": {"metric": "m", "scores": {"q": "x"}, "texts": {}}}])
def test_another_record_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(DualencError, match="no record of an evaluation"):
        QueryScores.from_plain(plain)


def test_best_and_worst_never_share_a_query() -> None:
    scores = dict(zip("abcde", [0.1, 0.9, 0.5, 0.9, 0.0]))
    assert best_and_worst(scores, 2) == (["b", "d"], ["e", "a"])
    assert best_and_worst(scores, 10) == (["b", "d", "c"], ["e", "a"])
    assert best_and_worst({"a": 1.0}, 5) == (["a"], [])


def test_ranks_show_the_nearest_candidate() -> None:
    candidates = np.array([[1.0, 0.0], [0.5, 0.5], [0.25, 0.0]])
    rows = rank_rows(np.array([1, 3]), np.eye(2), candidates, "query {}".format, "candidate {}".format)
    assert rows == [
        {"": "best", "query": "0", "1/rank": 1.0, "rank": 1, "what": "query 0", "nearest": "candidate 0"},
        {"": "worst", "query": "1", "1/rank": 1 / 3, "rank": 3, "what": "query 1", "nearest": "candidate 1"},
    ]
