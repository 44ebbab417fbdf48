"""Arguments of the package's own classes, read from their sources: importing them takes seconds (torch)."""

from __future__ import annotations

import ast
import importlib.resources
from functools import cache
from typing import NamedTuple

import docstring_parser


class Argument(NamedTuple):
    """An argument of a class.

    Attributes:
        name: in calls and recipes.
        default: as the source has it; None if it must be given.
        text: its description.
    """

    name: str
    default: str | None
    text: str


def argument_names(path: str) -> list[str] | None:
    """Names of the arguments that a class takes; as `arguments_of`."""
    found = arguments_of(path)
    return None if found is None else [argument.name for argument in found]


def arguments_of(path: str) -> list[Argument] | None:
    """The arguments that a class takes, those behind `**arguments` of its base classes included.

    Args:
        path: of the class, such as "dualenc.objectives.SogCLR".

    Returns:
        The arguments; None for a class that is not in the package's sources.
    """
    module, _, name = path.rpartition(".")
    found = _find(module, name)
    if found is None:
        return None
    module, node = found
    texts = _texts(node)
    arguments: list[Argument] = []
    constructors = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if constructors:
        signature = constructors[-1].args
        arguments = _described(signature, texts)
        if signature.kwarg is None:
            return arguments
    elif any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        return [_argument(ast.unparse(field.target), field.value, texts) for field in fields]
    for base in map(ast.unparse, node.bases):
        inherited = [] if base in ("ABC", "nn.Module") else arguments_of(f"{module}.{base}")
        if inherited is None:
            return None
        present = {argument.name for argument in arguments}
        arguments += [argument for argument in inherited if argument.name not in present]
    return arguments


def _described(signature: ast.arguments, texts: dict[str, str]) -> list[Argument]:
    """The arguments of a constructor, self apart."""
    positional = signature.args[1:]
    missing = len(positional) - len(signature.defaults)
    defaults: list[ast.expr | None] = [*[None] * missing, *signature.defaults, *signature.kw_defaults]
    names = [*positional, *signature.kwonlyargs]
    return [_argument(name.arg, default, texts) for name, default in zip(names, defaults, strict=True)]


def _argument(name: str, default: ast.expr | None, texts: dict[str, str]) -> Argument:
    return Argument(name, None if default is None else ast.unparse(default), texts.get(name, ""))


def _texts(node: ast.ClassDef) -> dict[str, str]:
    """The descriptions of a class's arguments, by name."""
    parsed = docstring_parser.parse(ast.get_docstring(node) or "")
    texts: dict[str, str] = {}
    for entry in parsed.params:
        for name in entry.arg_name.split(","):
            texts[name.strip()] = " ".join((entry.description or "").split())
    return texts


def _find(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The class of a name in a module, and the module that defines it."""
    for node in ast.walk(_source(module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return _find(node.module or "", name)
    return None


@cache
def _source(module: str) -> ast.Module:
    """A module of the package, empty where there is none."""
    package, *names = module.split(".")
    place = importlib.resources.files("dualenc")
    for file in ("/".join([*names, "__init__.py"]), "/".join(names) + ".py"):
        if package == "dualenc" and all(map(str.isidentifier, names)) and (place / file).is_file():
            return ast.parse((place / file).read_text(encoding="utf-8"))
    return ast.Module([], [])
