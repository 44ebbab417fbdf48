"""SogCLR: each anchor's partition function is a moving average."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors, WithGradient
from dualenc.objectives.base import Objective
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.state import LogAverages, first_rows, log_average, mean_by_first


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
    both_at_once = True
    knows_partition = True

    def __init__(
        self, *, gamma: float = 0.9, gamma_schedule: Literal["constant", "cosine"] = "constant", **common: Any
    ) -> None:
        super().__init__(**common)
        if not 0 < gamma <= 1:
            self._fail("gamma", f"is {gamma}; it must lie in (0, 1]")
        self.final_gamma, self.gamma_schedule = gamma, gamma_schedule
        self.gamma = gamma if gamma_schedule == "constant" else 1.0
        self.left_averages = LogAverages(self.num_left or 1, on_cpu=self.state_on_cpu)
        self.right_averages = self.left_averages
        if not self.views:
            self.right_averages = LogAverages(self.num_right or 1, on_cpu=self.state_on_cpu)

    def set_progress(self, fraction: float) -> None:
        if self.gamma_schedule == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * min(max(fraction, 0.0), 1.0)))
            self.gamma = self.final_gamma + (1 - self.final_gamma) * fall

    def statistics(self, block: Anchors) -> tuple[Tensor, ...]:
        return (block.log_mean_exp,)

    def update(self, anchors: Anchors, *found: Tensor) -> tuple[Tensor, ...]:
        return (self._track(anchors, *found),)

    def _track(self, anchors: Anchors, log_mean: Tensor) -> Tensor:
        """(A,) log u_a, this step's mean counted in."""

        def table(some: Anchors) -> LogAverages:
            return self.left_averages if some.side == "left" else self.right_averages

        def remembered(some: Anchors) -> Tensor:
            return table(some).take("log_u", some.ids, some.known and some.known.own)

        def remember(some: Anchors, log_u: Tensor, log_mean: Tensor | None = None) -> None:
            table(some).store(some.ids, log_u, log_mean, some.sizes, some.known)

        all_usable = anchors.all_have_negatives
        old = anchors.by_direction(remembered).to(log_mean)
        log_u = log_average(old, log_mean, self.gamma, all_usable)
        if self.updates_state:
            anchors.by_direction(remember, log_u, *([] if anchors.distinct_rows else [log_mean]))
        self._watch(anchors, log_u)
        # An anchor that has never met a negative has no average; it has no weights either.
        return log_u if all_usable else torch.nan_to_num(log_u, nan=0.0)

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of u, so of the mean of exp(s/τ) over all negatives: equal ones need no memory."""
        return self._spread("log_mean_exp")

    def losses(self, block: Anchors, *known: Tensor) -> Tensor:
        (log_u,) = known
        with torch.no_grad():
            weights = torch.exp(block.logits - (log_u + block.log_num_negatives)[:, None])
            # The positive is no negative, and pulls with −1.
            weights.scatter_(1, block.positive_place, -1.0)
            value = log_u + self.log_corpus_size(block) - block.positive_scores
        return WithGradient.apply(value, block.scores, weights)


class ISogCLR(SogCLR):
    """SogCLR where anchor a has its own τ_a, moved by its own gradient with momentum and clamped to a range.

    The dual of a constraint KL(weights ‖ uniform) ≤ ρ (Qiu et al. 2023, "Not all semantics are created equal",
    Algorithm 1): with u_a the moving average of the mean of exp(s/τ_a) and weights w_c = exp(s_c/τ_a)/(n·u_a),

        F_a(τ) = τ·log mean_c exp((s_c − s⁺)/τ) + τ·ρ,   ∂F_a/∂τ = log u_a + ρ − Σ_c w_c s_c/τ_a

    The embeddings' gradient Σ_c w_c ∇s_c − ∇s⁺ is scaled by 1/temperature, the starting τ, as in all other
    objectives; with frozen τ_a it is that of SogCLR.

    Args:
        radius: ρ ≥ 0; larger radii let temperatures fall further and weights concentrate more.
        temperature_rate: step size of τ_a; 0 freezes the temperatures.
        temperature_momentum: share of the old gradient of τ_a in its moving average, in [0, 1).
        min_temperature, max_temperature: bounds of τ_a.
        gamma, gamma_schedule: see `SogCLR`.
        **common: see `Objective`; `temperature` is the starting value of every τ_a.
    """

    def __init__(
        self,
        *,
        radius: float = 0.3,
        temperature_rate: float = 0.01,
        temperature_momentum: float = 0.1,
        min_temperature: float = 0.005,
        max_temperature: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if radius < 0 or temperature_rate < 0 or not 0 <= temperature_momentum < 1:
            self._fail(
                "radius and temperature_rate",
                "must be 0 or more, temperature_momentum in [0, 1); "
                f"they are {radius}, {temperature_rate}, {temperature_momentum}",
            )
        if not 0 < min_temperature <= max_temperature:
            ends = f"{min_temperature} and max_temperature {max_temperature}"
            self._fail("min_temperature", f"{ends} must satisfy 0 < min ≤ max")
        if self.log_temperature.requires_grad:
            self._fail("learnable_temperature", "does not apply; every anchor learns its own temperature")
        self.radius, self.temperature_rate, self.temperature_momentum = radius, temperature_rate, temperature_momentum
        self.bounds = (min_temperature, max_temperature)
        start = float(self.temperature)
        self.left_temperatures = AnchorTemperatures(self.num_left or 1, start, self.state_on_cpu)
        self.right_temperatures = self.left_temperatures
        if not self.views:
            self.right_temperatures = AnchorTemperatures(self.num_right or 1, start, self.state_on_cpu)

    def statistics(self, block: Anchors) -> tuple[Tensor, ...]:
        def remembered(some: Anchors) -> Tensor:
            return self._temperatures(some).take("tau", some.ids, some.known and some.known.own)

        tau = block.by_direction(remembered).to(block.temperature)
        logits = _own_logits(block, tau)
        # The mean similarity under the softmax is what τ's slope needs; NaN in a row without negatives.
        mean = (torch.softmax(logits, dim=1) * block.similarities).sum(dim=1)
        return tau, torch.logsumexp(logits, dim=1) - block.log_num_negatives, mean

    def update(self, anchors: Anchors, *found: Tensor) -> tuple[Tensor, ...]:
        tau, log_mean, mean_similarity = found
        log_u = self._track(anchors, log_mean)
        self._watch(anchors, log_u, tau)
        if self.temperature_rate and self.updates_state:
            # Σ_c w_c s_c, with weights exp(s_c/τ_a)/(n·u_a).
            pull = torch.exp(log_mean - log_u) * mean_similarity
            rows = [log_u + self.radius - pull / tau]
            anchors.by_direction(self._move, *rows, *([] if anchors.all_have_negatives else [anchors.num_negatives]))
        return tau, log_u

    def diagnostics(self) -> dict[str, Tensor]:
        """As of SogCLR, and the anchors' own temperatures."""
        return self._spread("log_mean_exp") | self._spread("own_temperature", 1)

    def _move(self, anchors: Anchors, slope: Tensor, num_negatives: Tensor | None = None) -> None:
        """v ← momentum·v + (1 − momentum)·slope, of an item that stands in several rows their mean; τ ← τ − rate·v."""
        ids, slope = (distributed.gather(values, anchors.sizes) for values in (anchors.ids, slope))
        some = None if num_negatives is None else distributed.gather(num_negatives, anchors.sizes) > 0
        if not anchors.distinct_rows:
            usable = torch.ones_like(ids, dtype=torch.bool) if some is None else some
            slope, some = mean_by_first(slope, usable, first_rows(ids))
        table, everyone = self._temperatures(anchors), anchors.known and anchors.known.all_anchors
        old, old_tau = (table.take(name, ids, everyone) for name in ("momentum", "tau"))
        velocity = torch.lerp(old, slope.to(old), 1 - self.temperature_momentum)
        new_tau = torch.sub(old_tau, velocity, alpha=self.temperature_rate).clamp(*self.bounds)
        table.put(ids, everyone, some, momentum=velocity, tau=new_tau)

    def _temperatures(self, anchors: Anchors) -> AnchorTemperatures:
        return self.left_temperatures if anchors.side == "left" else self.right_temperatures

    def losses(self, block: Anchors, *known: Tensor) -> Tensor:
        tau, log_u = known
        with torch.no_grad():
            # The positive is no negative, and pulls with −1.
            weights = torch.exp(_own_logits(block, tau) - (log_u + block.log_num_negatives)[:, None])
            weights.scatter_(1, block.positive_place, -1.0).div_(block.temperature)
            value = log_u + self.log_corpus_size(block) - block.positive_similarities / tau
        return WithGradient.apply(value, block.similarities, weights)


def _own_logits(block: Anchors, tau: Tensor) -> Tensor:
    """(A, C) s/τ_a, -inf where a candidate is no negative."""
    logits = block.similarities / tau[:, None]
    if block.distinct_rows:
        return logits.scatter_(1, block.positive_place, -torch.inf)
    return logits.masked_fill_(block.excluded, -torch.inf)


class AnchorTemperatures(ItemState):
    """τ, at first `start`, and the momentum of its gradient for each of N items."""

    tau: Tensor
    momentum: Tensor

    def __init__(self, num_items: int, start: float, on_cpu: bool) -> None:
        super().__init__(on_cpu)
        self.register_buffer("tau", torch.full((num_items,), start))
        self.register_buffer("momentum", torch.zeros(num_items))
