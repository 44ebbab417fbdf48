"""Draw curves for reports with matplotlib."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from dualenc.errors import DualencError
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, which color-blind readers can distinguish; gray for its yellow, which is
# faint on white.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#000000")
DASHES = ("-", "--", ":", "-.")
MISSING = "drawing curves needs the package matplotlib: pip install 'dualenc[plots]'"


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
) -> Figure:
    """Draw curves over one another.

    Args:
        series: x and y values of each curve by its name.
        xlabel: label of the x axis.
        ylabel: label of the y axis.

    Raises:
        DualencError: if matplotlib is not installed.
    """
    figure, axes = _new_axes(series, xlabel, ylabel)
    for number, (name, (x, y)) in enumerate(series.items()):
        # Markers of many points would hide the line.
        marker = "o" if len(x) <= 30 else None
        axes.plot(
            x,
            y,
            label=literal(name),
            color=COLORS[number % len(COLORS)],
            # More curves than colors are told apart by their dashes.
            linestyle=DASHES[number // len(COLORS) % len(DASHES)],
            marker=marker,
            markersize=4,
        )
    _add_legend(figure, series)
    return figure


def points(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
) -> Figure:
    """Draw points over a logarithmic x axis.

    Args:
        series: x and y values of each color by its name; x is above 0.
        xlabel: label of the x axis.
        ylabel: label of the y axis.

    Raises:
        DualencError: if matplotlib is not installed.
    """
    figure, axes = _new_axes(series, xlabel, ylabel)
    # An optional package, as in `_new_axes`.
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    for number, (name, (x, y)) in enumerate(series.items()):
        axes.scatter(x, y, label=literal(name), color=COLORS[number % len(COLORS)], s=24)
    low, high = axes.get_xlim()
    # Within two decades, powers of ten alone are too few labels; more would overlap.
    steps = (1, 2, 5) if high < 100 * low else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    _add_legend(figure, series)
    return figure


def _new_axes(series: Collection[str], xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return an empty figure with labels, and room for a legend below."""
    if not can_draw():
        raise DualencError(MISSING)
    # An optional package, which takes a second to import.
    from matplotlib.figure import Figure

    legend_rows = math.ceil(len(series) / _legend_columns(series)) if len(series) > 1 else 0
    # Narrow, so that labels are readable on a telephone.
    figure = Figure(figsize=(5.2, 3.2 + 0.22 * legend_rows), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _legend_columns(series: Collection[str]) -> int:
    """Return the columns of a legend; paths of runs are too long for two in a figure's width."""
    return 2 if max(map(len, series), default=0) <= 22 else 1


def _add_legend(figure: Figure, series: Collection[str]) -> None:
    """Add a legend of several series below the axes, where it covers no curve."""
    if len(series) > 1:
        columns = _legend_columns(series)
        figure.legend(frameon=False, loc="outside lower center", ncols=columns)


def literal(text: str) -> str:
    """Escape control characters, and dollars, between which matplotlib typesets mathematics."""
    return printable(text).replace("$", r"\$")


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG text; equal figures give equal texts."""
    import matplotlib

    stream = io.StringIO()
    # A random salt and the date would change the bytes on every run.
    with matplotlib.rc_context({"svg.hashsalt": "dualenc", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
