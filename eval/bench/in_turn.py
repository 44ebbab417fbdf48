"""Calls timed in turn, or in a process of its own; and models that need no download."""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

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
    runs: Mapping[Any, Callable[[], Any]],
    repeats: int,
    warm_up: int = 1,
    clock: Callable[[], float] = quietest_clock,
) -> tuple[dict[Any, list[float]], dict[Any, Any]]:
    """Return seconds of each call, after some to warm up, and what each call returned last."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    results: dict[Any, Any] = {}
    for name in rounds(runs, warm_up + repeats):
        start = clock()
        results[name] = runs[name]()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times[name].append(clock() - start)
    return {name: taken[warm_up:] for name, taken in times.items()}, results


def rows_of(times: Mapping[Any, Sequence[float]], column: str = "call") -> list[dict[str, Any]]:
    """Return a row per call: median and lowest milliseconds, and their ratios to the first's."""
    first, *_ = times.values()
    rows = []
    for name, taken in times.items():
        row = {column: name, "ms": 1000 * statistics.median(taken), "lowest": 1000 * min(taken)}
        row["ratio"] = statistics.median(taken) / statistics.median(first)
        rows.append({**row, "ratio of lowest": min(taken) / min(first)})
    return rows


def ratios(times: Mapping[str, Sequence[float]]) -> Outcome:
    """Return the least milliseconds of each call, and ratios to the first: of least, of medians."""
    first, *others = times
    row = {f"{name}, ms": 1000 * min(taken) for name, taken in times.items()}
    for name in others:
        row[f"{name} / {first}"] = min(times[name]) / min(times[first])
        medians = (statistics.median(times[each]) for each in (name, first))
        row[f"{name} / {first}, medians"] = next(medians) / next(medians)
    return row


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory_of_process(kind: str = "RssAnon") -> float:
    """Return the MiB of this process that are in no file, or what it calls by another kind."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition(f"{kind}:")[2].split()[0]) / 1024


def new_backbone(name: str) -> tuple[nn.Module, int]:
    """Return a model with random weights, "resnet18" or "minilm", and the size of its vectors."""
    if name == "resnet18":
        import timm

        return timm.create_model(name, num_classes=0), 512
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(num_hidden_layers=6, **sizes))
    model.register_forward_hook(lambda _, given, output: output.last_hidden_state.mean(dim=1))
    return model, 384
