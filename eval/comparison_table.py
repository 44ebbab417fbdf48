"""Finished runs of `small_batch.py`: kept as lines of JSON, and shown as tables and figures."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import COLORS, as_svg, lines
from dualenc.evaluation.report_page import Table, print_table

RESULTS = Path("eval/results/small_batch.jsonl")
"""Of perceptrons."""
ENCODER_RESULTS = Path("eval/results/small_batch_encoders.jsonl")
"""Of models of texts and images."""
ORDINARY_BATCH = 32
FIRST_RATE = 1.0
"""Factor of a task's learning rate while τ is chosen."""
GAPS_IN, GAPS_OF = "vectors papers", ("GlobalCache", "ISIR", "SogCLR", "DCL")
"""The task and the objectives of the figure that shows where the gap to InfoNCE opens and
closes."""
DRAWN = (*GAPS_OF, "InfoNCE", "SogCLR+", "GlobalCache+", "NegativeCache", "MomentumQueue")
"""The objectives of the other figures: as many as can be told apart."""
HEADLINE = {
    "GlobalCache": "GlobalCache",
    "SogCLR+": "SogCLR(positive_in_softmax=True)",
    "InfoNCE": "InfoNCE",
}
"""The objectives of the README's figure, and their labels."""

Settings = dict[str, Any]
"""What a run is found by."""
Compute = Callable[[list[Settings]], Iterable[tuple[Settings, dict[str, Any]]]]
"""Makes runs, and gives each when it is finished."""


class Runs:
    """Finished runs, one JSON object per line, found by their settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                one = json.loads(line)
                self.found[self.key(one["settings"])] = one

    @staticmethod
    def key(settings: dict[str, Any]) -> str:
        return json.dumps(settings, sort_keys=True)

    def get(
        self, settings_of_runs: Iterable[dict[str, Any]], compute: Compute
    ) -> list[dict[str, Any]]:
        """The runs with these settings, in their order; `compute` makes those that are not there,
        one line for each."""
        settings_of_runs = list(settings_of_runs)
        missing = {key: one for one in settings_of_runs if (key := self.key(one)) not in self.found}
        for settings, outcome in compute(list(missing.values())):
            self.found[self.key(settings)] = {"settings": settings, **outcome}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(self.found[self.key(settings)]) + "\n")
        return [self.found[self.key(settings)] for settings in settings_of_runs]


def in_processes(
    train: Callable[[Settings], tuple[Settings, dict[str, Any]]], count: int
) -> Compute:
    """What makes runs in so many processes at once; to be called before data and models are opened.

    On a GPU one process makes them itself: a forked one has no GPU if its parent has asked CUDA for
    anything, which the forward pass of a transformer does. There, several commands with parts of
    the objectives can run at once.
    """
    # A forked process would wait for its parent's threads.
    torch.set_num_threads(1)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

    def compute(missing: list[Settings]) -> Iterator[tuple[Settings, dict[str, Any]]]:
        if count == 1:
            yield from map(train, missing)
            return
        with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as pool:
            for one in as_completed([pool.submit(train, settings) for settings in missing]):
                yield one.result()

    return compute


class Row:
    """All seeds of one objective at one batch size and length, with the settings that were chosen
    for it.

    Args:
        runs: where they are.
        cell: what their settings have in common: task, objective, batch_size, pairs_seen.
    """

    def __init__(self, runs: Runs, cell: dict[str, Any]) -> None:
        chosen: dict[tuple[float, float], list[dict[str, Any]]] = {}
        for one in runs.found.values():
            own = one["settings"]
            if {**cell, "equal": "pairs"}.items() <= own.items():
                chosen.setdefault((own["rate"], own["temperature"]), []).append(one)
        # Settings with all seeds; where there are several, the best by the mean quality on held-out
        # data.
        most = max(map(len, chosen.values()))
        complete = {setting: seeds for setting, seeds in chosen.items() if len(seeds) == most}
        held_out = {
            key: statistics.mean(one["validation"] for one in seeds)
            for key, seeds in complete.items()
        }
        self.rate, self.temperature = max(held_out, key=held_out.__getitem__)
        self.seeds = complete[self.rate, self.temperature]
        self.objective, self.batch_size, self.pairs_seen = (
            cell[k] for k in ("objective", "batch_size", "pairs_seen")
        )
        self.seconds = self._longest(runs, cell)
        # Of equal passes, each seed saw pairs of its own number.
        self.passes = [
            one for one in (self._fewer_pairs(runs, one) for one in self.seeds) if one is not None
        ]

    def _longest(self, runs: Runs, cell: dict[str, Any]) -> list[dict[str, Any]]:
        """The runs of equal seconds: those of the length that has most seeds, for others were only
        tried.

        Where longer trainings were tried and none was better, they are the runs of equal pairs.
        """
        wanted = {**cell, "equal": "seconds"}
        del wanted["pairs_seen"]
        lengths: dict[int, list[dict[str, Any]]] = {}
        for one in runs.found.values():
            if wanted.items() <= one["settings"].items():
                lengths.setdefault(one["settings"]["pairs_seen"], []).append(one)
        longest = max(lengths.values(), key=len, default=[])
        return self.seeds if len(longest) == 1 else longest

    @staticmethod
    def _fewer_pairs(runs: Runs, one: dict[str, Any]) -> dict[str, Any] | None:
        """The run with as many passes as InfoNCE makes: itself, where nothing else is encoded."""
        if one["extra_encodes"] <= 0.01:
            return one
        pairs_seen = one["settings"]["pairs_seen"] / (1 + one["extra_encodes"] / 2)
        settings = {**one["settings"], "equal": "passes"}
        del settings["pairs_seen"]
        alike = [
            found for found in runs.found.values() if settings.items() <= found["settings"].items()
        ]
        return next(
            (
                found
                for found in alike
                if abs(found["settings"]["pairs_seen"] / pairs_seen - 1) < 0.01
            ),
            None,
        )

    def mean(self, what: str) -> float:
        """Over the seeds."""
        return statistics.mean(one[what] for one in self.seeds)

    @property
    def on_gpu(self) -> bool:
        """Whether seconds are those of a core that mostly waits."""
        return any("device" in one for one in self.seeds)

    @property
    def per_query(self) -> np.ndarray:
        """(Q,) mean over the seeds of each query's quality."""
        packed = (base64.b64decode(one["scores"]) for one in self.seeds)
        decoded = [np.frombuffer(zlib.decompress(scores), np.uint8) for scores in packed]
        return np.mean(decoded, axis=0) / 255


def spread(seeds: Sequence[dict[str, Any]], what: str = "test") -> str:
    """Mean and standard deviation of the test quality, or of another measure."""
    values = [one[what] for one in seeds if what in one]
    if not values:
        return "not run"
    if len(values) == 1:
        return f"{values[0]:.3f} (one seed)"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def rows_of(runs: Runs, task: str, pairs_seen: int | None = None) -> list[Row]:
    """Every cell of a task with several seeds, by batch size and then the best first."""
    keys = ("task", "objective", "batch_size", "pairs_seen")
    settings = [one["settings"] for one in runs.found.values() if one["settings"]["task"] == task]
    cells = {tuple(own[key] for key in keys) for own in settings if own["equal"] == "pairs"}
    rows = [Row(runs, dict(zip(keys, cell, strict=True))) for cell in cells]
    rows = [row for row in rows if len(row.seeds) > 1 and pairs_seen in (None, row.pairs_seen)]
    return sorted(rows, key=lambda row: (row.batch_size, -row.mean("test")))


def report(results: Path = RESULTS, figures: Path | None = None, samples: int = 10_000) -> None:
    """Print tables of all runs that are there, and draw.

    Args:
        results: where finished runs are kept.
        figures: a folder to draw to.
        samples: of the paired bootstrap over queries.
    """
    runs = Runs(results)
    by_length: dict[tuple[str, int], list[Row]] = {}
    for task in dict.fromkeys(one["settings"]["task"] for one in runs.found.values()):
        for row in rows_of(runs, task):
            by_length.setdefault((task, row.pairs_seen), []).append(row)
    for (task, pairs_seen), rows in by_length.items():
        print_table(Table(f"{task}: {pairs_seen:,} pairs seen", list(cells_of(rows, samples))))
        if figures is not None:
            draw(task, rows, figures)
    if figures is not None:
        draw_gaps(by_length, runs, figures / "small_batch_gaps.svg")
        rows = max(
            (rows for (task, _), rows in by_length.items() if task == GAPS_IN), key=len, default=[]
        )
        if rows:
            draw_headline(rows, figures / "quality_by_batch_size.svg")


def cells_of(rows: Sequence[Row], samples: int) -> Iterator[dict[str, object]]:
    """One line per row, with its difference to the best batch size of InfoNCE."""
    of_batch = [row for row in rows if row.objective == "InfoNCE"]
    best = max(of_batch, key=lambda row: row.mean("test"), default=None)
    for row in rows:
        cells = {"objective": row.objective, "B": row.batch_size, "equal pairs": spread(row.seeds)}
        cells["equal passes"] = spread(row.passes)
        cells["equal seconds"] = spread(row.seconds)
        for name in ("linear_probe", "mean_log_rank"):
            if any(name in one for one in row.seeds):
                cells[name.replace("_", " ")] = spread(row.seeds, name)
        if best is not None:
            found = paired_bootstrap(best.per_query, row.per_query, samples=samples)
            over = f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
            cells[f"over InfoNCE, B = {best.batch_size}"] = "–" if row is best else over
        seconds = "on a GPU" if row.on_gpu else f"{row.mean('seconds'):.0f}"
        cells |= {"extra encodes": f"{row.mean('extra_encodes'):.2f}", "seconds": seconds}
        yield cells | {"rate, τ": f"{row.rate:g}, {row.temperature:g}", "seeds": len(row.seeds)}


def draw(task: str, rows: Sequence[Row], folder: Path) -> None:
    """Quality by batch size; and at the ordinary batch size by pairs seen and by seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{task}_{rows[0].pairs_seen}".replace(" ", "_").replace(",", "")
    rows = [row for row in rows if row.objective in DRAWN]
    by_size: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        by_size.setdefault(row.objective, []).append((row.batch_size, row.mean("test")))
    sizes = {name: tuple(zip(*points)) for name, points in by_size.items() if len(points) > 1}
    if sizes:
        figure = lines(sizes, xlabel="batch size", ylabel="quality on test data")
        figure.axes[0].set_xscale("log", base=2)
        (folder / f"{stem}_batch.svg").write_text(as_svg(figure))
    for axis, label in enumerate(("pairs seen", "seconds of one core")):
        curves = {}
        for row in rows:
            if row.batch_size == ORDINARY_BATCH and not (axis == 1 and row.on_gpu):
                points = np.mean([one["curve"] for one in row.seeds], axis=0)
                curves[row.objective] = points[:, axis].tolist(), points[:, 2].tolist()
        if curves:
            figure = lines(curves, xlabel=label, ylabel="quality on held-out data")
            (folder / f"{stem}_{label.split()[0]}.svg").write_text(as_svg(figure))


def draw_headline(rows: Sequence[Row], path: Path) -> None:
    """Test quality by batch size at equal pairs seen, mean and standard deviation over seeds, of
    three objectives."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, label) in zip(COLORS, HEADLINE.items(), strict=False):
        points = [row for row in rows if row.objective == name]
        sizes = [row.batch_size for row in points]
        means = [row.mean("test") for row in points]
        deviations = [float(np.std([seed["test"] for seed in row.seeds], ddof=1)) for row in points]
        axes.errorbar(
            sizes, means, deviations, marker="o", markersize=4, capsize=2, color=colour, label=label
        )
    ticks = sorted({row.batch_size for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("batch size, equal pairs seen")
    axes.set_ylabel("nDCG@10 on test queries")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    path.write_text(as_svg(figure))


def draw_gaps(by_length: dict[tuple[str, int], list[Row]], runs: Runs, path: Path) -> None:
    """How far objectives are above InfoNCE with the same settings: by batch size, τ, epochs and
    number of pairs.

    The first three of one task, the last of parts of another, each as far as there are runs.
    """
    panels: dict[str, dict[str, dict[float, float]]] = {}

    def add(panel: str, at: float, of_objective: dict[str, float]) -> None:
        base = of_objective.get("InfoNCE")
        for name, value in of_objective.items():
            if base is not None and name in GAPS_OF:
                panels.setdefault(panel, {}).setdefault(name, {})[at] = value - base

    of_task = {seen: rows for (task, seen), rows in by_length.items() if task == GAPS_IN}
    longest = max(of_task, key=lambda seen: len(of_task[seen]), default=0)
    for size in {row.batch_size for row in of_task.get(longest, [])}:
        add(
            "batch size",
            size,
            {row.objective: row.mean("test") for row in of_task[longest] if row.batch_size == size},
        )
    for seen, rows in of_task.items():
        small = {
            row.objective: row.mean("test") for row in rows if row.batch_size == ORDINARY_BATCH
        }
        add("pairs seen", seen, small)
    tuning = [
        one
        for one in runs.found.values()
        if one["settings"]["task"] == GAPS_IN and one["settings"]["seed"] == 0
    ]
    by_tau: dict[float, dict[str, float]] = {}
    same_settings = {
        "batch_size": ORDINARY_BATCH,
        "rate": FIRST_RATE,
        "pairs_seen": longest,
        "equal": "pairs",
    }
    for one in tuning:
        own = one["settings"]
        if same_settings.items() <= own.items():
            by_tau.setdefault(own["temperature"], {})[own["objective"]] = one["test"]
    for tau, of_objective in by_tau.items():
        add("τ of all (one seed)", tau, of_objective)
    for (task, _), rows in by_length.items():
        _, _, pairs = task.partition(", ")
        if pairs:
            small = {
                row.objective: row.mean("test") for row in rows if row.batch_size == ORDINARY_BATCH
            }
            add("pairs to train on (functions)", int(pairs.split()[0].replace(",", "")), small)
    if not panels:
        return
    figure = Figure(figsize=(3.2 * len(panels), 3.2), layout="constrained")
    for axes, (panel, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for colour, name in zip(COLORS, GAPS_OF, strict=False):
            points = sorted(curves.get(name, {}).items())
            axes.plot(
                *zip(*points), marker="o", markersize=4, color=colour, label=name
            ) if points else None
        axes.axhline(0, color="grey", linewidth=0.8)
        ticks = sorted({at for curve in curves.values() for at in curve})
        axes.set_xscale("log")
        axes.set_xticks(
            ticks, [f"{tick:,g}" if tick < 1000 else f"{tick / 1000:,.0f}k" for tick in ticks]
        )
        axes.set_xticks([], minor=True)
        axes.set_xlabel(panel)
    figure.axes[0].set_ylabel("quality above InfoNCE")
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.write_text(as_svg(figure))
