"""LARS: the learning rate of each layer in proportion to the norm of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

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


OptimizerName = Literal["adamw", "sgd", "lars"]
ScheduleName = Literal["cosine", "linear", "constant"]


def build_optimizer(
    modules: Iterable[nn.Module],
    name: OptimizerName = "adamw",
    learning_rate: float = 1e-4,
    weight_decay: float = 0.01,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
) -> Optimizer:
    """An optimizer over all trainable parameters of some modules.

    Parameters with fewer than two dimensions (norms, biases, the temperature) get no weight decay, and under LARS
    no layer-wise rate.

    Args:
        modules: the model and the objective; a shared parameter counts once.
        name: "adamw", "sgd" (Nesterov momentum when momentum > 0) or "lars".
        learning_rate: peak learning rate.
        weight_decay: of parameters with two or more dimensions.
        momentum: of "sgd" and "lars".
        betas: of "adamw".

    Raises:
        DualencError: an unknown name, an argument out of range, or nothing to train.
    """
    check_optimizer(name, learning_rate, weight_decay, momentum, betas)
    builders: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
        "adamw": lambda groups: torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=_fusable(groups)),
        "sgd": lambda groups: torch.optim.SGD(
            groups, lr=learning_rate, momentum=momentum, nesterov=momentum > 0, fused=_fusable(groups)
        ),
        "lars": lambda groups: LARS(groups, lr=learning_rate, momentum=momentum),
    }
    return builders[name](parameter_groups(modules, weight_decay))


def check_optimizer(
    name: OptimizerName, learning_rate: float, weight_decay: float, momentum: float, betas: tuple[float, float]
) -> None:
    """Refuse arguments of `build_optimizer` with which nothing could be learned.

    Raises:
        DualencError: an unknown name, or an argument out of range.
    """
    if name not in get_args(OptimizerName):
        raise DualencError(f"optimizer is {name!r}; choose one of {', '.join(get_args(OptimizerName))}")
    if not 0 < learning_rate < math.inf:
        raise DualencError(f"learning_rate is {learning_rate}; it must be above 0, such as 1e-4")
    if not 0 <= weight_decay < math.inf:
        raise DualencError(f"weight_decay is {weight_decay}; it must be at least 0")
    if not 0 <= momentum < 1:
        raise DualencError(f"momentum is {momentum}; it must be in [0, 1), such as 0.9")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise DualencError(f"betas are {list(betas)}; give two numbers in [0, 1), such as [0.9, 0.999]")


def trainable_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """All parameters that training changes, each once, in a fixed order."""
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())


def parameter_groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights that decay and, under LARS, adapt their rate; and the rest."""
    parameters = trainable_parameters(modules)
    if not parameters:
        raise DualencError("nothing to train: every weight of the model is fixed; unfreeze a tower")
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "adapt": True},
        {"params": others, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]


def build_schedule(
    optimizer: Optimizer,
    name: ScheduleName,
    total_steps: int,
    warmup: int | float = 0,
    final_fraction: float = 0.0,
) -> LambdaLR:
    """A linear warm-up, then the schedule; one `step()` per optimizer step.

    Args:
        optimizer: whose learning rate it drives.
        name: "cosine" or "linear" decay to `final_fraction` of the peak, or "constant".
        total_steps: optimizer steps of the whole training.
        warmup: steps of warm-up (int), or their share of total_steps (float in [0, 1)).
        final_fraction: learning rate at the end, as a share of the peak.

    Raises:
        DualencError: an unknown name or a warm-up out of range.
    """
    check_schedule(name, warmup, final_fraction)
    steps = warmup_steps(warmup, total_steps)
    decay = _DECAYS[name]

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / steps
        progress = min(1.0, (step - steps) / max(1, total_steps - steps))
        return final_fraction + (1 - final_fraction) * decay(progress)

    return LambdaLR(optimizer, factor)


def check_schedule(name: ScheduleName, warmup: int | float, final_fraction: float) -> None:
    """Refuse arguments of `build_schedule` that make no learning rate.

    Raises:
        DualencError: an unknown name, or an argument out of range.
    """
    if name not in _DECAYS:
        raise DualencError(f"schedule is {name!r}; choose one of {', '.join(_DECAYS)}")
    if not 0 <= final_fraction <= 1:
        raise DualencError(f"final_fraction is {final_fraction}; it must be in [0, 1]")
    if not 0 <= warmup < math.inf or (warmup >= 1 and warmup != int(warmup)):
        raise DualencError(f"warmup is {warmup}; give a number of steps, or a share of all steps below 1")


def warmup_steps(warmup: int | float, total_steps: int) -> int:
    """Steps of warm-up from a number or a share of all steps."""
    check_schedule("constant", warmup, 0.0)
    return round(warmup * total_steps) if isinstance(warmup, float) and warmup < 1 else int(warmup)


_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def _fusable(groups: list[dict[str, Any]]) -> bool:
    """One kernel for all weights: there is one for CUDA and, in recent torch, for the CPU."""
    parameters = [p for group in groups for p in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
