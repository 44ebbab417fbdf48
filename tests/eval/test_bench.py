"""What the benchmarks measure: seconds from a loss to a later one, recall, vectors near centers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.eval_scripts import load_script


def test_clock_is_read_at_two_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    script, now = load_script("bench/training.py"), iter([10.0, 13.0])
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    steps = range(4)
    assert script.seconds_per_step(lambda _, loss: [loss() for _ in steps], 1, 2) == 1.5


def test_stopped_run_keeps_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("bench/training.py")
    rounds = iter([0.1, 0.4, 0.2, 0.8])

    def seconds_per_step(*_: object) -> float:
        if (value := next(rounds, None)) is None:
            raise KeyboardInterrupt
        return value

    measured = {"seconds_per_step": seconds_per_step, "profile_steps": lambda *_: None}
    measured |= {"counts": lambda *_: {"launches": 6}, "step_flops": lambda *_: 10}
    for name, function in {**measured, "matmul_rate": lambda *_: 100}.items():
        monkeypatch.setattr(script, name, function)
    with pytest.raises(KeyboardInterrupt):
        script.run("views", 2, 1, rows=["InfoNCE", "SogCLR"], out=tmp_path / "runs.jsonl")
    runs = script.Store(tmp_path / "runs.jsonl").runs
    assert [each.outcome["repeats"] for each in runs] == [2, 2]
    assert runs[0].outcome["limit, ms"] == 100
    assert min(each.outcome["lowest"] for each in runs) == 100


def test_vectors_near_centers_have_the_length_and_noise_that_were_asked_for() -> None:
    vectors = load_script("bench/search.py")
    centers = np.random.default_rng(0).standard_normal((3, 4000), dtype=np.float32)
    found = vectors.around(centers, 20, 0.5, np.random.default_rng(1))
    directions = centers / np.linalg.norm(centers, axis=1, keepdims=True)
    nearest = (found @ directions.T).max(axis=1)
    assert found.dtype == np.float32
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)
    assert nearest == pytest.approx((1 + 0.5**2) ** -0.5, abs=0.02)


def test_recall_is_the_share_of_expected_rows() -> None:
    recall = load_script("bench/search.py").recall
    assert recall(np.array([[3, 1, -1], [7, 8, 9]]), np.array([[1, 2], [9, 8]])) == 0.75
