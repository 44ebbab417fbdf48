"""`dualenc recipe`: recipes without a checkout, and their keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dualenc.cli import main
from dualenc.recipe.packaged import FOLDER


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


@pytest.mark.parametrize("columns", [80, 120])
def test_descriptions_are_whole_sentences_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    listed = printed(capsys)
    assert max(map(len, listed.splitlines())) <= columns
    # A description goes on below its beginning.
    entries = re.split(r"\n  (?=\S)", listed.partition("\n\n")[0])
    assert [entry.split()[0] for entry in entries] == [
        path.stem.replace("_", "-") for path in sorted(FOLDER.glob("*.yaml"))
    ]
    for entry in entries:
        assert entry.endswith("."), entry
    assert "when the held-out queries no longer gain." in " ".join(listed.split())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_that_was_not_written_yet_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = path.stem.replace("_", "-")
    for typed in (name, path.stem, path.name, f"recipes/{path.name}", name[1:]):
        assert main(["train", typed, "data.path=mine.csv"]) == 2
        advice = f"try: dualenc recipe {name} > mine.yaml; dualenc train mine.yaml\n"
        assert capsys.readouterr().err.endswith(advice)
    assert main(["train", "mine.yaml"]) == 2
    assert "dualenc recipe text-pairs > mine.yaml" in capsys.readouterr().err


def test_keys_are_those_that_recipes_take(capsys: pytest.CaptureFixture[str]) -> None:
    keys = " ".join(printed(capsys, "text-pairs", "--keys").split())
    assert "data.left_column (str, required) query or image." in keys
    assert "objective.positive_in_softmax (bool, default: False)" in keys
    for filled in ("objective.num_left", "objective.seed", "model.left "):
        assert filled not in keys
