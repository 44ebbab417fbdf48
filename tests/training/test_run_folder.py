"""The folder of a run: locked, no trace of mistakes, nothing foreign replaced; checkpoints complete
or absent."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.errors import DualencError
from dualenc.io.reading import read_json
from dualenc.seeds import preserve_random_state, seed_everything
from dualenc.training import checkpoint as run_folder
from dualenc.training.checkpoint import Checkpoints
from tests.helpers.fakes import TinyEncoder, same, tiny_objective, tiny_pairs, weights
from tests.helpers.launched import launch, small_run
from tests.helpers.runs import FixedEvaluator, train
from tests.helpers.waiting import wait_for


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its contents, every folder with None."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


@pytest.mark.slow
def test_a_second_run_in_the_folder_of_a_running_one_is_refused_and_harms_nothing(tmp_path):
    run = tmp_path / "run"
    (process,) = launch(tmp_path, small_run, run, delay=0.1)
    wait_for((run / "metrics.jsonl").exists)
    for changes in ({"resume": True}, {"overwrite": True}, {}):
        with pytest.raises(
            DualencError, match=f"is in use by another run .process {process.pid} on "
        ):
            train(run, model=TinyEncoder(), **changes)
    returncode, errors = process.end()
    assert returncode == 0, errors
    assert not (run / ".lock").exists()
    train(tmp_path / "alone", model=TinyEncoder())
    assert same(weights(run), weights(tmp_path / "alone"))


def test_a_killed_process_holds_no_lock_before_its_parent_notices(tmp_path):
    """Killed, but not waited for by whoever started it: a zombie still has a number."""

    def lock_and_die():
        with run_folder.locked_run(tmp_path, resume=False, overwrite=False):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=lock_and_die)
    process.start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with run_folder.locked_run(tmp_path, resume=False, overwrite=False):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
        with pytest.raises(DualencError, match="is in use by another run"):
            run_folder.locked_run(tmp_path, resume=False, overwrite=True).__enter__()
    process.join()
    assert os.listdir(tmp_path) == []
    (tmp_path / ".lock").touch()  # left by a kill before anything else was written
    with run_folder.locked_run(tmp_path, resume=False, overwrite=False):
        pass
    assert os.listdir(tmp_path) == []


def failing():
    """An objective that cannot do its first step."""
    objective = tiny_objective(tiny_pairs())

    def fail(*_):
        raise DualencError("no first step")

    objective.register_forward_pre_hook(fail)
    return objective


MISTAKES = {
    "metric": (lambda: {"evaluator": FixedEvaluator(0.1, primary="foo")}, "primary is 'foo'"),
    "first step": (lambda: {"objective": failing()}, "no first step"),
    "sample": (
        lambda: {"pairs": tiny_pairs(bad=tuple(range(24))), "on_error": "raise"},
        r"pair (\d+): row \1: not readable",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_before_the_first_step_leaves_no_folder_or_an_earlier_run(tmp_path, name):
    run = tmp_path / "a" / "b"
    mistake, message = MISTAKES[name]
    with pytest.raises(DualencError, match=message):
        train(run, **mistake())
    assert list(tmp_path.iterdir()) == []
    train(run, evaluator=FixedEvaluator(0.1, 0.2))
    before = contents(run)
    with pytest.raises(DualencError, match=message):
        train(run, **mistake(), overwrite=True)
    assert contents(run) == before


@pytest.mark.slow
def test_a_resume_with_other_data_leaves_an_earlier_run(tmp_path):
    train(tmp_path / "run", max_steps=5, epochs=None)
    before = contents(tmp_path / "run")
    with pytest.raises(DualencError, match=r"another recipe or other data: data\.left_items was"):
        train(tmp_path / "run", pairs=tiny_pairs(bad=(1,)), resume=True)
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_a_run_is_overwritten_on_demand_alone_and_then_whole(tmp_path):
    train(tmp_path, evaluator=FixedEvaluator(0.1, 0.2))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DualencError, match=r"holds a run already .*--resume"):
        train(tmp_path, max_steps=1)
    train(tmp_path, max_steps=3, overwrite=True, save_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "meta.json",
        "metrics.jsonl",
        "model",
        "notes.txt",
    ]


FOREIGN = {
    "files of a run's names": {
        "recipe.yaml": "mine",
        "metrics.jsonl": '{"step": 1, "loss": 2.0}\n',
    },
    "other files": {"thesis/chapter.txt": "years of work"},
    "another meta.json": {"meta.json": '{"format": "something else"}'},
}


@pytest.mark.parametrize("how", ["resume", "overwrite"])
@pytest.mark.parametrize("name", list(FOREIGN))
def test_a_folder_of_other_files_is_refused_and_stays(tmp_path, name, how):
    for file, content in FOREIGN[name].items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    before = contents(tmp_path)
    with pytest.raises(DualencError, match="holds no run of dualenc"):
        train(tmp_path, objective=failing(), **{how: True})
    assert contents(tmp_path) == before


def test_an_output_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for output, message in (
        ("", "output is empty"),
        (tmp_path / "file" / "run", "file/run: cannot be created"),
    ):
        with pytest.raises(DualencError, match=message):
            train(output)


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_the_latest_state_and_the_generators_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load_latest(seed=0) is None
    for step in (1, 9, 10):
        checkpoints.save(step, {})
    seed_everything(1)
    checkpoints.save(
        100, {"weights": torch.arange(3), "nested": {"lr": 0.1, "names": ["a"], "pair": (1, None)}}
    )
    with preserve_random_state():
        expected = draws()
    assert draws() == expected
    seed_everything(1, rank=1)
    assert draws() != expected
    (tmp_path / "notes.txt").write_text("mine")
    state = Checkpoints(tmp_path).load_latest(seed=0)
    assert state["weights"].tolist() == [0, 1, 2]
    assert state["nested"] == {"lr": 0.1, "names": ["a"], "pair": (1, None)}
    assert draws() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt",
        "step-00000010",
        "step-00000100",
    ]


@pytest.mark.parametrize(
    ("name", "damage"), [("state.pt", "missing"), ("state.pt", "short"), ("meta.json", "missing")]
)
def test_an_incomplete_checkpoint_is_named_with_the_remedy(tmp_path, name, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"step": 2})
    path = tmp_path / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-100]) if damage == "short" else path.unlink()
    with pytest.raises(DualencError, match="step-00000002"):
        checkpoints.load_latest(seed=0)
    shutil.rmtree(path.parent)
    assert checkpoints.load_latest(seed=0) == {"step": 1}


def test_one_flipped_bit_is_found_and_the_remedy_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"weights": torch.arange(1000)})
    sums = read_json(tmp_path / "step-00000001" / "meta.json")["files"]
    listed = "".join(f"{digest}  {file}\n" for file, digest in sums.items())
    check = ["sha256sum", "--check", "--status"]
    subprocess.run(check, input=listed, cwd=tmp_path / "step-00000001", text=True, check=True)
    path = tmp_path / "step-00000001" / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DualencError, match=r"state.pt: corrupt.*; remove the folder .*step-00000001"
    ):
        checkpoints.load_latest(seed=0)


def test_loading_runs_no_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return (print, ("run",))

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"payload": Payload()})
    with pytest.raises(DualencError, match="damaged"):
        checkpoints.load_latest(seed=0)
