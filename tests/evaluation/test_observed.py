"""What evaluations see besides metrics: cosines counted as a slow loop counts them, and what comes back from JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation import observed
from dualenc.evaluation.observed import Observed, observed_labels, observed_pairs, observed_queries

EDGES = np.linspace(-1, 1, 51)


def unit(rows: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, 4))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@settings(max_examples=30, deadline=None)
@given(
    positives=st.lists(st.lists(st.integers(0, 8), unique=True, max_size=3), min_size=2, max_size=6),
    seed=st.integers(0, 99),
)
def test_similarities_are_those_of_a_slow_loop(positives: list[list[int]], seed: int) -> None:
    left, right = unit(len(positives), seed), unit(9, seed + 100)
    pairs = [(q, d) for q, columns in enumerate(positives) for d in columns]
    against = [left[q] @ right[e] for q, d in pairs for p, e in pairs if p != q and e != d and e not in positives[q]]
    found = observed_pairs(left, right, positives)
    if not pairs or not against:
        assert found is None
        return
    assert found is not None
    plain = Observed(found).to_plain()["similarities"]
    for name, cosines in (("positives", [left[q] @ right[d] for q, d in pairs]), ("negatives", against)):
        assert plain[name] == np.histogram(np.float32(cosines), EDGES)[0].tolist()
        assert plain[f"{name[:-1]}_mean"] == pytest.approx(np.mean(cosines), abs=1e-4)


def test_of_many_pairs_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "MAX_PAIRS", 5)
    found = observed_pairs(unit(30, 0), unit(30, 1), [[row] for row in range(30)])
    assert found is not None
    assert (found.positives.sum(), found.negatives.sum()) == (5, 20)
    features, labels = unit(30, 2), np.arange(30) % 2
    by_label = observed_labels(features, labels)
    assert by_label is not None
    assert by_label.positives.sum() + by_label.negatives.sum() == 10
    assert observed_labels(features, np.zeros(30, np.int64)) is None


@settings(max_examples=20, deadline=None)
@given(
    scores=st.dictionaries(st.text(max_size=4), st.integers(0, 10000).map(lambda n: n / 10000), max_size=40),
    words=st.text(max_size=300),
)
def test_json_brings_it_back(scores: dict[str, float], words: str) -> None:
    told = observed_queries("ndcg@10", scores, dict.fromkeys(scores, words))
    assert len(told["texts"]) <= 20
    assert all(len(text) <= 202 for text in told["texts"].values())
    before = Observed(observed_pairs(unit(5, 0), unit(5, 1), [[row] for row in range(5)]), **told)
    plain = json.loads(json.dumps(before.to_plain()))
    after = Observed.from_plain(plain)
    assert after.scores == scores
    assert after.to_plain() == plain
    assert after.similarities is not None
    assert Observed.from_plain(Observed().to_plain()) == Observed()


@pytest.mark.parametrize(
    "plain", [{"similarities": {"positives": "x"}}, {"similarities": 3}, {"queries": {"scores": 1}}]
)
def test_what_is_no_record_is_told(plain: dict[str, object]) -> None:
    with pytest.raises(DualencError, match="no record of an evaluation"):
        Observed.from_plain(plain)
