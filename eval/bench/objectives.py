"""What does an objective add to a training step: in time by the size of the corpus, and in state?

    python eval/bench/objectives.py --sizes [10000,100000,1000000,10000000] --repeats 3

An objective is timed alone, forward and backward, on random embeddings, those of items
outside the batch included; caches are full. The least time is taken, on one thread. "operations"
counts kernels and views, which is what launching costs on a GPU. Memory is what the process has
grown by since before the objective was built (what an earlier one has left is used first: time one
at a time). For steps with a model, see `training.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_turn import in_turn, shown
from psutil import Process
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import Outcome, Settings, command_line

import dualenc.objectives as library
from dualenc.objectives import SACLR, GlobalCache, NegativeCache, Objective
from dualenc.objectives.memory import EmbeddingMemory

PLAIN = ("InfoNCE", "DCL", "HCL", "SigLIP", "SogCLR", "ISogCLR", "EMC2", "ISIR")
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **{name: getattr(library, name) for name in PLAIN},
    "SACLR row": SACLR,
    "SACLR-1 matrix": partial(SACLR, form="matrix", negatives=1),
    "GlobalCache": GlobalCache,
    "GlobalCache, pool=65536": partial(GlobalCache, pool=65_536),
    "NegativeCache": partial(NegativeCache, refresh=0.0),
}
WRITTEN = 1 << 16
"""Embeddings that are written at once, and that items share."""


def new_step(
    objective: Objective, vectors: Tensor, batch_size: int, paired: bool = True
) -> tuple[Callable[[], None], Counter[bool]]:
    """Return a step of an objective alone, and the items it asks for, with and without gradient.

    Items beyond the vectors (n, D) share them. `paired`: ids of both sides are the same space.
    """
    draw = torch.Generator().manual_seed(0)
    num_items = max(objective.num_left, objective.num_right or 0)
    # Few anchors, so that each comes back after some steps and finds its state, mostly outside the
    # batch.
    visited = torch.randperm(objective.num_left, generator=draw)[: 4 * batch_size]
    asked: Counter[bool] = Counter()

    def embeddings(ids: Tensor) -> Tensor:
        return vectors[ids if num_items <= len(vectors) else ids % len(vectors)]

    def encode(side: str, ids: Tensor) -> Tensor:
        asked[torch.is_grad_enabled()] += len(ids)
        return embeddings(ids).requires_grad_()

    def step() -> None:
        ids = visited[torch.randperm(len(visited), generator=draw)[:batch_size]]
        left, right = (embeddings(ids).detach().requires_grad_() for _ in range(2))
        objective(left, right, ids, None if paired else ids, encode=encode).loss.backward()

    return step, asked


class Operations(TorchDispatchMode):
    """Counts every operation, forward and backward, while it is on."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def fill(objective: Objective, dimension: int) -> None:
    """Write an embedding of every item to the memories of an objective."""
    for memory in {each for each in objective.modules() if isinstance(each, EmbeddingMemory)}:
        for items in torch.arange(memory.num_items).split(WRITTEN):
            embeddings = normalize(torch.randn(len(items), dimension))
            memory.write(items * memory.keys_per_item, embeddings)


def steps(
    batch_sizes: list[int] = [32],  # noqa: B006 - a default for the command line, never changed
    sizes: list[int] = [20_000],  # noqa: B006
    dimension: int = 64,
    num_left: int | None = None,
    objectives: list[str] = list(OBJECTIVES),  # noqa: B006
    repeats: int = 5,
) -> list[Outcome]:
    """Print a row per batch size, size of the corpus, and objective.

    Args:
        sizes: items of the corpus, N.
        dimension: D.
        num_left: items on the left, such as queries; by default N.
        repeats: timed steps.
    """

    def run(settings: Settings) -> Outcome:
        torch.manual_seed(0)
        batch_size, num_items = settings["B"], settings["N"]
        vectors = normalize(torch.randn(min(num_items, WRITTEN), dimension))
        right = {"num_right": num_items} if num_left else {}
        before = Process().memory_info().rss
        new = OBJECTIVES[settings["objective"]]
        objective = new(num_left=num_left or num_items, **right)
        fill(objective, dimension)
        step, asked = new_step(objective, vectors, batch_size, paired=num_left is None)
        for _ in range(8):
            step()
        with Operations() as operations:
            step()
        asked.clear()
        times, _ = in_turn({"step": step}, repeats)
        return {
            "operations": operations.count,
            "ms": 1000 * min(times["step"]),
            "encodes": asked.total() / (repeats + 1),
            "state, MB": sum(each.nbytes for each in objective.buffers()) / 1e6,
            "memory, MB": (Process().memory_info().rss - before) / 1e6,
        }

    wanted = [
        {"B": batch_size, "N": num_items, "objective": name}
        for batch_size, num_items, name in itertools.product(batch_sizes, sizes, objectives)
    ]
    return shown(f"D = {dimension}", wanted, run)


def check(folder: Path) -> None:
    """Time all; state of an item is 4 bytes in SogCLR and 12 in ISogCLR, besides a few."""
    found = steps([4], [10_000], repeats=1)
    by_name = dict(zip(OBJECTIVES, found, strict=True))
    for name, expected in {"SogCLR": 4, "ISogCLR": 12}.items():
        assert round(by_name[name]["state, MB"] * 1e6 / 20_000) == expected


if __name__ == "__main__":
    command_line(steps, check=check)
