"""What is training against the whole index worth, where documents are vectors that stay as they
are?

    python eval/adapting.py run DATA VECTORS "[scifact,medquad]"                 # methods at equal
    seconds of one core python eval/adapting.py keep DATA VECTORS medquad "[scifact,papers]"
    # between the original and the adapted python eval/adapting.py few DATA VECTORS medquad
    # with few pairs python eval/adapting.py report --figures docs/figures

DATA/NAME is a BEIR folder, VECTORS/NAME/{corpus,queries} are what `dualenc embed` made of its two
sides. Query vectors go through a map that begins as the identity. A tenth of the training pairs, of
500 queries at most, is held out by documents, as `dualenc adapt` does. Test nDCG@10 is over all
documents, of three groups of queries: all; those with a relevant document in the pairs that are
trained on ("seen"); those with none in any pair of train.tsv ("new").

Every method is tuned alike on the held-out pairs with the first seed: τ at the middle rate, then
the rate, both on past an edge; every run keeps the weights of its best evaluation, of ten and the
one before. Seconds are of one core, without evaluations. One line per run is added to --results,
and a run that is there already is not made again.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from adapting_table import RESULTS, report
from adapting_task import Task
from adapting_training import EXACT, METHODS, SHARES, Training
from comparison_table import Runs, Settings

from dualenc.encoders import interpolate
from dualenc.evaluation.metrics import paired_bootstrap

TEMPERATURES = (0.02, 0.03, 0.05, 0.1)
RATES = (1e-3, 3e-4, 3e-3)
"""At a batch of 32, the first while τ is chosen; they grow with the square root of the batch."""
BEYOND_EDGE = 2
FEW = (100, 300, 1000, 3000, 10000)
MIN_STEPS = 300
"""Of trainings on few pairs, whose epochs are short."""


class Trainings:
    """The trainings of one method on one task.

    Args:
        task: what to train on.
        runs: earlier ones, to which new ones are added.
        common: settings of all of them: method, map, and steps or seconds of a training.
    """

    def __init__(self, task: Task, runs: Runs, **common: Any) -> None:
        self.task = task
        self.runs = runs
        self.common = {"task": task.name, **common, **({"held_out": "both"} if task.known else {})}

    def get(self, **settings: Any) -> dict[str, Any]:
        """One run."""

        def compute(missing: list[Settings]) -> Iterator[tuple[Settings, dict[str, Any]]]:
            return ((one, Training(self.task, one).run()) for one in missing)

        return self.runs.get([{**self.common, **settings}], compute)[0]

    def best(self, name: str, values: Sequence[float], **fixed: float) -> float:
        """The value of a setting with the highest quality on held-out pairs, also beyond the
        edges."""
        tried = sorted(values)
        for _ in range(1 + BEYOND_EDGE):
            quality = {
                value: self.get(**fixed, **{name: value}, seed=0)["validation"] for value in tried
            }
            winner = max(tried, key=quality.__getitem__)
            if winner == tried[0]:
                tried.insert(0, float(f"{winner * tried[0] / tried[1]:.1g}"))
            elif winner == tried[-1]:
                tried.append(float(f"{winner * tried[-1] / tried[-2]:.1g}"))
        return winner

    def tune(self) -> dict[str, float]:
        """τ and rate."""
        temperature = self.best("temperature", TEMPERATURES, rate=RATES[0])
        return {
            "temperature": temperature,
            "rate": self.best("rate", RATES, temperature=temperature),
        }


def run(
    data: Path,
    vectors: Path,
    tasks: list[str],
    epochs: float = 8,
    methods: Sequence[str] = tuple(METHODS),
    tower: Literal["dense", "mlp", "linear"] = "dense",
    tuning: float = 0.34,
    seeds: int = 3,
    hold_known: bool = False,
    results: Path = RESULTS,
) -> None:
    """Tune and train every method on every task, those but the exact loss for its seconds.

    Args:
        data, vectors: folders of all tasks.
        tasks: names of tasks.
        epochs: passes of the exact loss over the training pairs.
        methods: names of methods.
        tower: kind of the map of queries.
        tuning: share of a training's length while τ and rate are chosen.
        seeds: of each method.
        hold_known: tune, stop, and then choose a share of the original weights by held-out queries
            of both kinds.
        results: where finished runs are added.
    """
    torch.set_num_threads(1)
    runs = Runs(results)
    for name in tasks:
        task = Task(data, vectors, name, hold_known=hold_known)
        add_unadapted(task, runs)
        steps = steps_of(task, epochs)
        tuned, found = tune_and_train(task, runs, EXACT, tower, {"steps": steps}, tuning, seeds)
        seconds = {"seconds": round(statistics.mean(one["spent"] for one in found), 1)}
        for method in [one for one in methods if one != EXACT]:
            tuned, _ = tune_and_train(task, runs, method, tower, seconds, tuning, seeds)
            if method.startswith("InfoNCE, B"):
                equal = {"steps": math.ceil(steps * 32 / METHODS[method].batch_size)}
                for seed in range(seeds):
                    Trainings(task, runs, method=method, map=tower, **equal).get(**tuned, seed=seed)


def add_unadapted(task: Task, runs: Runs) -> None:
    """Measure the query vectors as they are."""
    measured = task.grouped(task.quality(lambda queries: queries, task.test))
    runs.get(
        [{"task": task.name, "method": "unadapted"}],
        lambda missing: ((one, measured) for one in missing),
    )


def steps_of(task: Task, epochs: float) -> int:
    """Steps of the exact loss."""
    return round(epochs * len(task.pairs) / METHODS[EXACT].batch_size)


def tune_and_train(
    task: Task,
    runs: Runs,
    method: str,
    tower: str,
    length: dict[str, float],
    tuning: float,
    seeds: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """τ and rate by a `tuning` share of the length, and the runs of all seeds with them at full
    length."""
    short = {
        name: round(tuning * value, 1 if name == "seconds" else None)
        for name, value in length.items()
    }
    tuned = Trainings(task, runs, method=method, map=tower, **short).tune()
    trainings = Trainings(task, runs, method=method, map=tower, **length)
    found = [trainings.get(**tuned, seed=seed) for seed in range(seeds)]
    values = " ".join(f"{one['all']:.3f}" for one in found)
    print(f"{task.name}, {method}, {tower}, {length}, {tuned}: {values}", flush=True)
    return tuned, found


def few(
    data: Path,
    vectors: Path,
    task: str,
    epochs: float = 8,
    sizes: Sequence[int] = FEW,
    temperature: float = 0.05,
    rate: float = 1e-3,
    tower: Literal["dense", "mlp", "linear"] = "dense",
    seeds: int = 3,
    results: Path = RESULTS,
) -> None:
    """Train with few pairs, of which a tenth is held out, by the exact loss and by InfoNCE for the
    same seconds.

    Args:
        data, vectors: folders of all tasks.
        task: name of the task.
        epochs: passes of the exact loss, or more up to 300 steps.
        sizes: numbers of pairs.
        temperature, rate: the same for all sizes.
        tower: kind of the map of queries.
        seeds: each with pairs of its own.
        results: where finished runs are added.
    """
    torch.set_num_threads(1)
    runs = Runs(results)
    for size in sizes:
        for seed in range(seeds):
            opened = Task(data, vectors, task, size, seed)
            common = {"map": tower, "pairs": size}
            settings = {"temperature": temperature, "rate": rate, "seed": seed}
            steps = max(MIN_STEPS, steps_of(opened, epochs))
            exact = Trainings(opened, runs, method=EXACT, steps=steps, **common).get(**settings)
            seconds = max(0.1, round(exact["spent"], 1))
            Trainings(opened, runs, method="InfoNCE, B = 32", seconds=seconds, **common).get(
                **settings
            )


def keep(
    data: Path,
    vectors: Path,
    task: str,
    others: list[str],
    epochs: float = 8,
    tower: Literal["dense", "mlp", "linear"] = "dense",
    tuning: float = 0.34,
    seeds: int = 3,
    results: Path = RESULTS,
) -> None:
    """Interpolate between the original map and the one at the end of the training, and measure the
    task and others.

    Args:
        data, vectors: folders of all tasks.
        task: what is adapted to, as `run` did.
        others: tasks whose test queries are measured, too.
        epochs, tower, tuning: of `run`.
        seeds: adapted models; intervals are of the mean over them of each query.
        results: where finished runs are added.
    """
    torch.set_num_threads(1)
    runs, own = Runs(results), Task(data, vectors, task)
    length = {"steps": steps_of(own, epochs)}
    tuned, _ = tune_and_train(own, runs, EXACT, tower, length, tuning, seeds)
    base = {"task": task, "method": "keep", "map": tower, **length, **tuned}
    measured = {
        name: own if name == task else Task(data, vectors, name) for name in (task, *others)
    }

    def compute(missing: list[Settings]) -> Iterator[tuple[Settings, dict[str, Any]]]:
        settings = {"method": EXACT, "map": tower, **length, **tuned}
        trainings = [Training(own, {**settings, "seed": seed}) for seed in range(seeds)]
        models = []
        for training in trainings if missing else []:
            training.run(keep_best=False)
            models.append(copy.deepcopy(training.model))
        for one in missing:
            other = measured[one["on"]]
            unadapted = list(other.quality(lambda queries: queries, other.test).values())
            scores: list[dict[str, float]] = []  # of each seed, by query
            for training, adapted in zip(trainings, models):
                training.model.load_state_dict(interpolate(training.original, adapted, one["keep"]))
                scores.append(other.quality(training.encode, other.test))
            means = {query: statistics.mean(own[query] for own in scores) for query in scores[0]}
            found = paired_bootstrap(unadapted, list(means.values()))
            interval = {"difference": found.difference, "low": found.low, "high": found.high}
            interval["deviation"] = statistics.stdev(
                statistics.mean(own.values()) for own in scores
            )
            yield (
                one,
                {
                    **other.grouped(means),
                    **{name: round(value, 4) for name, value in interval.items()},
                },
            )

    runs.get(
        [{**base, "on": name, "keep": share} for name in measured for share in SHARES], compute
    )


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, keep, few, report])
