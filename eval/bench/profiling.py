"""What a training step consists of: time, launches, host waits, the least time of arithmetic."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from in_turn import in_turn
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from dualenc.batching import RandomBatches
from dualenc.data import PairDataset
from dualenc.encoders import DualEncoder
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import BatchLoader

LAUNCH = re.compile(r"cu(da)?(Launch|GraphLaunch)")
HOST_WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy$")
END = "end of the profile"
NUM_BATCHES = 3
"""Batches over which the operations of a step are counted: texts differ in length."""


def device() -> torch.device:
    """Return the device that the trainers compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def watch(loss: nn.Module, before_loss: Callable[[], None]) -> None:
    """Have a loss call `before_loss` whenever it is computed."""
    loss.register_forward_pre_hook(lambda *_: before_loss())


class StepClock:
    """Times some steps of a training loop that calls it before every loss.

    Args:
        skipped: steps before the clock is read.
        steps: steps between the two readings.
    """

    def __init__(self, skipped: int, steps: int) -> None:
        self.skipped = skipped
        self.steps = steps
        self.calls = 0
        self.readings: list[float] = []

    def __call__(self) -> None:
        if self.calls in (self.skipped, self.skipped + self.steps):
            self.read()
        self.calls += 1

    def read(self) -> None:
        """Read the clock."""
        synchronize()
        self.readings.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> float:
        """Return the mean of the steps between the readings."""
        start, end = self.readings
        return (end - start) / self.steps


class StepProfiler(StepClock):
    """Profiles some steps of a training loop that calls it before every loss."""

    def __init__(self, skipped: int, steps: int) -> None:
        super().__init__(skipped, steps)
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)

    def read(self) -> None:
        """Start the profile, or stop it."""
        if self.calls == self.skipped:
            synchronize()
            self.profiler.start()
            return
        # The profiler waits for the GPU when it stops; that wait is not the step's.
        with record_function(END):
            pass
        self.profiler.stop()

    def counts(self) -> dict[str, float]:
        """Return launches per step and, on a GPU, kernels and host waits.

        On a GPU a launch is a call that starts a kernel or a CUDA graph; kernels of a graph are
        counted one by one. On a CPU a launch is an operator (aten) that no other one calls;
        compiled code has few.
        """
        events = list(self.profiler.events())
        if not torch.cuda.is_available():
            return {"launches": sum(map(is_top_operator, events)) / self.steps}
        end = next(event.time_range.start for event in events if event.name == END)
        calls = [
            event.name
            for event in events
            if event.device_type == DeviceType.CPU and event.time_range.start < end
        ]
        return {
            "launches": sum(map(bool, map(LAUNCH.match, calls))) / self.steps,
            "kernels": sum(map(is_kernel, events)) / self.steps,
            "host waits": sum(map(bool, map(HOST_WAIT.match, calls))) / self.steps,
        }

    def write(self, folder: Path, name: str) -> None:
        """Write NAME.json.gz, for Perfetto, and NAME.txt, the operators that take longest."""
        folder.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        operators = self.profiler.key_averages().table(
            sort_by=order, row_limit=40, max_name_column_width=80
        )
        (folder / f"{name}.txt").write_text(f"{self.steps} steps\n{operators}", encoding="utf-8")


def is_top_operator(event: FunctionEvent) -> bool:
    """Return True for an operator that no other operator calls."""

    def in_operator(caller: FunctionEvent | None) -> bool:
        return caller is not None and (is_operator(caller) or in_operator(caller.cpu_parent))

    return is_operator(event) and not in_operator(event.cpu_parent)


def is_operator(event: FunctionEvent) -> bool:
    """Return True for an operator of torch."""
    return event.name.startswith("aten::")


def is_kernel(event: FunctionEvent) -> bool:
    """Return True for a kernel on the GPU."""
    on_gpu = event.device_type == DeviceType.CUDA and not event.is_user_annotation
    return on_gpu and not event.name.startswith(("Memcpy", "Memset"))


def step_flops(model: DualEncoder, pairs: PairDataset, batch_size: int) -> float:
    """Return the floating-point operations of a step, forward and backward, as we train."""
    model.to(device()).train()
    loader = BatchLoader(pairs, model.left.prepare, model.right.prepare)
    plan = RandomBatches(len(pairs), batch_size).select(0)[:NUM_BATCHES]
    with FlopCounterMode(display=False) as counter:
        for rows in plan:
            batch = loader.build(rows, epoch=0)
            encoding = PlainEncoding(model, device(), keep_statistics=False)
            left, right = encoding.encode_parts(("left", batch.left), ("right", batch.right))
            encoding.backward((left + right).sum())
    return counter.get_total_flops() / len(plan)


def matmul_rate(dtype: torch.dtype, tf32: bool = False) -> float:
    """Return the FLOP/s of large square matrix products, the best of several measurements.

    Args:
        dtype: type of the matrices.
        tf32: let a GPU multiply float32 as TF32.
    """
    size, products = (4096, 10) if torch.cuda.is_available() else (2048, 1)
    matrix = torch.randn(size, size, device=device()).to(dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else precision)
    times, _ = in_turn({"products": lambda: [matrix @ matrix for _ in range(products)]}, 6)
    torch.set_float32_matmul_precision(precision)
    return 2 * size**3 * products / min(times["products"])
