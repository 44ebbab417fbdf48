"""The recipes that come with the package."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """Return the files of the recipes by name, such as "text-pairs"."""
    return {recipe_name(path.name): path for path in sorted(FOLDER.glob("*.yaml"))}


def recipe_name(text: str) -> str:
    """Return the name of a recipe as `dualenc recipe` lists it.

    Args:
        text: a name or a file's name, such as "text_pairs.yaml".
    """
    return text.removesuffix(".yaml").replace("_", "-")


def remedy_for_missing(path: Path) -> str:
    """Return the command that writes the recipe which a missing file was meant to be.

    Args:
        path: path that does not exist.
    """
    # A file of one's own, such as mine.yaml, is not the abbreviation of a recipe's name.
    alike = difflib.get_close_matches(recipe_name(path.name), packaged_recipes(), n=1, cutoff=0.74)
    if alike:
        return f"try: dualenc recipe {alike[0]} > mine.yaml; dualenc train mine.yaml"
    return "write it first: dualenc recipe text-pairs > mine.yaml (dualenc recipe lists others)"
