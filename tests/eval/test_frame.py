"""The frame of the experiments: runs kept and found, grids past their edges, origins."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.data import PairDataset
from dualenc.encoders import VectorEncoder
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.objectives import InfoNCE
from tests.helpers.eval_scripts import load_script

frame = load_script("frame.py")


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_are_kept_with_their_origin_and_not_repeated(tmp_path: Path, processes: int) -> None:
    store = frame.Store(tmp_path / "new" / "runs.jsonl")
    wanted = [{"seed": seed, "rate": 0.1} for seed in (2, 0, 1)]
    made: list[int] = []

    def run(settings: dict[str, float]) -> dict[str, float]:
        made.append(int(settings["seed"]))
        return {"test": 10 * settings["seed"], "process": os.getpid()}

    outcomes = store.get(wanted, run, processes)
    assert [each["test"] for each in outcomes] == [20, 0, 10]
    assert (os.getpid() in {each["process"] for each in outcomes}) == (processes == 1)
    assert store.get(wanted, run, processes) == outcomes
    assert len(made) in (0, 3)  # forked processes count for themselves
    again = frame.Store(store.path)
    assert sorted(each.settings["seed"] for each in again.runs) == [0, 1, 2]
    assert [each.outcome["test"] for each in again.where(seed=1)] == [10]
    for each in again.runs:
        assert set(each.origin) == {"commit", "versions", "device", "date", "seconds"}
        assert torch.__version__.startswith(each.origin["versions"]["torch"])
        assert each.origin["seconds"] >= 0


def test_a_run_that_fails_loses_no_other(tmp_path: Path) -> None:
    store = frame.Store(tmp_path / "runs.jsonl")

    def run(settings: dict[str, int]) -> dict[str, int]:
        if settings["seed"] == 1:
            raise RuntimeError("out of memory")
        return {"test": settings["seed"]}

    with pytest.raises(RuntimeError, match="out of memory"):
        store.get([{"seed": 0}, {"seed": 1}], run)
    assert [each.settings for each in frame.Store(store.path).runs] == [{"seed": 0}]


def test_the_best_value_of_each_cell_is_found_past_an_edge() -> None:
    best = {"inside": 0.1, "above": 0.4, "below": 0.025}
    tried: list[tuple[str, float]] = []

    def held_out(missing: list[tuple[str, float]]) -> list[float]:
        tried.extend(missing)
        return [-abs(math.log(value / best[cell])) for cell, value in missing]

    assert frame.tune(list(best), [0.05, 0.1, 0.2], held_out) == best
    assert len(tried) == len(set(tried))
    assert frame.tune(["inside"], [3.0], held_out) == {"inside": 3.0}
    # Of equals, the smallest.
    assert frame.tune(["a"], [2.0, 1.0], lambda missing: [0.0 for _ in missing]) == {"a": 0.25}


def test_scores_survive_packing_to_half_a_step() -> None:
    scores = np.random.default_rng(0).random(1000)
    assert np.abs(frame.unpacked(frame.packed(scores)) - scores).max() <= 0.5 / 255 + 1e-9


def test_spread_and_difference_are_those_of_the_seeds_and_queries() -> None:
    assert frame.spread([0.1, 0.3]) == f"0.200 ± {np.std([0.1, 0.3], ddof=1):.3f}"
    assert frame.spread([0.1]) == "0.100 (one seed)"
    assert frame.spread([]) == "not run"
    base, other = np.random.default_rng(0).random((2, 50))
    found = paired_bootstrap(base, other, samples=500)
    expected = f"{other.mean() - base.mean():+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    assert frame.difference(base, other, samples=500) == expected


def test_a_training_leaves_no_folder_and_keeps_the_last_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    vectors = np.eye(8, dtype=np.float32)
    pairs = PairDataset(vectors, vectors, left_modality="vector", right_modality="vector")
    model = VectorEncoder(8, tower="dense")
    before = model.left({"vector": torch.eye(8)}).detach()
    trained = frame.train(model, pairs, InfoNCE(num_left=8), batch_size=4, max_steps=3)
    assert list(tmp_path.iterdir()) == []
    assert (trained.steps, trained.model.training) == (3, False)
    assert trained.seconds > 0
    assert not torch.equal(trained.model.left({"vector": torch.eye(8)}), before)


def test_every_store_is_readable_and_says_where_its_numbers_come_from() -> None:
    stores = sorted(frame.RESULTS.glob("*.jsonl"))
    assert stores
    for path in stores:
        runs = frame.Store(path).runs
        assert runs
        for each in runs:
            assert each.origin["commit"]
            assert each.origin["date"]
            assert set(each.origin) == {"commit", "versions", "device", "date", "seconds"}
        # Times are measured again, on other machines; results of trainings are not.
        keys = [json.dumps(each.settings, sort_keys=True) for each in runs]
        assert len(set(keys)) == len(keys) or path.stem.startswith("steps_")


def test_the_command_line_checks_in_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--check"])
    frame.command_line(print, check=lambda folder: print(list(folder.iterdir())))
    assert capsys.readouterr().out == "[]\n"


def test_settings_are_chosen_one_after_another_and_repeated_with_all_seeds(tmp_path: Path) -> None:
    store = frame.Store(tmp_path / "runs.jsonl")

    def run(settings: dict[str, float]) -> dict[str, float]:
        distance = abs(settings["tau"] - settings["best"]) + abs(settings["rate"] - 2)
        return {"validation": -distance, "seed": settings["seed"]}

    trials = {name: {"best": best, "steps": 1} for name, best in (("a", 0.2), ("b", 0.4))}
    grids = {"tau": (0.1, 0.2, 0.4, 0.8), "rate": (1.0, 2.0, 4.0)}
    chosen = frame.choose(store, run, trials, grids)
    assert chosen == {"a": {"tau": 0.2, "rate": 2.0}, "b": {"tau": 0.4, "rate": 2.0}}
    assert {each.settings["seed"] for each in store.runs} == {0}
    final = {name: {"best": 0.0, "steps": 2, **own} for name, own in chosen.items()}
    found = frame.repeat(store, run, final, seeds=3)
    assert all([each["seed"] for each in found[name]] == [0, 1, 2] for name in "ab")
    assert [each.settings["seed"] for each in frame.most_seeds(store.where(tau=0.4))] == [0, 1, 2]
    of_one = frame.most_seeds(store.where(best=0.2))
    assert [each.settings["tau"] for each in of_one] == [0.2]
