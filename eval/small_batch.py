"""What is a global objective at a small batch worth? Every objective at equal pairs, encoder
passes, seconds.

    python eval/small_batch.py run vectors PATH_TO_PAPERS --batch_sizes [16,32,64]
    python eval/small_batch.py run text PATH_TO_PAPERS --objectives [InfoNCE,ISIR]
    python eval/small_batch.py report --figures docs/figures
    python eval/small_batch.py report --results eval/results/small_batch_encoders.jsonl

Every run of one task trains the same model from the same start on the same number of pairs,
whatever the batch: a smaller batch takes more steps. With --equal passes, objectives that encode
items besides the batch see fewer pairs, so that all encode, forward and backward, as much as
InfoNCE does; forward alone counts a third. With --equal seconds, fast objectives train longer,
where that is better, until each has had the seconds of one core that the slowest needs.

Tuning is the same for all: with the first seed, τ at the middle learning rate, then the learning
rate at the best τ, by the quality on held-out data, both on past any edge; then all seeds. Learning
rates grow with the square root of the batch size. One line per run is added to --results, and a run
that is there already is not made again: tables grow. --processes makes several at once; on a GPU,
where models of texts cannot be forked, start several commands.

Objectives with a + have the positive in the softmax. A name that is an import path, such as
my_package.MyLoss, is a class of your own or of another library: see `outside.py`.

Tasks: see `comparison_tasks.py`.
"""

from __future__ import annotations

import base64
import difflib
import gc
import itertools
import math
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from comparison_table import (
    ENCODER_RESULTS,
    FIRST_RATE,
    ORDINARY_BATCH,
    RESULTS,
    Compute,
    Runs,
    Settings,
    in_processes,
    report,
    spread,
)
from comparison_tasks import TASKS, Quality, Task, some_of
from outside import import_objective, report_progress
from probes import (
    DualBank,
    FilteredGlobalCache,
    FilteredInfoNCE,
    FilteredSogCLR,
    PredictedPartition,
    SharedRobustTemperature,
    TeacherBatches,
)
from quality import COMPARED

from dualenc.encoders import DualEncoder
from dualenc.errors import DualencError
from dualenc.objectives import (
    SACLR,
    ExactGlobal,
    GlobalCache,
    MomentumQueue,
    NegativeCache,
    Objective,
    SigLIP,
    SogCLR,
)
from dualenc.training import Evaluator, Trainer

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **COMPARED,
    "NegativeCache": lambda **common: NegativeCache(refresh=0.001, **common),
    "SACLR": SACLR,
    "SigLIP": SigLIP,
    "GlobalCache": GlobalCache,
    "GlobalCache, pool of all": lambda **common: GlobalCache(pool=10**9, **common),
    "ExactGlobal": lambda **common: ExactGlobal(corpus_chunk_size=4096, **common),
    "GlobalCache 0.5": lambda **common: GlobalCache(extra_encodes=0.5, **common),
    "GlobalCache 2": lambda **common: GlobalCache(extra_encodes=2.0, **common),
    "GlobalCache+": lambda **common: GlobalCache(positive_in_softmax=True, **common),
    "MomentumQueue": MomentumQueue,
    "SogCLR+": lambda **common: SogCLR(gamma=0.5, positive_in_softmax=True, **common),
}

TRAINER: dict[str, dict[str, Any]] = {
    "InfoNCE, mined each epoch": {"mine_every": 1},
    "InfoNCE, 4 mined each epoch": {"mine_every": 1, "mine_negatives": 4},
    "GlobalCache, mined each epoch": {"mine_every": 1},
    "InfoNCE, 4 accumulated": {"gradient_accumulation": 4},
    "InfoNCE, cached": {"chunk_size": 16},
    "InfoNCE, cached by 8": {"chunk_size": 8},
    "InfoNCE, cached by 4": {"chunk_size": 4},
}
"""Settings of the trainer: mined negatives; steps of several batches, of B pairs each; gradients
cached."""
OBJECTIVES |= {name: OBJECTIVES[name.partition(",")[0]] for name in TRAINER}

PROBES: dict[str, Callable[..., Objective]] = {
    "predicted log-normaliser+": lambda **common: PredictedPartition(
        positive_in_softmax=True, **common
    ),
    **{
        f"robust τ+, ρ = {radius}": lambda radius=radius, **common: SharedRobustTemperature(
            radius=radius, temperature_rate=1e-4, gamma=0.5, positive_in_softmax=True, **common
        )
        for radius in (2, 4, 6)
    },
    "two banks of 24, 4 accumulated": lambda **common: DualBank(queue_size=24, **common),
    "two banks of 128, 4 accumulated": lambda **common: DualBank(queue_size=128, **common),
    "two banks of 128": lambda **common: DualBank(queue_size=128, **common),
    "two banks of 512": lambda **common: DualBank(queue_size=512, **common),
    "InfoNCE, teacher's batches": OBJECTIVES["InfoNCE"],
    **{f"InfoNCE, α = {alpha}": partial(FilteredInfoNCE, alpha=alpha) for alpha in (0.001, 0.01)},
    **{
        f"SogCLR+, α = {alpha}": partial(
            FilteredSogCLR, alpha=alpha, gamma=0.5, positive_in_softmax=True
        )
        for alpha in (0.001, 0.01)
    },
    "SogCLR+, α = 0.01 at once": lambda **common: FilteredSogCLR(
        alpha=0.01, threshold_rate=0.3, start=0.0, gamma=0.5, positive_in_softmax=True, **common
    ),
    **{
        f"GlobalCache, nearest {count} left out": partial(FilteredGlobalCache, count=count)
        for count in (1, 5, 50)
    },
}
"""Methods that are tried, see `probes.py`."""
OBJECTIVES |= PROBES
TRAINER |= {name: {"gradient_accumulation": 4} for name in PROBES if name.endswith("4 accumulated")}


def objective_of(name: str) -> Callable[..., Objective]:
    """What makes the objective of a row: by its name here, or by an import path.

    Raises:
        DualencError: there is none.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if "." in name:
        return import_objective(name)
    alike = difflib.get_close_matches(name, OBJECTIVES, n=1)
    advice = (
        f"did you mean {alike[0]}?"
        if alike
        else f"give one of {', '.join(OBJECTIVES)}, or an import path"
    )
    raise DualencError(f"objectives: there is no {name}; {advice}")


RATES = (FIRST_RATE, 0.5, 2.0)
"""Factors of a task's learning rate."""
BEYOND_EDGE = 3
"""How often τ or the rate is moved beyond the edge of what was to be tried."""
Cell = tuple[int, str]
"""Batch size and objective."""


@dataclass
class Curve(Evaluator):
    """Quality on held-out data during training, against pairs seen and seconds of work, which
    evaluations do not count.

    Attributes:
        points: (pairs, seconds, quality) of each evaluation.
    """

    quality: Quality
    pairs_per_evaluation: int
    primary: str = "validation"
    points: list[tuple[int, float, float]] = field(default_factory=list)
    spent: float = 0.0

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        begun = time.process_time()
        value = self.quality(model)[self.quality.primary]
        if len(self.points) == 0:
            self.spent = begun  # what came before the first step is no training
        self.points.append(
            (len(self.points) * self.pairs_per_evaluation, begun - self.spent, value)
        )
        self.spent += time.process_time() - begun
        return {self.primary: value}


class Passes:
    """Counts what the towers of a model encode in training, forward alone as a third."""

    def __init__(self, model: DualEncoder) -> None:
        self.count = 0.0
        self.model = model
        for tower in {model.left, model.right}:
            tower.register_forward_hook(self.add)

    def add(self, tower: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self.model.training:
            self.count += len(output) * (1 if torch.is_grad_enabled() else 1 / 3)


OPENED: dict[str, Task] = {}
"""The tasks of this call by their names in settings; processes inherit it."""


def train(settings: Settings) -> tuple[Settings, dict[str, Any]]:
    """Train once; what came out, as it is kept."""
    torch.set_num_threads(1)
    task, objective, batch_size, pairs_seen, rate, tau, seed = (
        settings[key]
        for key in ("task", "objective", "batch_size", "pairs_seen", "rate", "temperature", "seed")
    )
    task = OPENED[task]
    torch.manual_seed(seed)
    model, pairs = task.new_model(), task.pairs
    common = {"num_left": pairs.num_left, "num_right": pairs.num_right, "views": pairs.views}
    criterion = objective_of(objective)(temperature=tau, seed=seed, **common)
    trainer_settings = TRAINER.get(objective, {})
    pairs_per_step = batch_size * trainer_settings.get("gradient_accumulation", 1)
    steps = max(1, pairs_seen // pairs_per_step)
    report_progress(criterion, steps * trainer_settings.get("gradient_accumulation", 1))
    steps_between = -(-steps // max(1, task.evaluations))
    passes, curve = Passes(model), Curve(task.validation, steps_between * pairs_per_step)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            output=folder,
            batch_size=batch_size,
            max_steps=steps,
            learning_rate=rate * task.learning_rate * math.sqrt(pairs_per_step / ORDINARY_BATCH),
            evaluate_every=steps_between,
            keep_best=False,
            save_every=None,
            seed=seed,
            overwrite=True,
            progress=False,
            deterministic=False,
            mixed_precision=task.mixed_precision,
            **trainer_settings,
        )
        if torch.cuda.is_available():
            gc.collect()  # the model of the run before
            torch.cuda.reset_peak_memory_stats()
        batching = None
        if objective == "InfoNCE, teacher's batches":
            # The features themselves are the teacher.
            sides = (
                np.asarray(pairs.left_items)[pairs.left_id],
                np.asarray(pairs.right_items)[pairs.right_id],
            )
            batching = TeacherBatches(*sides, batch_size, seed=seed)
        begun = time.process_time()
        trainer.fit(
            model, pairs, criterion, batching, evaluator=curve if task.evaluations else None
        )
    outcome: dict[str, Any] = {}
    if torch.cuda.is_available():
        outcome = {
            "device": torch.cuda.get_device_name(),
            "peak_memory": torch.cuda.max_memory_allocated(),
        }
    if task.evaluations == 0:
        seconds = time.process_time() - begun
        curve.points.append(
            (pairs_seen, seconds, task.validation(model.eval())[task.validation.primary])
        )
    measured = task.test(model.eval())
    scores = np.round(255 * np.array(task.test.per_query)).astype(np.uint8)
    outcome |= {
        "validation": curve.points[-1][2],  # of the last step, after which training evaluates
        "test": measured.pop(task.test.primary),
        "extra_encodes": passes.count / (steps * pairs_per_step) - 2,
        "seconds": curve.points[-1][1],
        "curve": [
            (seen, round(seconds, 1), round(value, 4)) for seen, seconds, value in curve.points
        ],
        "scores": base64.b64encode(zlib.compress(scores.tobytes(), 9)).decode(),
        **measured,
    }
    return settings, outcome


@dataclass
class Comparison:
    """Cells of one task that are tuned alike and trained with so many seeds; finished runs are not
    made again."""

    runs: Runs
    compute: Compute
    cells: list[Cell]
    seeds: int

    def best(
        self, values: Sequence[float], settings_with: Callable[[Cell, float], Settings]
    ) -> dict[Cell, float]:
        """Of each cell, the value whose run has the highest quality on held-out data, also beyond
        the edges."""
        tried = {cell: sorted(values) for cell in self.cells}
        quality: dict[tuple[Cell, float], float] = {}
        for _ in range(1 + BEYOND_EDGE):
            missing = [
                (c, value) for c in self.cells for value in tried[c] if (c, value) not in quality
            ]
            quality |= self._held_out({(c, value): settings_with(c, value) for c, value in missing})
            for cell, own in tried.items():
                if len(own) == 1:
                    continue
                winner = max(own, key=lambda value: quality[cell, value])
                if winner == own[0]:
                    own.insert(0, float(f"{winner * own[0] / own[1]:.2g}"))
                elif winner == own[-1]:
                    own.append(float(f"{winner * own[-1] / own[-2]:.2g}"))
        return best_values(quality)

    def with_seeds(
        self, settings_with: Callable[[Cell, int], Settings]
    ) -> dict[Cell, list[dict[str, Any]]]:
        """The runs of all seeds of each cell."""
        found = self.runs.get(
            [settings_with(c, seed) for c in self.cells for seed in range(self.seeds)], self.compute
        )
        parts = (found[start : start + self.seeds] for start in range(0, len(found), self.seeds))
        return dict(zip(self.cells, parts, strict=True))

    def lengths(
        self,
        found: dict[Cell, list[dict[str, Any]]],
        seconds: float | None,
        settings_with: Callable[[Cell, float], Settings],
    ) -> dict[Cell, float]:
        """By how much each cell trains longer to have so many seconds, or those of the slowest, if
        that is better."""
        spent = {
            cell: statistics.mean(one["seconds"] for one in seeds) for cell, seeds in found.items()
        }
        budget = {cell: (seconds or max(spent.values())) / own for cell, own in spent.items()}
        # Of two lengths, the whole budget and the geometric mean of it and one, the better one is
        # chosen.
        tried = [
            (cell, share)
            for cell, most in budget.items()
            for share in (math.sqrt(most), most)
            if most > 1.02
        ]
        quality = {(cell, 1.0): seeds[0]["validation"] for cell, seeds in found.items()}
        return best_values(
            quality | self._held_out({(c, share): settings_with(c, share) for c, share in tried})
        )

    def _held_out(
        self, settings: dict[tuple[Cell, float], Settings]
    ) -> dict[tuple[Cell, float], float]:
        """The quality on held-out data of runs with these settings."""
        found = self.runs.get(settings.values(), self.compute)
        return {key: one["validation"] for key, one in zip(settings, found, strict=True)}


def best_values(quality: dict[tuple[Cell, float], float]) -> dict[Cell, float]:
    """Of each cell, the value with the highest quality."""
    cells = dict.fromkeys(cell for cell, _ in quality)
    return {
        cell: max((key for key in quality if key[0] == cell), key=quality.__getitem__)[1]
        for cell in cells
    }


def share_of_passes(outcome: dict[str, Any]) -> float:
    """The share of the pairs with which a run encodes as much as InfoNCE does with all."""
    return 1 / (1 + outcome["extra_encodes"] / 2) if outcome["extra_encodes"] > 0.01 else 1.0


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
    tune_pairs: int | None = None,
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    processes: int = 1,
    results: Path | None = None,
) -> None:
    """Tune objectives, train them with all seeds, and add every run to the results.

    Args:
        task: a name of `comparison_tasks.TASKS`.
        path: the data.
        objectives: which, by name or import path.
        batch_sizes: B.
        epochs: pairs seen, over M; those of InfoNCE where passes are equal.
        pairs: train on a random part of so many pairs.
        seeds: how many.
        equal: what is the same for all. "seconds": each objective trains longer, up to the seconds
            that the slowest of the call takes for the same pairs, as long as is best on held-out
            data.
        seconds: the budget of equal seconds, in place of what the slowest takes.
        rates: factors of the task's learning rate to choose from, the first of them while τ is
            chosen.
        temperatures: τ to choose from, where not the task's own. Beyond the edge of rates and of
            these, more are tried while they are better.
        tune_at, tune_epochs, tune_pairs: batch size, epochs and pairs at which to tune, where not
            those of the runs.
        model: name or folder of the model that minilm starts from.
        processes: trainings at once.
        results: where finished runs are kept; by default those of perceptrons in one file, and all
            others in another.
    """
    if results is None:
        results = RESULTS if task.startswith(("vectors", "copies")) else ENCODER_RESULTS
    for objective in objectives:
        objective_of(objective)  # before data are opened
    cells: list[Cell] = list(itertools.product(batch_sizes, objectives))
    comparison = Comparison(Runs(results), in_processes(train, processes), cells, seeds)
    opened = TASKS[task](path, model)
    for count in {pairs, tune_pairs}:
        part = opened if count is None else replace(opened, pairs=some_of(opened.pairs, count))
        OPENED[name_of(task, path, count)] = part

    def settings(
        cell: Cell, rate: float, tau: float, seed: int = 0, share: float = 1.0, tuning: bool = False
    ) -> Settings:
        batch_size, objective = cell
        name = name_of(task, path, (tune_pairs or pairs) if tuning else pairs)
        length = (tune_epochs or epochs) if tuning else epochs
        own = {
            "task": name,
            "objective": objective,
            "batch_size": (tune_at or batch_size) if tuning else batch_size,
        }
        own |= {
            "pairs_seen": round(share * length * len(OPENED[name].pairs)),
            "rate": rate,
            "temperature": tau,
        }
        return own | {"seed": seed, "equal": "pairs" if share == 1 else equal}

    tried = temperatures or opened.temperatures
    tau = comparison.best(tried, lambda cell, value: settings(cell, rates[0], value, tuning=True))
    rate = comparison.best(rates, lambda cell, value: settings(cell, value, tau[cell], tuning=True))

    def tuned(cell: Cell, seed: int = 0, share: float = 1.0) -> Settings:
        return settings(cell, rate[cell], tau[cell], seed, share)

    found = comparison.with_seeds(tuned)
    if equal == "passes":
        shares = {cell: [share_of_passes(one) for one in own] for cell, own in found.items()}
        found = comparison.with_seeds(lambda cell, seed: tuned(cell, seed, shares[cell][seed]))
    if equal == "seconds":
        lengths = comparison.lengths(found, seconds, lambda cell, share: tuned(cell, share=share))
        found = comparison.with_seeds(lambda cell, seed: tuned(cell, seed, lengths[cell]))
    for (batch_size, objective), outcomes in found.items():
        print(
            f"{name_of(task, path, pairs)} {objective} B={batch_size}: {spread(outcomes)}",
            flush=True,
        )


def name_of(task: str, path: Path, pairs: int | None) -> str:
    """What a task on these data is called in tables."""
    return f"{task} {path.name}" if pairs is None else f"{task} {path.name}, {pairs:,} pairs"


if __name__ == "__main__":
    from jsonargparse import auto_cli

    try:
        auto_cli([run, report])
    except DualencError as error:
        raise SystemExit(f"error: {error}") from error
