"""`dualenc recipe`: the recipes that come with the package, and their keys."""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import yaml

from dualenc.errors import DualencError, nearest

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe(name: str | None = None, *, keys: bool = False) -> None:
    """List the recipes that come with dualenc, or print one: `dualenc recipe text-pairs >
    mine.yaml`.

    Args:
        name: of a recipe in the list.
        keys: print every key of the recipe's classes instead, with types, defaults and
            descriptions.
    """
    paths = {path.stem.replace("_", "-"): path for path in sorted(FOLDER.glob("*.yaml"))}
    if name is None:
        if keys:
            raise DualencError("--keys is for one recipe; name it, see dualenc recipe")
        width = max(map(len, paths))
        for label, path in paths.items():
            summary = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            print(f"  {label:<{width}}  {summary}")
        print(
            "\nnext: dualenc recipe text-pairs > mine.yaml; dualenc train mine.yaml data.path=pairs.csv"
        )
        return
    label = name.removesuffix(".yaml").replace("_", "-")
    if label not in paths:
        raise DualencError(
            f"there is no recipe '{name}'{nearest(label, paths)}; see dualenc recipe"
        )
    text = paths[label].read_text(encoding="utf-8")
    print(_keys(text) if keys else text, end="")


def _keys(text: str) -> str:
    """Every key that a recipe's classes take, by section: type, default and description."""
    import docstring_parser

    from dualenc.recipe.check import parameters
    from dualenc.recipe.resolve import make_recipe

    lines = []
    for section, checked in make_recipe(yaml.safe_load(text)).sections.items():
        if checked is None:
            continue
        kind = pkgutil.resolve_name(checked["class_path"])
        texts = {}
        for base in reversed(kind.__mro__):
            for entry in docstring_parser.parse(base.__doc__ or "").params:
                texts[entry.arg_name] = " ".join((entry.description or "").split())
        lines.append(f"{section}: {kind.__name__}")
        for name, parameter in parameters(kind).items():
            if name in checked["init_args"]:
                value = re.sub(r"\w+\.", "", inspect.formatannotation(parameter.annotation))
                is_required = parameter.default is parameter.empty
                default = "required" if is_required else f"default: {parameter.default}"
                lines.append(f"  {section}.{name} ({value}, {default})")
                description = textwrap.wrap(texts.get(name, ""), 94)
                lines += [" " * 6 + line for line in description]
    return "\n".join(lines) + "\n"
