from __future__ import annotations

import pytest

from dualenc.data import Corpus
from dualenc.errors import DualencError

from .make import picture


def test_items_by_position_and_snippets_in_one_line() -> None:
    corpus = Corpus(["a", "b"], ["first\n  text", "x " * 500])
    assert (len(corpus), corpus[0], corpus.text(0)) == (2, "first\n  text", "first text")
    assert len(corpus.text(1)) <= 240
    assert corpus.text(1).endswith("x…")


def test_images_have_no_snippet() -> None:
    assert Corpus(["a"], [picture(3)], "image").text(0) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": ["a"], "items": ["x", "y"]}, "ids has 1 rows but there are 2 items"),
        ({"ids": ["a", "b", "a"], "items": ["x", "y", "z"]}, "'a' stands twice (again at row 2)"),
        ({"ids": ["a"], "items": ["x"], "labels": [0, 1]}, "labels has 2 rows for 1 items"),
        ({"ids": ["a"], "items": ["x"], "labels": [2], "class_names": ["c", "d"]}, "class 2 has no name"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(DualencError) as error:
        Corpus(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
