"""Where does the time of a training step go, and what does each setting save, beside other tools?

    python eval/bench/training.py run --task text --steps 20
    python eval/bench/training.py run --text_source corpus.jsonl --rows "[InfoNCE,rival]"
    python eval/bench/training.py run --task views --steps 60 --rows [InfoNCE+all] --out steps.jsonl
    python eval/bench/training.py report steps.jsonl

text: MiniLM on docstrings of this machine or the texts of a file, against sentence-transformers.
image-text: a small open_clip model on noise in JPEG files, against open_clip's own loop.
views: ResNet-18 on two views of 32×32 pixels of noise, against lightly's SimCLR loop.

Rows are an objective and measures, such as InfoNCE+bf16: bf16 (`mixed_precision="auto"`), compile,
not_deterministic (on GPUs), and all of them. `rival` and `rival+bf16` are the other tool.

In each round every row trains once. The clock is read between two losses, after a few steps: what
happens once per training is not in it. Shown are the median of the rounds and its range. × rival is
the rival's time in the same precision over the row's, × InfoNCE the row's time over that of InfoNCE
with the same measures. The limit is the time of the model's matrix products and convolutions at the
speed of one large product in the row's precision; that of our packed texts for the rival too. On a
GPU, launches and host waits are counted in some more steps.
"""

from __future__ import annotations

import itertools
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
from in_turn import NOWHERE, in_turn, rounds
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from workloads import DEVICE, ON_GPU, WORKERS, WORKLOADS, Workload, watch

sys.path.insert(0, str(Path(__file__).parents[1]))
import frame
from frame import RESULTS, Outcome, Run, Settings, Store
from rows import sizes_of

from dualenc.batching import RandomBatches
from dualenc.data import PairDataset
from dualenc.encoders import DualEncoder
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import ISIR, GlobalCache, InfoNCE, SogCLR
from dualenc.training.devices import has_fast_bf16
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import BatchLoader

FEW = 3
"""Steps before times are taken."""
PROFILED = 4 if ON_GPU else 0
"""Steps of a profile afterwards, none of which writes the log; reading ten takes a minute."""
COUNTED = {
    "launches": re.compile(r"cu(da)?(Launch|GraphLaunch)"),
    "host waits": re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy$"),
}
END = "end of the profile"
Train = Callable[[int, Callable[[], None]], None]
"""`train(steps, before_loss)` trains, and calls `before_loss` before every loss."""
OBJECTIVES = {each.__name__: each for each in (InfoNCE, SogCLR, GlobalCache, ISIR)}
MEASURES: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": "auto"},
    "compile": {"compile": True},
    "not_deterministic": {"deterministic": False},
}
ROWS = [*OBJECTIVES, *(f"InfoNCE+{measure}" for measure in MEASURES), "GlobalCache+bf16"]
ROWS += [*(f"{objective}+all" for objective in OBJECTIVES), "rival", "rival+bf16"]


def measures_of(row: str) -> list[str]:
    """Return the measures of a row that apply to this device."""
    applying = {"bf16": has_fast_bf16(), "compile": True, "not_deterministic": ON_GPU}
    return [each for each in MEASURES if row.endswith((f"+{each}", "+all")) and applying[each]]


def training_of(row: str, work: Workload, settings: Settings) -> Train:
    """Return the training of a row; all runs of ours train one model, which is compiled once."""
    measures, objective = measures_of(row), row.partition("+")[0]
    if objective == "rival":
        return partial(work.rival, "bf16" in measures)
    pairs, model_once = work.pairs, cache(work.new_model)
    trainer = {key: settings[key] for key in ("batch_size", "chunk_size")}
    trainer |= {"num_workers": WORKERS, "deterministic": True}
    for each in measures:
        trainer |= MEASURES[each]

    def train(steps: int, before_loss: Callable[[], None]) -> None:
        model = model_once()
        for tower in (model.left, model.right):
            # Tokens of an earlier run.
            if hasattr(tower.prepare, "token_cache"):
                tower.prepare.token_cache = None
        loss = OBJECTIVES[objective](temperature=0.05, **sizes_of(pairs))
        watch(loss, before_loss)
        frame.train(model, pairs, loss, max_steps=steps, **trainer)

    if "compile" in measures:
        # Every shape.
        train(FEW + settings["steps"] + 1, lambda: None)
    return train


def measure_once(train: Train, steps: int) -> Outcome:
    """Train; return milliseconds of a step, from a loss to a later one, and what a GPU is asked."""
    losses, readings = itertools.count(), []
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = profile(activities=activities, acc_events=True) if ON_GPU else None

    def before_loss() -> None:
        number = next(losses) - FEW
        if number in (0, steps):
            if ON_GPU:
                torch.cuda.synchronize()
            readings.append(time.perf_counter())
        if profiler and number == steps:
            profiler.start()
        if profiler and number == steps + PROFILED:
            # The profiler waits for the GPU when it stops; that wait is not the step's.
            with record_function(END):
                pass
            profiler.stop()

    train(FEW + steps + PROFILED + 1, before_loss)
    outcome: Outcome = {"ms per step": 1000 * (readings[1] - readings[0]) / steps}
    if profiler:
        on_host = [each for each in profiler.events() if each.device_type == DeviceType.CPU]
        end = next(each.time_range.start for each in on_host if each.name == END)
        calls = [each.name for each in on_host if each.time_range.start < end]
        for what, call in COUNTED.items():
            outcome[what] = len(list(filter(call.match, calls))) / PROFILED
    return outcome


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
    times, _ = in_turn({"products": lambda: [matrix @ matrix for _ in range(products)]}, 5)
    torch.set_float32_matmul_precision(usual)
    return 2 * size**3 * products / min(times["products"])


def measure(work: Workload, settings: Settings, rows: list[str], repeats: int) -> list[Run]:
    """Train all rows in turn."""
    flops = step_flops(work.new_model(), work.pairs, settings["batch_size"])
    # By default a GPU's convolutions, which are nearly all of a ResNet, compute in TF32, and matrix
    # products do not.
    tf32 = settings["task"] == "views" and torch.backends.cudnn.allow_tf32
    training = cache(lambda row: training_of(row, work, settings))
    found: dict[str, list[Outcome]] = {row: [] for row in rows}
    begun = time.process_time()
    for row in rounds(rows, repeats):
        found[row].append(measure_once(training(row), settings["steps"]))
    origin, runs = frame.origin(time.process_time() - begun), []
    for row, outcomes in found.items():
        times = [each["ms per step"] for each in outcomes]
        precision = "bfloat16" if "bf16" in measures_of(row) else "float32"
        outcome = {**outcomes[-1], "ms per step": statistics.median(times), "lowest": min(times)}
        outcome |= {"highest": max(times), "repeats": repeats, "precision": precision}
        limit = 1000 * flops / matmul_rate(precision, tf32)
        outcome |= {"limit, ms": limit, "GFLOP": flops / 1e9}
        runs.append(Run(settings | {"row": row}, outcome, origin))
    return runs


def print_runs(runs: list[Run]) -> None:
    """Print a table for all runs in succession that differ in the row alone."""

    def caption_of(run: Run) -> str:
        about = {"device": run.origin["device"], "torch": run.origin["versions"]["torch"]}
        about |= {**run.settings, "row": None, "date": run.origin["date"][:10]}
        return ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)

    for caption, each in itertools.groupby(runs, caption_of):
        table = list(each)
        print_table(Table(caption, [cells_of(run, table) for run in table]))


def cells_of(run: Run, table: list[Run]) -> dict[str, Any]:
    """Return what was measured, and its ratios to the rows of the table to compare with."""
    row, milliseconds = run.settings["row"], run.outcome["ms per step"]
    cells = {"row": row, "pairs/s": 1000 * run.settings["batch_size"] / milliseconds}
    for other in table:
        theirs, (objective, _, measure) = other.outcome, other.settings["row"].partition("+")
        if objective == "rival" and theirs["precision"] == run.outcome["precision"]:
            cells["× rival"] = theirs["ms per step"] / milliseconds
        if objective == "InfoNCE" and measure == row.partition("+")[2] and "rival" not in row:
            cells["× InfoNCE"] = milliseconds / theirs["ms per step"]
    return {**cells, **run.outcome, "share of limit": run.outcome["limit, ms"] / milliseconds}


def run(
    task: Literal["text", "image-text", "views"] = "text",
    batch_size: int = 32,
    steps: int = 20,
    repeats: int = 3,
    text_source: str = "docstrings",
    text_length: int = 64,
    chunk_size: int | None = None,
    threads: int | None = None,
    rows: list[str] = ROWS,
    out: Path = NOWHERE,
) -> None:
    """Print a row for each training.

    Args:
        batch_size: pairs per step, of both tools.
        text_source: docstrings, or a corpus.jsonl.
        chunk_size: of gradient caching, for texts; null for none.
        rows: names of rows; those whose measure does not apply to this device are left out.
    """
    warnings.simplefilter("ignore")
    if unknown := sorted(set(rows).difference(ROWS)):
        raise SystemExit(f"rows {', '.join(unknown)} not known; choose from {', '.join(ROWS)}")
    rows = [row for row in rows if "+" not in row or measures_of(row)]
    torch.set_num_threads(threads or torch.get_num_threads())
    # A training has the towers' code to itself; here all compiled rows share it.
    torch._dynamo.config.recompile_limit = 64
    settings = {"task": task, "threads": torch.get_num_threads(), "batch_size": batch_size}
    settings |= {"steps": steps, "workers": WORKERS, "chunk_size": chunk_size}
    if task == "text":
        settings |= {"text_length": text_length, "text_source": text_source}
    count, store = batch_size * (FEW + steps + PROFILED + 1), Store(out)
    with tempfile.TemporaryDirectory() as folder:
        work = WORKLOADS[task](settings, count, Path(folder))
        runs = measure(work, settings, rows, repeats)
    for each in runs:
        store.add(each)
    print_runs(runs)


def report(results: Path = RESULTS / "steps_cpu.jsonl") -> None:
    """Print the tables of a store."""
    print_runs(Store(results).runs)


def check(folder: Path) -> None:
    """Time ResNet-18 on two views of two images: 4 × 0.56 GMAC, times 6 with the backward pass."""
    run("views", 2, 1, 1, rows=["InfoNCE", "rival"], out=folder / "steps.jsonl")
    found, rival = Store(folder / "steps.jsonl").runs
    assert {"× InfoNCE": 1}.items() <= cells_of(found, [found, rival]).items()
    assert 13.2 < found.outcome["GFLOP"] < 13.4
    for task in ("text", "image-text"):
        run(task, 2, 1, 1, rows=["rival"])


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
