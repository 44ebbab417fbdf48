"""Test files share code by `tests/helpers` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(path for path in TESTS.rglob("*.py") if "helpers" not in path.parts)


def imported_modules(path: Path) -> set[str]:
    """The absolute names of all modules that a file may import, anywhere in it."""
    package = ("tests", *path.relative_to(TESTS).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*parents, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_file_imports_another(path: Path) -> None:
    modules = {module for module in imported_modules(path) if module.startswith("tests.")}
    outside = {module for module in modules if not f"{module}.".startswith("tests.helpers.")}
    assert not outside, "move what is shared to tests/helpers"
