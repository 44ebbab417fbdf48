"""A whole step where encoding costs next to nothing: two perceptrons on features, by the trainer,
over that of InfoNCE.

    python eval/bench/cheap_towers.py PAPERS --batch_sizes [32,128,512]

Rows take turns. The clock is the processor time of one thread, read at each loss from a quarter of
a training on, so that what happens once per training is not in it; with other work on the machine,
ratios hold and milliseconds do not.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parent.parent))
from comparison_tasks import TASKS, Task
from small_batch import objective_of

from dualenc.evaluation.report_page import Table, print_table
from dualenc.training import Trainer


def seconds_per_step(task: Task, objective: str, batch_size: int, steps: int) -> float:
    """The time of a step of one training."""
    torch.manual_seed(0)
    pairs = task.pairs
    criterion = objective_of(objective)(
        num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.05
    )
    times: list[float] = []
    criterion.register_forward_pre_hook(lambda *_: times.append(time.process_time()))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            output=folder, batch_size=batch_size, max_steps=steps, save_every=None, progress=False
        )
        trainer.fit(task.new_model(), pairs, criterion)
    first = steps // 4
    return (times[-1] - times[first]) / (steps - 1 - first)


def main(
    path: Path,
    objectives: Sequence[str] = ("InfoNCE", "SogCLR+", "MomentumQueue", "GlobalCache", "ISIR"),
    batch_sizes: Sequence[int] = (32, 128, 512),
    steps: int = 600,
    repeats: int = 3,
) -> None:
    """Print milliseconds of a step, and their ratio to InfoNCE's, by batch size.

    Args:
        path: a BEIR folder, whose titles and texts become features.
        objectives: names of `small_batch.py`.
        batch_sizes: B.
        steps: of a training at B = 32; of larger batches fewer, down to a fifth.
        repeats: trainings of each row, of which the median is shown.
    """
    torch.set_num_threads(1)
    task = TASKS["vectors"](path, "")
    table = []
    for batch_size in batch_sizes:
        length = max(steps // 5, steps * 32 // batch_size)
        times: dict[str, list[float]] = {name: [] for name in objectives}
        for _ in range(repeats):
            for name, own in times.items():
                own.append(seconds_per_step(task, name, batch_size, length))
        medians = {name: statistics.median(own) for name, own in times.items()}
        for name, median in medians.items():
            row = {"B": batch_size, "objective": name, "ms": 1000 * median}
            table.append(
                row
                | {"lowest": 1000 * min(times[name]), "× InfoNCE": median / medians[objectives[0]]}
            )
    print_table(Table("A step of two perceptrons", table))


if __name__ == "__main__":
    auto_cli(main)
