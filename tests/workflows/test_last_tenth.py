"""The last tenth of a log against a log whose parts are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualenc.data import Corpus
from dualenc.data.item_lists import VectorItems
from dualenc.data.logs.open_log import open_log
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import VectorEncoder
from dualenc.io.provenance import Provenance
from dualenc.workflows.adaptation_log import LearnedLog, learn_log
from dualenc.workflows.last_tenth import last_tenth, scores_without_training
from dualenc.workflows.trained_pairs import Seen, TrainedPairs

N = 20


@pytest.fixture
def documents() -> Embeddings:
    return Embeddings([f"d{row}" for row in range(N)], np.eye(N, dtype=np.float32), Provenance())


def learned(path: Path, rows: list[tuple[str, str, int]], documents: Embeddings) -> LearnedLog:
    """Write clicks with times, and return the log with vectors in place of texts."""
    lines = [f"{query},{document},{1_700_000_000 + 60 * time}" for query, document, time in rows]
    path.write_text("\n".join(["query,doc_id,timestamp", *lines]) + "\n")
    log = open_log(path, documents)
    random = np.random.default_rng(0).normal(size=(len(log.queries), N)).astype(np.float32)
    queries = Corpus(log.queries.ids, VectorItems(random), "vector")
    return learn_log(replace(log, queries=queries), documents)


def test_queries_of_the_last_tenth_are_new_or_known(tmp_path: Path, documents: Embeddings) -> None:
    rows = [(f"query {time}", f"d{time % 10}", time) for time in range(18)]
    rows += [("query 3", "d3", 18), ("later", "d15", 19)]
    part = last_tenth(learned(tmp_path / "log.csv", rows, documents), documents)
    assert part is not None
    assert part.begins == 1_700_000_000 + 60 * 18
    assert len(part.earlier) == 18
    judged = {task: list(each.qrels.values()) for task, each in part.tasks.items()}
    assert judged == {
        "last tenth: new documents": [{"d15": 1}],
        "last tenth: documents in training": [{"d3": 1}],
    }
    # "query 3" was clicked before, so its document comes first; "later" stays as it is.
    model = VectorEncoder(N, tower="linear", right_tower="identity").eval()
    scores = scores_without_training(part, model)
    assert scores["last tenth: documents in training"].tolist() == [1.0]
    new = part.tasks["last tenth: new documents"]
    original = [row[new.primary] for row in new.per_query(model).values()]
    assert scores["last tenth: new documents"].tolist() == original


def test_without_times_there_is_no_last_tenth(tmp_path: Path, documents: Embeddings) -> None:
    (tmp_path / "log.csv").write_text("query,doc_id\na,d1\nb,d2\n")
    log = open_log(tmp_path / "log.csv", documents)
    assert last_tenth(learn_log(log, documents), documents) is None


def test_later_queries_that_were_trained_on_before_are_not_measured(
    tmp_path: Path, documents: Embeddings, caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier model was trained on: its pairs measure nothing, its documents are not
    new."""
    rows = [(f"query {time}", f"d{time % 10}", time) for time in range(36)]
    rows += [("query 3", "d3", 36), ("a", "d15", 37), ("b", "d16", 38), ("c", "d17", 39)]
    log = learned(tmp_path / "log.csv", rows, documents)
    before = learned(tmp_path / "old.csv", [("query 3", "d3", 0), ("old", "d16", 1)], documents)
    texts = open_log(tmp_path / "old.csv", documents).queries
    record = TrainedPairs.of(before.pairs, texts, documents)
    seen = Seen(record, open_log(tmp_path / "log.csv", documents).queries, documents)
    part = last_tenth(log, documents, seen=seen)
    assert part is not None
    assert part.num_seen == 1
    judged = {
        task: sorted(name for grades in each.qrels.values() for name in grades)
        for task, each in part.tasks.items()
    }
    assert judged == {
        "last tenth: new documents": ["d15", "d17"],
        "last tenth: documents in training": ["d16"],
    }
    model = VectorEncoder(N, tower="linear", right_tower="identity").eval()
    assert {task: len(own) for task, own in scores_without_training(part, model).items()} == {
        "last tenth: new documents": 2,
        "last tenth: documents in training": 1,
    }
    everything = Seen(TrainedPairs.of(log.pairs, seen.queries, documents), seen.queries, documents)
    with caplog.at_level("INFO"):
        assert last_tenth(log, documents, seen=everything) is None
    assert "the last tenth of the log measures nothing: all its pairs" in caplog.text


def test_last_tenth_without_a_relevant_pair_is_named(
    tmp_path: Path, documents: Embeddings, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"q{time},d{time},{int(time < 18)},{1_700_000_000 + time}" for time in range(20)]
    (tmp_path / "log.csv").write_text("\n".join(["query,doc_id,clicked,timestamp", *lines]))
    log = learn_log(open_log(tmp_path / "log.csv", documents), documents)
    with caplog.at_level("INFO"):
        assert last_tenth(log, documents) is None
    assert "measures nothing: no pair of the log counts as relevant" in caplog.text
