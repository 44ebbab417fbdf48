"""Objectives of the batch alone, without memory: InfoNCE, DCL, HCL, and SigLIP to compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import Objective


class InfoNCE(Objective):
    """−s⁺/τ + log(exp(s⁺/τ) + Σ_c exp(s_c/τ)) over the negatives c of the batch.

    Source: SimCLR (Chen et al. 2020) with views=True, CLIP (Radford et al. 2021) otherwise. Positives beyond the
    anchor's own (captions of the same image, other relevant documents) are left out of the sum, not counted as
    negatives.
    """

    def losses(self, block: Anchors, *known: Tensor) -> Tensor:
        return cross_entropy(block.logits_with_positive, block.positive_column, reduction="none")


class DCL(Objective):
    """−s⁺/τ + log Σ_c exp(s_c/τ) over the negatives c of the batch (Yeh et al. 2022, decoupled contrastive loss)."""

    both_at_once = True

    def losses(self, block: Anchors, *known: Tensor) -> Tensor:
        if block.all_have_negatives:
            return torch.logsumexp(block.logits, dim=1) - block.positive_logits
        alone = block.num_negatives == 0
        # An anchor without negatives only pulls its positive; a row of -inf would have a NaN gradient.
        logits = block.logits.masked_fill(alone[:, None], 0.0)
        return torch.logsumexp(logits, dim=1).masked_fill(alone, 0.0) - block.positive_logits


class HCL(Objective):
    """InfoNCE with negatives re-weighted by exp(β_h·s/τ) (mean weight 1) and debiased by the class prior τ⁺.

        −log( e⁺ / (e⁺ + G) ),   G = max( (Σ_c w_c e_c − n·τ⁺·e⁺) / (1 − τ⁺), n·exp(−1/τ) )

    with e = exp(s/τ), w_c = exp(β_h·s_c/τ) / mean over c. Source: Robinson et al. 2021, Eq. 2 (hard negatives) and
    Chuang et al. 2020 (β_h = 0, debiased); both at zero give InfoNCE. The paper's Fig. 5 writes β·e for the weight;
    Eq. 2 (and the authors) mean exp(β_h·s/τ), which is what stands here.

    Args:
        hardness: β_h ≥ 0, concentration on hard negatives.
        class_prior: τ⁺ in [0, 1), probability that a random candidate is a hidden positive.
        annealing_steps: ℓ, the number of equal steps in which β_h falls to 0 over the training; 0 keeps it.
        **common: see `Objective`.
    """

    both_at_once = True

    def __init__(
        self, *, hardness: float = 1.0, class_prior: float = 0.1, annealing_steps: int = 0, **common: Any
    ) -> None:
        super().__init__(**common)
        if hardness < 0:
            self._fail("hardness", f"is {hardness}; it must be 0 or more")
        if not 0 <= class_prior < 1:
            self._fail("class_prior", f"is {class_prior}; it must lie in [0, 1)")
        if annealing_steps < 0:
            self._fail("annealing_steps", f"is {annealing_steps}; it must be 0 or more")
        self.initial_hardness = self.hardness = hardness
        self.class_prior, self.annealing_steps = class_prior, annealing_steps

    def set_progress(self, fraction: float) -> None:
        if self.annealing_steps:
            passed = math.floor(min(max(fraction, 0.0), 1.0) * self.annealing_steps)
            self.hardness = self.initial_hardness * (1 - passed / self.annealing_steps)

    def losses(self, block: Anchors, *known: Tensor) -> Tensor:
        positive, scores, prior = block.positive_logits, block.scores, self.class_prior
        alone, masked = block.num_negatives == 0, block.excluded
        if not block.all_have_negatives:
            masked = masked & ~alone[:, None]
        importance = (self.hardness * scores).masked_fill(masked, -torch.inf)
        weighted = ((1 + self.hardness) * scores).masked_fill(masked, -torch.inf)
        log_sum = torch.logsumexp(weighted, dim=1) - torch.logsumexp(importance, dim=1) + block.log_num_negatives
        if prior:
            # log G: the difference of exponentials in the log domain, where it exceeds the floor.
            log_count = block.log_num_negatives
            gap = log_count + math.log(prior) + positive - log_sum
            above = gap < 0
            # The inner where keeps log1p finite on rows that take the floor, so that their gradient is 0, not NaN.
            shrink = torch.log1p(-torch.exp(torch.where(above, gap, -torch.ones_like(gap))))
            difference = log_sum + shrink - math.log1p(-prior)
            floor = log_count - 1 / block.temperature
            log_sum = torch.where(above & (difference > floor), difference, floor)
        loss = torch.logaddexp(positive, log_sum) - positive
        return loss if block.all_have_negatives else torch.where(alone, positive - positive, loss)


class SigLIP(Objective):
    """−log σ(s⁺/τ + b) − Σ_c log σ(−(s_c/τ + b)) per anchor (Zhai et al. 2023, Algorithm 1), for comparison.

    Not an estimate of the global contrastive loss.

    Args:
        temperature: starting value of τ.
        learnable_temperature: learn log τ with the model.
        bias: starting value of b.
        learnable_bias: learn b with the model.
        **common: see `Objective`.
    """

    both_at_once = True

    def __init__(
        self,
        *,
        temperature: float = 0.1,
        learnable_temperature: bool = True,
        bias: float = -10.0,
        learnable_bias: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(temperature=temperature, learnable_temperature=learnable_temperature, **common)
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learnable_bias)

    def losses(self, block: Anchors, *known: Tensor) -> Tensor:
        attract = logsigmoid(block.positive_logits + self.bias)
        repel = logsigmoid(-(block.scores + self.bias)).masked_fill(block.excluded, 0.0)
        return -attract - repel.sum(dim=1)
