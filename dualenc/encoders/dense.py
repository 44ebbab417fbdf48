"""What stands behind pooling in a sentence-transformers folder: Dense and Normalize, read and written."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from dualenc.encoders.hub import check_safetensors, load_weights, save_weights
from dualenc.errors import DualencError
from dualenc.files import write_json
from dualenc.reading import read_json_object

WEIGHTS_FILE = "model.safetensors"

ACTIVATIONS = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish)
ACTIVATION_NAMES: dict[str, type[nn.Module]] = {
    f"{kind.__module__}.{kind.__name__}": kind for kind in ACTIVATIONS
}
"""Names that a folder may give: classes of torch alone, looked up and never imported by name."""


class Dense(nn.Module):
    """Vectors x (B, input_dim) ↦ f(Wx + b) (B, D)."""

    def __init__(self, input_dim: int, dim: int, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(input_dim, dim, bias=bias)
        self.activation = activation

    @property
    def dim(self) -> int:
        """D, size of the result."""
        return self.linear.out_features

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors (B, input_dim) to (B, D)."""
        result: Tensor = self.activation(self.linear(vectors))
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
        }
        write_json(folder / "config.json", config)
        save_weights(self.state_dict(), folder / WEIGHTS_FILE)


class Normalize(nn.Module):
    """Vectors (B, D) to length one."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Scale vectors (B, D) to length one."""
        return nn.functional.normalize(vectors, dim=-1)


def read_dense(folder: Path) -> Dense:
    """Read a Dense module's folder; an activation is one of torch's own, and code in the folder is never run."""
    path = folder / "config.json"
    config = read_json_object(path, {"in_features": int, "out_features": int})
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in ACTIVATION_NAMES:
        known = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        raise DualencError(f"{path}: activation_function {name} is not supported; only {known} of torch")
    if config.get("use_residual"):
        raise DualencError(f"{path}: use_residual is not supported; only f(Wx + b)")
    has_bias = config.get("bias", True) is True
    dense = Dense(config["in_features"], config["out_features"], has_bias, ACTIVATION_NAMES[name]())
    check_safetensors(folder, WEIGHTS_FILE)
    load_weights(dense, folder / WEIGHTS_FILE)
    return dense
