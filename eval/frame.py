"""The frame of every experiment: runs found by their settings, tuned, repeated and shown.

An experiment is a function that trains or measures once, `run(settings) -> outcome`. The frame
stores what it returns and repeats no run that it has:

    store = Store(RESULTS / "static.jsonl")
    outcomes = store.get([{"task": "papers", "seed": seed} for seed in range(3)], run)

A line of a store is {"settings": …, "outcome": …, "origin": …}. The origin says where the numbers
come from: commit, versions, device, date, and seconds of processor time.
"""

from __future__ import annotations

import base64
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dualenc.data import PairDataset
from dualenc.encoders import DualEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import Objective
from dualenc.training import Evaluator, Trainer

RESULTS = Path(__file__).parent / "results"
"""Folder of the stores."""
ORDINARY_BATCH = 32
"""Batch size that learning rates are given for; they grow with the square root of the batch."""
VERSIONS = ("dualenc", "torch", "transformers", "faiss-cpu", "numpy")

Settings = dict[str, Any]
Outcome = dict[str, Any]
Cell = TypeVar("Cell", bound=Hashable)


class Run(NamedTuple):
    """A finished run: one line of a store."""

    settings: Settings
    outcome: Outcome
    origin: dict[str, Any]


class Store:
    """Finished runs in a file of JSON lines, which need not exist, found by their settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.runs = [Run(**json.loads(line)) for line in lines]

    def get(
        self, wanted: Iterable[Settings], run: Callable[[Settings], Outcome], processes: int = 1
    ) -> list[Outcome]:
        """Return the outcomes of runs, in the order of their settings; run those that are missing.

        `processes` are made at once. They are forked, and so inherit data that are open; CUDA does
        not survive a fork, so that on a GPU this has to be 1.
        """
        wanted = list(wanted)
        known = {key_of(each.settings): each.outcome for each in self.runs}
        missing = {key: each for each in wanted if (key := key_of(each)) not in known}
        for finished in run_all(list(missing.values()), run, processes):
            self.add(finished)
            known[key_of(finished.settings)] = finished.outcome
        return [known[key_of(each)] for each in wanted]

    def add(self, finished: Run) -> None:
        """Append a run to the file."""
        self.runs.append(finished)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finished._asdict(), ensure_ascii=False) + "\n")

    def where(self, **settings: Any) -> list[Run]:
        """Return the runs that have these settings, among others."""
        return [each for each in self.runs if settings.items() <= each.settings.items()]


def key_of(settings: Settings) -> str:
    """Return a text that is equal for equal settings."""
    return json.dumps(settings, sort_keys=True)


def run_all(
    wanted: Sequence[Settings], run: Callable[[Settings], Outcome], processes: int
) -> Iterator[Run]:
    """Make runs, and yield each as soon as it is finished."""

    def run_once(settings: Settings) -> Run:
        torch.set_num_threads(1)
        begun = time.process_time()
        outcome = run(settings)
        return Run(settings, outcome, origin(time.process_time() - begun))

    if processes == 1:
        yield from map(run_once, wanted)
        return
    # A forked process would wait for the threads of its parent.
    torch.set_num_threads(1)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # A closure cannot be pickled; forked processes find it here.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _RUNNING.append, (run_once,)) as pool:
        for each in as_completed([pool.submit(_run_forked, settings) for settings in wanted]):
            yield each.result()


_RUNNING: list[Callable[[Settings], Run]] = []


def _run_forked(settings: Settings) -> Run:
    """Run in a forked process what its parent runs."""
    return _RUNNING[-1](settings)


def origin(seconds: float) -> dict[str, Any]:
    """Return where the numbers of a run come from, which took so many seconds of processor time."""
    return {
        "commit": commit(),
        "versions": {name: version(name) for name in VERSIONS},
        "device": device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
    }


@cache
def commit() -> str | None:
    """Return the commit of this checkout, with a + if files differ from it; None outside git."""
    here = Path(__file__).parent
    asked = {"cwd": here, "capture_output": True, "text": True}
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], check=True, **asked)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], check=True, **asked)
    except (OSError, subprocess.CalledProcessError):
        return None
    # Stores change while experiments run.
    lines = [line for line in changed.stdout.splitlines() if not line.endswith(".jsonl")]
    return head.stdout.strip() + ("+" if lines else "")


@cache
def device_name() -> str:
    """Return the name of the GPU, or else of the processor with its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {os.cpu_count()} cores"


def tune(
    cells: Sequence[Cell],
    values: Sequence[float],
    held_out: Callable[[list[tuple[Cell, float]]], list[float]],
    beyond_edge: int = 2,
) -> dict[Cell, float]:
    """Return the best value of each cell: of a grid, and past its edges while an edge is best.

    Args:
        cells: what is tuned, each for itself, such as an objective at a batch size.
        values: the grid. A single value is taken as it is.
        held_out: function that returns the quality on held-out data of (cell, value) pairs.
        beyond_edge: how often the grid may grow, by the ratio of its outermost values.
    """
    if len(values) == 1:
        return dict.fromkeys(cells, values[0])
    grids = {cell: sorted(values) for cell in cells}
    quality: dict[tuple[Cell, float], float] = {}

    def best(cell: Cell) -> float:
        # Of equals, the smallest: `max` takes the first.
        tried = (value for value in grids[cell] if (cell, value) in quality)
        return max(tried, key=lambda value: quality[cell, value])

    for _ in range(1 + beyond_edge):
        pairs = [(cell, value) for cell, grid in grids.items() for value in grid]
        missing = [each for each in pairs if each not in quality]
        quality |= zip(missing, held_out(missing), strict=True)
        for cell, grid in grids.items():
            if best(cell) == grid[0]:
                grid.insert(0, float(f"{grid[0] ** 2 / grid[1]:.2g}"))
            elif best(cell) == grid[-1]:
                grid.append(float(f"{grid[-1] ** 2 / grid[-2]:.2g}"))
    return {cell: best(cell) for cell in cells}


def choose(
    store: Store,
    run: Callable[[Settings], Outcome],
    trials: dict[Cell, Settings],
    grids: dict[str, Sequence[float]],
    quality: Callable[[Outcome], float] = itemgetter("validation"),
    beyond_edge: int = 2,
    processes: int = 1,
) -> dict[Cell, Settings]:
    """Choose settings of each cell by trials with the first seed, one setting after another.

        trials = {name: {"objective": name, "steps": 100} for name in names}
        chosen = choose(store, run, trials, {"temperature": (0.05, 0.1), "rate": (1.0, 0.5, 2.0)})

    Args:
        store: store of the trials.
        run: function that makes one run.
        trials: the other settings of a trial, by what is tuned, each for itself.
        grids: values as for `tune`; later settings stay at their first while earlier are chosen.
        quality: what is to be high in an outcome.
        beyond_edge: as in `tune`.
        processes: as in `Store.get`.
    """
    chosen = {cell: {name: values[0] for name, values in grids.items()} for cell in trials}

    def held_out(name: str, tried: list[tuple[Cell, float]]) -> list[float]:
        wanted = [{**trials[cell], **chosen[cell], name: own, "seed": 0} for cell, own in tried]
        return [quality(each) for each in store.get(wanted, run, processes)]

    for name, values in grids.items():
        for cell, best in tune(list(trials), values, partial(held_out, name), beyond_edge).items():
            chosen[cell][name] = best
    return chosen


def repeat(
    store: Store,
    run: Callable[[Settings], Outcome],
    wanted: dict[Cell, Settings],
    seeds: int,
    processes: int = 1,
) -> dict[Cell, list[Outcome]]:
    """Return the outcomes of each cell's settings with all seeds."""
    # Seeds outside: an interrupted call has all cells.
    every = [{**own, "seed": seed} for seed in range(seeds) for own in wanted.values()]
    found = store.get(every, run, processes)
    return {cell: found[place :: len(wanted)] for place, cell in enumerate(wanted)}


class Trained(NamedTuple):
    """What `train` returns: the model in evaluation mode, steps, and seconds of processor time."""

    model: DualEncoder
    steps: int
    seconds: float


def train(
    model: DualEncoder,
    pairs: PairDataset,
    objective: Objective,
    evaluator: Evaluator | None = None,
    **settings: Any,
) -> Trained:
    """Train in a temporary folder, without checkpoints, and keep the last weights.

    `settings` are those of `Trainer`, such as max_steps.
    """
    quiet = {"save_every": None, "progress": False, "keep_best": False, "deterministic": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(output=Path(folder) / "run", **{**quiet, **settings})
        begun = time.process_time()
        result = trainer.fit(model, pairs, objective, evaluator=evaluator)
        spent = time.process_time() - begun
    return Trained(model.eval(), result.steps, spent)


def scaled_rate(rate: float, batch_size: int) -> float:
    """Return the learning rate for a batch size, from that for a batch of 32."""
    return rate * math.sqrt(batch_size / ORDINARY_BATCH)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation over seeds."""
    if not values:
        return "not run"
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return f"{mean} (one seed)"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def difference(base: Sequence[float], other: Sequence[float], samples: int = 10_000) -> str:
    """Return the mean difference over queries with its 95% interval, by a paired bootstrap."""
    found = paired_bootstrap(base, other, samples=samples)
    return f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def packed(scores: Sequence[float]) -> str:
    """Return scores from 0 to 1, in steps of 1/255, as a short text."""
    codes = np.round(255 * np.asarray(scores)).astype(np.uint8)
    return base64.b64encode(zlib.compress(codes.tobytes(), 9)).decode()


def unpacked(text: str) -> np.ndarray:
    """Return the (Q,) scores that `packed` was given, rounded."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8) / 255


def by_seed(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs that differ in nothing but the seed."""
    groups: dict[str, list[Run]] = {}
    for each in runs:
        groups.setdefault(key_of(each.settings | {"seed": None}), []).append(each)
    return list(groups.values())


def most_seeds(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the settings that were chosen: with most seeds, or else the best mean."""

    def rank(own: list[Run]) -> tuple[int, float]:
        return len(own), statistics.mean(each.outcome.get("validation", 0.0) for each in own)

    return max(by_seed(runs), key=rank)


def print_runs(title: str, runs: Iterable[Run], digits: int = 3) -> None:
    """Print settings and outcomes of each group of runs; of whole numbers the first."""
    rows = []
    for own in by_seed(runs):
        rows.append({name: str(value) for name, value in own[0].settings.items() if name != "seed"})
        for name, value in own[0].outcome.items():
            values = [each.outcome[name] for each in own]
            rows[-1][name] = value if isinstance(value, int) else spread(values, digits)
    print_table(Table(title, rows))


def command_line(*functions: Callable[..., object], check: Callable[[Path], None]) -> None:
    """Run the function that the command line names, or `--check`: all of it, at toy size.

    Args:
        *functions: functions with typed arguments, one subcommand each; a single one needs no name.
        check: function that runs the experiment on toy data in an empty folder; it raises if the
            numbers that are known beforehand do not come out.
    """
    from jsonargparse import auto_cli

    try:
        if sys.argv[1:] == ["--check"]:
            with tempfile.TemporaryDirectory() as folder:
                check(Path(folder))
        else:
            auto_cli(functions[0] if len(functions) == 1 else list(functions))
    except DualencError as error:
        raise SystemExit(f"error: {error}") from error
