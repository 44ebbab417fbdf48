"""What the benchmarks measure: milliseconds of a step, ratios, recall."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.eval_scripts import load_script


def test_clock_is_read_at_two_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    script, now = load_script("bench/training.py"), iter([10.0, 13.0])
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(script, "ON_GPU", False)
    losses = range(script.FEW + 3)
    found = script.measure_once(lambda _, before_loss: [before_loss() for _ in losses], 2)
    assert found == {"ms per step": 1500}


def test_ratios_are_those_of_least_times_and_of_medians_to_the_first_call() -> None:
    found = load_script("bench/in_turn.py").ratios({"faiss": [4, 2, 3], "ours": [6, 1, 9]})
    assert found == {
        "faiss, ms": 2000,
        "ours, ms": 1000,
        "ours / faiss": 0.5,
        "ours / faiss, medians": 2,
    }


def test_recall_is_the_share_of_expected_rows() -> None:
    recall = load_script("bench/search.py").recall
    assert recall(np.array([[3, 1, -1], [7, 8, 9]]), np.array([[1, 2], [9, 8]])) == 0.75
