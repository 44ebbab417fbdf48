"""Galleries: the right queries, the right marks, and the relevant document that was missed."""

from __future__ import annotations

import numpy as np

from dualenc.evaluation.report import Item, best_and_worst, rank_galleries, retrieval_galleries
from dualenc.evaluation.retrieval import Result


def test_best_and_worst_never_share_a_query() -> None:
    scores = {name: {"m": value} for name, value in zip("abcde", [0.1, 0.9, 0.5, 0.9, 0.0])}
    assert best_and_worst(scores, "m", 2) == (["b", "d"], ["e", "a"])
    assert best_and_worst(scores, "m", 10) == (["b", "d", "c"], ["e", "a"])
    assert best_and_worst({"a": {"m": 1.0}}, "m", 5) == (["a"], [])


def test_a_worst_query_shows_what_it_missed() -> None:
    run = {"good": {"d1": 0.9, "d2": 0.8}, "bad": {"d2": 0.9, "d3": 0.8, "d1": 0.7}, "lost": {"d2": 0.5}}
    qrels = {"good": {"d1": 1}, "bad": {"d1": 2}, "lost": {"d9": 1}}
    result = Result("model", "toy", run, qrels, 4)
    best, worst = retrieval_galleries(result, str.upper, lambda doc: f"text of {doc}", entries=2, documents=2)
    assert [entry.query.text for entry in best.entries] == ["GOOD", "BAD"]
    assert [item.relevant for item in best.entries[0].results] == [True, False]
    assert best.entries[0].results[0].note == "1. d1 · 0.900"
    missed = best.entries[1].results[-1]
    assert (missed.text, missed.relevant, missed.note) == ("text of d1", True, "relevant, missed: d1 · rank 3")
    assert worst.entries[0].results[-1].note == "relevant, missed: d9 · not in the first 1"


def test_a_query_that_the_run_lacks_is_shown_without_documents() -> None:
    result = Result("model", "toy", {}, {"q": {"d": 1}}, 1)
    best, _ = retrieval_galleries(result, str, str)
    assert [item.note for item in best.entries[0].results] == ["relevant, missed: d · not in the first 0"]


def test_ranks_show_the_nearest_candidates() -> None:
    queries, candidates = np.eye(2), np.array([[1.0, 0.0], [0.5, 0.5], [0.25, 0.0]])
    best, worst = rank_galleries(
        "image to text",
        np.array([1, 3]),
        queries,
        candidates,
        [[0], [2]],
        lambda row: Item(f"query {row}"),
        lambda column: Item(f"candidate {column}"),
        results=2,
    )
    assert best.entries[0].query == Item("query 0", note="right answer at rank 1")
    assert best.entries[0].results == [
        Item("candidate 0", note="1.000", relevant=True),
        Item("candidate 1", note="0.500", relevant=False),
    ]
    assert [item.text for item in worst.entries[0].results] == ["candidate 1", "candidate 0"]
