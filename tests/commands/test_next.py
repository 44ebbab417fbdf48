"""The commands that are printed to run next fit a terminal, and bash takes them as pasted."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from dualenc.commands.output import QUERY, print_next

INDEX = ["index", "runs/text_pairs/model", "mine.csv", "--text-column", "answer"]
COMMANDS = [
    [*INDEX, "--out", "runs/text_pairs/index"],
    ["index", "my runs/model", "it's  a file.csv", "--no-quotes", "--text-column", "a -- b"],
    ["evaluate", "retrieval", "m" * 90, "dev.jsonl", "--left-column", "question", "--k", "-1"],
    ["report", "runs/mine"],
]


@pytest.mark.parametrize("columns", ["80", "120", "20"])
@pytest.mark.parametrize("words", COMMANDS)
def test_bash_reads_the_words_of_a_command_in_several_lines(
    words: Sequence[str],
    columns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    print_next(words, QUERY)
    printed = capsys.readouterr().out
    script = 'dualenc() { printf "%s\\n" "$@"; }\n' + printed.removeprefix("next:")
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [*words, "…"]


def test_lines_fit_a_terminal_and_options_keep_their_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_next(COMMANDS[0])
    assert capsys.readouterr().out == (
        "next:  dualenc index runs/text_pairs/model mine.csv --text-column answer \\\n"
        "           --out runs/text_pairs/index\n"
    )


def test_a_log_has_a_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_next(COMMANDS[0])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"next:  dualenc {' '.join(COMMANDS[0])}"
