"""Figures of docs/results.md and of the README, from the stores of `small_batch.py`.

python eval/figures.py small_batch docs/figures
python eval/bench/memory.py fine_tuning MODEL MEDQUAD --out eval/results/fine_tuning_memory.jsonl
python eval/figures.py memory "minilm_beginnings medquad, 1,536 pairs" docs/figures/memory.svg
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from comparison import ENCODERS, FINE_TUNING, VECTORS, Seeds, groups_of, main_groups, values
from frame import ORDINARY_BATCH, RESULTS, Run, Store, command_line, origin
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualenc.evaluation.plots import COLORS, as_svg, lines

# Where the gap to InfoNCE opens and closes.
GAPS_IN, GAPS_OF = "vectors papers", ("GlobalCache", "ISIR", "SogCLR", "DCL")
# As many as can be told apart.
DRAWN = (*GAPS_OF, "InfoNCE", "SogCLR+", "GlobalCache+", "NegativeCache", "MomentumQueue")
# Labels of the README's figure.
HEADLINE = {"GlobalCache": None, "SogCLR+": "SogCLR(positive_in_softmax=True)", "InfoNCE": None}
OF_MEMORY = ("InfoNCE", "InfoNCE, cached by 8", "MomentumQueue", "GlobalCache+", "ISIR", "SogCLR+")


def small_batch(folder: Path, vectors: Path = VECTORS, encoders: Path = ENCODERS) -> None:
    """Draw quality by batch size, pairs and seconds, the gaps to InfoNCE, and the README's figure.

    Args:
        folder: folder to draw to.
        vectors: store of perceptrons.
        encoders: store of other models.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for results in (vectors, encoders):
        for (task, pairs_seen), group in groups_of(Store(results)).items():
            stem = f"{task}_{pairs_seen}".replace(" ", "_").replace(",", "")
            draw_curves([each for each in group if each.objective in DRAWN], folder, stem)
    store = Store(vectors)
    draw_gaps(store, folder / "small_batch_gaps.svg")
    if group := main_groups(store).get(GAPS_IN):
        draw_headline(group, folder / "quality_by_batch_size.svg")


def draw_curves(group: Sequence[Seeds], folder: Path, stem: str) -> None:
    """Draw quality by batch size; at the ordinary batch size, by pairs seen and by seconds."""
    by_size: dict[str, list[tuple[float, float]]] = {}
    for each in group:
        by_size.setdefault(each.objective, []).append((each.batch_size, each.mean("test")))
    sizes = {name: tuple(zip(*points)) for name, points in by_size.items() if len(points) > 1}
    if sizes:
        figure = lines(sizes, xlabel="batch size", ylabel="quality on test data")
        figure.axes[0].set_xscale("log", base=2)
        (folder / f"{stem}_batch.svg").write_text(as_svg(figure))
    for axis, label in enumerate(("pairs seen", "seconds of one core")):
        curves = {}
        for each in group:
            found = values(each.runs, "curve")
            if each.batch_size == ORDINARY_BATCH and found and not (axis and each.on_gpu):
                points = np.mean(found, axis=0)
                curves[each.objective] = points[:, axis].tolist(), points[:, 2].tolist()
        if curves:
            figure = lines(curves, xlabel=label, ylabel="quality on held-out data")
            (folder / f"{stem}_{label.split()[0]}.svg").write_text(as_svg(figure))


def draw_headline(group: Sequence[Seeds], path: Path) -> None:
    """Draw test quality by batch size at equal pairs seen, of three objectives."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for color, (name, label) in zip(COLORS, HEADLINE.items(), strict=False):
        own = [each for each in group if each.objective == name]
        draw_spread(axes, own, [each.batch_size for each in own], color, label or name)
    ticks = sorted({each.batch_size for each in group})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    finish(axes, "batch size, equal pairs seen")
    axes.legend(frameon=False)
    path.write_text(as_svg(figure))


def draw_spread(
    axes: Axes, group: Sequence[Seeds], at: Sequence[float], color: str, label: str
) -> None:
    """Draw mean and standard deviation of the test quality over seeds."""
    tests = [values(each.runs, "test") for each in group]
    means, deviations = map(statistics.mean, tests), map(statistics.stdev, tests)
    style = {"marker": "o", "markersize": 4, "capsize": 2, "color": color, "label": label}
    axes.errorbar(at, list(means), list(deviations), **style)


def finish(axes: Axes, x_label: str) -> None:
    """Label the axes, and leave out what is no data."""
    axes.set_xlabel(x_label)
    axes.set_ylabel("nDCG@10 on test queries")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def draw_gaps(store: Store, path: Path) -> None:
    """Draw how far objectives are above InfoNCE with the same settings, as far as there are runs.

    By batch size, epochs and τ of one task, and by number of pairs of another.
    """
    panels: dict[str, dict[str, dict[float, float]]] = {}

    def add(panel: str, at: float, quality: dict[str, float]) -> None:
        for name in GAPS_OF:
            if {name, "InfoNCE"} <= quality.keys():
                curve = panels.setdefault(panel, {}).setdefault(name, {})
                curve[at] = quality[name] - quality["InfoNCE"]

    def at_size(group: Sequence[Seeds], size: int = ORDINARY_BATCH) -> dict[str, float]:
        return {each.objective: each.mean("test") for each in group if each.batch_size == size}

    groups = groups_of(store)
    of_task = {seen: group for (task, seen), group in groups.items() if task == GAPS_IN}
    longest = max(of_task, key=lambda seen: len(of_task[seen]), default=0)
    for size in {each.batch_size for each in of_task.get(longest, [])}:
        add("batch size", size, at_size(of_task[longest], size))
    for seen, group in of_task.items():
        add("pairs seen", seen, at_size(group))
    same = {"batch_size": ORDINARY_BATCH, "rate": 1.0, "pairs_seen": longest, "equal": "pairs"}
    by_tau: dict[float, dict[str, float]] = {}
    for settings, outcome, _ in store.where(task=GAPS_IN, seed=0, **same):
        of_tau = by_tau.setdefault(settings["temperature"], {})
        of_tau[settings["objective"]] = outcome["test"]
    for tau, quality in by_tau.items():
        add("τ of all (one seed)", tau, quality)
    for (task, _), group in groups.items():
        if pairs := task.partition(", ")[2]:
            count = int(pairs.split()[0].replace(",", ""))
            add("pairs to train on (functions)", count, at_size(group))
    if panels:
        draw_panels(panels, path)


def draw_panels(panels: dict[str, dict[str, dict[float, float]]], path: Path) -> None:
    """Draw curves side by side, by the titles of the panels and the names of the curves."""
    figure = Figure(figsize=(3.2 * len(panels), 3.2), layout="constrained")
    every_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (panel, curves) in zip(every_axes, panels.items(), strict=True):
        for color, name in zip(COLORS, GAPS_OF, strict=False):
            if points := sorted(curves.get(name, {}).items()):
                axes.plot(*zip(*points), marker="o", markersize=4, color=color, label=name)
        axes.axhline(0, color="grey", linewidth=0.8)
        ticks = sorted({at for curve in curves.values() for at in curve})
        labels = [f"{tick:,g}" if tick < 1000 else f"{tick / 1000:,.0f}k" for tick in ticks]
        axes.set_xscale("log")
        axes.set_xticks(ticks, labels)
        axes.set_xticks([], minor=True)
        axes.set_xlabel(panel)
    figure.axes[0].set_ylabel("quality above InfoNCE")
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.write_text(as_svg(figure))


def memory(
    task: str,
    figure: Path,
    results: Path = FINE_TUNING,
    measured: Path = RESULTS / "fine_tuning_memory.jsonl",
) -> None:
    """Draw the quality of fine-tuning by the memory of its step; rows without memory are left out.

    Args:
        task: name of the task in settings.
        figure: an SVG file to draw to.
        results: runs of `small_batch.py`.
        measured: what `bench/memory.py` measured.
    """
    mib = {
        (settings["objective"], settings["batch_size"]): outcome["MiB"]
        for settings, outcome, _ in Store(measured).runs
    }
    group = main_groups(Store(results))[task]
    canvas = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = canvas.add_subplot()
    for color, name in zip(COLORS, OF_MEMORY, strict=False):
        own = [each for each in group if (name, each.batch_size) in mib and each.objective == name]
        needed = [mib[name, each.batch_size] for each in own]
        if own:
            draw_spread(axes, own, needed, color, name)
        style = {"textcoords": "offset points", "fontsize": 7, "color": color}
        for at, each in zip(needed, own, strict=True):
            axes.annotate(f"{each.batch_size}", (at, each.mean("test")), (3, 3), **style)
    finish(axes, "MiB of a training step beside the weights (numbers: B)")
    canvas.legend(frameon=False, fontsize=8, loc="outside right upper")
    figure.write_text(as_svg(canvas), encoding="utf-8")


def check(folder: Path) -> None:
    """Draw every figure from runs whose quality is the batch size, as far as they go."""
    names, sizes = ("InfoNCE", "GlobalCache"), (8, 32)
    for file, of_task in (("runs", {"task": GAPS_IN, "equal": "pairs"}), ("memory", {})):
        store = Store(folder / f"{file}.jsonl")
        for name, size, seed in product(names, sizes, range(2 if of_task else 1)):
            settings = {"objective": name, "batch_size": size, **of_task}
            if of_task:
                settings |= {"pairs_seen": 64, "rate": 1.0, "temperature": 0.1, "seed": seed}
            quality = size / 100 + 0.1 * (name == "GlobalCache")
            outcome = {"validation": quality, "test": quality, "extra_encodes": 0.0, "MiB": size}
            outcome |= {"curve": [[0, 0.0, 0.1], [64, 1.0, quality]]}
            store.add(Run(settings, outcome, origin(0.0)))
    small_batch(folder, folder / "runs.jsonl", folder / "none.jsonl")
    memory(GAPS_IN, folder / "memory.svg", folder / "runs.jsonl", folder / "memory.jsonl")
    drawn = {file.name for file in folder.glob("*.svg")}
    stems = {f"vectors_papers_64_{by}.svg" for by in ("batch", "pairs", "seconds")}
    assert drawn == stems | {"memory.svg", "small_batch_gaps.svg", "quality_by_batch_size.svg"}


if __name__ == "__main__":
    command_line(small_batch, memory, check=check)
