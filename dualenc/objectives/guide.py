"""False negatives found by a guide: what another model finds more similar to the anchor than its positive.

Source: Solatorio 2024, "GISTEmbed: Guided in-sample selection of training negatives for text embedding fine-tuning",
arXiv:2402.16829, Algorithm 1. The guide's embeddings are known beforehand; it judges the candidates of the batch and
mined negatives. With two towers it compares anchors with candidates; with views, each view with both views of other
images.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Copies of the positive are as similar to the anchor as it is, however the products are rounded.
ROUNDING = 1e-6


class GuideVectors(NamedTuple):
    """A guide's unit vectors of this rank's pairs and mined negatives; NaN where it has none, which judges nothing.

    Attributes:
        left, right: (b, V).
        negatives: (n, V); None without mined negatives.
    """

    left: Tensor
    right: Tensor
    negatives: Tensor | None = None


class Guide(NamedTuple):
    """A guide's vectors of anchors and candidates.

    Attributes:
        anchors: (X, A, V).
        candidates: (X, C, V).
        limits: (X, A) largest similarity that a negative may have with the anchor.
    """

    anchors: Tensor
    candidates: Tensor
    limits: Tensor

    @property
    def likely_positives(self) -> Tensor:
        """(X, A, C) True where a candidate is above the anchor's limit."""
        return self.anchors @ self.candidates.mT > self.limits[..., None]


def similarity_limits(left: Tensor, right: Tensor, margin: float, relative: float) -> Tensor:
    """(b,) s⁺ − (1 − relative)·|s⁺| − margin, with s⁺ the guide's similarity of the two items (b, V) of each pair."""
    positive = (left * right).sum(dim=-1)
    return positive - (1 - relative) * positive.abs() - margin + ROUNDING
