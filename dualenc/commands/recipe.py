"""`dualenc recipe`: the recipes that come with the package, and their keys."""

from __future__ import annotations

from pathlib import Path

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.recipe_check import SECTIONS
from dualenc.signatures import arguments_of

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe(name: str | None = None, *, keys: bool = False) -> None:
    """List the recipes that come with dualenc, or print one: `dualenc recipe text-pairs > mine.yaml`.

    Args:
        name: of a recipe in the list.
        keys: print every key of the recipe's classes instead, with defaults and descriptions.
    """
    paths = {path.stem.replace("_", "-"): path for path in sorted(FOLDER.glob("*.yaml"))}
    if name is None:
        width = max(map(len, paths))
        for label, path in paths.items():
            print(f"  {label:<{width}}  {_summary(path)}")
        print("\nnext: dualenc recipe text-pairs > mine.yaml; dualenc train mine.yaml data.path=pairs.csv")
        return
    label = name.removesuffix(".yaml").replace("_", "-")
    if label not in paths:
        raise DualencError(f"there is no recipe '{name}'{nearest(label, paths)}; see dualenc recipe")
    if keys:
        _print_keys(paths[label])
    else:
        print(paths[label].read_text(encoding="utf-8"), end="")


def _summary(path: Path) -> str:
    """What the first line of a recipe says."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _print_keys(path: Path) -> None:
    """Every key that a recipe's classes take, by section, with defaults."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, section in SECTIONS.items():
        if name not in settings:
            continue
        kind = section.path
        if section.package is not None:
            kind = f"{section.package}.{settings[name]['class_path'].rpartition('.')[2]}"
        print(f"{name}: {kind.rpartition('.')[2]}")
        for argument in arguments_of(kind) or []:
            if argument.name not in section.filled:
                default = " (required)" if argument.default is None else f" = {argument.default}"
                print(f"  {name}.{argument.name}{default}\n      {argument.text}")
        print()
