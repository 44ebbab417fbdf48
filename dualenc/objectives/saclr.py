"""SACLR: an unnormalized kernel whose scale is tracked instead of a softmax.

Shapes: see `anchors`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, log_count
from dualenc.objectives.base import CommonArguments, Objective, temperature_term
from dualenc.objectives.checks import check_choice, check_range
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.item_tables import log_average, write_log_means

# Stands for log 0 of a masked kernel. Finite, because a row of -inf has a NaN gradient.
LOG_NOTHING = -1e4


class SACLR(Objective):
    """−log q⁺ + s·(q⁺ + n·mean_{c ∈ M} q_c) with q = exp(−‖x − z‖²/(2τ)), 1/s a moving average.

    This is the I-divergence between the matrix of positives and s·q ("Stochastic approximation to
    contrastive learning"): row form Eq. 11 and Algorithm 1 (one scale per item), matrix form Eq. 6
    and Algorithm 2 (a single scale). Of N items n are negatives (with views two for each other
    image). The paper's kernel is exp(−‖x − z‖²/(2τ²)): its τ = 0.5 is temperature=0.25 here.

    The scale is that of Eq. 4,

        1/s ← ρ/s + (1 − ρ)·ξ,   ξ = (α·N + 1 − α)·q⁺ + (1 − α)·n·mean_{c ∈ M} q_c,

    with the positive once in the repulsive sum, as in Eq. 10. A step uses the scale it has just
    updated, so that the repulsion is at most 1/((1 − ρ)(1 − α)). In the matrix form 1/s is the mean
    of ξ over anchors; Eqs. 7–8 and Algorithm 2 (line 11) have the sum over all 2N, and therefore an
    s that is 2N times smaller. Algorithm 1 (line 13) has 2α where the text below Eq. 11 has α, as
    here.

        loss = SACLR(num_left=m, num_right=n, temperature=0.25)(left, right, left_id, right_id).loss

    Args:
        form: "row" keeps a scale per item, "matrix" one per direction.
        negatives: "all" candidates of the batch, or 1 drawn uniformly per anchor (with views, both
            views of it).
        alpha: weight of the positives in the scale, in [0, 1].
        rho: forgetting rate in [0, 1): weight of the old scale.
        **common: see `Objective`.
    """

    log_scale: Tensor

    needs_num_left = True

    def __init__(
        self,
        *,
        form: Literal["row", "matrix"] = "row",
        negatives: Literal[1, "all"] = "all",
        alpha: float = 0.125,
        rho: float = 0.9,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(**common)
        check_choice("form", form, ("row", "matrix"))
        check_choice("negatives", negatives, (1, "all"))
        check_range("alpha", alpha, "[0, 1]")
        check_range("rho", rho, "[0, 1)")
        self.form = form
        self.negatives = negatives
        self.alpha = alpha
        self.rho = rho
        num_scales = self.corpus.num_rows if form == "row" else len(self.directions)
        # Log of 1/s; NaN before the first visit.
        self.register_buffer("log_scale", torch.full((num_scales,), torch.nan))
        self.draws = SharedRandom(self.seed)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        draws = []
        if self.negatives == 1:
            draws.append(self.draws.per_anchor(anchors))
        log_mean, has_negatives = anchors.in_blocks(self._log_mean_kernel, *draws)
        log_positive = log_kernel(anchors.positive_similarities, anchors.temperature)
        log_num = has_negatives * self.corpus.log_num_negatives(anchors)
        with torch.no_grad():
            log_scale = self._update_scale(anchors, log_positive, log_mean, log_num)
        log_sum = torch.logaddexp(log_positive, log_mean + log_num)  # log(q⁺ + n·mean q)
        repulsion = torch.exp(log_sum - log_scale)
        # At the exact scale the I-divergence is the cross-entropy: −log q⁺ + log(1/s) + s·Σq − 1
        # (Eq. 13).
        losses = repulsion - log_positive + log_scale - 1
        fixed_positive = log_kernel(anchors.positive_similarities.detach(), anchors.temperature)
        return losses + temperature_term(fixed_positive, repulsion)

    def _log_mean_kernel(self, block: Anchors, uniform: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return (X, A) log of the mean of q over negatives, and (X, A) True if any exist.

        With uniform draws (X, A), a single negative per anchor is used.
        """
        not_sampled = block.not_negative
        has_negatives = ~not_sampled.all(dim=-1)
        if uniform is not None:
            not_sampled = self._all_but_one(not_sampled, uniform)
        log_kernels = log_kernel(block.similarities, block.temperature)
        log_kernels = log_kernels.masked_fill(not_sampled, LOG_NOTHING)
        log_sum = log_kernels.logsumexp(dim=-1)
        return log_sum - log_count(~not_sampled, like=log_kernels), has_negatives

    def _all_but_one(self, not_negative: Tensor, uniform: Tensor) -> Tensor:
        """Return (X, A, C) True except for the drawn negative, or both views of it."""
        num_items = not_negative.shape[-1] // self.num_views
        allowed = ~not_negative[..., :num_items]
        count = allowed.sum(dim=-1)
        last = (count - 1).clamp(min=0)
        chosen = (uniform * count).long().clamp(max=last)
        # The position of each candidate among the allowed ones.
        number = allowed.cumsum(dim=-1) - 1
        not_chosen = ~allowed | (number != chosen[..., None])
        return not_negative | torch.cat([not_chosen] * self.num_views, dim=-1)

    def _update_scale(
        self, anchors: Anchors, log_positive: Tensor, log_mean: Tensor, log_num: Tensor
    ) -> Tensor:
        """Return (X, A) log 1/s, updated by this step's ξ."""
        corpus_sizes = anchors.per_direction(map(self.corpus.size, anchors.directions))  # N
        # ξ = (α·N + 1 − α)·q⁺ + (1 − α)·n·mean q
        factor = self.alpha * corpus_sizes + 1 - self.alpha
        log_new = log_positive + torch.log(factor)
        if self.alpha < 1:
            log_negatives = log_mean + log_num + math.log1p(-self.alpha)
            log_new = torch.logaddexp(log_new, log_negatives)
        rows = anchors.rows
        if self.form == "matrix":
            rows = anchors.per_direction(anchors.directions).long().expand_as(rows)
            log_sum = anchors.gather(log_new).logsumexp(dim=1)
            log_mean_new = log_sum - math.log(max(anchors.num_batch, 1))
            log_new = log_mean_new[:, None].expand_as(log_new)
        old = self.log_scale[rows].to(log_new)
        log_scale = log_average(old, log_new, 1 - self.rho)
        if self.updates_state:
            all_rows = anchors.gather(rows).flatten()
            # The positive contributes to ξ, so every anchor has a scale.
            is_usable = torch.ones_like(all_rows, dtype=torch.bool)
            write_log_means(
                self.log_scale, all_rows, anchors.gather(log_scale).flatten(), is_usable
            )
        self.record(log_scale=log_scale)
        return log_scale


def log_kernel(similarities: Tensor, temperature: Tensor) -> Tensor:
    """Return log q of cosines: on the unit sphere, ‖x − z‖²/2 = 1 − s."""
    return -(1 - similarities) / temperature
