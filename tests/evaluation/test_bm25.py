"""BM25 against the formula written out (Lucene's variant, Kamphuis et al. 2020)."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation.retrieval import bm25_run

WORDS = ["wing", "flow", "shock", "heat", "plate"]
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)


def slow_bm25(query: str, documents: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    bags = [Counter(document.split()) for document in documents]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for word in query.split():
        holding = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        for number, bag in enumerate(bags):
            if bag[word]:
                norm = k1 * (1 - b + b * sum(bag.values()) / mean)
                scores[number] += idf * bag[word] / (bag[word] + norm)
    return scores


@given(texts, st.lists(texts, min_size=1, max_size=8).filter(any), st.integers(1, 8))
def test_equals_the_formula(query: str, documents: list[str], k: int) -> None:
    ids = [f"d{number}" for number in range(len(documents))]
    run = bm25_run(["q"], [query], ids, documents, k)["q"]
    expected = dict(zip(ids, slow_bm25(query, documents)))
    found = {document: score for document, score in expected.items() if score > 0}
    assert len(run) == min(k, len(found))
    for document, score in run.items():
        assert score == pytest.approx(found[document], rel=1e-5)
    assert sorted(run.values(), reverse=True) == pytest.approx(sorted(found.values(), reverse=True)[:k], rel=1e-5)


def test_ties_at_the_cut_go_to_the_higher_id() -> None:
    run = bm25_run(["q"], ["wing"], ["a", "c", "b", "x"], ["wing flow", "wing flow", "wing flow", "heat"], 2)
    assert list(run["q"]) == ["c", "b"]


def test_a_query_without_a_known_word_finds_nothing() -> None:
    assert bm25_run(["q", "r"], ["gravity", ""], ["a"], ["wing"], 3) == {"q": {}, "r": {}}


def test_a_corpus_without_words_is_told() -> None:
    with pytest.raises(DualencError, match="no document holds a word"):
        bm25_run(["q"], ["wing"], ["a", "b"], ["", "the"], 3)
