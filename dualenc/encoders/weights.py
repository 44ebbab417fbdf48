"""Weights of models as safetensors files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from dualenc.errors import DualencError, explain


def check_safetensors(folder: Path, name: str = "*.safetensors") -> None:
    """Refuse a folder without safetensors weights."""
    if not any(folder.glob(name)):
        raise DualencError(f"{folder}: no {name}; convert its weights to safetensors first")


def check_floats(path: Path, names: Collection[str]) -> None:
    """Refuse a safetensors file in which one of these tensors is quantized to whole numbers."""
    with explain(f"{path}: does not load", "restore the file"), safe_open(path, "pt") as file:
        for name in {*names} & {*file.keys()}:
            kind = file.get_slice(name).get_dtype()
            if not re.match(r"(F|BF)\d+$", kind):
                problem = f"{name} is quantized to {kind}"
                remedy = "save it in float32 (model2vec: quantize_to='float32')"
                raise DualencError(f"{path}: {problem}; {remedy}")


def count_weights(path: Path) -> int:
    """The number of all tensors' entries in a safetensors file, read from its header."""
    with explain(f"{path}: does not load", "restore the file"), safe_open(path, "pt") as file:
        names = list(file.keys())
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def load_weights(module: Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes are exactly the module's."""
    with explain(f"{path}: does not load", "restore the file"):
        module.load_state_dict(load_file(path))


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights as safetensors, as transformers reads them."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def settle_missing(
    module: Module,
    missing: Collection[str],
    outputs: Sequence[Tensor],
    where: Path | str,
) -> None:
    """Refuse missing weights on which a module's outputs depend; set others to zero, untrained.

    A library draws missing weights at random. Vectors that depend on them are noise. Others, such
    as those of a pooler behind the token vectors, would give the model a new checksum at each load.

    Args:
        module: as a library loaded it.
        missing: names of weights and buffers that its files lack.
        outputs: tensors of a forward pass, with their graph.
        where: the folder, for the error.
    """
    weights = dict(module.named_parameters())
    drawn = [name for name in missing if name in weights]
    unused: set[str] = set()
    if drawn:
        total = torch.stack([output.float().sum() for output in outputs]).sum()
        gradients = torch.autograd.grad(total, [weights[name] for name in drawn], allow_unused=True)
        unused = {name for name, gradient in zip(drawn, gradients) if gradient is None}
    # Other buffers, such as positions, are computed and not drawn.
    statistics = {name for name in missing if name.endswith(("running_mean", "running_var"))}
    if needed := sorted(({*drawn} - unused) | statistics):
        problem = f"{needed[0]} is missing"
        if len(needed) > 1:
            problem = f"{len(needed)} weights are missing, {needed[0]} first"
        raise DualencError(f"{where}: {problem}; restore the file of its weights")
    for name in unused:
        weights[name].requires_grad_(False).zero_()
