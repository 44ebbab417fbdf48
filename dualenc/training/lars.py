"""LARS: the learning rate of each layer in proportion to the norm of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dualenc.errors import DualencError


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling with momentum, for large batches.

    For weights w, gradient g and weight decay λ: the layer's rate is η·‖w‖ / (‖g‖ + λ‖w‖), and 1 where either norm
    is zero or the group sets `adapt` to False; v ← μv + rate·(g + λw); w ← w − lr·v.

    Source: You, Gitman, Ginsburg 2017, "Large batch training of convolutional networks", Algorithm 1; with the
    learning rate outside the momentum, as SimCLR trains.

    Args:
        params: parameters, or groups of them; a group may set lr, momentum, weight_decay, trust and adapt.
        lr: learning rate.
        momentum: μ in [0, 1).
        weight_decay: λ.
        trust: η, the trust coefficient.
        adapt: scale by the layer's rate; False gives SGD with momentum.
        epsilon: added to the denominator of the rate.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        adapt: bool = True,
        epsilon: float = 1e-12,
    ) -> None:
        if lr < 0 or weight_decay < 0 or trust <= 0 or not 0 <= momentum < 1:
            raise DualencError(
                f"LARS: lr {lr} and weight_decay {weight_decay} must be at least 0, trust {trust} above 0, "
                f"momentum {momentum} in [0, 1)"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt": adapt,
            "epsilon": epsilon,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decayed = gradient.add(parameter, alpha=group["weight_decay"])
        if group["adapt"]:
            decayed *= _layer_rate(parameter, gradient, group)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(decayed)
        parameter.add_(velocity, alpha=-group["lr"])


def _layer_rate(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Scalar η·‖w‖ / (‖g‖ + λ‖w‖), without asking the device for a value."""
    weight_norm, gradient_norm = parameter.norm(), gradient.norm()
    rate = group["trust"] * weight_norm / (gradient_norm + group["weight_decay"] * weight_norm + group["epsilon"])
    return torch.where((weight_norm > 0) & (gradient_norm > 0), rate, torch.ones_like(rate))
