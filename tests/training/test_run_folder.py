"""The folder of a run: one run at a time, and no trace of one that failed before its first step."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from dualenc.errors import DualencError
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
        with pytest.raises(
            DualencError, match=f"a run is going on in this folder .process {process.pid} on "
        ) as raised:
            train(run, model=TinyEncoder(), **changes)
        assert "\n" not in str(raised.value)
    returncode, errors = process.end()
    assert returncode == 0, errors
    assert not (run / ".lock").exists()
    train(tmp_path / "alone", model=TinyEncoder())
    assert same(weights(run), weights(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_lock_of_a_killed_run_is_no_obstacle(tmp_path, num_workers):
    """Nor are its data workers, which notice only after seconds that it is gone."""
    assert run_and_die(train_and_die, tmp_path, 6, {"num_workers": num_workers}) == -signal.SIGKILL
    assert (tmp_path / ".lock").read_text().startswith("process ")
    train(tmp_path, resume=True)
    assert not (tmp_path / ".lock").exists()


def test_a_killed_process_holds_no_lock_before_its_parent_notices(tmp_path):
    """Killed, but not waited for by whoever started it: a zombie still has a number."""

    def claim_and_die():
        with run_folder.locked_run(tmp_path, resume=False, overwrite=False):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=claim_and_die)
    process.start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with run_folder.locked_run(tmp_path, resume=False, overwrite=False):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
    process.join()
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("content", ["", "process 1 on elsewhere"])
def test_a_lock_file_that_nobody_holds_is_no_obstacle(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    with run_folder.locked_run(tmp_path, resume=True, overwrite=False):
        pass
    assert not (tmp_path / ".lock").exists()


def test_what_a_run_killed_at_its_beginning_leaves_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").touch()
    with run_folder.locked_run(tmp_path, resume=False, overwrite=False):
        assert sorted(os.listdir(tmp_path)) == [".lock", "meta.json"]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_claimed_twice_in_one_process_is_refused(tmp_path):
    with (
        run_folder.locked_run(tmp_path, resume=False, overwrite=False),
        pytest.raises(DualencError, match="a run is going on"),
        run_folder.locked_run(tmp_path, resume=False, overwrite=True),
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
    with pytest.raises(DualencError) as raised:
        train(output, **changes, **more)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_before_the_first_step_leaves_no_folder(tmp_path, name):
    mistaken(tmp_path / "a" / "b", MISTAKES[name])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    mistaken(tmp_path / "a" / "b", MISTAKES[name])
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("metric", "overwrite"), ("first step", "overwrite"), ("sample", "resume")])
def test_a_mistake_before_the_first_step_leaves_an_earlier_run(tmp_path, name, how):
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2), **({"max_steps": 5, "epochs": None} if how == "resume" else {}))
    before = contents(tmp_path)
    mistaken(tmp_path, MISTAKES[name], **{how: True})
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_overwriting_leaves_nothing_of_the_run_before(tmp_path):
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2))
    (tmp_path / "notes.txt").write_text("mine")
    train(tmp_path, max_steps=3, overwrite=True, save_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meta.json", "metrics.jsonl", "model", "notes.txt"]


FOREIGN = {
    "files of a run's names": {"recipe.yaml": "mine", "metrics.jsonl": '{"step": 1, "loss": 2.0}\n'},
    "a lock": {".lock": "mine"},
    "a model": {"model/config.json": "{}", "model/model.safetensors": "", "model/notes.txt": "mine"},
    "other files": {"thesis/chapter.txt": "years of work"},
    "another meta.json": {"meta.json": '{"format": "something else"}'},
    "checkpoints": {"checkpoints/step-1/meta.json": '{"step": 1}'},
}


@pytest.mark.parametrize("how", ["resume", "overwrite", "neither"])
@pytest.mark.parametrize("name", list(FOREIGN))
def test_a_folder_of_other_files_is_refused_and_stays(tmp_path, name, how):
    for file, content in FOREIGN[name].items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    before = contents(tmp_path)
    with pytest.raises(DualencError, match=r"holds no run of dualenc; choose a new|lock: was not written") as raised:
        train(tmp_path, objective=FirstStepFails.of(tiny_pairs()), **{how: True} if how != "neither" else {})
    assert "overwrite" not in str(raised.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_model_of_other_origin_in_the_folder_of_a_run_is_refused_before_the_first_step(tmp_path, how):
    train(tmp_path, max_steps=2)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(DualencError, match="model: was not written by a training and is not replaced"):
        train(tmp_path, objective=FirstStepFails.of(tiny_pairs()), **{how: True})
    assert contents(tmp_path) == before


def test_an_output_without_a_name_is_refused():
    with pytest.raises(DualencError, match="output is empty"):
        train("")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DualencError, match=r"file/run: cannot be made or written to .*; choose another trainer.output"):
        train(tmp_path / "file" / "run")
