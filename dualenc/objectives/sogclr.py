"""SogCLR: each anchor's partition function is a moving average."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors, weighted_sum
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.tables import LogAverages


class SogCLR(Objective):
    """Weight exp(s/τ) / (n·u_a), where u_a tracks the mean of exp(s/τ) over the anchor's negatives.

    Source: Yuan et al. 2022, "Provable stochastic optimization for global contrastive learning", Algorithm 1. An
    anchor's first visit sets its u, whatever the rest of the batch.

    Args:
        gamma: rate of the moving average, in (0, 1]; with a cosine schedule its value at the end.
        gamma_schedule: "constant", or "cosine" from 1 down to gamma over the training (`set_progress`).
        **common: see `Objective`.
    """

    needs_num_left = True

    def __init__(
        self,
        *,
        gamma: float = 0.9,
        gamma_schedule: Literal["constant", "cosine"] = "constant",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if not 0 < gamma <= 1:
            raise DualencError(f"{type(self).__name__}: gamma is {gamma}; it must lie in (0, 1]")
        self.final_gamma = gamma
        self.gamma_schedule = gamma_schedule
        self.gamma = gamma if gamma_schedule == "constant" else 1.0
        self.left_averages = LogAverages(self.num_left or 1)
        self.right_averages = self.left_averages if self.views else LogAverages(self.num_right or 1)

    def set_progress(self, fraction: float) -> None:
        if self.gamma_schedule == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))
            self.gamma = self.final_gamma + (1 - self.final_gamma) * fall

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        table = self.left_averages if anchors.side == "left" else self.right_averages
        log_mean = anchors.statistics(lambda some: some.log_mean_exp)
        log_u = table.track(anchors.ids, log_mean, self.gamma, anchors.sizes, self.updates_state, anchors.distinct_rows)
        # An anchor that has never met a negative has no average; it has no weights either.
        log_u = torch.nan_to_num(log_u, nan=0.0)
        surrogate = anchors.by_rows(_weighted, log_u) - anchors.positive_logits
        value = log_u + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(surrogate, value.detach())


def _weighted(anchors: Anchors, log_u: Tensor) -> Tensor:
    with torch.no_grad():
        log_total = log_u + anchors.num_negatives.clamp(min=1).to(log_u).log()
        weights = torch.exp(anchors.logits - log_total[:, None])
    return weighted_sum(weights, anchors.scores)
