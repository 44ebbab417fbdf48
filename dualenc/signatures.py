"""Argument names of the package's own classes, read from their sources: importing them takes seconds (torch)."""

from __future__ import annotations

import ast
import importlib.resources
from functools import cache


def argument_names(path: str) -> list[str] | None:
    """Names of the arguments that a class takes, those behind `**arguments` of its base classes included.

    Args:
        path: of the class, such as "dualenc.objectives.SogCLR".

    Returns:
        The names; None for a class that is not in the package's sources.
    """
    module, _, name = path.rpartition(".")
    found = _find(module, name)
    if found is None:
        return None
    module, node = found
    constructors = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if constructors:
        arguments = constructors[-1].args
        names = [argument.arg for argument in (*arguments.args[1:], *arguments.kwonlyargs)]
        if arguments.kwarg is None:
            return names
    elif any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    else:
        names = []
    for base in map(ast.unparse, node.bases):
        inherited = [] if base in ("ABC", "nn.Module") else argument_names(f"{module}.{base}")
        if inherited is None:
            return None
        names += inherited
    return names


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
