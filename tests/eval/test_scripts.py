"""Every script of eval runs at toy size, none is dead, and pages name commands that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.eval_scripts import EVAL, commands, functions_of, mistake_in
from tests.helpers.pages import ROOT

FILES = sorted(EVAL.rglob("*.py"))
SCRIPTS = [file for file in FILES if functions_of(file)]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.*")]
PAGES += [file for name in ("docs", "eval/results") for file in (ROOT / name).rglob("*.md")]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_script_finds_the_numbers_that_are_known_beforehand(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(tmp_path.iterdir())


def test_every_file_is_a_script_or_imported() -> None:
    lines = "\n".join(file.read_text("utf-8") for file in FILES)
    imported = set(re.findall(r"^ *(?:from|import) (?:\w+\.)*(\w+)", lines, flags=re.M))
    assert [name(file) for file in FILES if file not in SCRIPTS and file.stem not in imported] == []


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_are_those_of_the_scripts(page: Path) -> None:
    mistakes = [mistake for command in commands(page) if (mistake := mistake_in(*command))]
    assert mistakes == []
