"""Two and three processes give the gradient, and the state, of one process with the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.objectives import ranks
from tests.objectives.every import SETTINGS, SETTINGS_AT, STEPS, Run

pytestmark = pytest.mark.slow
CASES = pytest.mark.parametrize(
    ("world_size", "name"), [(size, setting.name) for size, settings in SETTINGS_AT.items() for setting in settings]
)
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def one() -> Results:
    return {setting.name: ranks.run(Run(setting)) for setting in SETTINGS}


@pytest.fixture(scope="module")
def many(one: Results, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Results]]:
    """Results of every rank, by world size: processes are started once, for all objectives."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.save(one, folder / "one.pt")
    mp.start_processes(ranks.work, (folder,), nprocs=max(SETTINGS_AT), start_method="spawn")
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
            assert_same_gradient(found, one[name]["gradients"][ranks.RESUMED_AT + i])


def test_state_of_many_processes_continues_in_one(one: Results, many: Any) -> None:
    for setting in SETTINGS:
        training = Run(setting)
        training.load(many[3][2][setting.name]["run"]["states"][ranks.RESUMED_AT - 1])
        for step in range(ranks.RESUMED_AT, STEPS):
            assert_same_gradient(training.step(step), one[setting.name]["gradients"][step])
