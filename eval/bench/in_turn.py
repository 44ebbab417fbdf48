"""Calls timed in turn, and runs shown as a table."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import Outcome, Settings, Store

from dualenc.evaluation.report_page import Table, print_table

Name = TypeVar("Name")
NOWHERE = Path(os.devnull)
"""A store that keeps nothing."""


def shown(
    title: str,
    wanted: Sequence[Settings],
    run: Callable[[Settings], Outcome],
    out: Path = NOWHERE,
) -> list[Outcome]:
    """Make the runs that a store does not have, print a row for each, and return the outcomes."""
    outcomes = Store(out).get(wanted, run)
    rows = [settings | outcome for settings, outcome in zip(wanted, outcomes, strict=True)]
    print_table(Table(title, rows))
    return outcomes


def rounds(names: Iterable[Name], count: int) -> Iterator[Name]:
    """Yield all names in each round, in a new order: a call leaves caches to the next one."""
    orders, names = random.Random(0), list(names)
    for _ in range(count):
        yield from orders.sample(names, len(names))


def quietest_clock() -> float:
    """Return processor time on one thread, which other processes disturb little; else seconds."""
    # A GPU works outside of processor time.
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


def in_turn(
    runs: Mapping[str, Callable[[], Any]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return seconds of each call, after one to warm up, and what each call returned last."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, Any] = {}
    for name in rounds(runs, 1 + repeats):
        start = quietest_clock()
        results[name] = runs[name]()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times[name].append(quietest_clock() - start)
    return {name: taken[1:] for name, taken in times.items()}, results


def ratios(times: Mapping[str, Sequence[float]]) -> Outcome:
    """Return the least milliseconds of each call, and ratios to the first: of least, of medians."""
    first, *others = times
    row = {f"{name}, ms": 1000 * min(taken) for name, taken in times.items()}
    for name in others:
        row[f"{name} / {first}"] = min(times[name]) / min(times[first])
        medians = (statistics.median(times[each]) for each in (name, first))
        row[f"{name} / {first}, medians"] = next(medians) / next(medians)
    return row
