"""Figures for reports, drawn with matplotlib; each function returns a figure and keeps no global state."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dualenc.files import atomic_path
from dualenc.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dualenc.evaluation.convergence import SimilarityHistogram

MAX_HEAT_MAP_NUMBERS = 120
# Okabe & Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")


def bars(
    groups: Mapping[str, Mapping[str, float]],
    *,
    ylabel: str = "",
    errors: Mapping[str, Mapping[str, float]] | None = None,
) -> Figure:
    """Bars side by side: for each series the heights by label, and errors (±); every series has the same labels."""
    figure, axes = _axes(ylabel=ylabel)
    labels = list(next(iter(groups.values()), {}))
    width = 0.8 / max(len(groups), 1)
    for number, (name, heights) in enumerate(groups.items()):
        # The groups' bars are centred on their label.
        offset = (number - (len(groups) - 1) / 2) * width
        positions = [place + offset for place in range(len(labels))]
        values = [heights[label] for label in labels]
        spread = None if errors is None else [errors[name][label] for label in labels]
        drawn = axes.bar(positions, values, width, yerr=spread, label=literal(name), color=_colour(number), capsize=2)
        if len(labels) * len(groups) <= 12:
            axes.bar_label(drawn, fmt="%.3f", fontsize=8, padding=2)
    rotation = 30 if len(labels) > 6 else 0
    axes.set_xticks(range(len(labels)), [literal(label) for label in labels], rotation=rotation)
    _legend(axes, len(groups))
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
    log_y: bool = False,
) -> Figure:
    """Curves of (x, y) points by name."""
    figure, axes = _axes(xlabel=xlabel, ylabel=ylabel)
    for number, (name, (x, y)) in enumerate(series.items()):
        marker = "o" if len(x) <= 30 else None
        axes.plot(x, y, label=literal(name), color=_colour(number), marker=marker, markersize=4)
    if log_y:
        axes.set_yscale("log")
    _legend(axes, len(series))
    return figure


def histograms(
    values: Mapping[str, Sequence[float]], *, xlabel: str = "", ylabel: str = "share", bins: int = 40
) -> Figure:
    """Overlaid histograms on common bins, each of total height 1, so that sets of different size compare."""
    figure, axes = _axes(xlabel=xlabel, ylabel=ylabel)
    kept = {name: np.asarray(numbers, float) for name, numbers in values.items() if len(numbers)}
    if kept:
        edges = np.histogram_bin_edges(np.concatenate(list(kept.values())), bins=bins)
        for number, (name, numbers) in enumerate(kept.items()):
            # Shares instead of counts: the series may differ in size.
            weights = np.full(len(numbers), 1 / len(numbers))
            axes.hist(numbers, edges.tolist(), weights=weights, label=literal(name), color=_colour(number), alpha=0.6)
    _legend(axes, len(kept))
    return figure


def similarities(found: SimilarityHistogram, positives: str, negatives: str) -> Figure:
    """Overlaid histograms of the similarities of positive and negative pairs, each of total height 1."""
    figure = counts(found.edges, {positives: found.positives, negatives: found.negatives}, xlabel="cosine")
    # Only the range that holds something.
    filled = np.flatnonzero(found.positives + found.negatives)
    figure.axes[0].set_xlim(found.edges[filled[0]], found.edges[filled[-1] + 1])
    return figure


def ridges(found: Mapping[str, SimilarityHistogram], positives: str, negatives: str) -> Figure:
    """Similarity histograms of several steps by name, stacked on one scale, the first at the bottom."""
    figure, axes = _axes(xlabel="cosine")
    figure.set_figheight(1.5 + 0.5 * len(found))
    shares = [
        [counted / counted.sum() for counted in (histogram.positives, histogram.negatives)]
        for histogram in found.values()
    ]
    highest = max((float(share.max()) for pair in shares for share in pair), default=1.0)
    for level, (histogram, pair) in enumerate(zip(found.values(), shares, strict=True)):
        for share, name, colour in zip(pair, (positives, negatives), COLOURS):
            heights = level + 0.9 * share / highest
            # One legend entry for all levels.
            label = name if level == 0 else None
            axes.stairs(heights, histogram.edges, baseline=level, fill=True, alpha=0.55, label=label, color=colour)
    filled = np.flatnonzero(sum(histogram.positives + histogram.negatives for histogram in found.values()))
    edges = next(iter(found.values())).edges
    axes.set_xlim(edges[filled[0]], edges[filled[-1] + 1])
    axes.set_yticks(range(len(found)), [literal(name) for name in found])
    _legend(axes, 2)
    return figure


def counts(edges: npt.NDArray[np.floating], counted: Mapping[str, npt.NDArray[np.integer]], *, xlabel: str) -> Figure:
    """Overlaid histograms from counts (R,) in bins with edges (R + 1,), each of total height 1."""
    figure, axes = _axes(xlabel=xlabel, ylabel="share")
    for number, (name, heights) in enumerate(counted.items()):
        share = heights / max(1, heights.sum())
        axes.stairs(share, edges, fill=True, alpha=0.55, label=literal(name), color=_colour(number))
    _legend(axes, len(counted))
    return figure


def heat(values: npt.NDArray[np.floating], rows: Sequence[str], columns: Sequence[str], *, xlabel: str = "") -> Figure:
    """A matrix (R, C) of numbers from 0 as colours, darker for higher, with the numbers in it where there is room."""
    figure, axes = _axes(xlabel=xlabel)
    figure.set_figheight(max(1.5, 0.26 * len(rows) + 1.2))
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    axes.set_yticks(range(len(rows)), [literal(row) for row in rows], fontsize=8)
    rotation = 90 if len(columns) > 6 else 0
    axes.set_xticks(range(len(columns)), [literal(column) for column in columns], fontsize=8, rotation=rotation)
    if values.size <= MAX_HEAT_MAP_NUMBERS:
        middle = np.nanmax(values, initial=0) / 2
        for (row, column), value in np.ndenumerate(values):
            shade = "white" if value > middle else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    figure.colorbar(image, ax=axes)
    return figure


def literal(text: str) -> str:
    """An untrusted text as a label: without mathematics between dollars, and without control characters."""
    return printable(text).replace("$", r"\$")


def as_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same figure on every run."""
    import matplotlib

    stream = io.StringIO()
    # Without a fixed salt and date the same figure gives other bytes on every run.
    with matplotlib.rc_context({"svg.hashsalt": "dualenc", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, in the format of its ending (.svg, .png, .pdf)."""
    with atomic_path(path) as part:
        figure.savefig(part, format=Path(path).suffix.removeprefix("."))


def _axes(xlabel: str = "", ylabel: str = "") -> tuple[Figure, Axes]:
    # matplotlib is imported where a figure is drawn: `dualenc search` prints tables without it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _legend(axes: Axes, series: int) -> None:
    if series > 1:
        axes.legend(frameon=False)
