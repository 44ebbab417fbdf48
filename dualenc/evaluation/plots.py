"""Curves for reports, drawn with matplotlib."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dualenc.errors import DualencError
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MISSING = "drawing curves needs the package matplotlib: pip install 'dualenc[plots]'"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str = "",
    ylabel: str = "",
) -> Figure:
    """Curves of (x, y) points by name.

    Raises:
        DualencError: if matplotlib is not installed.
    """
    if not can_draw():
        raise DualencError(MISSING)
    # An optional package, whose import takes a second.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.3)
    for number, (name, (x, y)) in enumerate(series.items()):
        marker = "o" if len(x) <= 30 else None
        axes.plot(
            x,
            y,
            label=literal(name),
            color=COLOURS[number % len(COLOURS)],
            marker=marker,
            markersize=4,
        )
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure


def literal(text: str) -> str:
    """An untrusted text as a label: without mathematics between dollars, and without control
    characters."""
    return printable(text).replace("$", r"\$")


def as_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same figure on every run."""
    import matplotlib

    stream = io.StringIO()
    # Without a fixed salt and date the same figure gives other bytes on every run.
    with matplotlib.rc_context({"svg.hashsalt": "dualenc", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
