"""The folder of a run: one run at a time, and no trace of one that failed before its first step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dualenc.errors import DualencError
from dualenc.files import started
from dualenc.training import checkpoint as run_folder
from tests.training.fakes import TinyEncoder, same, tiny_objective, tiny_pairs, weights
from tests.training.launched import launch, small_run
from tests.training.runs import FixedEvaluator, run_and_die, train, train_and_die
from tests.training.test_signals import wait_for


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its contents, every folder with None."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.slow
def test_a_second_run_in_the_folder_of_a_running_one_is_refused_and_harms_nothing(tmp_path):
    run = tmp_path / "run"
    (process,) = launch(tmp_path, small_run, run, delay=0.1)
    wait_for(run / "metrics.jsonl")
    for changes in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(DualencError, match=f"a run is going on in this folder .process {process.pid} on ") as told:
            train(run, model=TinyEncoder(), **changes)
        assert "\n" not in str(told.value)
    returncode, errors = process.end()
    assert returncode == 0, errors
    assert not (run / ".lock").exists()
    train(tmp_path / "alone", model=TinyEncoder())
    assert same(weights(run), weights(tmp_path / "alone"))


def test_the_lock_of_a_killed_run_is_no_obstacle(tmp_path):
    assert run_and_die(train_and_die, tmp_path, 6, {}) == -signal.SIGKILL
    assert json.loads((tmp_path / ".lock").read_text())["pid"] != os.getpid()
    train(tmp_path, resume=True)
    assert not (tmp_path / ".lock").exists()


def test_who_holds_a_lock_is_judged_by_more_than_a_process_number(tmp_path):
    """A number is used again after its process has ended; another machine or container cannot be looked into."""
    lock = tmp_path / ".lock"
    with run_folder.claimed(tmp_path, resume=False, overwrite=False):
        mine = json.loads(lock.read_text())
    for stale in ({"started": "1"}, {"boot": "another"}, {"pid": 2**22 + 1}):
        lock.write_text(json.dumps({**mine, **stale}))
        with run_folder.claimed(tmp_path, resume=False, overwrite=False):
            assert json.loads(lock.read_text())["pid"] == os.getpid()
        assert not lock.exists()
    remedy = f"if it has ended, remove {re.escape(str(lock))} and start again"
    for unknown in (json.dumps({**mine, "host": "elsewhere"}), json.dumps({**mine, "container": "pid:[1]"}), "", "[1]"):
        lock.write_text(unknown)
        with (
            pytest.raises(DualencError, match=remedy),
            run_folder.claimed(tmp_path, resume=True, overwrite=False),
        ):
            pass
        assert lock.read_text() == unknown


def test_a_process_that_has_ended_unnoticed_holds_no_lock():
    """Killed, but not waited for by whoever started it: a zombie still has a number."""
    process = subprocess.Popen([sys.executable, "-c", "print()"], stdout=subprocess.PIPE)
    assert started(os.getpid()) not in ("", started(2**22 + 1))
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started(process.pid) == ""
    process.wait()


def test_a_folder_that_is_claimed_twice_in_one_process_is_refused(tmp_path):
    with (
        run_folder.claimed(tmp_path, resume=False, overwrite=False),
        pytest.raises(DualencError, match="a run is going on"),
        run_folder.claimed(tmp_path, resume=False, overwrite=True),
    ):
        pass


class FirstStepFails:
    """An objective that cannot do its first step."""

    @staticmethod
    def of(pairs):
        objective = tiny_objective(pairs)

        def fail(*_):
            raise DualencError("no first step")

        objective.register_forward_pre_hook(fail)
        return objective


MISTAKES = {
    "metric": {"evaluator": "foo"},
    "first step": {"objective": "fails"},
    "batch": {"batch_size": 25},
    "precision": {"mixed_precision": "half"},
    "sample": {"pairs": "bad", "on_error": "raise"},
    "schedule": {"schedule": "zigzag"},
}


def mistaken(output: Path, changes: dict, **more) -> None:
    changes = dict(changes)
    if "evaluator" in changes:
        changes["evaluator"] = FixedEvaluator(0.1)
        changes["evaluator"].primary = "foo"
    if "objective" in changes:
        changes["objective"] = FirstStepFails.of(tiny_pairs())
    if "pairs" in changes:
        changes["pairs"] = tiny_pairs(bad=tuple(range(24)))
    with pytest.raises(DualencError) as told:
        train(output, **changes, **more)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_before_the_first_step_leaves_no_folder(tmp_path, name):
    mistaken(tmp_path / "a" / "b", MISTAKES[name])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    mistaken(tmp_path / "a" / "b", MISTAKES[name])
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


@pytest.mark.parametrize("name", list(MISTAKES))
@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_a_mistake_before_the_first_step_leaves_the_run_that_is_there(tmp_path, name, how):
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2), **({"max_steps": 5, "epochs": None} if how == "resume" else {}))
    before = contents(tmp_path)
    mistaken(tmp_path, MISTAKES[name], **{how: True})
    assert contents(tmp_path) == before


def test_overwriting_leaves_nothing_of_the_run_before(tmp_path):
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2))
    (tmp_path / "selection").mkdir()
    (tmp_path / "selection" / "job-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    train(tmp_path, max_steps=3, overwrite=True, save_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "model", "notes.txt"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DualencError, match=r"file/run: cannot be made or written to .*; choose another trainer.output"):
        train(tmp_path / "file" / "run")
