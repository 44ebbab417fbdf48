"""What is training against the whole index worth, where the documents' vectors stay fixed?

    python eval/adapting.py run DATA VECTORS "[scifact,medquad]"
    python eval/adapting.py report

DATA/NAME is a BEIR folder, and VECTORS/NAME/{corpus,queries} is what `dualenc embed` made of its
sides. Queries pass through a map that begins as the identity. Training, held-out queries and the
share of the original weights are those of `dualenc adapt`, for a number of steps, and the best of
eleven evaluations. Test nDCG@10 is over all documents: of all queries, of those with a relevant
document in training ("seen"), and of those with none in any pair of train.tsv ("new").

The exact loss trains for so many epochs, every other method for as many seconds of one core,
without evaluations. Each is tuned on held-out queries with the first seed, τ and then the rate.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import frame
import numpy as np
from adapting_task import (
    GROUPS,
    Task,
    best_share,
    open_task,
    scores_of,
    train_map,
    write_judged,
)
from frame import Outcome, Run, Settings, Store
from rows import sizes_of

from dualenc.encoders import DualEncoder, interpolate
from dualenc.encoders.vector import TowerKind
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective
from dualenc.training import Evaluator
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adapting import score_interpolations

STORE = frame.RESULTS / "adapting.jsonl"
TEMPERATURES = (0.02, 0.03, 0.05, 0.1)
RATES = (1e-3, 3e-4, 3e-3)
"""At a batch of 32; the first while τ is chosen."""
EVALUATIONS, SEEDS = 10, 3
EXACT = "FrozenCorpus+"
"""With the positive in the softmax, the loss of `dualenc adapt`."""
METHODS = {EXACT: 32, "InfoNCE, B = 32": 32, "InfoNCE, B = 512": 512}
"""Batch sizes."""
NUMBERS = ("spent", "embedding", "done", "best", "share")


@dataclass
class Best(Evaluator):
    """Quality on held-out queries, the best model so far, and seconds of the evaluations."""

    held_out: dict[str, IndexEvaluator]
    primary: str = "validation"
    qualities: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        begun = time.process_time()
        scores = [scores_of(model, part) for part in self.held_out.values()]
        self.qualities.append(statistics.mean(score for part in scores for score in part))
        if self.qualities.index(max(self.qualities)) == len(self.qualities) - 1:
            self.model = copy.deepcopy(model)
        self.seconds += time.process_time() - begun
        return {self.primary: self.qualities[-1]}


def new_objective(task: Task, settings: Settings) -> Objective:
    """Return the objective of a training."""
    common = {"temperature": settings["temperature"], **sizes_of(task.pairs)}
    if settings["method"] == EXACT:
        return FrozenCorpus(task.documents.vectors, positive_in_softmax=True, **common)
    return InfoNCE(**common)


def train(
    task: Task, settings: Settings, steps: int, evaluator: Evaluator | None = None
) -> tuple[DualEncoder, frame.Trained]:
    """Train a map of queries; return the map before, and what was trained."""
    batch_size = min(METHODS[settings["method"]], len(task.pairs))
    return train_map(
        task.documents,
        task.pairs,
        new_objective(task, settings),
        settings["seed"],
        settings["map"],
        evaluator=evaluator,
        evaluate_every=-(-steps // EVALUATIONS),
        batch_size=batch_size,
        learning_rate=frame.scaled_rate(settings["rate"], batch_size),
        max_steps=steps,
    )


def measure(task: Task, settings: Settings) -> Outcome:
    """Train for steps or seconds; measure the last weights, and the best ones by their share."""
    steps = settings.get("steps") or steps_in(task, settings, settings["seconds"])
    best = Best(task.held_out)
    original, trained = train(task, settings, steps, best)
    points = score_interpolations(original, best.model, task.held_out)
    share = best_share(points, "new", list(task.held_out))
    best.model.load_state_dict(interpolate(original, best.model, share))
    last = task.measure(trained.model)
    progress = best.qualities.index(max(best.qualities)) / (len(best.qualities) - 1)
    return task.measure(best.model) | {
        "validation": round(max(best.qualities), 4),
        "share": share,
        "last": {name: last[name] for name in GROUPS if name in last},
        "spent": round(trained.seconds - best.seconds, 2),
        "done": trained.steps,
        "best": round(progress, 2),
    }


def steps_in(task: Task, settings: Settings, seconds: float) -> int:
    """Return the number of steps that fit, by the time of a few."""
    few, many = (train(task, settings, steps)[1].seconds for steps in (2, 22))
    return max(1, round(seconds * 20 / max(many - few, many / 22)))


def run(
    data: Path,
    vectors: Path,
    tasks: list[str],
    epochs: float = 8,
    methods: Sequence[str] = tuple(METHODS),
    tower: TowerKind = "dense",
    tuning: float = 0.34,
) -> None:
    """Tune and train every method on every task, those but the exact loss for its seconds.

    `tuning` is the share of a training's length while τ and rate are chosen.
    """
    store = Store(STORE)
    for name in tasks:
        task = open_task(data, vectors, name)
        unadapted = {"task": name, "method": "unadapted"}
        store.get([unadapted], lambda _, task=task: task.measure())
        common = {"task": name, "held_out": "both", "map": tower}
        steps = epochs * len(task.pairs) / METHODS[EXACT]
        lengths = [{"steps": round(share * steps)} for share in (tuning, 1)]
        [exact] = tune_and_train(store, task, [{**common, "method": EXACT}], *lengths)
        seconds = statistics.mean(each["spent"] for each in exact)
        lengths = [{"seconds": round(share * seconds, 1)} for share in (tuning, 1)]
        others = [{**common, "method": method} for method in methods if method != EXACT]
        tune_and_train(store, task, others, *lengths)


def tune_and_train(
    store: Store, task: Task, wanted: Sequence[Settings], short: Settings, whole: Settings
) -> list[list[Outcome]]:
    """Choose τ and the rate of each by short trainings, and return whole ones of all seeds."""
    run_once, cells = partial(measure, task), range(len(wanted))
    trials = {cell: {**wanted[cell], **short} for cell in cells}
    grids = {"temperature": TEMPERATURES, "rate": RATES}
    chosen = frame.choose(store, run_once, trials, grids)
    final = {cell: {**wanted[cell], **whole, **chosen[cell]} for cell in cells}
    return list(frame.repeat(store, run_once, final, SEEDS).values())


def report() -> None:
    """Print tables of all runs."""
    runs = Store(STORE).runs
    curves: dict[tuple[str, str], list[Run]] = {}
    for task in dict.fromkeys(each.settings["task"] for each in runs):
        own = [each for each in runs if each.settings["task"] == task and "on" not in each.settings]
        for title, is_few in (("methods", False), ("few pairs", True)):
            rows = rows_of([each for each in own if ("pairs" in each.settings) == is_few])
            if rows:
                print_table(Table(f"{task}: {title}", rows))
    shares = [each for each in runs if "keep" in each.settings]
    for each in sorted(shares, key=lambda each: each.settings["keep"]):
        curves.setdefault((each.settings["task"], each.settings["on"]), []).append(each)
    for (task, other), points in curves.items():
        groups = GROUPS if task == other else GROUPS[:1]
        rows = [
            {"keep": settings["keep"]}
            | {group: outcome[group] for group in groups if group in outcome}
            | {"over unadapted": "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**outcome)}
            for settings, outcome, _ in points
        ]
        print_table(Table(f"adapted to {task}, measured on {other}", rows))


def rows_of(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return a row for all seeds of the same settings; a single seed was only tried."""
    # Subsets of few pairs have lengths of their own.
    any_length = {"seconds": None, "steps": None}
    runs = [
        each._replace(settings=each.settings | any_length) if "pairs" in each.settings else each
        for each in runs
    ]
    rows = []
    for own in frame.by_seed(runs):
        settings, first, _ = own[0]
        if len(own) == 1 and not settings["method"].startswith(("unadapted", "text")):
            continue
        outcomes = [each.outcome for each in own]
        last = [outcome.get("last", {}) for outcome in outcomes]
        cells = {name: settings.get(name) for name in ("method", "map", "pairs")}
        cells |= {group: mean_spread(outcomes, group) for group in GROUPS}
        cells |= {f"last, {group}": mean_spread(last, group) for group in GROUPS}
        cells |= {name: mean_spread(outcomes, name, 2) for name in NUMBERS}
        cells["queries"] = " / ".join(str(first[f"{group} queries"]) for group in GROUPS)
        cells |= {"τ": settings.get("temperature"), "rate": settings.get("rate")}
        rows.append({name: cell for name, cell in cells.items() if cell is not None})
    return rows


def mean_spread(outcomes: Sequence[Outcome], name: str, digits: int = 3) -> str | None:
    """Return mean and standard deviation of a number, where outcomes have it."""
    present = [outcome[name] for outcome in outcomes if name in outcome]
    return frame.spread(present, digits).removesuffix(" (one seed)") if present else None


def check(folder: Path) -> None:
    """Turn queries: every method turns them back."""
    globals().update(TEMPERATURES=(0.1,), RATES=(3e-2,), EVALUATIONS=2, SEEDS=2)
    globals().update(STORE=folder / "runs.jsonl")
    draw = np.random.default_rng(0)
    documents = draw.standard_normal((80, 6))
    turn = np.linalg.qr(draw.standard_normal((6, 6)))[0]
    places = np.array([*range(80), *range(20)])
    pairs = np.stack([np.arange(100), places], axis=1)
    splits = {"train": np.concatenate([pairs[:60], pairs[80:98]]), "test": pairs[60:80]}
    *where, name = write_judged(folder, documents, documents[places] @ turn, splits)
    run(*where, [name], epochs=20, tuning=1)
    [unadapted], *found = (Store(STORE).where(method=name) for name in ("unadapted", *METHODS))
    for runs in found:
        assert len(runs) == 2
        for each in runs:
            assert each.outcome["last"]["new"] > unadapted.outcome["new"] + 0.2
    report()


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
