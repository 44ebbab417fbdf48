"""Counterfactual Rocchio, against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.evaluation.feedback_queries import feedback_queries


def test_queries_move_to_the_weighted_mean_of_their_documents() -> None:
    draw = np.random.default_rng(0)
    queries, documents = (draw.standard_normal((rows, 5)) for rows in (4, 9))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    query, document = np.array([0, 0, 2, 3]), np.array([1, 8, 5, 5])
    weight = np.array([1.0, 3.0, 0.5, 0.0])
    moved = feedback_queries(queries, documents, query, document, weight)
    for row in range(4):
        own = [each for each in range(4) if query[each] == row and weight[each] > 0]
        expected = queries[row]
        if own:
            total = sum(weight[each] for each in own)
            expected = (
                expected + sum(weight[each] * documents[document[each]] for each in own) / total
            )
            expected = expected / np.sqrt((expected**2).sum())
        assert moved[row] == pytest.approx(expected, abs=1e-6)


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(DualencError, match="1 queries, 1 documents and 2 weights"):
        feedback_queries(np.eye(2), np.eye(2), [0], [0], np.ones(2))
    with pytest.raises(DualencError, match="0 or more"):
        feedback_queries(np.eye(2), np.eye(2), [0], [0], -np.ones(1))
