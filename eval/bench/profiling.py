"""What a training step consists of: its time, launches, host waits, operators, and the least time
of its arithmetic."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
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
    """The device that the trainers compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StepClock:
    """Times some steps of a training loop that calls it before every loss: from one loss to
    another.

    Args:
        skipped: steps before the clock is read.
        steps: between the two readings.
    """

    def __init__(self, skipped: int, steps: int) -> None:
        self.skipped = skipped
        self.steps = steps
        self.calls = 0
        self.readings: list[float] = []

    def __call__(self) -> None:
        if self.calls in (self.skipped, self.skipped + self.steps):
            synchronize()
            self.readings.append(time.perf_counter())
        self.calls += 1

    @property
    def seconds_per_step(self) -> float:
        """The mean of the steps between the readings."""
        start, end = self.readings
        return (end - start) / self.steps


class StepProfiler:
    """Profiles some steps of a training loop that calls it before every loss: from one loss to
    another.

    Args:
        skipped: steps before the profile.
        steps: in the profile.
    """

    def __init__(self, skipped: int, steps: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities, acc_events=True)
        self.skipped = skipped
        self.steps = steps
        self.calls = 0

    def __call__(self) -> None:
        if self.calls == self.skipped:
            synchronize()
            self.profiler.start()
        if self.calls == self.skipped + self.steps:
            # The profiler waits for the GPU when it stops; that wait is not the step's.
            with record_function(END):
                pass
            self.profiler.stop()
        self.calls += 1

    def counts(self) -> dict[str, float]:
        """Per step: launches and, on a GPU, kernels and host waits.

        On a GPU a launch is a call that starts a kernel or a CUDA graph; kernels of a graph are
        counted one by one. On a CPU a launch is an operator (aten) that no other one calls;
        compiled code has few.
        """
        events = list(self.profiler.events())
        end = next(event.time_range.start for event in events if event.name == END)
        if not torch.cuda.is_available():
            return {"launches": sum(map(_is_top_operator, events)) / self.steps}
        calls = [
            event
            for event in events
            if event.device_type == DeviceType.CPU and event.time_range.start < end
        ]
        launches = sum(LAUNCH.match(event.name) is not None for event in calls)
        waits = sum(HOST_WAIT.match(event.name) is not None for event in calls)
        kernels = sum(map(_is_kernel, events))
        return {
            "launches": launches / self.steps,
            "kernels": kernels / self.steps,
            "host waits": waits / self.steps,
        }

    def write(self, folder: Path, name: str) -> None:
        """Write NAME.json.gz, for chrome://tracing or Perfetto, and NAME.txt, the operators that
        take longest."""
        folder.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        operators = self.profiler.key_averages().table(
            sort_by=order, row_limit=40, max_name_column_width=80
        )
        (folder / f"{name}.txt").write_text(f"{self.steps} steps\n{operators}", encoding="utf-8")


def _is_top_operator(event: FunctionEvent) -> bool:
    if not event.name.startswith("aten::"):
        return False
    caller = event.cpu_parent
    while caller is not None:
        if caller.name.startswith("aten::"):
            return False
        caller = caller.cpu_parent
    return True


def _is_kernel(event: FunctionEvent) -> bool:
    if event.device_type != DeviceType.CUDA or event.is_user_annotation:
        return False
    return not event.name.startswith(("Memcpy", "Memset"))


def step_flops(model: DualEncoder, pairs: PairDataset, batch_size: int) -> float:
    """Floating-point operations of a step's forward and backward passes, as our trainer makes
    them."""
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
    """FLOP/s of large square matrix products, the best of several measurements.

    Args:
        dtype: of the matrices.
        tf32: let a GPU multiply float32 as TF32.
    """
    on_gpu = torch.cuda.is_available()
    size = 4096 if on_gpu else 2048
    products = 10 if on_gpu else 1
    matrix = torch.randn(size, size, device=device()).to(dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else precision)
    seconds = []
    for _ in range(6):
        synchronize()
        start = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        synchronize()
        seconds.append(time.perf_counter() - start)
    torch.set_float32_matmul_precision(precision)
    return 2 * size**3 * products / min(seconds)
