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
        loss = anchors.by_rows(self._cross_entropy)
        return AnchorLosses(loss, loss.detach())

    def _cross_entropy(self, anchors: Anchors) -> Tensor:
        attract = logsigmoid(anchors.positive_logits + self.bias)
        # A masked logit of -inf has log σ(+inf) = 0, but its gradient would be NaN: replace it first.
        logits = anchors.logits.masked_fill(~anchors.allowed, 0.0)
        repel = logsigmoid(-(logits + self.bias)) * anchors.allowed
        return -attract - repel.sum(dim=1)
