"""A model divided among ranks: in which modules, how it is put together to be saved, and what its checkpoints hold.

    shards/shard-00001-….safetensors      of each rank its part of the weights, of what the optimizer keeps of them, and
                                          of their moving average

Everything smaller is in `state.pt`, see `dualenc.training.checkpoint`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualenc import distributed
from dualenc.encoders.dual import DualEncoder, Tower
from dualenc.errors import DualencError
from dualenc.training.averages import AveragedWeights
from dualenc.training.encoding import uses_batch_statistics

SHARDED_OPTIMIZERS = (
    *("adamw", "sgd", "lars", "lion", "adan", "adopt", "laprop", "madgrad", "nadamw", "radam", "rmsprop"),
)
"""Those that take the same step when each rank has a part of every weight."""


def check_shardable(
    model: DualEncoder, optimizer: str = "adamw", mixed_precision: str = "no", compiled: bool = False
) -> None:
    """Refuse what does not go with a model of which each rank holds a part.

    Args:
        model: before it is divided.
        optimizer: its name.
        mixed_precision: "no", "bf16" or "fp16".
        compiled: whether `torch.compile` is wanted.

    Raises:
        DualencError: in one line.
    """
    left, right = ({id(p) for p in tower.parameters()} for tower in (model.left, model.right))
    partly = bool(left & right) and not model.shares_weights
    problems = (
        (
            optimizer not in SHARDED_OPTIMIZERS,
            f"optimizer {optimizer}",
            f"choose one of {', '.join(SHARDED_OPTIMIZERS)}",
        ),
        (mixed_precision == "fp16", "mixed_precision=fp16", "use bf16 or no"),
        (compiled, "compile", "leave compile out"),
        (uses_batch_statistics(model), "BatchNorm", "leave shard_model out, or choose a model without BatchNorm"),
        (partly, "towers that have some weights in common", "let them share all of them or none"),
        (not distributed.can_shard(), f"torch {torch.__version__}", "install torch 2.9 or later"),
    )
    for wrong, what, remedy in problems:
        if wrong:
            raise DualencError(f"shard_model does not go with {what}; {remedy}")


def shard_model(model: DualEncoder, device: torch.device) -> DualEncoder:
    """Divide the weights of a model among all ranks, and bring each rank's part to its device.

    Each repeated layer is a unit, whose weights are whole for its own pass only; what is left of a tower is another.

    Args:
        model: in any place, equal on all ranks; changed.
        device: where the parts are to be.

    Returns:
        The same model without weights and without the division, for `assembled`.
    """
    # Parameters stand for themselves on a device without memory; buffers are few, and not all of them are saved.
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    skeleton = copy.deepcopy(model, empty)
    for root in _roots(model):
        distributed.shard([*repeated_layers(root), root], device)
        if isinstance(root, Tower) and type(root).features is not Tower.features:
            distributed.shard_forward(root, "features")
    model.to(device)
    return skeleton


def _roots(model: DualEncoder) -> list[nn.Module]:
    """What holds all weights, each once, and is called as a whole."""
    if model.left is model.right or not model.shares_weights:
        return [tower for tower in dict.fromkeys((model.left, model.right)) if any(True for _ in tower.parameters())]
    # Two towers over the same modules.
    return [module for module in model.left.children() if any(True for _ in module.parameters())]


def repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of layers of one class, such as the blocks of a transformer."""
    for child in module.children():
        layers = list(child.children())
        alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and alike and any(True for _ in child.parameters()):
            yield from layers
        else:
            yield from repeated_layers(child)


@contextmanager
def assembled(model: DualEncoder, skeleton: DualEncoder) -> Iterator[DualEncoder]:
    """In this context the main process has the whole model on its CPU; all ranks enter it together.

    Args:
        model: sharded.
        skeleton: what `shard_model` returned; on the main process it is what is yielded, elsewhere without weights.
    """
    tensors = distributed.whole_tensors(model.state_dict())
    if tensors:
        skeleton.load_state_dict(tensors, assign=True)
    del tensors
    try:
        yield skeleton
    finally:
        empty = {name: p.detach().to("meta") for name, p in skeleton.named_parameters(remove_duplicate=False)}
        skeleton.load_state_dict(empty, assign=True, strict=False)


def split_state(
    model: DualEncoder, optimizer: Optimizer, averages: AveragedWeights | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a checkpoint keeps of a model, its optimizer and its averaged weights, in two parts.

    Returns:
        What is small: buffers, scalars, settings; and tensors by name, of each of which a rank may hold a part.
    """
    kept, divisible, rest = optimizer.state_dict(), _divisible(model), dict(model.state_dict())
    large = {f"model.{name}": rest.pop(name) for name in divisible}
    states: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        states[number] = {}
        for key, value in kept["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                large[f"optimizer.{number}.{key}"] = value
                states[number][key] = str(value.dtype).removeprefix("torch.")
            else:
                states[number][key] = value
    small = {"model": rest, "optimizer": {"state": states, "param_groups": kept["param_groups"]}}
    if averages is not None:
        rest = dict(averages.average)
        large |= {f"average.{name}": rest.pop(name) for name in divisible}
        small["averages"] = {"steps": averages.steps, "average": rest}
    return small, large


def join_state(
    model: DualEncoder,
    optimizer: Optimizer,
    averages: AveragedWeights | None,
    small: dict[str, Any],
    folder: Path,
) -> None:
    """Take over what `split_state` gave on any number of ranks; all ranks call it together.

    Args:
        model: whose weights are replaced.
        optimizer: likewise its state.
        averages: likewise.
        small: the first part.
        folder: where `dualenc.distributed.save_shards` has written the second.

    Raises:
        DualencError: the two do not fit.
    """
    weights = model.state_dict()
    large = {f"model.{name}": weights[name] for name in _divisible(model)}
    for name, tensor in small["model"].items():
        weights[name].copy_(tensor)
    if averages is not None:
        averages.load_state_dict(small["averages"])
        large |= {f"average.{name}": averages.average[name] for name in _divisible(model)}
    states: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        states[number] = dict(small["optimizer"]["state"].get(number, {}))
        for key, value in states[number].items():
            if isinstance(value, str):
                states[number][key] = torch.zeros_like(parameter, dtype=getattr(torch, value), requires_grad=False)
                large[f"optimizer.{number}.{key}"] = states[number][key]
    distributed.load_shards(folder, large)
    groups = small["optimizer"]["param_groups"]
    optimizer.load_state_dict({"state": {n: s for n, s in states.items() if s}, "param_groups": groups})


def join_evaluated(model: DualEncoder, small: dict[str, Any], folder: Path) -> None:
    """Take over only the weights that were evaluated, averaged ones if there are any; else as `join_state`."""
    kind, rest = ("average", small["averages"]["average"]) if "averages" in small else ("model", small["model"])
    weights = model.state_dict()
    for name, tensor in rest.items():
        weights[name].copy_(tensor)
    distributed.load_shards(folder, {f"{kind}.{name}": weights[name] for name in _divisible(model)})


def _divisible(model: DualEncoder) -> list[str]:
    """Names of the weights that are divided on several ranks: all parameters but scalars."""
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.dim()]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the order in which `state_dict` counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
