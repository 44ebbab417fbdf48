"""Two and three processes give the gradient, and the state, of one process with the same global
batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dualenc.objectives import memory
from dualenc.objectives.memory import EmbeddingMemory
from tests.helpers.every import (
    EVERY,
    FIRST,
    SETTINGS,
    STEPS,
    THREE,
    WRAPPED,
    Run,
    assert_same_state,
)

pytestmark = pytest.mark.slow
ALL = {s.name: s for s in (*FIRST, *WRAPPED, *SETTINGS)}
RESUMED_AT = 3
TOLERANCE = 1e-9
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Several blocks of memories on each rank; of left items, a third rank holds none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MIN_BLOCK_SIZE", 16)
        yield


def run(training: Run) -> dict[str, Any]:
    """All steps from the start: gradients, the state after each step, how many rows of memories
    this rank holds."""
    gradients, states = [], []
    for step in range(STEPS):
        gradients.append(training.step(step))
        states.append(training.state())
    memories = [
        module for module in training.criterion.modules() if isinstance(module, EmbeddingMemory)
    ]
    return {"gradients": gradients, "states": states, "held": sum(len(m.keys) for m in memories)}


def resumed(training: Run, saved: dict[str, Any]) -> torch.Tensor:
    """The gradient of the last step, continued from a saved state."""
    training.load(saved["states"][RESUMED_AT - 1])
    return training.step(RESUMED_AT)


def work(rank: int, world_size: int, folder: Path, names: list[str], one: Results) -> None:
    """Run the settings on one of several ranks, continue those of one process, and write the
    results to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
    )
    results = {name: run(Run(ALL[name])) for name in names}
    continued = {s.name: resumed(Run(s), one[s.name]) for s in THREE}
    again = {s.name: resumed(Run(s), results[s.name]) for s in THREE}
    torch.save((results, continued, again), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one() -> Results:
    return {name: run(Run(setting)) for name, setting in ALL.items()}


@pytest.fixture(scope="module")
def many(
    request: pytest.FixtureRequest, one: Results, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """`many(world_size)`: results of every rank. Processes are started once for all objectives."""
    settings = [
        item.callspec.params.get("setting")
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    names = [name for name, setting in ALL.items() if setting in settings or setting in THREE]
    results: dict[int, list[Any]] = {}

    def at(world_size: int) -> list[Any]:
        if world_size not in results:
            folder: Path = tmp_path_factory.mktemp("ranks")
            mp.start_processes(
                work, (world_size, folder, names, one), nprocs=world_size, start_method="fork"
            )
            results[world_size] = [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
        return results[world_size]

    return at


@pytest.mark.parametrize("setting", EVERY, ids=lambda s: s.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_equal_one_process(setting: Any, world_size: int, one: Results, many: Any) -> None:
    expected = one[setting.name]
    ranks = [results[setting.name] for results, _, _ in many(world_size)]
    for step in range(STEPS):
        first = ranks[0]["states"][step]["criterion"]
        assert_same_state(first, expected["states"][step]["criterion"], TOLERANCE)
        for found in ranks:
            gradients = found["gradients"][step], expected["gradients"][step]
            torch.testing.assert_close(*gradients, rtol=TOLERANCE, atol=TOLERANCE)
            assert_same_state(found["states"][step]["criterion"], first)
    assert sum(found["held"] for found in ranks) == expected["held"], (
        "memories are divided among ranks"
    )


@pytest.mark.parametrize("setting", THREE, ids=lambda s: s.name)
def test_another_number_of_processes_continues_the_run(
    setting: Any, one: Results, many: Any
) -> None:
    """One run by three, and theirs by one."""
    found = [continued[setting.name] for _, continued, _ in many(3)]
    found.append(resumed(Run(setting), many(3)[2][0][setting.name]))
    for gradient in found:
        expected = one[setting.name]["gradients"][RESUMED_AT]
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("setting", THREE, ids=lambda s: s.name)
def test_the_same_number_of_processes_continues_bit_by_bit(setting: Any, many: Any) -> None:
    for results, _, again in many(3):
        assert torch.equal(again[setting.name], results[setting.name]["gradients"][RESUMED_AT])
