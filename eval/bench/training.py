"""Where does the time of a training step go, and what does each setting save, beside other tools?

    python eval/bench/training.py run --task text --steps 20
    python eval/bench/training.py run --task text --text_source BEIR --rows "[InfoNCE,rival]"
    python eval/bench/training.py run --task views --images train.parquet --workers 8
    python eval/bench/training.py run --task all --steps 60 --out steps.jsonl --profile traces
    python eval/bench/training.py report

text: MiniLM on docstrings of this machine or a BEIR corpus, against sentence-transformers.
image-text: a small open_clip model on noise in JPEG files, against open_clip's own loop.
views: ResNet-18 on two views of 32×32 pixels, against lightly's SimCLR loop.

Rows are an objective and measures, such as InfoNCE+bf16: bf16 (`mixed_precision="auto"`), compile,
not_deterministic (on GPUs), and all of them. `rival` and `rival+bf16` are the other tool.

In each round every row trains once. After a few steps the clock is read before a loss, and again
some steps later: what happens once per training is not in it. Shown are the median of the rounds,
the lowest and the highest. × rival is the rival's time in the same precision over the row's,
× InfoNCE the row's time over that of InfoNCE with the same measures. The limit is the time of the
model's matrix products and convolutions at the speed of one large product in the row's precision;
that of our packed texts for the rival too. On a GPU, launches and host waits are counted.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
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
from in_turn import in_turn, rounds
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode
from workloads import DEVICE, ON_GPU, WORKLOADS, Workload, watch

sys.path.insert(0, str(Path(__file__).parents[1]))
import frame
from frame import RESULTS, Outcome, Run, Settings, Store

from dualenc.batching import RandomBatches
from dualenc.data import PairDataset
from dualenc.encoders import DualEncoder
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import GlobalCache, InfoNCE, SogCLR
from dualenc.training.devices import has_fast_bf16
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import BatchLoader

FEW = 3
"""Steps before times, and a profile, are taken."""
PROFILED = 4
"""Steps of a profile, none of which writes the log; on a GPU, reading ten takes a minute."""
COUNTED = {
    "launches": re.compile(r"cu(da)?(Launch|GraphLaunch)"),
    "host waits": re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy$"),
}
END = "end of the profile"
Train = Callable[[int, Callable[[], None]], None]
"""`train(steps, before_loss)` trains, and calls `before_loss` before every loss."""
OBJECTIVES = {each.__name__: each for each in (InfoNCE, SogCLR, GlobalCache)}
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
    trainer |= {"num_workers": settings["workers"], "deterministic": True}
    for each in measures:
        trainer |= MEASURES[each]

    def train(steps: int, before_loss: Callable[[], None]) -> None:
        model = model_once()
        for tower in (model.left, model.right):
            # Tokens of an earlier run.
            if hasattr(tower.prepare, "token_cache"):
                tower.prepare.token_cache = None
        sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right, "views": pairs.views}
        loss = OBJECTIVES[objective](temperature=0.05, **sizes)
        watch(loss, before_loss)
        frame.train(model, pairs, loss, max_steps=steps, **trainer)

    if "compile" in measures:
        # Every shape, and not to profile the compiler.
        train(FEW + settings["steps"] + 1, lambda: None)
    return train


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


def counts(profiler: profile, steps: int) -> dict[str, float]:
    """Return a step's launches, of kernels and CUDA graphs, and host waits, on a GPU."""
    if not ON_GPU:
        return {}
    on_host = [each for each in profiler.events() if each.device_type == DeviceType.CPU]
    end = next(each.time_range.start for each in on_host if each.name == END)
    calls = [each.name for each in on_host if each.time_range.start < end]
    matches = {what: list(filter(call.match, calls)) for what, call in COUNTED.items()}
    return {what: len(matching) / steps for what, matching in matches.items()}


def write_profile(profiler: profile, folder: Path, name: str) -> None:
    """Write NAME.json.gz, for Perfetto, and NAME.txt, the operators that take longest."""
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
    order = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    operators = profiler.key_averages().table(order, row_limit=40, max_name_column_width=80)
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


def measure(
    work: Workload,
    settings: Settings,
    rows: list[str],
    repeats: int,
    traces: Path | None,
    store: Store,
) -> None:
    """Train all rows in turn, and store them; a run that is stopped stores the rounds it has."""
    task, few = settings["task"], min(PROFILED, settings["steps"])
    flops = step_flops(work.new_model(), work.pairs, settings["batch_size"])
    # By default a GPU's convolutions, which are nearly all of a ResNet, compute in TF32, and matrix
    # products do not.
    tf32 = task == "views" and torch.backends.cudnn.allow_tf32
    trainings: dict[str, Train] = {}
    outcomes: dict[str, Outcome] = {}
    times: dict[str, list[float]] = {row: [] for row in rows}
    begun = time.process_time()
    try:
        for row in rounds(rows, repeats):
            if row not in times:
                continue
            try:
                if row not in trainings:
                    trainings[row] = training_of(row, work, settings)
                    profiler = profile_steps(trainings[row], FEW, few)
                    if traces is not None and row.startswith(("InfoNCE", "GlobalCache")):
                        write_profile(profiler, traces, f"{task}-{row}")
                    precision = "bfloat16" if "bf16" in measures_of(row) else "float32"
                    limit = 1000 * flops / matmul_rate(precision, tf32)
                    found = {"precision": precision, "limit, ms": limit, "GFLOP": flops / 1e9}
                    outcomes[row] = found | counts(profiler, few)
                seconds = seconds_per_step(trainings[row], FEW, settings["steps"])
                times[row].append(1000 * seconds)
            except Exception as error:
                reason = str(error).partition("\n")[0]
                print(f"{task}: no row {row}: {type(error).__name__}: {reason}")
                del times[row]
    finally:
        for row, taken in times.items():
            if taken:
                shown = {"ms per step": statistics.median(taken), "lowest": min(taken)}
                shown |= {"highest": max(taken), "repeats": len(taken), **outcomes[row]}
                origin = frame.origin(time.process_time() - begun)
                store.add(Run(settings | {"row": row}, shown, origin))


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
    task: Literal["text", "image-text", "views", "all"] = "text",
    batch_size: int = 32,
    steps: int = 20,
    repeats: int = 3,
    workers: int = 0,
    text_source: str = "docstrings",
    text_length: int = 64,
    images: str | None = None,
    chunk_size: int | None = None,
    threads: int | None = None,
    rows: list[str] = ROWS,
    profile: Path | None = None,
    out: Path = Path(os.devnull),
) -> None:
    """Print a table for each task.

    Args:
        batch_size: pairs per step, of both tools.
        workers: processes that prepare the data, of both tools.
        text_source: docstrings, or a BEIR folder or its corpus.jsonl.
        images: a table for views, such as a parquet file with a column `image`; noise by default.
        chunk_size: of gradient caching, for texts; null for none.
        rows: names of rows; those whose measure does not apply to this device are left out.
        profile: folder for traces and operators of steps with InfoNCE and GlobalCache.
    """
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if unknown := sorted(set(rows).difference(ROWS)):
        raise SystemExit(f"rows {', '.join(unknown)} not known; choose from {', '.join(ROWS)}")
    rows = [row for row in rows if "+" not in row or measures_of(row)]
    torch.set_num_threads(threads or torch.get_num_threads())
    # A training has the towers' code to itself; here all compiled rows share it.
    torch._dynamo.config.recompile_limit = 64
    shared = {"threads": torch.get_num_threads(), "batch_size": batch_size, "steps": steps}
    shared |= {"workers": workers, "chunk_size": None}
    own = {"views": {"images": images}, "image-text": {}}
    own["text"] = {"text_length": text_length, "text_source": text_source, "chunk_size": chunk_size}
    store, count = Store(out), batch_size * (FEW + steps + 1)
    known = len(store.runs)
    for name in WORKLOADS if task == "all" else [task]:
        settings = {"task": name, **shared, **own[name]}
        with tempfile.TemporaryDirectory() as folder:
            work = WORKLOADS[name](settings, count, Path(folder))
            if len(work.pairs) < count:
                print(f"{name}: {len(work.pairs)} pairs for {count}, so that some come again")
            measure(work, settings, rows, repeats, profile, store)
    print_runs(store.runs[known:])


def report(results: Path = RESULTS / "steps_cpu.jsonl") -> None:
    """Print the tables of a store."""
    print_runs(Store(results).runs)


def check(folder: Path) -> None:
    """Time ResNet-18 on two views of two images: 4 × 0.56 GMAC, times 6 with the backward pass."""
    run("views", 2, 1, 1, rows=["InfoNCE"], profile=folder, out=folder / "steps.jsonl")
    [found] = Store(folder / "steps.jsonl").runs
    assert cells_of(found, [found])["× InfoNCE"] == 1
    assert 13.2 < found.outcome["GFLOP"] < 13.4
    assert {"views-InfoNCE.json.gz", "views-InfoNCE.txt"} < {file.name for file in folder.iterdir()}


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
