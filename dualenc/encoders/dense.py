"""What stands behind pooling in a sentence-transformers folder: Dense and Normalize, read and written."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dualenc.errors import DualencError, first_line
from dualenc.files import write_json
from dualenc.reading import read_json_object

WEIGHTS_FILE = "model.safetensors"
LARGEST = 1 << 20
"""Sizes beyond it are mistakes."""

ACTIVATIONS: dict[str, type[nn.Module]] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish)
}
"""Names that a folder may give: classes of torch alone, looked up and never imported by name."""
OLDER_NAMES = {"torch.nn.Tanh": nn.Tanh, "torch.nn.Identity": nn.Identity, "torch.nn.ReLU": nn.ReLU}


class Dense(nn.Module):
    """x ↦ f(Wx + b), and x, or Rx where the sizes differ, added to it if it is residual.

    Args:
        input_dim: size of x.
        dim: D, size of the result.
        bias: whether there is b.
        activation: f.
        residual: whether x, or Rx, is added.
    """

    def __init__(
        self, input_dim: int, dim: int, bias: bool = True, activation: nn.Module | None = None, residual: bool = False
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(input_dim, dim, bias=bias)
        self.activation = activation or nn.Identity()
        self.is_residual = residual
        if residual and input_dim != dim:
            self.residual = nn.Linear(input_dim, dim, bias=False)

    @property
    def dim(self) -> int:
        """D, size of the result."""
        return self.linear.out_features

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors (B, input_dim) to (B, D)."""
        result: Tensor = self.activation(self.linear(vectors))
        if self.is_residual:
            result = result + (self.residual(vectors) if hasattr(self, "residual") else vectors)
        return result

    def write(self, folder: Path) -> None:
        """Write config.json and weights into a new folder, as sentence-transformers' module of this name reads them."""
        folder.mkdir()
        kind = type(self.activation)
        config = {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__name__}",
            **({"use_residual": True} if self.is_residual else {}),  # older versions do not know the key
        }
        write_json(folder / "config.json", config)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS_FILE)


class Normalize(nn.Module):
    """Vectors (B, D) to length one."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Scale vectors (B, D) to length one."""
        return nn.functional.normalize(vectors, dim=-1)


def first_components(input_dim: int, dim: int) -> Dense:
    """A Dense module that gives the first components of its input as they are."""
    dense = Dense(input_dim, dim, bias=False)
    nn.init.eye_(dense.linear.weight)
    return dense


def kept_components(module: nn.Module) -> int | None:
    """How many first components a module keeps that does nothing else; None of every other module."""
    if not isinstance(module, Dense) or module.linear.bias is not None or module.is_residual:
        return None
    weight = module.linear.weight
    if type(module.activation) is not nn.Identity or len(weight) >= weight.shape[1]:
        return None
    return len(weight) if torch.equal(weight, torch.eye(*weight.shape)) else None


def read_dense(folder: Path) -> Dense:
    """Read a Dense module's folder; an activation is one of torch's own, and code in the folder is never run.

    Raises:
        DualencError: settings or weights are missing, corrupt, or not among what can be expressed.
    """
    path = folder / "config.json"
    config = read_json_object(path, {"in_features": int, "out_features": int})
    sizes = config["in_features"], config["out_features"]
    if not all(1 <= size <= LARGEST for size in sizes):
        raise DualencError(f"{path}: sizes {sizes[0]} and {sizes[1]} are no layer's; restore the file")
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    known = ACTIVATIONS | OLDER_NAMES
    if name not in known:
        raise DualencError(
            f"{path}: activation_function {name} is not supported; only "
            f"{', '.join(kind.__name__ for kind in ACTIVATIONS.values())} of torch"
        )
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise DualencError(f"{path}: {key} is {config[key]!r}; only sentence_embedding is supported")
    dense = Dense(*sizes, config.get("bias", True) is True, known[name](), config.get("use_residual") is True)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise DualencError(f"{folder}: no {WEIGHTS_FILE}; convert its weights to safetensors first")
    try:
        dense.load_state_dict(load_file(weights))
    except Exception as error:  # of safetensors, torch and the file system
        raise DualencError(f"{weights}: does not load ({first_line(error)}); restore the file") from error
    return dense
