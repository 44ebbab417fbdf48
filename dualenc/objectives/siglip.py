"""SigLIP: every pair is its own yes-or-no question."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective


class SigLIP(Objective):
    """−log σ(s⁺/τ + b) − Σ_c log σ(−(s_c/τ + b)) per anchor (Zhai et al. 2023, Algorithm 1), for comparison.

    Not an estimate of the global contrastive loss. Temperature and bias are learned unless told otherwise.

    Args:
        bias: starting value of b.
        learnable_bias: learn b with the model.
        **common: see `Objective`.
    """

    def __init__(self, *, bias: float = -10.0, learnable_bias: bool = True, **common: Any) -> None:
        super().__init__(**{"temperature": 0.1, "learnable_temperature": True, **common})
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learnable_bias)

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        return AnchorLosses(anchors.by_rows(self._cross_entropy))

    def _cross_entropy(self, anchors: Anchors) -> Tensor:
        attract = logsigmoid(anchors.positive_logits + self.bias)
        repel = logsigmoid(-(anchors.scores + self.bias)).masked_fill(anchors.excluded, 0.0)
        return -attract - repel.sum(dim=1)
