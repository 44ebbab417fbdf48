"""Sharded models (FSDP): which modules are divided, how a model is assembled to be saved, what its checkpoints hold.

    shards/shard-00001-….safetensors      each rank's part of the weights, the optimizer state and the moving average

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
"""Optimizers that take the same step when each rank has a part of every weight."""


def check_shardable(
    model: DualEncoder, optimizer: str = "adamw", mixed_precision: str = "no", compiled: bool = False
) -> None:
    """Refuse what does not go with a sharded model.

    Args:
        model: before it is divided.
        optimizer: its name.
        mixed_precision: "no", "bf16" or "fp16".
        compiled: whether `torch.compile` is wanted.

    Raises:
        DualencError: in one line.
    """
    left = {id(parameter) for parameter in model.left.parameters()}
    right = {id(parameter) for parameter in model.right.parameters()}
    is_partly_shared = bool(left & right) and not model.shares_weights
    problems = (
        (
            optimizer not in SHARDED_OPTIMIZERS,
            f"optimizer {optimizer}",
            f"choose one of {', '.join(SHARDED_OPTIMIZERS)}",
        ),
        (mixed_precision == "fp16", "mixed_precision=fp16", "use bf16 or no"),
        (compiled, "compile", "leave compile out"),
        (uses_batch_statistics(model), "BatchNorm", "leave shard_model out, or choose a model without BatchNorm"),
        (is_partly_shared, "towers that have some weights in common", "let them share all of them or none"),
        (not distributed.can_shard(), f"torch {torch.__version__}", "install torch 2.9 or later"),
    )
    for applies, problem, remedy in problems:
        if applies:
            raise DualencError(f"shard_model does not go with {problem}; {remedy}")


def shard_model(model: DualEncoder, device: torch.device) -> DualEncoder:
    """Divide the weights of a model among all ranks, and move each rank's part to its device.

    Each repeated layer is a unit, whose weights are whole for its own pass only; the rest of a tower is another.

    Args:
        model: on any device, equal on all ranks; changed.
        device: of the parts.

    Returns:
        A copy of the model without weights and not divided, for `assembled`.
    """
    # Parameters are copied without memory; buffers with theirs: they are few, and not all of them are saved.
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    skeleton = copy.deepcopy(model, empty)
    for root in _roots(model):
        # Inner modules first: what is left is the root's own unit.
        distributed.shard([*repeated_layers(root), root], device)
        if isinstance(root, Tower) and type(root).features is not Tower.features:
            distributed.shard_forward(root, "features")
    model.to(device)
    return skeleton


def _roots(model: DualEncoder) -> list[nn.Module]:
    """Modules that hold all weights, each once, and are called as a whole."""
    roots: list[nn.Module] = list(dict.fromkeys((model.left, model.right)))
    if model.left is not model.right and model.shares_weights:
        # Two towers over the same modules.
        roots = list(model.left.children())
    return [module for module in roots if _has_parameters(module)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of layers of one class, such as the blocks of a transformer."""
    for child in module.children():
        layers = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
        are_alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
        if is_list and are_alike and _has_parameters(child):
            yield from layers
        else:
            yield from repeated_layers(child)


@contextmanager
def assembled(model: DualEncoder, skeleton: DualEncoder) -> Iterator[DualEncoder]:
    """In this context the main process has the whole model on its CPU; all ranks enter it together.

    Args:
        model: sharded.
        skeleton: returned by `shard_model`; yielded with all weights on the main process, elsewhere without.
    """
    tensors = distributed.whole_tensors(model.state_dict())
    # Assigned, not copied: on the main process the model is in memory once.
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
    """The state of a model, its optimizer and its averaged weights for a checkpoint, in two parts.

    Returns:
        Small values: buffers, scalars, settings; and tensors by name, of each of which a rank may hold a part.
    """
    optimizer_state = optimizer.state_dict()
    divisible = _divisible(model)
    rest = dict(model.state_dict())
    large = {f"model.{name}": rest.pop(name) for name in divisible}
    states: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        states[number] = {}
        for key, value in optimizer_state["state"].get(number, {}).items():
            # Of a divided value the small part keeps the precision, for `join_state` to make room for it.
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                large[f"optimizer.{number}.{key}"] = value
                states[number][key] = str(value.dtype).removeprefix("torch.")
            else:
                states[number][key] = value
    small = {"model": rest, "optimizer": {"state": states, "param_groups": optimizer_state["param_groups"]}}
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
    """Restore from `split_state()` on any number of ranks; all ranks call it together.

    Args:
        model: restored in place.
        optimizer: likewise.
        averages: likewise.
        small: the first part.
        folder: written by `dualenc.distributed.save_shards`, with the second.

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
    # An optimizer without a step yet has no tensors to load into: they are made here.
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
    """Like `join_state`, but only the weights that were evaluated: averaged ones, if there are any."""
    if "averages" in small:
        kind = "average"
        rest = small["averages"]["average"]
    else:
        kind = "model"
        rest = small["model"]
    weights = model.state_dict()
    for name, tensor in rest.items():
        weights[name].copy_(tensor)
    distributed.load_shards(folder, {f"{kind}.{name}": weights[name] for name in _divisible(model)})


def _divisible(model: DualEncoder) -> list[str]:
    """Names of the weights that are divided on several ranks: all parameters but scalars."""
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.dim()]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters in the order in which `state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
