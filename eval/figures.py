"""Figures of docs/results.md and of the README, from the stores of `small_batch.py`.

python eval/figures.py small_batch docs/figures
python eval/bench/memory.py fine_tuning MODEL MEDQUAD --out eval/results/fine_tuning_memory.jsonl
python eval/figures.py memory "minilm_beginnings medquad, 1,536 pairs" docs/figures/memory.svg
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from comparison import ENCODERS, FINE_TUNING, VECTORS, Seeds, main_groups, values
from frame import ORDINARY_BATCH, RESULTS, Run, Store, command_line, origin
from matplotlib.figure import Figure

from dualenc.evaluation.plots import COLORS, as_svg

FIGURES = {
    "vectors papers": ("pairs seen", "seconds of one core"),
    "vectors medquad": (),
    "text papers": (),
}
"""Tasks whose quality is drawn by batch size, and in training, by what."""
HEADLINE = ("GlobalCache", "SogCLR+", "InfoNCE")
# As many as there are colors.
DRAWN = (*HEADLINE, "ISIR", "SogCLR", "DCL", "NegativeCache", "MomentumQueue")
OF_MEMORY = ("InfoNCE", "InfoNCE, cached by 8", "MomentumQueue", "GlobalCache+", "ISIR", "SogCLR+")
QUALITY = "nDCG@10 on test queries"
Curves = dict[str, list[tuple[float, float, float]]]
"""By objective: x, y and the deviation of y."""


def small_batch(folder: Path, vectors: Path = VECTORS, encoders: Path = ENCODERS) -> None:
    """Draw quality by batch size, pairs and seconds, and the README's figure, to a folder."""
    groups = main_groups(Store(vectors)) | main_groups(Store(encoders))
    for task in FIGURES.keys() & groups:
        group = groups[task]
        stem = f"{task}_{group[0].pairs_seen}".replace(" ", "_")
        curves = test_quality(group, DRAWN, lambda each: each.batch_size)
        several = {name: points if len(points) > 1 else [] for name, points in curves.items()}
        figure = drawn(several, "batch size", "quality on test data", log=True)
        write(folder / f"{stem}_batch.svg", figure)
        for column, label in enumerate(FIGURES[task]):
            figure = drawn(held_out_quality(group, column), label, "quality on held-out data")
            write(folder / f"{stem}_{label.split()[0]}.svg", figure)
    curves = test_quality(groups["vectors papers"], HEADLINE, lambda each: each.batch_size)
    labels = ("GlobalCache", "SogCLR(positive_in_softmax=True)", "InfoNCE")
    curves = dict(zip(labels, curves.values(), strict=True))
    figure = drawn(curves, "batch size, equal pairs seen", QUALITY, log=True)
    write(folder / "quality_by_batch_size.svg", figure)


def test_quality(
    group: Sequence[Seeds], names: Sequence[str], place: Callable[[Seeds], float | None]
) -> Curves:
    """Return mean and deviation of the test quality of objectives, at places on the x axis."""
    curves: Curves = {name: [] for name in names}
    for each in group:
        if each.objective in names and (at := place(each)) is not None:
            deviation = statistics.stdev(values(each.runs, "test"))
            curves[each.objective].append((at, each.mean("test"), deviation))
    return curves


def held_out_quality(group: Sequence[Seeds], column: int) -> Curves:
    """Return quality in training at the ordinary batch size by a column of curves."""
    curves: Curves = {name: [] for name in DRAWN}
    for each in group:
        if each.batch_size == ORDINARY_BATCH and each.objective in DRAWN:
            points = np.mean(values(each.runs, "curve"), axis=0)  # pairs, seconds, quality
            # Without the untrained model, whose quality of 0 would press the curves together.
            curves[each.objective] = [(own[column], own[2], 0.0) for own in points[1:]]
    return curves


def drawn(curves: Curves, xlabel: str, ylabel: str, log: bool = False) -> Figure:
    """Draw curves with their legend below them, narrow enough to be read on a telephone."""
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    # An objective without points keeps its color, so that all figures of a page agree.
    for (name, points), color in zip(curves.items(), COLORS[: len(curves)], strict=True):
        if not points:
            continue
        x, y, deviations = zip(*points, strict=True)
        style = {"marker": "o", "markersize": 4, "capsize": 2, "color": color, "label": name}
        axes.errorbar(x, y, deviations if any(deviations) else None, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.xaxis.set_major_formatter("{x:,g}")
    if log:
        ticks = sorted({at for points in curves.values() for at, *_ in points})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{at:,}" for at in ticks])
        axes.set_xticks([], minor=True)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def write(path: Path, figure: Figure) -> None:
    """Write a figure as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_svg(figure), encoding="utf-8")


def memory(
    task: str,
    figure: Path,
    results: Path = FINE_TUNING,
    measured: Path = RESULTS / "fine_tuning_memory.jsonl",
) -> None:
    """Draw the quality of fine-tuning to a task by the memory of its step, where that is measured.

    `results` are runs of `small_batch.py`, and `measured` those of `bench/memory.py`.
    """
    mib = {
        (settings["objective"], settings["batch_size"]): outcome["MiB"]
        for settings, outcome, _ in Store(measured).runs
    }
    group = main_groups(Store(results))[task]

    def needed(seeds: Seeds) -> float | None:
        return mib.get((seeds.objective, seeds.batch_size))

    curves = test_quality(group, OF_MEMORY, needed)
    canvas = drawn(curves, "MiB of a training step beside the weights (numbers: B)", QUALITY)
    style = {"textcoords": "offset points", "fontsize": 9}
    for each in group:
        if each.objective in OF_MEMORY and needed(each):
            place = needed(each), each.mean("test")
            canvas.axes[0].annotate(str(each.batch_size), place, (3, 3), **style)
    write(figure, canvas)


def check(folder: Path) -> None:
    """Draw every figure from runs whose quality is the batch size."""
    store, measured = Store(folder / "runs.jsonl"), Store(folder / "memory.jsonl")
    for name, size, seed in product(("InfoNCE", "GlobalCache"), (8, 32), range(2)):
        cell = {"objective": name, "batch_size": size}
        own = {"task": "vectors papers", "equal": "pairs", "pairs_seen": 64, "seed": seed}
        outcome = {"test": size / 100, "extra_encodes": 0.0}
        outcome |= {"curve": [[0, 0.0, 0.1], [64, 1.0, size / 100]]}
        store.add(Run(cell | own, outcome, origin(0.0)))
        measured.add(Run(cell, {"MiB": size}, origin(0.0)))
    [group] = main_groups(store).values()
    found = test_quality(group, ["InfoNCE"], lambda each: each.batch_size)
    assert found == {"InfoNCE": [(8, 0.08, 0.0), (32, 0.32, 0.0)]}
    small_batch(folder, store.path, folder / "none.jsonl")
    memory("vectors papers", folder / "memory.svg", store.path, measured.path)
    stems = {f"vectors_papers_64_{axis}" for axis in ("batch", "pairs", "seconds")}
    drawn_stems = {file.stem for file in folder.glob("*.svg")}
    assert drawn_stems == stems | {"memory", "quality_by_batch_size"}


if __name__ == "__main__":
    command_line(small_batch, memory, check=check)
