"""Model weights in safetensors files."""

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
    """Raise unless the folder has safetensors weights."""
    if not any(folder.glob(name)):
        raise DualencError(
            f"no {name}",
            fix="convert its weights to safetensors first",
            where=folder,
        )


def check_floats(path: Path, names: Collection[str]) -> None:
    """Raise if one of the named tensors in a safetensors file is quantized to integers."""
    with explain(f"{path}: does not load", "restore the file"), safe_open(path, "pt") as file:
        for name in {*names} & {*file.keys()}:
            # A slice gives type and shape without reading the tensor.
            kind = file.get_slice(name).get_dtype()
            if not re.match(r"(F|BF)\d+$", kind):
                raise DualencError(
                    f"{name} is quantized to {kind}",
                    fix="save it in float32 (model2vec: quantize_to='float32')",
                    where=path,
                )


def count_weights(path: Path) -> int:
    """Return the total number of elements in a safetensors file, read from its header."""
    with explain(f"{path}: does not load", "restore the file"), safe_open(path, "pt") as file:
        names = list(file.keys())
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def load_weights(module: Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes must match the module's exactly."""
    with explain(f"{path}: does not load", "restore the file"):
        module.load_state_dict(load_file(path))


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights as safetensors with the metadata that transformers requires."""
    # safetensors refuses tensors that are not contiguous.
    contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


def settle_missing(
    module: Module,
    missing: Collection[str],
    outputs: Sequence[Tensor],
    where: Path | str,
) -> None:
    """Raise if the outputs depend on missing weights; zero and freeze the other missing ones.

    Libraries initialize missing weights randomly. Vectors that depend on them are noise. Unused
    ones, such as a pooler behind the token vectors, would change the model's checksum at each load.

    Args:
        module: the module as a library loaded it.
        missing: names of weights and buffers that its files lack.
        outputs: tensors of a forward pass, with their graph.
        where: folder that the error names.
    """
    weights = dict(module.named_parameters())
    drawn = [name for name in missing if name in weights]
    unused: set[str] = set()
    if drawn:
        # `allow_unused` gives None for weights outside the graph. A gradient of zero is not proof
        # of independence, so its value does not matter.
        total = torch.stack([output.float().sum() for output in outputs]).sum()
        gradients = torch.autograd.grad(total, [weights[name] for name in drawn], allow_unused=True)
        unused = {name for name, gradient in zip(drawn, gradients) if gradient is None}
    # Running statistics are loaded, never computed. Other buffers, such as position ids, are
    # computed from the configuration.
    statistics = {name for name in missing if name.endswith(("running_mean", "running_var"))}
    if needed := sorted(({*drawn} - unused) | statistics):
        problem = f"{needed[0]} is missing"
        if len(needed) > 1:
            problem = f"{len(needed)} weights are missing, such as {needed[0]}"
        raise DualencError(problem, fix="restore the weights file", where=where)
    # Frozen, because no gradient would ever move them.
    for name in unused:
        weights[name].requires_grad_(False).zero_()
