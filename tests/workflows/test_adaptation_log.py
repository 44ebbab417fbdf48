"""Relevance from a simulated log whose click model is known."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.data.logs.click_model import KnownPropensities
from dualenc.data.logs.open_log import LogColumns, open_log
from dualenc.data.logs.split_by_time import split_by_time
from dualenc.data.store.vector_shards import Embeddings
from dualenc.io.provenance import Provenance
from dualenc.workflows.adaptation_log import day_of, learn_log

N, Q, SHOWN = 120, 60, 5
START = 1.7e9


@pytest.fixture
def documents() -> Embeddings:
    vectors = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    return Embeddings([f"d{row}" for row in range(N)], vectors, Provenance())


def is_relevant(query: int, document: int) -> bool:
    return (document - 2 * query) % N == 0


def write_log(path: Path, sessions: int) -> Path:
    """Write a row for each impression: position k is examined with probability 1/k."""
    random = np.random.default_rng(1)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["query", "doc_id", "position", "clicked", "session_id", "timestamp"])
        for session in range(sessions):
            query = int(random.integers(Q))
            for place, step in enumerate(random.permutation(SHOWN), 1):
                document = int(2 * query + step) % N
                rate = (0.9 if is_relevant(query, document) else 0.1) / place
                clicked = int(random.random() < rate)
                time = START + 60 * session
                rows.writerow([f"query {query}", f"d{document}", place, clicked, session, time])
    return path


def test_relevance_is_told_from_position(tmp_path: Path, documents: Embeddings) -> None:
    log = open_log(write_log(tmp_path / "log.csv", 4000), documents)
    learned = learn_log(log, documents)
    assert learned.click_model is not None
    assert learned.click_model.theta[:3] == pytest.approx([1, 1 / 2, 1 / 3], abs=0.07)
    assert learned.click_model.click_relevant == pytest.approx(0.9, abs=0.07)
    truth = [
        is_relevant(int(str(learned.pairs.left_items[left]).split()[1]), right)
        for left, right in zip(learned.pairs.left_id, learned.pairs.right_id, strict=True)
    ]
    assert learned.pairs.weights is not None
    assert (np.asarray(truth) == (learned.pairs.weights > 0.5)).mean() > 0.97
    assert learned.findings[0].startswith("click model: at position 1 a relevant document is")
    assert "position 2: 0." in learned.findings[1]


def test_known_propensities_are_used_as_they_are(tmp_path: Path, documents: Embeddings) -> None:
    known = tmp_path / "known.json"
    content = {"theta": [1 / k for k in range(1, 6)], "relevant": 0.9, "irrelevant": 0.1}
    known.write_text(json.dumps(content))
    log = open_log(write_log(tmp_path / "log.csv", 300), documents)
    learned = learn_log(log, documents, KnownPropensities.read(known))
    assert learned.click_model is not None
    assert learned.click_model.theta[1] == 0.5
    assert "position 2: 0.50," in learned.findings[1]


def test_clicks_alone_are_counted(tmp_path: Path, documents: Embeddings) -> None:
    (tmp_path / "clicks.csv").write_text("query,doc_id\na,d1\na,d1\na,d2\nb,d3\n")
    learned = learn_log(open_log(tmp_path / "clicks.csv", documents), documents)
    assert learned.findings[0].startswith("clicks are counted as they are: ")
    assert learned.pairs.weights == pytest.approx([1.5, 0.75, 0.75])


def test_the_end_of_a_log_is_held_out(tmp_path: Path, documents: Embeddings) -> None:
    log = open_log(write_log(tmp_path / "log.csv", 200), documents)
    split = split_by_time(log)
    assert split is not None
    assert len(split.later) == 20 * SHOWN
    assert split.begins == START + 60 * 180
    assert day_of(split.begins) == "2023-11-15 01:13"
    untimed = open_log(tmp_path / "log.csv", documents, columns=LogColumns(time="none"))
    assert split_by_time(untimed) is None
