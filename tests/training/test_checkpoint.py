"""Checkpoint folders: complete or absent, the latest few, random states restored."""

import json
import random
import shutil
import subprocess
from contextlib import suppress

import numpy as np
import pytest
import torch

from dualenc.errors import DualencError
from dualenc.seeds import random_state_kept, seed_everything
from dualenc.training.checkpoint import Checkpoints
from tests.training.fakes import same, tiny_objective, tiny_pairs, weights
from tests.training.runs import train


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def test_the_latest_state_and_the_generators_come_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    seed_everything(1)
    checkpoints.save(5, {"weights": torch.arange(3), "nested": {"lr": 0.1, "names": ["a"], "pair": (1, None)}})
    expected = draws()
    seed_everything(2)
    state = Checkpoints(tmp_path / "c").load_latest(seed=0)
    assert state["weights"].tolist() == [0, 1, 2]
    assert state["nested"] == {"lr": 0.1, "names": ["a"], "pair": (1, None)}
    assert draws() == expected


def test_only_the_latest_few_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 9, 10, 100):
        checkpoints.save(step, {})
    assert [step for step, _ in checkpoints.finished()] == [10, 100]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpoints(tmp_path / "nowhere").load_latest(seed=0) is None


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt", "meta.json"])
def test_an_incomplete_folder_does_not_count(tmp_path, name):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"step": 1})
    checkpoints.save(2, {"step": 2})
    (tmp_path / "step-00000002" / name).unlink()
    with pytest.warns(UserWarning, match="step-00000002: this checkpoint is not complete"):
        assert checkpoints.load_latest(seed=0) == {"step": 1}


def test_damage_of_the_right_size_is_explained_in_one_line(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"weights": torch.arange(100)})
    path = tmp_path / "step-00000001" / "state.pt"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DualencError, match=r"state\.pt: damaged") as raised:
        checkpoints.load_latest(seed=0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["state.pt", "ranks.pt"])
def test_one_flipped_bit_is_found_and_the_remedy_is_named(tmp_path, name):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"weights": torch.arange(1000)})
    path = tmp_path / "step-00000002" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    message = (
        rf"{name}: damaged \(its SHA-256 .*\); remove the folder .*step-00000002 to resume from the checkpoint before"
    )
    with pytest.raises(DualencError, match=message) as raised:
        checkpoints.load_latest(seed=0)
    assert "\n" not in str(raised.value)
    shutil.rmtree(path.parent)
    assert torch.equal(checkpoints.load_latest(seed=0)["weights"], torch.arange(1000))


def test_checksums_are_those_that_other_tools_compute(tmp_path):
    Checkpoints(tmp_path).save(1, {"weights": torch.arange(10)})
    folder = tmp_path / "step-00000001"
    sums = json.loads((folder / "meta.json").read_text())["checksums"]
    assert set(sums) == {"state.pt", "ranks.pt"}
    listed = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    subprocess.run(["sha256sum", "--check", "--status"], input=listed, cwd=folder, text=True, check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes root's rights")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("elements", [300_000, 10_000_000])
def test_a_full_disk_is_explained_in_one_line_and_leaves_the_checkpoint_before(small_disk, elements):
    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(1, {"weights": torch.arange(10)})
    with pytest.raises(DualencError, match=r"step-00000002: could not be written, no space left") as raised:
        checkpoints.save(2, {"weights": torch.zeros(elements)})
    assert "\n" not in str(raised.value)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
    assert checkpoints.load_latest(seed=0)["weights"].tolist() == list(range(10))


@pytest.mark.slow
def test_a_run_whose_disk_was_full_goes_on_when_there_is_room(small_disk, tmp_path_factory):
    """The disk fills up between two checkpoints, down to the last byte of the log."""
    whole, run, ballast = tmp_path_factory.mktemp("whole"), small_disk / "run", small_disk / "ballast"
    train(whole)
    objective = tiny_objective(tiny_pairs())
    steps = iter(range(1, 100))

    def fill_up(*_):
        if next(steps) == 5:
            with suppress(OSError), open(ballast, "wb", buffering=0) as stream:
                while stream.write(bytes(4096)):
                    pass

    objective.register_forward_pre_hook(fill_up)
    with pytest.raises(DualencError, match="could not be written") as raised:
        train(run, objective=objective)
    assert "\n" not in str(raised.value)
    ballast.unlink()
    train(run, resume=True)
    assert same(weights(run), weights(whole))


def test_left_overs_of_a_killed_writer_are_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {})
    (tmp_path / ".step-00000002.part-00c0ffee").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints.load_latest(seed=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000001"]


def test_loading_runs_no_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return (print, ("run",))

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"payload": Payload()})
    with pytest.raises(DualencError, match="damaged"):
        checkpoints.load_latest(seed=0)


def test_keeping_the_generators():
    seed_everything(3)
    expected = draws()
    seed_everything(3)
    with random_state_kept():
        draws()
    assert draws() == expected


def test_ranks_are_seeded_differently():
    found = []
    for rank in (0, 1):
        seed_everything(3, rank)
        found.append(torch.rand(1).item())
    assert found[0] != found[1]
