"""Calls timed in turn, or in a process of its own; and models that need no download."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

Name = TypeVar("Name")


def rounds(names: Iterable[Name], count: int) -> Iterator[Name]:
    """Yield all names in each round, in a new order: a call leaves caches to the next one."""
    orders, names = random.Random(0), list(names)
    for _ in range(count):
        yield from orders.sample(names, len(names))


def in_turn(
    runs: Mapping[Name, Callable[[], Any]],
    repeats: int,
    warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[Name, list[float]], dict[Name, Any]]:
    """Return seconds of each call, after some to warm up, and what each call returned last."""
    times: dict[Name, list[float]] = {name: [] for name in runs}
    results: dict[Name, Any] = {}
    for name in rounds(runs, warm_up + repeats):
        start = clock()
        results[name] = runs[name]()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times[name].append(clock() - start)
    return {name: taken[warm_up:] for name, taken in times.items()}, results


def rows_of(times: Mapping[Name, Sequence[float]], column: str = "call") -> list[dict[str, Any]]:
    """Return a row per call: median and lowest milliseconds, and their ratios to the first's."""
    first, *_ = times.values()
    rows = []
    for name, taken in times.items():
        row = {column: name, "ms": 1000 * statistics.median(taken), "lowest": 1000 * min(taken)}
        row["ratio"] = statistics.median(taken) / statistics.median(first)
        rows.append({**row, "ratio of lowest": min(taken) / min(first)})
    return rows


def quietest_clock() -> float:
    """Return processor time on one thread, which other processes disturb little; else seconds."""
    # A GPU works outside of processor time.
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


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
