"""Suggestions of names for mistyped ones."""

from __future__ import annotations

import pytest

from dualenc.errors import nearest


@pytest.mark.parametrize(
    ("word", "valid", "meant"),
    [
        ("temprature", ["gamma", "temperature"], "temperature"),
        ("lr", ["epochs", "learning_rate"], "learning_rate"),
        ("Text", ["title", "text"], "text"),
        ("query", ["document", "query_text"], "query_text"),
        ("text_of_query", ["document", "query_text"], "query_text"),
        ("pos", ["anchor", "positives"], "positives"),
        ("ndcg", ["mrr@10", "ndcg@10"], "ndcg@10"),
        ("max_epochs", ["max_steps", "epochs"], "epochs"),
    ],
)
def test_a_name_that_is_alike_is_suggested(word: str, valid: list[str], meant: str) -> None:
    assert nearest(word, valid) == f" (did you mean {meant}?)"


@pytest.mark.parametrize(
    ("word", "valid"),
    [
        ("question", ["prompt", "response"]),
        ("title", ["text"]),
        ("score", ["source"]),
        ("left_column", ["right_column"]),
        ("--recall", ["--resume", "--device"]),
        ("k", ["kind", "keys"]),
        ("", ["abc"]),
        ("東京", ["text"]),
    ],
)
def test_other_names_are_not(word: str, valid: list[str]) -> None:
    assert nearest(word, valid) == ""
