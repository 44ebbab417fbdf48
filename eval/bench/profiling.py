"""What a training step consists of: time, launches, host waits, the least time of arithmetic."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from in_turn import in_turn
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from dualenc.batching import RandomBatches
from dualenc.data import PairDataset
from dualenc.encoders import DualEncoder
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import BatchLoader

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
"""Device that the trainers compute on."""
COUNTED = {
    "launches": re.compile(r"cu(da)?(Launch|GraphLaunch)"),
    "host waits": re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy$"),
}
END = "end of the profile"

Train = Callable[[int, Callable[[], None]], None]
"""`train(steps, before_loss)` trains, and calls `before_loss` before every loss."""


def watch(loss: nn.Module, before_loss: Callable[[], None]) -> None:
    """Have a loss call `before_loss` whenever it is computed."""
    loss.register_forward_pre_hook(lambda *_: before_loss())


def train_between(train: Train, first: int, steps: int, begin: Callable, end: Callable) -> None:
    """Train, and call two functions: before loss number `first`, and `steps` losses later."""
    losses = itertools.count()
    actions = {first: begin, first + steps: end}
    train(first + steps + 1, lambda: actions.get(next(losses), lambda: None)())


def seconds_per_step(train: Train, first: int, steps: int) -> float:
    """Return the mean time of steps within one training, from a loss to a later one."""
    readings = []

    def read() -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        readings.append(time.perf_counter())

    train_between(train, first, steps, read, read)
    return (readings[1] - readings[0]) / steps


def profile_steps(train: Train, first: int, steps: int) -> profile:
    """Return a profile of steps within one training, from a loss to a later one."""
    gpu = [ProfilerActivity.CUDA] if ON_GPU else []
    profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)

    def start() -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        profiler.start()

    def stop() -> None:
        # The profiler waits for the GPU when it stops; that wait is not the step's.
        with record_function(END):
            pass
        profiler.stop()

    train_between(train, first, steps, start, stop)
    return profiler


def counts(profiler: profile) -> dict[str, int]:
    """Return launches and host waits on a GPU; a launch starts a kernel or a CUDA graph."""
    if not ON_GPU:
        return {}
    on_host = [each for each in profiler.events() if each.device_type == DeviceType.CPU]
    end = next(each.time_range.start for each in on_host if each.name == END)
    calls = [each.name for each in on_host if each.time_range.start < end]
    return {what: sum(map(bool, map(call.match, calls))) for what, call in COUNTED.items()}


def write_profile(profiler: profile, folder: Path, name: str) -> None:
    """Write NAME.json.gz, for Perfetto, and NAME.txt, the operators that take longest."""
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
    order = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    averages = profiler.key_averages()
    operators = averages.table(sort_by=order, row_limit=40, max_name_column_width=80)
    (folder / f"{name}.txt").write_text(operators, encoding="utf-8")


def step_flops(model: DualEncoder, pairs: PairDataset, batch_size: int) -> float:
    """Return the floating-point operations of a step, forward and backward, as we train."""
    model.to(DEVICE).train()
    loader = BatchLoader(pairs, model.left.prepare, model.right.prepare)
    # Several, for texts differ in length.
    plan = RandomBatches(len(pairs), batch_size).select(0)[:3]
    with FlopCounterMode(display=False) as counter:
        for rows in plan:
            batch = loader.build(rows, epoch=0)
            encoding = PlainEncoding(model, DEVICE, keep_statistics=False)
            left, right = encoding.encode_parts(("left", batch.left), ("right", batch.right))
            encoding.backward((left + right).sum())
    return counter.get_total_flops() / len(plan)


@cache
def matmul_rate(precision: str, tf32: bool = False) -> float:
    """Return the FLOP/s of large square matrix products, the best of several measurements."""
    size, products = (4096, 10) if ON_GPU else (2048, 1)
    matrix = torch.randn(size, size, device=DEVICE).to(getattr(torch, precision))
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 and precision == "float32" else usual)
    times, _ = in_turn({"products": lambda: [matrix @ matrix for _ in range(products)]}, 6)
    torch.set_float32_matmul_precision(usual)
    return 2 * size**3 * products / min(times["products"])
