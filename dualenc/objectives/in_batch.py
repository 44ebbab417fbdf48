"""Objectives of the batch alone: InfoNCE, DCL, HCL, SigLIP.

Shapes: see `anchors`; a anchors of a block.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from dualenc.objectives.anchors import Anchors, log_count
from dualenc.objectives.base import CommonArguments, DataArguments, Objective
from dualenc.objectives.checks import check_range


class InfoNCE(Objective):
    """−s⁺/τ + log(exp(s⁺/τ) + Σ_c exp(s_c/τ)) over the negatives c of the batch.

    Positives other than the anchor's own (captions of the same image, further relevant documents)
    are left out of the sum, so they are not counted as negatives. Source: SimCLR (Chen et al. 2020,
    arXiv:2002.05709) with views=True, CLIP (Radford et al. 2021, arXiv:2103.00020) otherwise.

        loss = InfoNCE(temperature=0.07)(left, right, ids).loss
    """

    def block_losses(self, block: Anchors) -> Tensor:
        not_candidate = block.not_negative.scatter(-1, block.positive_column[..., None], False)
        logits = block.scores.masked_fill(not_candidate, -torch.inf)
        return logits.logsumexp(dim=-1) - block.positive_scores


class DCL(Objective):
    """Decoupled contrastive loss: −s⁺/τ + log Σ_c exp(s_c/τ) over the negatives c of the batch.

    Unlike in InfoNCE, the positive is not part of the sum. Source: Yeh et al. 2022, "Decoupled
    contrastive learning", arXiv:2110.06848, Eq. 6.

        loss = DCL(temperature=0.07)(left, right, ids).loss
    """

    def block_losses(self, block: Anchors) -> Tensor:
        return log_sum_exp(block.logits) - block.positive_scores


class HCL(Objective):
    """InfoNCE with hard negatives up-weighted by exp(β_h·s/τ) and debiased by the class prior τ⁺.

        −log( e⁺ / (e⁺ + G) ),   G = max( (Σ_c w_c e_c − n·τ⁺·e⁺) / (1 − τ⁺), n·exp(−1/τ) )

    with e = exp(s/τ), w_c = exp(β_h·s_c/τ) divided by its mean over c, and n negatives. Source:
    Robinson et al. 2021 (arXiv:2010.04592), Eq. 2 (hard negatives) and Chuang et al. 2020
    (arXiv:2007.00224; debiased, β_h = 0). With both at zero it is InfoNCE.

        loss = HCL(hardness=0.5, class_prior=0.0)(left, right, ids).loss

    Args:
        hardness: β_h ≥ 0, concentration on hard negatives.
        class_prior: τ⁺ in [0, 1), probability that a random candidate is an unlabeled positive.
        **common: see `Objective`.
    """

    def __init__(
        self,
        *,
        hardness: float = 1.0,
        class_prior: float = 0.1,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(**common)
        check_range("hardness", hardness, "[0, inf)")
        check_range("class_prior", class_prior, "[0, 1)")
        self.hardness = hardness
        self.class_prior = class_prior

    def block_losses(self, block: Anchors) -> Tensor:
        scores = block.scores  # (X, a, C)
        not_negative = block.not_negative
        positive = block.positive_scores  # (X, a)
        log_num = log_count(~not_negative, like=scores)
        # Everything stays in logs, where small τ cannot overflow:
        # Σ_c w_c e_c = n·Σ_c exp((1 + β_h)·s_c/τ) / Σ_c exp(β_h·s_c/τ).
        sharpened = (self.hardness * scores).masked_fill(not_negative, -torch.inf)
        weighted = ((1 + self.hardness) * scores).masked_fill(not_negative, -torch.inf)
        log_importance = log_sum_exp(sharpened)
        log_weighted = log_sum_exp(weighted)
        log_sum = log_weighted - log_importance + log_num  # log Σ_c w_c e_c
        if self.class_prior:
            log_sum = self._debiased(log_sum, log_num, positive, block.temperature)
        losses = torch.logaddexp(positive, log_sum) - positive
        # Without negatives there is nothing to separate the positive from: the loss is 0.
        return losses.masked_fill(not_negative.all(dim=-1), 0.0)

    def _debiased(
        self, log_sum: Tensor, log_num: Tensor, positive: Tensor, temperature: Tensor
    ) -> Tensor:
        """Return (X, a) log G."""
        # log of n·τ⁺·e⁺ / Σ_c w_c e_c: the numerator of G is Σ_c w_c e_c·(1 − this share).
        log_share = log_num + math.log(self.class_prior) + positive - log_sum
        is_difference = log_share < 0
        # The inner `where` keeps log1p finite in rows that use the floor: its gradient would be
        # NaN, and 0·NaN is NaN.
        shrink = torch.log1p(-torch.exp(torch.where(is_difference, log_share, -1.0)))
        difference = log_sum + shrink - math.log1p(-self.class_prior)
        floor = log_num - 1 / temperature
        return torch.where(is_difference & (difference > floor), difference, floor)


class SigLIP(Objective):
    """Sigmoid loss: −log σ(s⁺/τ + b) − Σ_c log σ(−(s_c/τ + b)) per anchor.

    It is included for comparison, and does not estimate the global loss. Source: Zhai et al. 2023,
    arXiv:2303.15343, Algorithm 1.

        loss = SigLIP(temperature=0.1, bias=-10.0)(left, right, ids).loss

    Args:
        temperature: initial value of τ.
        learnable_temperature: learn log τ with the model.
        bias: initial value of b, which is learned with the model.
        **common: see `Objective`.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.1,
        learnable_temperature: bool = True,
        bias: float = -10.0,
        **common: Unpack[DataArguments],
    ) -> None:
        super().__init__(
            temperature=temperature, learnable_temperature=learnable_temperature, **common
        )
        check_range("bias", bias, "(-inf, inf)")
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def block_losses(self, block: Anchors) -> Tensor:
        attraction = logsigmoid(block.positive_scores + self.bias)
        repulsion = logsigmoid(-(block.scores + self.bias)).masked_fill(block.not_negative, 0.0)
        return -attraction - repulsion.sum(dim=-1)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return (X, a) log Σ_c exp of logits (X, a, C); 0, without gradient, if all are -inf."""
    has_no_negative = (logits == -torch.inf).all(dim=-1)
    # A row of -inf has a NaN gradient.
    finite_rows = logits.masked_fill(has_no_negative[..., None], 0.0)
    return finite_rows.logsumexp(dim=-1).masked_fill(has_no_negative, 0.0)
