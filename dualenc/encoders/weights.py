"""Weights of models as safetensors files."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from dualenc.errors import DualencError, explain


def check_safetensors(folder: Path, name: str = "*.safetensors") -> None:
    """Refuse a folder without safetensors weights."""
    if not any(folder.glob(name)):
        raise DualencError(f"{folder}: no {name}; convert its weights to safetensors first")


def load_weights(module: Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes are exactly the module's."""
    with explain(f"{path}: does not load", "restore the file"):
        module.load_state_dict(load_file(path))


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights as safetensors, as transformers reads them."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
