"""Every recipe of the repository names classes and arguments that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.recipe import read_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_is_valid_and_writes_to_a_folder_of_its_own_name(path: Path) -> None:
    settings = read_recipe(path).settings
    assert settings["trainer"]["output"] == f"runs/{path.stem}"
    assert path.read_text().startswith("# ")


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 10
