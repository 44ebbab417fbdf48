"""`dualenc recipe`: list the recipes of the package, or print one or its keys."""

from __future__ import annotations

import inspect
import pkgutil
import re
import shutil
import textwrap
from collections.abc import Mapping
from itertools import takewhile, zip_longest
from pathlib import Path

import yaml

from dualenc.errors import DualencError, nearest
from dualenc.recipe.packaged import packaged_recipes, recipe_name


def recipe(name: str | None = None, *, keys: bool = False) -> None:
    """List the recipes that come with dualenc, or print one: `dualenc recipe text-pairs >
    mine.yaml`.

    Args:
        name: name of a recipe in the list.
        keys: print every key of the recipe's classes instead, with types, defaults and
            descriptions.
    """
    paths = packaged_recipes()
    if name is None:
        if keys:
            raise DualencError("--keys is for one recipe", fix="name it, see dualenc recipe")
        _print_list(paths)
        return
    label = recipe_name(name)
    if label not in paths:
        raise DualencError(
            f"unknown recipe '{name}'{nearest(label, paths)}", fix="see dualenc recipe"
        )
    # The file as it is, comments included: it is the documentation of its keys.
    text = paths[label].read_text(encoding="utf-8")
    print(_keys(text) if keys else text, end="")


def _print_list(paths: Mapping[str, Path]) -> None:
    """Print the name and the first sentence of each recipe."""
    start = max(map(len, paths)) + 4
    columns = shutil.get_terminal_size().columns
    for label, path in paths.items():
        sentence = _first_sentence(path.read_text(encoding="utf-8"))
        width = max(columns - start, 24)
        for name, line in zip_longest([label], textwrap.wrap(sentence, width), fillvalue=""):
            print(f"  {name:<{start - 2}}{line}")
    print()
    print("next:  dualenc recipe text-pairs > mine.yaml")
    print("       dualenc train mine.yaml data.path=pairs.csv")


def _first_sentence(text: str) -> str:
    """Return what a recipe is for: the sentence that its first comment begins with."""
    # Commands below it are indented.
    lines = takewhile(lambda line: re.match(r"# \S", line), text.splitlines())
    comment = " ".join(line.removeprefix("# ") for line in lines)
    # "et al. 2024" ends no sentence.
    return re.split(r"(?<=\.) (?=[A-Z])", comment)[0]


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
