"""`dualenc recipe`: the recipes that come with the package, and their keys."""

from __future__ import annotations

import importlib
from pathlib import Path

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.recipe_check import SECTIONS

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe(name: str | None = None, *, keys: bool = False) -> None:
    """List the recipes that come with dualenc, or print one: `dualenc recipe text-pairs > mine.yaml`.

    Args:
        name: of a recipe in the list.
        keys: print every key of the recipe's classes instead, with types, defaults and descriptions.
    """
    paths = {path.stem.replace("_", "-"): path for path in sorted(FOLDER.glob("*.yaml"))}
    if name is None:
        width = max(map(len, paths))
        for label, path in paths.items():
            summary = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            print(f"  {label:<{width}}  {summary}")
        print("\nnext: dualenc recipe text-pairs > mine.yaml; dualenc train mine.yaml data.path=pairs.csv")
        return
    label = name.removesuffix(".yaml").replace("_", "-")
    if label not in paths:
        raise DualencError(f"there is no recipe '{name}'{nearest(label, paths)}; see dualenc recipe")
    text = paths[label].read_text(encoding="utf-8")
    print(_keys(text) if keys else text, end="")


def _keys(text: str) -> str:
    """Every key that a recipe's classes take, by section."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(usage="section.key=value", add_help=False, default_env=False)
    settings = yaml.safe_load(text)
    for name, section in SECTIONS.items():
        if name in settings:
            cls = section.base
            if section.package is not None:
                class_name = settings[name]["class_path"].rpartition(".")[2]
                cls = getattr(importlib.import_module(section.package), class_name)
            parser.add_class_arguments(cls, name, skip=set(section.filled))
    lines = parser.format_help().replace("--", "").splitlines(keepends=True)
    return "".join(line for line in lines if "Path to a configuration file" not in line)
