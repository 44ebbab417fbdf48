"""Commands run in this process."""

from __future__ import annotations

from typing import Any

import pytest

from dualenc.cli import main


def run(*words: Any) -> None:
    """`dualenc WORDS`, which must end well."""
    assert main([str(word) for word in words]) == 0


def failure(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """The one line that a mistake prints."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.strip() and "items/s" not in line]
    assert len(told) == 1, told
    return told[0].removeprefix("dualenc: error: ")
