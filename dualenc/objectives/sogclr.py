"""SogCLR and iSogCLR: a moving average of each anchor's partition function.

Shapes: see `anchors`.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, log_count, log_mean
from dualenc.objectives.base import CommonArguments, Estimate, Objective, temperature_term
from dualenc.objectives.checks import check_range, fail
from dualenc.objectives.item_tables import (
    first_occurrence,
    log_average,
    mean_over_duplicates,
    write_log_means,
    write_rows,
)


class SogCLR(Objective):
    """Weighs negative c of anchor a by exp(s_c/τ) / (n·u_a), with a moving average u_a.

    u_a tracks the mean of exp(s/τ) over the anchor's n negatives. Its first visit sets it, whatever
    the rest of the batch. Source: Yuan et al. 2022, "Provable stochastic optimization for global
    contrastive learning", arXiv:2202.12387, Algorithm 1.

        criterion = SogCLR(num_left=m, num_right=n, temperature=0.07)
        criterion(left, right, left_id, right_id).loss.backward()

    Args:
        gamma: rate of the moving average, in (0, 1].
        **common: see `Objective`.
    """

    log_u: Tensor

    needs_num_left = True
    estimates_partition = True

    def __init__(self, *, gamma: float = 0.9, **common: Unpack[CommonArguments]) -> None:
        super().__init__(**common)
        check_range("gamma", gamma, "(0, 1]")
        self.gamma = gamma
        # NaN: never visited.
        self.register_buffer("log_u", torch.full((self.corpus.num_rows,), torch.nan))

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            log_means = anchors.in_blocks(lambda block: log_mean(block.logits))  # (X, A)
            log_u = self.update_averages(anchors, log_means)
            # Z is the mean over negatives times their number in the corpus.
            log_partition = log_u + self.corpus.log_num_negatives(anchors)
            value = self.log_odds(log_partition, anchors.positive_scores)
            tau = anchors.temperature.expand_as(log_u)
        return anchors.in_blocks(self._weigh, tau, log_u, value)

    @staticmethod
    def _weigh(block: Anchors, tau: Tensor, log_u: Tensor, value: Tensor) -> Tensor:
        """Return (X, a) losses with weights exp(s_c/τ_a)/(n·u_a).

        The gradient is that of s/τ with the objective's τ, while the weights use each anchor's τ_a.
        """
        scores = block.scores  # (X, a, C)
        with torch.no_grad():
            not_negative = block.not_negative
            log_num = log_count(~not_negative, like=scores)
            own_scores = scores * (block.temperature / tau)[..., None]  # s/τ_a
            log_total = (log_u + log_num)[..., None]  # log(n·u_a)
            weights = (own_scores - log_total).exp_().masked_fill_(not_negative, 0.0)
        positive = block.positive_similarities  # (X, a)
        losses = Estimate.apply(value, scores, weights, positive / block.temperature)
        fixed_positive = positive.detach() / block.temperature
        return losses + temperature_term(fixed_positive, weights.sum(dim=-1))

    def update_averages(self, anchors: Anchors, log_means: Tensor) -> Tensor:
        """Update u_a by this batch's log mean of exp(s/τ) (X, A).

        Returns:
            (X, A) log u_a; -inf if the anchor had no negative so far.
        """
        remembered = self.log_u[anchors.rows].to(log_means)
        log_u = log_average(remembered, log_means, self.gamma)
        if self.updates_state:
            # All ranks write the values of all ranks, so that the table is the same everywhere.
            rows = anchors.gather(anchors.rows).flatten()
            has_negatives = anchors.gather(log_means > -torch.inf).flatten()
            write_log_means(self.log_u, rows, anchors.gather(log_u).flatten(), has_negatives)
        self.record(log_mean_exp=log_u)
        return log_u.nan_to_num(nan=-torch.inf)


class SogCLRArguments(CommonArguments, total=False):
    """All keyword arguments of `SogCLR`, for the constructors of its subclasses."""

    gamma: float


class ISogCLR(SogCLR):
    """SogCLR with an own temperature τ_a per anchor, which follows its own gradient with momentum.

    It is the dual of the constraint KL(weights ‖ uniform) ≤ ρ (Qiu et al. 2023, "Not all semantics
    are created equal", arXiv:2305.11965, Algorithm 1). With u_a the moving average of the mean of
    exp(s/τ_a) and weights w_c = exp(s_c/τ_a)/(n·u_a),

        F_a(τ) = τ·log mean_c exp((s_c − s⁺)/τ) + τ·ρ
        ∂F_a/∂τ = log u_a − s⁺/τ_a + ρ − Σ_c w_c (s_c − s⁺)/τ_a

    The embeddings' gradient Σ_c w_c ∇s_c − ∇s⁺ is divided by `temperature`, the initial τ, as in
    all other objectives; with frozen τ_a it is that of SogCLR.

        criterion = ISogCLR(num_left=m, num_right=n, radius=0.3)
        criterion(left, right, left_id, right_id).loss.backward()

    Args:
        radius: ρ ≥ 0. A larger radius lets temperatures fall further, so that weights concentrate
            more.
        temperature_rate: step size of τ_a; 0 freezes the temperatures.
        temperature_momentum: weight of the old gradient of τ_a in its moving average, in [0, 1).
        min_temperature: lower bound of τ_a.
        max_temperature: upper bound of τ_a.
        **common: see `SogCLR`; `temperature` is the initial value of every τ_a.
    """

    tau: Tensor
    tau_momentum: Tensor

    def __init__(
        self,
        *,
        radius: float = 0.3,
        temperature_rate: float = 0.01,
        temperature_momentum: float = 0.1,
        min_temperature: float = 0.005,
        max_temperature: float = 1.0,
        **common: Unpack[SogCLRArguments],
    ) -> None:
        super().__init__(**common)
        check_range("radius", radius, "[0, inf)")
        check_range("temperature_rate", temperature_rate, "[0, inf)")
        check_range("temperature_momentum", temperature_momentum, "[0, 1)")
        check_range("max_temperature", max_temperature, "(0, inf)")
        check_range("min_temperature", min_temperature, f"(0, {max_temperature}]")
        start = round(self.temperature.item(), 6)
        check_range("temperature", start, f"[{min_temperature}, {max_temperature}]")
        if self.log_temperature.requires_grad:
            fix = "leave it out: every anchor learns its own temperature"
            fail("learnable_temperature", "does not apply", fix)
        self.radius = radius
        self.temperature_rate = temperature_rate
        self.temperature_momentum = temperature_momentum
        self.min_temperature = min_temperature
        self.max_temperature = max_temperature
        self.register_buffer("tau", torch.full((self.corpus.num_rows,), self.temperature.item()))
        self.register_buffer("tau_momentum", torch.zeros(self.corpus.num_rows))

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            tau = self.tau[anchors.rows].to(anchors.embeddings)
            positive = anchors.positive_similarities
            log_means, mean_similarity = anchors.in_blocks(self._statistics, tau)
            log_u = self.update_averages(anchors, log_means)
            if self.temperature_rate and self.updates_state:
                # Σ_c w_c (s_c − s⁺): the weights sum to exp(log_means − log_u).
                weighted_margin = torch.exp(log_means - log_u) * (mean_similarity - positive)
                slope = log_u - positive / tau + self.radius - weighted_margin / tau
                self._move_temperatures(anchors, slope, log_means > -torch.inf)
            log_partition = log_u + self.corpus.log_num_negatives(anchors)
            value = self.log_odds(log_partition, positive / tau)
        self.record(own_temperature=tau)
        return anchors.in_blocks(self._weigh, tau, log_u, value)

    @staticmethod
    def _statistics(block: Anchors, tau: Tensor) -> tuple[Tensor, ...]:
        """Return (X, A) log of the mean of exp(s/τ_a), and (X, A) the mean s under the softmax.

        The mean similarity is NaN without negatives.
        """
        similarities = block.similarities  # (X, a, C)
        scores = similarities / tau[..., None]  # s/τ_a
        logits = scores.masked_fill(block.not_negative, -torch.inf)
        shares = logits.softmax(dim=-1)
        mean_similarity = (shares * similarities).sum(dim=-1)
        return log_mean(logits), mean_similarity

    def _move_temperatures(self, anchors: Anchors, slope: Tensor, usable: Tensor) -> None:
        """Move temperatures: v ← momentum·v + (1 − momentum)·slope, τ ← τ − rate·v.

        Args:
            anchors: anchors of the batch.
            slope: (X, A) ∂F_a/∂τ.
            usable: (X, A) True if the anchor has negatives.
        """
        rows = anchors.gather(anchors.rows).flatten()
        usable = anchors.gather(usable).flatten()
        # Two captions of an image give two slopes of one temperature, which are averaged.
        slopes = anchors.gather(slope).flatten()
        slope, written = mean_over_duplicates(slopes, usable, first_occurrence(rows))
        momentum = torch.lerp(
            self.tau_momentum[rows], slope.to(self.tau), 1 - self.temperature_momentum
        )
        tau = self.tau[rows] - self.temperature_rate * momentum
        write_rows(self.tau_momentum, rows, momentum, written)
        write_rows(self.tau, rows, tau.clamp(self.min_temperature, self.max_temperature), written)
