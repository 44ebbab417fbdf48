"""Two and three processes give the gradient, and the state, of one process with the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.objectives.every import FIRST, SETTINGS, STEPS, THREE, WRAPPED, Run, assert_same_state

pytestmark = pytest.mark.slow
FEW = FIRST + WRAPPED
FURTHER = [s for s in SETTINGS if s not in FEW]
RESUMED_AT = 3
TOLERANCE = 1e-9
Results = dict[str, dict[str, Any]]


def run(training: Run) -> dict[str, list[Any]]:
    """All steps from the start: gradients, and the state after each step."""
    gradients, states = [], []
    for step in range(STEPS):
        gradients.append(training.step(step))
        states.append(training.state())
    return {"gradients": gradients, "states": states}


def resumed(training: Run, saved: dict[str, list[Any]]) -> torch.Tensor:
    """The gradient of the last step, continued from a saved state."""
    training.load(saved["states"][RESUMED_AT - 1])
    return training.step(RESUMED_AT)


def work(rank: int, world_size: int, folder: Path, names: list[str], one: Results) -> None:
    """Run the settings on one of several ranks, continue those of one process, and write the results to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    settings = [s for s in FEW + FURTHER if s.name in names]
    results = {s.name: run(Run(s)) for s in settings}
    continued = {s.name: resumed(Run(s), one[s.name]) for s in THREE}
    torch.save((results, continued), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one() -> Results:
    return {setting.name: run(Run(setting)) for setting in FEW + FURTHER}


@pytest.fixture(scope="module")
def many(request: pytest.FixtureRequest, one: Results, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`many(world_size)`: results of every rank. Processes are started once for all objectives."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [s.name for s in FEW + FURTHER if s.name in wanted or s in THREE]
    results: dict[int, list[Any]] = {}

    def at(world_size: int) -> list[Any]:
        if world_size not in results:
            folder: Path = tmp_path_factory.mktemp("ranks")
            mp.start_processes(work, (world_size, folder, names, one), nprocs=world_size, start_method="fork")
            results[world_size] = [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
        return results[world_size]

    return at


def assert_equals_one_process(name: str, one: Results, ranks: list[Any]) -> None:
    for step in range(STEPS):
        expected = one[name]["states"][step]
        first = ranks[0][0][name]["states"][step]["criterion"]
        assert_same_state(first, expected["criterion"], TOLERANCE)
        for results, _ in ranks:
            found = results[name]
            torch.testing.assert_close(
                found["gradients"][step], one[name]["gradients"][step], rtol=TOLERANCE, atol=TOLERANCE
            )
            assert_same_state(found["states"][step]["criterion"], first)


@pytest.mark.parametrize("name", [s.name for s in FEW])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_equal_one_process(name: str, world_size: int, one: Results, many: Any) -> None:
    assert_equals_one_process(name, one, many(world_size))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [s.name for s in FURTHER])
def test_ranks_equal_one_process_in_every_variant(name: str, one: Results, many: Any) -> None:
    assert_equals_one_process(name, one, many(3))


@pytest.mark.parametrize("name", [s.name for s in THREE])
def test_another_number_of_processes_continues_the_run(name: str, one: Results, many: Any) -> None:
    expected = one[name]["gradients"][RESUMED_AT]
    for _, continued in many(3):
        torch.testing.assert_close(continued[name], expected, rtol=TOLERANCE, atol=TOLERANCE)
    training = Run(next(s for s in THREE if s.name == name))
    found = resumed(training, many(3)[2][0][name])
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
