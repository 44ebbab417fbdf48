"""DCL: the softmax over the batch, positive excluded."""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective


class DCL(Objective):
    """−s⁺/τ + log Σ_c exp(s_c/τ) over the negatives c of the batch (Yeh et al. 2022, decoupled contrastive loss)."""

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        return AnchorLosses(anchors.by_rows(_log_partition) - anchors.positive_logits)


def _log_partition(anchors: Anchors) -> Tensor:
    alone = anchors.num_negatives == 0
    # An anchor without negatives only pulls its positive; a row of -inf would have a NaN gradient.
    logits = anchors.logits.masked_fill(alone[:, None], 0.0)
    return torch.logsumexp(logits, dim=1).masked_fill(alone, 0.0)
