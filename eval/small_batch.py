"""What is a global objective at a small batch worth, at equal pairs, encoder passes or seconds?

    python eval/small_batch.py run vectors PATH_TO_PAPERS --batch_sizes [16,32,64]
    python eval/small_batch.py run text PATH_TO_PAPERS --objectives [InfoNCE,ISIR]
    python eval/small_batch.py report --results eval/results/small_batch_encoders.jsonl

Every run of a task trains the same model from the same start on the same number of pairs, whatever
the batch: a smaller batch takes more steps. With --equal passes, objectives that encode items
besides the batch see fewer pairs, until all encode as much as InfoNCE does; forward alone counts a
third. With --equal seconds, fast objectives train longer, where that is better, until each has had
the seconds of one core that the slowest needs.

All are tuned alike: with the first seed, τ at the middle learning rate, then the learning rate at
the best τ, by the quality on held-out data, both past any edge; then all seeds. Learning rates grow
with the square root of the batch size. `report` also prints the tables of docs/results.md.

Tasks: see `tasks.py`; objectives: see `rows.py`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import frame
import torch
import toys
from comparison import ENCODERS, VECTORS, groups_of, report, share_of_passes
from frame import Outcome, Settings, Store, choose, spread
from rows import TRAINER, objective_of, sizes_of
from tasks import TASKS, Quality, Task, beir_parts, on_features, some_of

from dualenc.encoders import DualEncoder
from dualenc.training import Evaluator

RATES = (1.0, 0.5, 2.0)  # factors of a task's learning rate; the first while τ is chosen
BEYOND_EDGE = 3  # how often τ or the rate moves beyond the edge of what was to be tried
Cell = tuple[int, str]  # batch size and objective


@dataclass
class Curve(Evaluator):
    """Quality on held-out data by pairs seen and seconds of work, without those of evaluations."""

    quality: Quality
    pairs_per_evaluation: int
    primary: str = "validation"
    points: list[tuple[int, float, float]] = field(default_factory=list)  # pairs, seconds, quality
    spent: float = 0.0

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        begun = time.process_time()
        value = self.quality(model)[self.quality.primary]
        if not self.points:
            self.spent = begun  # what came before the first step is no training
        seen = len(self.points) * self.pairs_per_evaluation
        self.points.append((seen, begun - self.spent, value))
        self.spent += time.process_time() - begun
        return {self.primary: value}


def count_passes(model: DualEncoder) -> list[float]:
    """Return a list that grows by what towers encode in training, forward alone as a third."""
    passes: list[float] = []

    def add(tower: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if model.training:
            passes.append(len(output) * (1 if torch.is_grad_enabled() else 1 / 3))

    for tower in {model.left, model.right}:
        tower.register_forward_hook(add)
    return passes


def train_once(task: Task, settings: Settings) -> Outcome:
    """Train once, and measure."""
    batch_size, own = settings["batch_size"], {"seed": settings["seed"]}
    torch.manual_seed(settings["seed"])
    model, name = task.new_model(), settings["objective"]
    sizes = sizes_of(task.pairs)
    objective = objective_of(name)(temperature=settings["temperature"], **sizes, **own)
    steps = max(1, settings["pairs_seen"] // batch_size)
    steps_between = -(-steps // max(1, task.evaluations))
    curve = Curve(task.validation, steps_between * batch_size)
    rate = frame.scaled_rate(settings["rate"] * task.learning_rate, batch_size)
    own |= {"batch_size": batch_size, "max_steps": steps, "learning_rate": rate}
    own |= {"evaluate_every": steps_between, "mixed_precision": task.mixed_precision}
    own |= {"evaluator": curve if task.evaluations else None, **TRAINER.get(name, {})}
    passes = count_passes(model)
    trained = frame.train(model, task.pairs, objective, **own)
    encoded = sum(passes)
    if not task.evaluations:
        value = task.validation(model)[task.validation.primary]
        curve.points.append((settings["pairs_seen"], trained.seconds, value))
    measured = task.test(model)
    return {
        "validation": curve.points[-1][2],  # of the last step, after which training evaluates
        "test": measured.pop(task.test.primary),
        "extra_encodes": encoded / (steps * batch_size) - 2,
        "seconds": curve.points[-1][1],
        "curve": [(seen, round(at, 1), round(value, 4)) for seen, at, value in curve.points],
        "scores": frame.packed(task.test.per_query),
        **measured,
    }


@dataclass
class Trainings:
    """Trainings of objectives at batch sizes, with the settings that were chosen for each.

    Attributes:
        task: the task, which its runs call `title`.
        epochs: pairs seen, over M.
        equal: what runs on another share of the pairs have in common.
        store: finished runs.
        processes: trainings at once.
        chosen: temperature and rate of each objective at a batch size.
    """

    task: Task
    title: str
    epochs: float
    equal: str
    store: Store
    processes: int
    chosen: dict[Cell, Settings] = field(default_factory=dict)

    def settings(self, cell: Cell, share: float = 1.0, epochs: float | None = None) -> Settings:
        """Return settings on a share of the pairs, without the chosen ones and the seed."""
        return {
            "task": self.title,
            "objective": cell[1],
            "batch_size": cell[0],
            "pairs_seen": round(share * (epochs or self.epochs) * len(self.task.pairs)),
            "equal": "pairs" if share == 1 else self.equal,
        }

    def train(self, shares: dict[Cell, Sequence[float]]) -> dict[Cell, list[Outcome]]:
        """Train each cell with each seed on a share of the pairs of its own."""
        wanted = [
            {**self.settings(cell, share), **self.chosen[cell], "seed": seed}
            for cell, own in shares.items()
            for seed, share in enumerate(own)
        ]
        outcomes = iter(self.store.get(wanted, partial(train_once, self.task), self.processes))
        return {cell: list(islice(outcomes, len(own))) for cell, own in shares.items()}

    def best_share(self, cell: Cell, most: float) -> float:
        """Return the best on held-out data of 1, a longer share, and their geometric mean."""
        shares = [1.0, math.sqrt(most), most] if most > 1.02 else [1.0]
        wanted = [{**self.settings(cell, own), **self.chosen[cell], "seed": 0} for own in shares]
        found = self.store.get(wanted, partial(train_once, self.task), self.processes)
        quality = [each["validation"] for each in found]
        return shares[quality.index(max(quality))]


def run(
    task: str,
    path: Path,
    objectives: Sequence[str] = ("InfoNCE", "DCL", "SogCLR", "ISIR", "GlobalCache"),
    batch_sizes: Sequence[int] = (32,),
    epochs: float = 6,
    pairs: int | None = None,
    seeds: int = 3,
    equal: Literal["pairs", "passes", "seconds"] = "pairs",
    seconds: float | None = None,
    rates: Sequence[float] = RATES,
    temperatures: Sequence[float] | None = None,
    tune_at: int | None = None,
    tune_epochs: float | None = None,
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    processes: int = 1,
    results: Path | None = None,
) -> None:
    """Tune objectives, train them with all seeds, and add every run to the results.

    Args:
        task: a name of `tasks.TASKS`.
        path: the data.
        objectives: names of rows, or import paths.
        batch_sizes: B.
        epochs: pairs seen, over M; those of InfoNCE where passes are equal.
        pairs: size of the random part to train on; all by default.
        seeds: number of seeds.
        equal: what is the same for all.
        seconds: the budget of equal seconds, in place of what the slowest takes.
        rates: factors of the task's learning rate to choose from.
        temperatures: τ to choose from, where not the task's own.
        tune_at: batch size to tune at, where not that of the runs.
        tune_epochs: epochs to tune with.
        model: name or folder of the model that minilm starts from.
        processes: trainings at once; on a GPU 1, and several commands instead.
        results: the store; by default one of perceptrons, and another for all others.
    """
    for name in objectives:
        objective_of(name)  # before data are opened
    store = Store(results or (VECTORS if task.startswith("vectors") else ENCODERS))
    cells: list[Cell] = list(product(batch_sizes, objectives))
    opened, title = TASKS[task](path, model), f"{task} {path.name}"
    if pairs is not None:
        opened.pairs = some_of(opened.pairs, pairs)
        title += f", {pairs:,} pairs"
    trainings = Trainings(opened, title, epochs, equal, store, processes)
    size = {"batch_size": tune_at} if tune_at else {}
    trials = {cell: trainings.settings(cell, epochs=tune_epochs) | size for cell in cells}
    grids = {"temperature": temperatures or opened.temperatures, "rate": rates}
    how = {"beyond_edge": BEYOND_EDGE, "processes": processes}
    trainings.chosen = choose(store, partial(train_once, opened), trials, grids, **how)
    found = trainings.train({cell: [1.0] * seeds for cell in cells})
    if equal == "passes":
        extra = {cell: [each["extra_encodes"] for each in own] for cell, own in found.items()}
        found = trainings.train({cell: list(map(share_of_passes, extra[cell])) for cell in cells})
    if equal == "seconds":
        spent = {
            cell: statistics.mean(each["seconds"] for each in own) for cell, own in found.items()
        }
        budget = seconds or max(spent.values())
        shares = {cell: trainings.best_share(cell, budget / spent[cell]) for cell in cells}
        found = trainings.train({cell: [share] * seeds for cell, share in shares.items()})
    for (batch_size, name), outcomes in found.items():
        tests = spread([each["test"] for each in outcomes])
        print(f"{title} {name} B={batch_size}: {tests}", flush=True)


def check(folder: Path) -> None:
    """Tune, train and report on toy data; ISIR encodes more, and so sees fewer pairs."""
    TASKS["vectors"] = lambda path, model: on_features(*beir_parts(path), dim=8)
    beir, results = toys.beir(folder / "toy"), folder / "runs.jsonl"
    few = {"objectives": ("InfoNCE", "ISIR"), "batch_sizes": (16,), "epochs": 3, "seeds": 2}
    for equal in ("pairs", "passes", "seconds"):
        run("vectors", beir, **few, rates=(1.0,), temperatures=(0.1,), equal=equal, results=results)
    store = Store(results)
    for each in store.runs:
        assert (each.outcome["extra_encodes"] > 0.01) == (each.settings["objective"] == "ISIR")
    for seeds in groups_of(store)["vectors toy", 108]:
        for each, fewer in zip(seeds.runs, seeds.passes, strict=True):
            share = share_of_passes(each.outcome["extra_encodes"])
            assert fewer.settings["pairs_seen"] == round(108 * share)
    report(results)


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
