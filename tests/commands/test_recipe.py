"""`dualenc recipe`: recipes without a checkout, and their keys."""

from __future__ import annotations

import pytest

from dualenc.cli import main
from dualenc.commands.recipe import FOLDER


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["recipe", *words]) == 0
    return capsys.readouterr().out


def test_recipes_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = printed(capsys)
    assert "text-pairs  " in listed
    assert "Fine-tune a published text encoder on a table" in listed
    assert printed(capsys, "text-pairs") == (FOLDER / "text_pairs.yaml").read_text("utf-8")
    assert printed(capsys, "text_pairs.yaml") == printed(capsys, "text-pairs")
    assert main(["recipe", "text-pears"]) == 2
    assert "did you mean text-pairs?" in capsys.readouterr().err


def test_keys_are_those_that_recipes_take(capsys: pytest.CaptureFixture[str]) -> None:
    keys = " ".join(printed(capsys, "text-pairs", "--keys").split())
    assert "data.left_column (str, required) query or image." in keys
    assert "objective.positive_in_softmax (bool, default: False)" in keys
    for filled in ("objective.num_left", "objective.seed", "model.left "):
        assert filled not in keys
