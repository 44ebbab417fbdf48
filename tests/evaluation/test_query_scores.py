"""Which queries a report shows."""

from __future__ import annotations

import numpy as np

from dualenc.evaluation.query_scores import best_and_worst, rank_rows


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
