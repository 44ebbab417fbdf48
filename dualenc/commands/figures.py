"""Figures that the image evaluations draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dualenc.evaluation.geometry import SimilarityHistogram
from dualenc.evaluation.plots import COLOURS, literal
from dualenc.evaluation.report import Figure

_MOST_NUMBERS = 120


def similarity_figure(found: SimilarityHistogram, positives: str, negatives: str, caption: str) -> Figure:
    """Histograms of similarities of positive and negative pairs over one another, each of total height 1.

    Args:
        found: The counts.
        positives: What the positive pairs are.
        negatives: What the negative pairs are.
        caption: What is shown; the overlap is added.
    """
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(6.4, 3.6), layout="constrained")
    axes = plot.add_subplot()
    for name, counts, colour in ((positives, found.positives, COLOURS[0]), (negatives, found.negatives, COLOURS[1])):
        axes.stairs(counts / counts.sum(), found.edges, fill=True, alpha=0.55, label=name, color=colour)
    filled = np.flatnonzero(found.positives + found.negatives)
    axes.set_xlim(found.edges[filled[0]], found.edges[filled[-1] + 1])
    axes.set_xlabel("cosine")
    axes.set_ylabel("share of pairs")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return Figure(f"{caption}; overlap {found.overlap:.3f}", plot)


def heat_figure(
    values: npt.NDArray[np.floating], rows: Sequence[str], columns: Sequence[str], caption: str, xlabel: str = ""
) -> Figure:
    """A matrix of numbers from 0 as colours, darker for higher, with the numbers in it where there is room.

    Args:
        values: (R, C).
        rows: R names.
        columns: C names.
        caption: What is shown.
        xlabel: What the columns are.
    """
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(6.4, max(1.5, 0.26 * len(rows) + 1.2)), layout="constrained")
    axes = plot.add_subplot()
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto")
    axes.set_yticks(range(len(rows)), [literal(row) for row in rows], fontsize=8)
    axes.set_xticks(
        range(len(columns)), [literal(column) for column in columns], fontsize=8, rotation=90 if len(columns) > 6 else 0
    )
    axes.set_xlabel(xlabel)
    if values.size <= _MOST_NUMBERS:
        middle = np.nanmax(values, initial=0) / 2
        for (row, column), value in np.ndenumerate(values):
            shade = "white" if value > middle else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    plot.colorbar(image, ax=axes)
    return Figure(caption, plot)
