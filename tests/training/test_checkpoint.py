"""Checkpoint folders: complete or absent, the latest few, random states restored."""

import json
import random
import shutil
import subprocess

import numpy as np
import pytest
import torch

from dualenc.errors import DualencError
from dualenc.seeds import random_state_kept, seed_everything
from dualenc.training.checkpoint import Checkpoints


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
    with pytest.raises(DualencError, match=r"state\.pt: corrupt") as raised:
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
        rf"{name}: corrupt, its checksum .*; remove the folder .*step-00000002 to resume from the checkpoint before"
    )
    with pytest.raises(DualencError, match=message) as raised:
        checkpoints.load_latest(seed=0)
    assert "\n" not in str(raised.value)
    shutil.rmtree(path.parent)
    assert torch.equal(checkpoints.load_latest(seed=0)["weights"], torch.arange(1000))


def test_checksums_are_those_that_other_tools_compute(tmp_path):
    Checkpoints(tmp_path).save(1, {"weights": torch.arange(10)})
    folder = tmp_path / "step-00000001"
    sums = json.loads((folder / "meta.json").read_text())["files"]
    assert set(sums) == {"state.pt", "ranks.pt"}
    listed = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    subprocess.run(["sha256sum", "--check", "--status"], input=listed, cwd=folder, text=True, check=True)


def test_left_overs_of_a_killed_writer_are_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {})
    (tmp_path / ".step-00000002.part").mkdir()
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
