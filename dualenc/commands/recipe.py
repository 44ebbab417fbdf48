"""`dualenc recipe`: list the recipes of the package, or print one or its keys."""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import yaml

from dualenc.errors import DualencError, nearest

FOLDER = Path(__file__).parents[1] / "recipes"


def recipe(name: str | None = None, *, keys: bool = False) -> None:
    """List the recipes that come with dualenc, or print one: `dualenc recipe text-pairs >
    mine.yaml`.

    Args:
        name: name of a recipe in the list.
        keys: print every key of the recipe's classes instead, with types, defaults and
            descriptions.
    """
    paths = {path.stem.replace("_", "-"): path for path in sorted(FOLDER.glob("*.yaml"))}
    if name is None:
        if keys:
            raise DualencError("--keys is for one recipe", fix="name it, see dualenc recipe")
        _print_list(paths)
        return
    label = name.removesuffix(".yaml").replace("_", "-")
    if label not in paths:
        raise DualencError(
            f"unknown recipe '{name}'{nearest(label, paths)}", fix="see dualenc recipe"
        )
    # The file as it is, comments included: it is the documentation of its keys.
    text = paths[label].read_text(encoding="utf-8")
    print(_keys(text) if keys else text, end="")


def _print_list(paths: Mapping[str, Path]) -> None:
    """Print the name and the first comment of each recipe."""
    # Each recipe begins with a comment that says what it is for.
    width = max(map(len, paths))
    for label, path in paths.items():
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        print(f"  {label:<{width}}  {first_line.removeprefix('# ')}")
    print()
    print(
        "next: dualenc recipe text-pairs > mine.yaml; dualenc train mine.yaml data.path=pairs.csv"
    )


def _keys(text: str) -> str:
    """Return every key of a recipe's classes by section: type, default and description."""
    from dualenc.recipe.check import parameters
    from dualenc.recipe.resolve import make_recipe

    lines = []
    for section, checked in make_recipe(yaml.safe_load(text)).sections.items():
        if checked is None:
            continue
        kind = pkgutil.resolve_name(checked["class_path"])
        descriptions = _descriptions(kind)
        lines.append(f"{section}: {kind.__name__}")
        for name, parameter in parameters(kind).items():
            # Arguments that a recipe fills in are not keys.
            if name not in checked["init_args"]:
                continue
            annotation = inspect.formatannotation(parameter.annotation)
            # Names without their modules: "Literal['a']" and not "typing.Literal['a']".
            annotation = re.sub(r"\w+\.", "", annotation)
            is_required = parameter.default is parameter.empty
            default = "required" if is_required else f"default: {parameter.default}"
            lines.append(f"  {section}.{name} ({annotation}, {default})")
            for line in textwrap.wrap(descriptions.get(name, ""), 94):
                lines.append(" " * 6 + line)
    return "\n".join(lines) + "\n"


def _descriptions(kind: type) -> dict[str, str]:
    """Return the documented arguments of a class and its bases, each in one line."""
    import docstring_parser

    descriptions = {}
    # From the base to the class, which may describe an argument again.
    for base in reversed(kind.__mro__):
        for entry in docstring_parser.parse(base.__doc__ or "").params:
            descriptions[entry.arg_name] = " ".join((entry.description or "").split())
    return descriptions
