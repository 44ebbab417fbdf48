"""Commands run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main


def run(*words: Any) -> None:
    """`dualenc WORDS`, which must end well."""
    assert main([str(word) for word in words]) == 0


def found(capsys: pytest.CaptureFixture[str], *words: Any) -> list[dict[str, Any]]:
    """The results of `dualenc search WORDS`."""
    capsys.readouterr()
    run("search", *words, "--json")
    return json.loads(capsys.readouterr().out)["results"]


def evaluated(task: str, out: Path, *words: Any) -> dict[str, Any]:
    """The metrics of `dualenc evaluate TASK WORDS`."""
    run("evaluate", task, *words, "--out", out)
    return json.loads((out / "metrics.json").read_text())


def failure(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """The one line that a mistake prints, below what was logged before it was found."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    prefix = "dualenc: error: "
    told = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert [line.startswith(prefix) for line in told].index(True) == len(told) - 1, told
    return told[-1].removeprefix(prefix)
