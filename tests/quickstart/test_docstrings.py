"""Docstrings are read with `ast`: summary, qualified name, rest; nothing is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dualenc.commands.quickstart import read_docstrings

SOURCE = '''
raise RuntimeError("this module must not be imported")

class Stack:
    """A pile of things to take from the top.

    The last thing put on is the first that is taken off, as with plates in a cupboard, and so on and so forth.
    """

    def push(self, item):
        """Put one thing on top of the pile.

        Args: item is whatever you like; the pile keeps a reference to it and never looks inside it at all.
        """

    def short(self):
        """Has no more than a summary line."""
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "plates"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "stack.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def (:\n")
    (folder / "test_stack.py").write_text(SOURCE.replace("plates", "dishes"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "no-such-folder")})
    return "plates"


def test_names_summaries_and_the_rest(package: str) -> None:
    found = read_docstrings(10, packages=[package], progress=False)
    assert [d.name for d in found] == ["plates.stack.Stack", "plates.stack.Stack.push"]
    assert found[0].summary == "A pile of things to take from the top."
    assert found[1].rest.startswith("Args: item is whatever you like; the pile keeps")
    assert not any(name.startswith("plates.") for name in sys.modules)


def test_limit_and_unknown_packages(package: str) -> None:
    assert len(read_docstrings(1, packages=["no_such_package_here", package], progress=False)) == 1


def test_the_standard_library_has_enough_and_its_names_and_summaries_are_unique() -> None:
    found = read_docstrings(500, packages=[], progress=False)
    assert len(found) == 500
    assert len({d.name for d in found}) == len({d.summary for d in found}) == 500
