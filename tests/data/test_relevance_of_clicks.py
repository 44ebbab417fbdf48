"""Weighted training pairs of a log, against tables by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest

from dualenc.data.corpus import Corpus
from dualenc.data.logs.click_log import ClickLog
from dualenc.data.logs.click_model import ClickModel, KnownPropensities, fit_click_model
from dualenc.data.logs.relevance_of_clicks import pairs_of
from dualenc.data.pairs import PairDataset
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError

DOCUMENTS = Embeddings(["a", "b", "c", "d"], np.eye(4, dtype=np.float32))


def log_of(rows: list[tuple[int, int, int, int, float]], **changes: Any) -> ClickLog:
    """Return a log of rows (query, document, session, position, reward)."""
    query, document, session, position, reward = (np.array(own) for own in zip(*rows))
    queries = [f"query {row}" for row in range(int(query.max()) + 1)]
    values = {
        "queries": Corpus([str(row) for row in range(len(queries))], queries),
        "query": query,
        "document": document,
        "reward": reward.astype(np.float32),
        "position": position,
        "session": session,
        "time": np.full(len(query), np.nan),
        "grades_are_relevance": False,
        "finding": "",
        "skipped": 0,
    }
    return ClickLog(**(values | changes))


def weights_of(pairs: PairDataset) -> dict[tuple[str, int], float]:
    assert pairs.weights is not None
    named = zip(pairs.left_id, pairs.right_id, pairs.weights, strict=True)
    return {(pairs.left_items[left], int(right)): float(own) for left, right, own in named}


ROWS = [
    (0, 0, 0, 1, 1.0),
    (0, 1, 0, 2, 0.0),
    (0, 0, 1, 1, 1.0),
    (0, 0, 1, 1, 1.0),  # the same click again
    (0, 1, 2, 1, 5.0),
    (1, 2, 3, 1, 0.0),
    (2, 3, 4, 1, 1.0),
    (2, 3, 4, 2, 2.0),  # another action of the same session
]


def test_without_a_model_sessions_with_a_click_count() -> None:
    table = pandas.DataFrame(ROWS, columns=["query", "document", "session", "position", "reward"])
    by_session = table.groupby(["query", "document", "session"])["reward"].max()
    counts = by_session.groupby(["query", "document"]).sum()
    counts = counts[counts > 0]
    expected = {
        (f"query {query}", document): pytest.approx(value / counts.mean())
        for (query, document), value in counts.items()
    }
    pairs = pairs_of(log_of(ROWS), DOCUMENTS, None)
    assert weights_of(pairs) == expected
    # Queries without a clicked document are no items to embed.
    assert len(pairs.left_items) == 2
    assert pairs.num_right == 4


def test_unidentified_model_counts_clicks() -> None:
    log = log_of(ROWS)
    model = fit_click_model(log.query, log.document, log.position * 0, log.reward > 0)
    assert model.unidentified is not None
    assert weights_of(pairs_of(log, DOCUMENTS, model)) == weights_of(pairs_of(log, DOCUMENTS, None))


def known_model(log: ClickLog) -> ClickModel:
    known = KnownPropensities((1.0, 0.5), 0.9, 0.1)
    return fit_click_model(log.query, log.document, log.position, log.reward > 0, known=known)


def test_pairs_that_are_likely_relevant_count_with_their_mean_reward() -> None:
    # A click that is as likely by chance: shown four times at the first position, clicked once.
    rows = [*ROWS, *((3, 0, session, 1, float(session == 10)) for session in range(10, 14))]
    log = log_of(rows)
    model = known_model(log)
    relevance = dict(zip(map(tuple, model.pairs.tolist()), model.relevance, strict=True))
    assert relevance[3, 0] < 0.5
    mean_reward = {(0, 0): 1.0, (0, 1): 5.0, (2, 3): 1.5}
    expected = {
        (f"query {query}", document): pytest.approx(reward)
        for (query, document), reward in mean_reward.items()
        if relevance[query, document] > 0.5
    }
    assert len(expected) >= 2
    assert weights_of(pairs_of(log, DOCUMENTS, model)) == expected


def test_equal_rewards_do_not_count() -> None:
    rows = [(*row[:4], 7.0 * (row[4] > 0)) for row in ROWS]
    log = log_of(rows)
    assert set(weights_of(pairs_of(log, DOCUMENTS, known_model(log))).values()) == {1.0}


def test_clicks_that_are_likely_chance_are_refused() -> None:
    log = log_of([(0, 0, session, 1, float(session == 0)) for session in range(9)])
    with pytest.raises(DualencError, match="more likely relevant than not"):
        pairs_of(log, DOCUMENTS, known_model(log))


def test_grades_are_weights_as_they_are() -> None:
    rows = [(0, 0, 0, 0, 0.25), (0, 1, 1, 0, 0.0), (1, 2, 2, 0, 0.5), (1, 2, 3, 0, 0.75)]
    pairs = pairs_of(log_of(rows, grades_are_relevance=True), DOCUMENTS, None)
    assert weights_of(pairs) == {("query 0", 0): 0.25, ("query 1", 2): 0.75}


def test_model_of_another_log_is_refused() -> None:
    model = known_model(log_of(ROWS[:3]))
    with pytest.raises(DualencError, match="another log"):
        pairs_of(log_of(ROWS), DOCUMENTS, model)


def test_log_without_relevance_is_refused_in_one_line() -> None:
    log = log_of([(*row[:4], 0.0) for row in ROWS])
    with pytest.raises(DualencError, match="no document has a click"):
        pairs_of(log, DOCUMENTS, None)
    draw = np.random.default_rng(0)
    rows = [
        (query, document, session, 1 + (document + session) % 4, float(draw.random() < 0.3))
        for query in range(3)
        for session in range(20)
        for document in range(4)
    ]
    log = log_of(rows)
    model = fit_click_model(log.query, log.document, log.position, log.reward > 0)
    assert model.position_alone is not None
    with pytest.raises(DualencError, match="position alone"):
        pairs_of(log, DOCUMENTS, model)
