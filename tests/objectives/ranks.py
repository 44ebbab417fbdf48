"""What a rank does in the distributed tests; a module of its own, so that spawned processes can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.objectives.every import SETTINGS_AT, STEPS, Run

RESUMED_AT = 4


def work(rank: int, folder: Path) -> None:
    """Run the settings at every world size that this rank takes part in; leave the results in the folder."""
    torch.set_num_threads(1)
    saved = torch.load(folder / "one.pt")
    for world_size in SETTINGS_AT:
        if rank >= world_size:
            continue
        meeting = f"file://{folder}/meeting-{world_size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
        settings = SETTINGS_AT[world_size]
        results = {s.name: {"run": run(Run(s)), "resumed": resumed(Run(s), saved[s.name])} for s in settings}
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
