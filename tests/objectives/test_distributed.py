"""Two and three processes give the gradient, and the state, of one process with the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.objectives.every import GUIDED, SETTINGS, SETTINGS_AT, STEPS, Run

pytestmark = pytest.mark.slow
CASES = pytest.mark.parametrize(
    ("world_size", "name"), [(size, setting.name) for size, settings in SETTINGS_AT.items() for setting in settings]
)
Results = dict[str, dict[str, Any]]
RESUMED_AT = 4


def work(rank: int, folder: Path, one: Results) -> None:
    """Run the settings at every world size that this rank takes part in, and continue those of one process; leave the
    results in the folder."""
    torch.set_num_threads(1)
    for world_size in SETTINGS_AT:
        if rank >= world_size:
            continue
        meeting = f"file://{folder}/meeting-{world_size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
        settings = SETTINGS_AT[world_size]
        results = {s.name: {"run": run(Run(s)), "resumed": resumed(Run(s), one[s.name])} for s in settings}
        torch.save(results, folder / f"{world_size}-{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()


def run(training: Run) -> dict[str, list[Any]]:
    """All steps from the start: gradients, and the state after each step."""
    gradients, states = [], []
    for step in range(STEPS):
        gradients.append(training.step(step))
        states.append(training.state())
    return {"gradients": gradients, "states": states}


def resumed(training: Run, saved: dict[str, list[Any]]) -> list[torch.Tensor]:
    """Gradients of the last steps, continued from the state of one process."""
    training.load(saved["states"][RESUMED_AT - 1])
    return [training.step(step) for step in range(RESUMED_AT, STEPS)]


@pytest.fixture(scope="module")
def one() -> Results:
    return {setting.name: run(Run(setting)) for setting in SETTINGS + GUIDED}


@pytest.fixture(scope="module")
def many(one: Results, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """Results of every rank, by world size: processes are started once, for all objectives, and import nothing."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, (folder, one), nprocs=max(SETTINGS_AT), start_method="fork")
    return {size: [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)] for size in SETTINGS_AT}


def assert_same_gradient(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm()) < 1e-5 * float(expected.norm())
    assert float(found.norm() / expected.norm()) == pytest.approx(1, abs=1e-5)


@CASES
def test_gradients_equal_one_process(name: str, world_size: int, one: Results, many: Any) -> None:
    for rank in range(world_size):
        for step in range(STEPS):
            assert_same_gradient(many[world_size][rank][name]["run"]["gradients"][step], one[name]["gradients"][step])


@CASES
def test_state_is_the_same_on_every_rank_and_that_of_one_process(
    name: str, world_size: int, one: Results, many: Any
) -> None:
    for step in range(STEPS):
        expected = one[name]["states"][step]["criterion"]
        first = many[world_size][0][name]["run"]["states"][step]["criterion"]
        for key, values in expected.items():
            torch.testing.assert_close(first[key], values, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}")
        for rank in range(1, world_size):
            other = many[world_size][rank][name]["run"]["states"][step]["criterion"]
            assert other.keys() == first.keys() == expected.keys()
            for key, values in first.items():
                assert torch.equal(torch.nan_to_num(other[key]), torch.nan_to_num(values)), key


@CASES
def test_another_number_of_processes_continues_the_run(name: str, world_size: int, one: Results, many: Any) -> None:
    for rank in range(world_size):
        for i, found in enumerate(many[world_size][rank][name]["resumed"]):
            assert_same_gradient(found, one[name]["gradients"][RESUMED_AT + i])


def test_state_of_many_processes_continues_in_one(one: Results, many: Any) -> None:
    for setting in SETTINGS:
        training = Run(setting)
        training.load(many[3][2][setting.name]["run"]["states"][RESUMED_AT - 1])
        for step in range(RESUMED_AT, STEPS):
            assert_same_gradient(training.step(step), one[setting.name]["gradients"][step])
