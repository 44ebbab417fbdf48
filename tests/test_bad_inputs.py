"""Bad inputs end in one line, exit code 2, and leave nothing half-written; and the harness that says so can say no."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dualenc import cli
from tests import bad_inputs
from tests.bad_inputs import Case, run_cases

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.nightly
def test_bad_inputs_end_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bad_inputs", "--jobs", str(os.cpu_count() or 2)]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*command, "--report", str(report)], cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False
    )
    assert report.is_file(), done.stderr[-3000:]
    outcomes = json.loads(report.read_text())
    assert len(outcomes) >= 600
    wrong = [
        f"{outcome['name']}: {outcome['problem']} {outcome['place']}" for outcome in outcomes if outcome["problem"]
    ]
    assert not wrong, "\n".join(wrong)


def refuse(line: str = "dualenc: error: no such file; give another\n", code: int = 2) -> int:
    sys.stderr.write(line)
    return code


def write_and_refuse(name: str, content: str = "half") -> int:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(content)
    return refuse()


def remove_and_refuse(name: str) -> int:
    Path(name).unlink()
    return refuse()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "expected", "problem"),
    [
        (refuse, "error", ""),
        (refuse, "either", ""),
        (refuse, "works", "refused, exit code 2"),
        (lambda: 0, "error", "accepted"),
        (lambda: 0, "either", ""),
        (lambda: 0, "works", ""),
        (lambda: 1 // 0, "error", "traceback"),
        (lambda: sys.exit("no"), "error", "exit code 1"),
        (lambda: refuse(code=3), "error", "exit code 3"),
        (lambda: refuse(""), "error", "0 error lines"),
        (lambda: refuse("dualenc: error: a\ndualenc: error: b\n"), "error", "2 error lines"),
        (lambda: refuse("dualenc: error: \x1b[2J\n"), "error", "unreadable line"),
        (lambda: refuse("dualenc: error: <_io.BytesIO object at 0x7f>\n"), "error", "unreadable line"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "error", "aborts: SIGSEGV"),
        (lambda: os.abort(), "either", "aborts: SIGABRT"),
        (lambda: time.sleep(60), "either", "hangs: more than 6 s"),
        (lambda: write_and_refuse("out"), "error", "half-written: out"),
        (lambda: write_and_refuse(".out.part-12"), "error", "leaves .out.part-12"),
        (lambda: remove_and_refuse("mine"), "error", "removed: mine"),
        (lambda: bytearray(1 << 40), "error", "traceback"),
        (lambda: write_and_refuse("out.json", "{}"), "error", ""),
        (lambda: write_and_refuse("out.json", "{"), "error", "half-written: out.json"),
        (lambda: write_and_refuse("out.ndjson", '{"a": 1}\n{"b'), "error", "half-written: out.ndjson"),
        (lambda: write_and_refuse("out/meta.json", '{"complete": false}'), "error", "half-written: out, out/meta.json"),
        (lambda: write_and_refuse("out/meta.json", '{"complete": true}'), "error", ""),
    ],
)
def test_the_harness_notices_what_is_wrong(
    command: Callable[[], int],
    expected: bad_inputs.Expected,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "toys").mkdir()
    monkeypatch.setattr(bad_inputs, "SECONDS", 6)
    monkeypatch.setattr(cli, "main", lambda argv: command())
    case = Case("case", "words", lambda box: (box.folder / "mine").write_text("mine"), expected)
    (outcome,) = run_cases([case], tmp_path / "toys", tmp_path)
    assert outcome.problem == problem


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toys").mkdir()
    monkeypatch.setattr(cli, "main", lambda argv: write_and_refuse("out"))
    case = Case("case", "words", file_bytes=2)
    (outcome,) = run_cases([case], tmp_path / "toys", tmp_path)
    assert outcome.problem == "traceback"
    assert "File too large" in outcome.line


def test_words_name_the_cases_own_copy_of_what_it_spoils(tmp_path: Path) -> None:
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "a.txt").write_text("sound")
    box = bad_inputs.Box(tmp_path, tmp_path / "toys")
    assert box.words("read {a.txt}") == ["read", str(tmp_path / "toys" / "a.txt")]
    box["a.txt"].unlink()
    assert box.words("read {a.txt}") == ["read", str(tmp_path / "a.txt")], "also once it is missing"
