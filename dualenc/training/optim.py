"""Optimizers of timm and schedules of transformers by name; parameter groups; ranges of the arguments.

timm and transformers are imported where they are called: a recipe is read and checked without them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError, nearest

# The names in recipes: a wrong one is refused while a recipe is read, without importing timm.
OptimizerName = Literal[
    "adamw", "sgd", "lars", "lion", "muon", "adafactor", "adan", "adopt", "lamb", "laprop", "madgrad",
    "mars", "nadamw", "radam", "rmsprop"
]  # fmt: skip
ScheduleName = Literal["cosine", "linear", "constant", "inverse_sqrt", "warmup_stable_decay"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def build_optimizer(
    modules: Iterable[nn.Module],
    name: str = "adamw",
    learning_rate: float = 1e-4,
    weight_decay: float = 0.01,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    layer_decay: float = 1.0,
) -> Optimizer:
    """One of timm's optimizers over all trainable parameters of modules.

    Parameters with fewer than two dimensions (norms, biases, the temperature) get no weight decay, and under LARS
    (You et al. 2017, arXiv:1708.03888) no layer-wise rate.

    Args:
        modules: the model and the objective; a shared parameter counts once.
        name: any of `timm.optim.list_optimizers()`; "sgd" has Nesterov momentum.
        learning_rate: peak learning rate.
        weight_decay: of parameters with two or more dimensions.
        momentum: of optimizers that have one, such as "sgd", "lars" and "muon".
        betas: of optimizers that have two, such as "adamw" and "lion".
        layer_decay: the learning rate of a layer as a share of that of the layer above it, see `layer_depths`.

    Raises:
        DualencError: an unknown name, an argument out of range, an optimizer whose package is missing, or nothing to
            train.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_info

    check_optimizer(name, learning_rate, weight_decay, momentum, betas, layer_decay)
    # Read twice below.
    modules = list(modules)
    groups = parameter_groups(modules, weight_decay)
    if layer_decay != 1:
        groups = groups_by_depth(groups, modules, learning_rate, layer_decay)
    info = get_optimizer_info(name)
    arguments: dict[str, Any] = {}
    if info.has_betas and info.num_betas == 2:
        arguments["betas"] = betas
    if info.opt_class in (torch.optim.SGD, torch.optim.AdamW):
        arguments["fused"] = _can_fuse(trainable_parameters(modules))
    if name in ("lars", "larc", "nlars", "nlarc"):
        # Otherwise timm adapts no group without weight decay, which it takes for norms and biases.
        for group in groups:
            group["always_adapt"] = group["params"][0].dim() >= 2
    if name == "sgd" and momentum == 0:
        # The same optimizer without Nesterov's momentum, which must be above 0.
        name = "momentum"
    try:
        return create_optimizer_v2(groups, name, lr=learning_rate, momentum=momentum, **arguments)
    except Exception as error:
        raise DualencError(f"optimizer {name!r} cannot be made: {' '.join(str(error).split())}") from error


def _can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def check_optimizer(
    name: str,
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    betas: tuple[float, float],
    layer_decay: float = 1.0,
) -> None:
    """Refuse, as `build_optimizer` does, a name or arguments with which nothing could be learned."""
    if name not in get_args(OptimizerName):
        from timm.optim import get_optimizer_info, list_optimizers

        names = [str(listed) for listed in list_optimizers()]
        if name not in names:
            raise DualencError(
                f"optimizer is {name!r}{nearest(name, names)}; choose one of {', '.join(get_args(OptimizerName))}, or "
                "another of timm.optim.list_optimizers()"
            )
        if get_optimizer_info(name).second_order:
            raise DualencError(f"optimizer {name!r} needs second derivatives, which are not computed; choose another")
    if not 0 < learning_rate < math.inf:
        raise DualencError(f"learning_rate is {learning_rate}; it must be above 0, such as 1e-4")
    if not 0 <= weight_decay < math.inf:
        raise DualencError(f"weight_decay is {weight_decay}; it must be at least 0")
    if not 0 <= momentum < 1:
        raise DualencError(f"momentum is {momentum}; it must be in [0, 1), such as 0.9")
    if not 0 < layer_decay <= 1:
        raise DualencError(f"layer_decay is {layer_decay}; it must be in (0, 1], such as 0.9")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise DualencError(f"betas are {list(betas)}; give two numbers in [0, 1), such as [0.9, 0.999]")


def trainable_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """All parameters that training changes, each once, in a fixed order."""
    # By id: towers may share weights.
    return list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())


def parameter_groups(modules: Iterable[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay."""
    parameters = trainable_parameters(modules)
    if not parameters:
        raise DualencError("nothing to train: every weight of the model is fixed; unfreeze a tower")
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def layer_depths(model: nn.Module) -> dict[int, int]:
    """Depth below the top of its tower of each parameter, by `id`.

    The layers of a tower are its numbered blocks in their order, such as `encoder.layer.11.` or `resblocks.3.`: the
    last of L has depth 1, the first L. Modules before them (embeddings in any place, patches, a stem) have L + 1;
    modules behind them, and projections in any place, 0.
    """
    depths: dict[int, int] = {}
    for tower in model.children():
        block_of: dict[str, re.Match[str] | None] = {
            name: re.match(r".*?\.\d+\.", name) for name, _ in tower.named_parameters()
        }
        blocks = list(dict.fromkeys(match[0] for match in block_of.values() if match))
        # In the order of registration, which is that of the forward pass but for the exceptions below.
        last = max((place for place, match in enumerate(block_of.values()) if match), default=-1)
        reached = 0
        for place, (name, parameter) in enumerate(tower.named_parameters()):
            match = block_of[name]
            if match:
                reached = blocks.index(match[0]) + 1
                depth = len(blocks) + 1 - reached
            elif blocks and "embed" in name:  # open_clip registers its tokens' behind the blocks
                depth = len(blocks) + 1
            elif place > last or "proj" in name:
                depth = 0
            else:
                depth = len(blocks) + 1 - reached
            depths.setdefault(id(parameter), depth)
    return depths


def groups_by_depth(
    groups: Iterable[dict[str, Any]], modules: Iterable[nn.Module], learning_rate: float, layer_decay: float
) -> list[dict[str, Any]]:
    """The same groups, each divided by depth, with learning rate · layer_decay^depth; that of the top comes first.

    Layer-wise decay of learning rates: Howard and Ruder 2018, arXiv:1801.06146; as used here, Clark et al. 2020,
    arXiv:2003.10555.
    """
    depths = {
        key: depth
        for module in modules
        if isinstance(module, DualEncoder)
        for key, depth in layer_depths(module).items()
    }
    divided = []
    for group in groups:
        for depth in sorted({depths.get(id(p), 0) for p in group["params"]}):
            members = [p for p in group["params"] if depths.get(id(p), 0) == depth]
            divided.append({**group, "params": members, "lr": learning_rate * layer_decay**depth})
    # The first group's rate is what the log shows as learning rate.
    return sorted(divided, key=lambda group: -float(group["lr"]))


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Freeze the weights whose names match `fnmatch` patterns: `left.*`, `*.embeddings.*`, `*.layer.[0-5].*`.

    Args:
        model: changed in place.
        patterns: each must match a weight.

    Returns:
        How many numbers are frozen by it.

    Raises:
        DualencError: a pattern matches no weight.
    """
    frozen = 0
    named = dict(model.named_parameters())
    for pattern in patterns:
        matched = [parameter for name, parameter in named.items() if fnmatchcase(name, pattern)]
        if not matched:
            examples = list(named)[:: max(1, len(named) // 3)][:3]
            raise DualencError(f"freeze: {pattern!r} matches no weight; names are such as {', '.join(examples)}")
        for parameter in matched:
            if parameter.requires_grad:
                frozen += parameter.numel()
            parameter.requires_grad_(False)
    return frozen


def build_schedule(
    optimizer: Optimizer, name: str, total_steps: int, warmup: int | float = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """A linear warm-up, then one of transformers' schedules; one `step()` per optimizer step.

    Args:
        optimizer: its learning rate follows the schedule.
        name: "cosine" or "linear" decay to `final_fraction` of the peak, "constant", "inverse_sqrt", or
            "warmup_stable_decay", which decays over the last tenth (Hu et al. 2024, arXiv:2404.06395).
        total_steps: optimizer steps of the whole training.
        warmup: steps of warm-up (int), or their share of total_steps (float in [0, 1)).
        final_fraction: learning rate at the end, as a share of the peak; "inverse_sqrt" falls towards it.

    Raises:
        DualencError: an unknown name or an argument out of range.
    """
    from transformers import get_scheduler

    check_schedule(name, warmup, final_fraction)
    warmup_steps = int(warmup)
    if isinstance(warmup, float) and warmup < 1:
        warmup_steps = round(warmup * total_steps)
    special = None
    if name == "warmup_stable_decay":
        tenth = -(-total_steps // 10)
        special = {"num_decay_steps": min(tenth, max(0, total_steps - warmup_steps))}
    # Only the shape is theirs: their warm-up begins with a step of rate 0, and only their cosine can end above 0.
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    shape = get_scheduler(name, unused, warmup_steps, total_steps, special).lr_lambdas[0]

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return final_fraction + (1 - final_fraction) * float(shape(min(step, total_steps)))

    return LambdaLR(optimizer, factor)


def check_schedule(name: str, warmup: int | float, final_fraction: float) -> None:
    """Refuse, as `build_schedule` does, a name or arguments that make no learning rate."""
    if name not in SCHEDULES:
        raise DualencError(f"schedule is {name!r}{nearest(name, SCHEDULES)}; choose one of {', '.join(SCHEDULES)}")
    if not 0 <= final_fraction <= 1:
        raise DualencError(f"final_fraction is {final_fraction}; it must be in [0, 1]")
    if not 0 <= warmup < math.inf or (warmup >= 1 and warmup != int(warmup)):
        raise DualencError(f"warmup is {warmup}; give a number of steps, or a share of all steps below 1")
