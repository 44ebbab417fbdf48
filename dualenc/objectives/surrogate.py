"""A loss with a value and a gradient of its own: what every estimator of the global loss returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualenc.errors import DualencError


class Estimate(torch.autograd.Function):
    """`Estimate.apply(value, scores, weights)`: losses with a value (X, A) whose gradient in the scores is `weights`.

    The gradient of the global loss is Σ_c p_c·∇s_c/τ − ∇s⁺/τ: it needs the negatives' weights p_c only, while the value
    needs the whole corpus. `scores` and `weights` are (X, A, C); no gradient flows through a weight.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, None]:
        refuse_second_derivatives()
        (weights,) = ctx.saved_tensors
        return None, grad_outputs[0][..., None] * weights, None


def temperature_term(positive_scores: Tensor, weight_sum: Tensor) -> Tensor:
    """(X, A) zeros with the gradient (1 − Σ_c w_c)·∇(s⁺/τ), to add where an estimator's weights need not sum to 1.

    L is a function of s − s⁺, so that its gradient in log τ is −Σ_c w_c·(s_c − s⁺)/τ: without this term every error of
    the sum would move τ by as much as s⁺/τ.

    Args:
        positive_scores: (X, A) s⁺/τ with a detached s⁺, so that the term reaches τ alone; of a kernel q, log q⁺.
        weight_sum: (X, A) Σ_c w_c.
    """
    missing = (1 - weight_sum).detach()[..., None]
    return Estimate.apply(torch.zeros_like(weight_sum), positive_scores[..., None], missing)


class FirstOrder(torch.autograd.Function):
    """`FirstOrder.apply(losses)`: the same losses, whose gradient takes a moving average for a constant."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        refuse_second_derivatives()
        return grad_outputs[0]


def refuse_second_derivatives() -> None:
    # torch's `once_differentiable` lets them pass where the incoming gradient is a constant.
    if torch.is_grad_enabled():
        raise DualencError("an objective has no second derivatives; call backward without create_graph")
