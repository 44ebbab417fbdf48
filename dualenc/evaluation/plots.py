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
        axes.bar(positions, values, width, yerr=spread, label=literal(name), color=_colour(number), capsize=2)
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
    filled = {name: np.asarray(numbers, float) for name, numbers in values.items() if len(numbers)}
    together = np.concatenate([np.zeros(0), *filled.values()])
    edges = np.histogram_bin_edges(together, bins=bins)
    counted = {name: np.histogram(numbers, edges)[0] for name, numbers in filled.items()}
    return counts(edges, counted, xlabel=xlabel, ylabel=ylabel)


def counts(
    edges: npt.NDArray[np.floating],
    counted: Mapping[str, npt.NDArray[np.integer]],
    *,
    xlabel: str,
    ylabel: str = "share",
) -> Figure:
    """Overlaid histograms from counts (R,) in bins with edges (R + 1,), each of total height 1."""
    figure, axes = _axes(xlabel=xlabel, ylabel=ylabel)
    for number, (name, heights) in enumerate(counted.items()):
        share = heights / max(1, heights.sum())
        axes.stairs(share, edges, fill=True, alpha=0.55, label=literal(name), color=_colour(number))
    _legend(axes, len(counted))
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
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _legend(axes: Axes, series: int) -> None:
    if series > 1:
        axes.legend(frameon=False)
