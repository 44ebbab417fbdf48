"""Optimizers (timm) and schedules (transformers) by name; parameter groups; frozen weights.

timm and transformers are imported late, so that recipes are checked without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dualenc.errors import DualencError
from dualenc.training.lazy_adam import LazyAdamW, sparse_tables

OptimizerName = Literal[
    "adamw",
    "sgd",
    "lars",
    "lion",
    "muon",
    "adafactor",
    "adan",
    "adopt",
    "lamb",
    "laprop",
    "madgrad",
    "mars",
    "nadamw",
    "radam",
    "rmsprop",
]
ScheduleName = Literal["cosine", "linear", "constant", "inverse_sqrt", "warmup_stable_decay"]


def build_optimizer(
    modules: Iterable[nn.Module],
    name: str = "adamw",
    learning_rate: float = 1e-4,
    weight_decay: float = 0.01,
    momentum: float = 0.9,
) -> Optimizer:
    """Create one of timm's optimizers for all trainable parameters of modules.

    Parameters with fewer than two dimensions (norms, biases, the temperature) get no weight decay
    and, under LARS (You et al. 2017, arXiv:1708.03888), no layer-wise rate. "sgd" uses Nesterov
    momentum. "adamw" is a `LazyAdamW` if an embedding table has sparse gradients.

    Args:
        modules: modules to train.
        name: name of the optimizer.
        learning_rate: peak learning rate.
        weight_decay: weight decay of parameters with two or more dimensions.
        momentum: momentum of optimizers that have one.

    Raises:
        DualencError: all weights are frozen.
    """
    from timm.optim import create_optimizer_v2

    modules = list(modules)
    groups = parameter_groups(modules, weight_decay)
    if name == "adamw" and sparse_tables(modules):
        return LazyAdamW(groups, lr=learning_rate)
    arguments: dict[str, Any] = {}
    if name in ("adamw", "sgd"):
        # Fused kernels exist for these devices only, and for real numbers.
        arguments["fused"] = all(
            parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()
            for parameter in trainable_parameters(modules)
        )
    if name == "lars":
        # By default timm adapts only groups with weight decay. With weight_decay=0 that would be
        # none.
        for group in groups:
            group["always_adapt"] = group["params"][0].dim() >= 2
    if name == "sgd" and momentum == 0:
        # The same optimizer without Nesterov momentum, which must be above 0.
        name = "momentum"
    optimizer = create_optimizer_v2(groups, name, lr=learning_rate, momentum=momentum, **arguments)
    optimizer.register_step_pre_hook(_densify_gradients)
    return optimizer


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a maximum total norm.

    Args:
        parameters: parameters whose gradients are scaled together.
        max_norm: maximum norm.

    Returns:
        The norm before scaling, a scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # torch before 2.14 cannot compute the norm of a sparse tensor.
    values = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients
    ]
    norm = get_total_norm(values)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _densify_gradients(optimizer: Optimizer, *_: Any) -> None:
    """Convert sparse gradients to dense ones, for optimizers that need these."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()


def trainable_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return all parameters that training changes, each once, in a fixed order."""
    # A module list removes duplicates: towers may share weights.
    parameters = nn.ModuleList(modules).parameters()
    return [parameter for parameter in parameters if parameter.requires_grad]


def parameter_groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into groups with and without weight decay.

    Args:
        modules: modules to train.
        weight_decay: weight decay of parameters with two or more dimensions.

    Raises:
        DualencError: all weights are frozen.
    """
    parameters = trainable_parameters(modules)
    if not parameters:
        raise DualencError(
            "nothing to train: every weight of the model is fixed",
            fix="unfreeze a tower",
        )
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@contextmanager
def frozen(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Freeze weights in this context.

    Args:
        model: model whose weights are frozen.
        patterns: glob patterns of parameter names (`fnmatch`): "left.*", "*.layer.[0-5].*".

    Raises:
        DualencError: a pattern matches no weight.
    """
    named = dict(model.named_parameters())
    trained = trainable_parameters([model])
    for pattern in patterns:
        matched = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if not matched:
            # Spread over the model, so that the names of both towers are seen.
            step = max(1, len(named) // 3)
            examples = list(named)[::step][:3]
            raise DualencError(
                f"{pattern!r} matches no weight",
                fix=f"names are {', '.join(examples)}, …",
                where="freeze",
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def build_schedule(
    optimizer: Optimizer, name: str, total_steps: int, warmup: int | float = 0
) -> LambdaLR:
    """Create a learning rate schedule: a linear warm-up, then one of transformers' schedules.

    "cosine" and "linear" decay to 0. "warmup_stable_decay" decays over the last tenth of the steps
    (Hu et al. 2024, arXiv:2404.06395). Call `step()` once per optimizer step.

    Args:
        optimizer: optimizer to schedule.
        name: name of the schedule.
        total_steps: number of optimizer steps.
        warmup: number of warm-up steps (int), or share of the steps (float in [0, 1)).
    """
    from transformers import get_scheduler

    warmup_steps = int(warmup)
    if isinstance(warmup, float) and warmup < 1:
        warmup_steps = round(warmup * total_steps)
    special = None
    if name == "warmup_stable_decay":
        tenth = -(-total_steps // 10)
        special = {"num_decay_steps": min(tenth, max(0, total_steps - warmup_steps))}
    # Only the shape after the warm-up is used: transformers' warm-up begins with a step of rate 0.
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    shape = get_scheduler(name, unused, warmup_steps, total_steps, special).lr_lambdas[0]

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return float(shape(min(step, total_steps)))

    return LambdaLR(optimizer, factor)
