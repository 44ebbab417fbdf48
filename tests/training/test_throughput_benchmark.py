"""eval/bench/training.py trains both tools, in small, and prints what a step takes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "eval" / "bench"


@pytest.mark.slow
@pytest.mark.parametrize(("task", "rival"), [("text", "sentence-transformers"), ("image-text", "open_clip")])
def test_both_tools_are_timed(
    task: str, rival: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    script = runpy.run_path(str(BENCH / "training.py"))
    script["main"](task=task, batch_size=2, steps=1, repeats=1, text_length=8)
    printed = capsys.readouterr().out
    assert printed.count("pairs/s") == 2
    assert "dualenc:" in printed
    assert f"{rival}:" in printed


def test_a_step_is_timed_by_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    script = runpy.run_path(str(BENCH / "training.py"))
    clock = [0.0]

    def train(steps: int) -> None:
        clock[0] += 100 + 2 * steps

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert script["seconds_per_step"]({"a": train}, few=3, steps=5, repeats=2) == {"a": 2.0}
