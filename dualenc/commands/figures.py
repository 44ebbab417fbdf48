"""Figures that several evaluation commands draw."""

from __future__ import annotations

from dualenc.evaluation import plots
from dualenc.evaluation.geometry import SimilarityHistogram
from dualenc.evaluation.report import Figure


def similarity_figure(found: SimilarityHistogram, positives: str, negatives: str, caption: str) -> Figure:
    """Histograms of similarities of positive and negative pairs, each of total height 1."""
    centres = ((found.edges[:-1] + found.edges[1:]) / 2).tolist()
    shares = {
        positives: (centres, (found.positives / found.positives.sum()).tolist()),
        negatives: (centres, (found.negatives / found.negatives.sum()).tolist()),
    }
    return Figure(f"{caption}; overlap {found.overlap:.3f}", plots.lines(shares, xlabel="cosine", ylabel="share"))
