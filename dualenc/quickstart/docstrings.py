"""The documentation already on this machine as query-document pairs: docstrings read with `ast`, never imported."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

PACKAGES = ("numpy", "scipy", "sklearn", "pandas", "matplotlib", "networkx", "sympy", "PIL", "torch", "datasets")
"""Installed packages that are read after the standard library, if they are there."""

SKIPPED_FOLDERS = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages", "_vendor"}
Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Docstring(NamedTuple):
    """One documented object: its qualified name, the summary line, and the rest of its docstring."""

    name: str
    summary: str
    rest: str


def read_docstrings(
    limit: int, packages: Sequence[str] = PACKAGES, minimum_length: int = 80, progress: bool = True
) -> list[Docstring]:
    """Docstrings of the standard library and of installed packages with a summary line and something after it.

    Args:
        limit: how many at most; the order is the same in every run on the same machine.
        packages: top-level packages to read after the standard library.
        minimum_length: characters that must follow the summary line.
        progress: show a progress bar.
    """
    found: list[Docstring] = []
    seen: set[str] = set()
    bar = tqdm(total=limit, desc="reading docstrings", unit="doc", disable=not progress, leave=False)
    for root in _roots(packages):
        for docstring in _docstrings_below(root, minimum_length):
            # The same summary over many overloads is one question with many answers: keep the first.
            if not seen.isdisjoint((docstring.summary, docstring.name)):
                continue
            seen.update((docstring.summary, docstring.name))
            found.append(docstring)
            bar.update()
            if len(found) == limit:
                bar.close()
                return found
    bar.close()
    return found


def _roots(packages: Sequence[str]) -> Iterator[Path]:
    yield Path(sysconfig.get_paths()["stdlib"])
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            yield Path(next(iter(spec.submodule_search_locations)))


def _docstrings_below(root: Path, minimum_length: int) -> Iterator[Docstring]:
    prefix = "" if root == Path(sysconfig.get_paths()["stdlib"]) else f"{root.name}."
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[-1].startswith("test_"):
            continue
        module = prefix + ".".join(part for part in parts if part != "__init__")
        yield from _docstrings_in(file, module.rstrip("."), minimum_length)


def _docstrings_in(file: Path, module: str, minimum_length: int) -> Iterator[Docstring]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError, OSError):
        return  # a file that Python itself would not read has no documentation to offer
    for name, node in _documented_nodes(tree, module):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            summary, _, rest = inspect.cleandoc(docstring).partition("\n")
            rest = " ".join(rest.split())
            if len(summary.split()) >= 3 and len(rest) >= minimum_length:
                yield Docstring(name, summary.strip(), rest)


def _documented_nodes(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented_nodes(child, name)
