"""The table of estimators and the benchmark run, in small, and print a row per objective."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EVAL = Path(__file__).resolve().parents[2] / "eval"


def test_estimator_bias_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EVAL / "estimator_bias.py"))
    script["main"](num_pairs=16, batch_size=8, epochs=8, warm_up=1, out=tmp_path / "drawn" / "bias.png")
    printed = capsys.readouterr().out
    assert all(name in printed for name in script["OBJECTIVES"])
    # The oracle has neither bias nor error.
    assert printed.split("ExactGlobal")[1].split()[:3] == ["0.0000"] * 3
    assert (tmp_path / "drawn" / "bias.png").stat().st_size > 10_000


def test_benchmark_prints_ratios_over_info_nce(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(EVAL / "bench" / "objectives.py"))
    script["main"](encoder="resnet18", batch_sizes=[4], num_items=50, image_size=32, repeats=1, device="cpu")
    printed = capsys.readouterr().out
    assert all(name in printed for name in script["OBJECTIVES"])
    assert printed.split("InfoNCE")[1].split()[2] == "1.0000"
