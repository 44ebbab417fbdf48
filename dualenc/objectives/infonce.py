"""InfoNCE: the softmax over the batch, positive included."""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective


class InfoNCE(Objective):
    """−s⁺/τ + log(exp(s⁺/τ) + Σ_c exp(s_c/τ)) over the negatives c of the batch.

    Source: SimCLR (Chen et al. 2020) with views=True, CLIP (Radford et al. 2021) otherwise. Positives beyond the
    anchor's own (captions of the same image, other relevant documents) are left out of the sum, not counted as
    negatives.
    """

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        return AnchorLosses(anchors.by_rows(_cross_entropy))


def _cross_entropy(anchors: Anchors) -> Tensor:
    return torch.nn.functional.cross_entropy(anchors.logits_with_positive, anchors.positive_column, reduction="none")
