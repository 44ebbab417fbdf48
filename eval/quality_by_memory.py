"""Quality by memory: what fine-tuning gives on test data, by the memory of its step, for objectives
and batch sizes.

    python eval/bench/training_memory.py MODEL MEDQUAD --out eval/results/fine_tuning_memory.jsonl
    python eval/quality_by_memory.py "minilm_beginnings medquad, 1,536 pairs"
    docs/figures/memory.svg

Rows whose memory was not measured are left out.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from comparison_table import Row, Runs, rows_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dualenc.evaluation.plots import COLORS, as_svg

FINE_TUNING = Path("eval/results/small_fine_tuning.jsonl")
MEMORY = Path("eval/results/fine_tuning_memory.jsonl")
DRAWN = ("InfoNCE", "InfoNCE, cached by 8", "MomentumQueue", "GlobalCache+", "ISIR", "SogCLR+")


def read_memory(file: Path) -> dict[tuple[str, int], float]:
    """MiB beside the weights, by objective and batch size."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {(line["objective"], line["batch_size"]): line["MiB"] for line in lines}


def draw_objective(
    axes: Axes, rows: list[Row], memory: dict[tuple[str, int], float], colour: str
) -> None:
    """Mean and standard deviation over seeds, a point for each batch size."""
    megabytes = [memory[row.objective, row.batch_size] for row in rows]
    means = [row.mean("test") for row in rows]
    deviations = [statistics.stdev(seed["test"] for seed in row.seeds) for row in rows]
    label = rows[0].objective
    axes.errorbar(
        megabytes, means, deviations, marker="o", markersize=4, capsize=2, color=colour, label=label
    )
    for row, x, y in zip(rows, megabytes, means, strict=True):
        axes.annotate(
            str(row.batch_size),
            (x, y),
            (3, 3),
            textcoords="offset points",
            fontsize=7,
            color=colour,
        )


def main(task: str, figure: Path, results: Path = FINE_TUNING, memory: Path = MEMORY) -> None:
    """Draw.

    Args:
        task: as the runs have it in their settings.
        figure: an SVG file to draw to.
        results: runs of `small_batch.py`.
        memory: what `bench/training_memory.py` measured.
    """
    megabytes = read_memory(memory)
    rows = [
        row for row in rows_of(Runs(results), task) if (row.objective, row.batch_size) in megabytes
    ]
    canvas = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = canvas.add_subplot()
    for colour, name in zip(COLORS, DRAWN, strict=False):
        drawn = [row for row in rows if row.objective == name]
        if drawn:
            draw_objective(axes, drawn, megabytes, colour)
    axes.set_xlabel("MiB of a training step beside the weights (numbers: B)")
    axes.set_ylabel("nDCG@10 on test queries")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    canvas.legend(frameon=False, fontsize=8, loc="outside right upper")
    figure.write_text(as_svg(canvas), encoding="utf-8")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
