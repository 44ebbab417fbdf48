"""Adapters: towers over vectors that another model made, with their folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Prepare, Tower, unit_norm
from dualenc.encoders.weights import load_weights, save_weights
from dualenc.errors import DualencError, explain
from dualenc.io.files import write_json
from dualenc.io.reading import read_json_object
from dualenc.types import Inputs

WEIGHTS_FILE = "model.safetensors"
MAX_DIM = 1 << 20
"""Larger sizes of layers are mistakes."""

TowerKind = Literal["linear", "mlp", "identity", "dense"]


class VectorEncoder(DualEncoder):
    """Adapters over vectors, such as those of an API or of a large model that stays as it is.

    Each tower scales its vectors to length one, maps them, and scales the result to length one.
    Where input and output have the same size, an untrained model gives the similarities of the
    vectors as they came.

    Args:
        input_dim: size of the left vectors; recipes fill it in.
        tower: "linear": a matrix and a bias; "mlp": the same vectors plus a perceptron of one
            hidden layer on them (a matrix instead where the sizes differ); "dense": likewise,
            without a LayerNorm before the perceptron, so that sentence-transformers has modules for
            it; "identity": the vectors as they are.
        dim: D, size of the embeddings; by default that of the right vectors.
        hidden: width of the perceptron; by default twice the size of the larger input.
        right_tower: kind of the right tower; by default as the left one. With "identity" only
            queries are adapted, and an index of the documents stays valid.
        right_input_dim: size of the right vectors; by default that of the left ones; recipes fill
            it in.
        shared: whether both towers are the same weights; by default where both are of one kind and
            size.
    """

    left: VectorTower
    right: VectorTower

    def __init__(
        self,
        input_dim: int,
        *,
        tower: TowerKind = "mlp",
        dim: int | None = None,
        hidden: int | None = None,
        right_tower: TowerKind | None = None,
        right_input_dim: int | None = None,
        shared: bool | None = None,
    ) -> None:
        if input_dim is None:  # what recipes fill in of texts and images
            raise DualencError(
                "the data holds no vectors to adapt; give embeddings, or choose another model"
            )
        right_tower = right_tower or tower
        right_input_dim = input_dim if right_input_dim is None else right_input_dim
        alike = (tower, input_dim) == (right_tower, right_input_dim)
        if shared and not alike:
            raise DualencError(
                f"shared towers, but left is {tower} of {input_dim} and right {right_tower} of {right_input_dim}; "
                "leave shared out, or make them alike"
            )
        dim = right_input_dim if dim is None else dim
        hidden = 2 * max(input_dim, right_input_dim) if hidden is None else hidden
        left = VectorTower(tower, input_dim, dim, hidden)
        right = (
            left
            if alike and shared is not False
            else VectorTower(right_tower, right_input_dim, dim, hidden)
        )
        super().__init__(left, right, kind="vector")

    @classmethod
    def from_folder(cls, folder: Path) -> VectorEncoder:
        """Load a folder that `save` wrote."""
        expected = {"dim": int, "left": dict, "right": (dict, NoneType)}
        config = read_json_object(folder / DUALENC_FILE, expected)
        left = config["left"]
        right = config["right"] or left
        with explain(f"{folder}: cannot be loaded", "save the model again"):
            model = cls(
                left["input_dim"],
                tower=left["tower"],
                dim=config["dim"],
                hidden=left["hidden"] or right["hidden"],
                right_tower=right["tower"],
                right_input_dim=right["input_dim"],
                shared=config["right"] is None,
            )
        load_weights(model, folder / WEIGHTS_FILE)
        return model

    def write(self, folder: Path) -> None:
        """Write dualenc.json and the weights of both towers."""
        right = None if self.shares_weights else self.right
        write_adapters(self.left, right, self.state_dict(), folder)


def write_adapters(
    left: VectorTower, right: VectorTower | None, weights: dict[str, Tensor], folder: Path
) -> None:
    """Write a folder for `VectorEncoder.from_folder`; a right tower of None is the left one."""
    right_config = None if right is None else right.config
    config = {"kind": "vector", "dim": left.dim, "left": left.config, "right": right_config}
    write_json(folder / DUALENC_FILE, config)
    save_weights(weights, folder / WEIGHTS_FILE)


class VectorTower(Tower):
    """Vectors (B, input_dim) of any length to (B, D) unit-norm float32; `hidden` is the width of
    "mlp" and "dense"."""

    modality = "vector"

    def __init__(self, kind: TowerKind, input_dim: int, dim: int, hidden: int | None) -> None:
        super().__init__()
        hidden = hidden if kind in ("mlp", "dense") else None
        for name, size in (("input_dim", input_dim), ("dim", dim), ("hidden", hidden)):
            if size is not None and (not isinstance(size, int) or not 1 <= size <= MAX_DIM):
                raise DualencError(f"{name} is {size!r}; give a whole number from 1 to {MAX_DIM:,}")
        if kind not in get_args(TowerKind):
            raise DualencError(f"tower is {kind!r}; choose one of {', '.join(get_args(TowerKind))}")
        if kind == "identity" and input_dim != dim:
            raise DualencError(
                f"an identity leaves vectors of {input_dim} as they are; dim cannot be {dim}"
            )
        self.config = {"tower": kind, "input_dim": input_dim, "hidden": hidden}
        self.dim = self.feature_dim = dim
        self.prepare: VectorPrepare = VectorPrepare(input_dim)
        self.map: nn.Module = nn.Identity()
        if kind == "linear":
            self.map = _near_identity(input_dim, dim, bias=True)
        elif hidden is not None:
            self.map = Residual(input_dim, hidden, dim, normed=kind == "mlp")
        # An identity has no weight that would tell which device to work on.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Map B vectors to (B, D) unit-norm float32."""
        return unit_norm(self.map(unit_norm(inputs["vector"])))

    def as_modules(self) -> list[nn.Module]:
        """The map as modules of sentence-transformers: sentence embeddings (B, input_dim) to unit
        vectors (B, D).

        The weights are copies. Raises `DualencError` for "mlp", whose LayerNorm has no place among
        them.
        """
        from sentence_transformers.sentence_transformer.modules import Normalize

        layers: list[nn.Module] = []
        if isinstance(self.map, nn.Linear):
            layers = [_dense(self.map.weight, self.map.bias, nn.Identity())]
        elif isinstance(self.map, Residual):
            layers = self.map.as_dense()
        return [Normalize(), *layers, Normalize()]


class Residual(nn.Module):
    """x ↦ √d·Sx + W₂ gelu(W₁ norm(x)); S is the identity, or a matrix where the sizes differ; W₂
    begins at zero.

    norm is a LayerNorm if `normed`, otherwise √d·x.
    """

    def __init__(self, input_dim: int, hidden: int, dim: int, normed: bool) -> None:
        super().__init__()
        self.skip = (
            nn.Identity() if input_dim == dim else _near_identity(input_dim, dim, bias=False)
        )
        self.scale = math.sqrt(input_dim)
        self.norm = nn.LayerNorm(input_dim) if normed else None
        self.up = nn.Linear(input_dim, hidden)
        self.down = nn.Linear(hidden, dim)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors (B, input_dim) to (B, D)."""
        inputs = self.scale * vectors if self.norm is None else self.norm(vectors)
        change: Tensor = self.down(nn.functional.gelu(self.up(inputs)))
        return self.scale * self.skip(vectors) + change

    def as_dense(self) -> list[nn.Module]:
        """Two Dense modules: gelu(z) − gelu(−z) = z, so the skip connection is 2·D more hidden
        units."""
        if self.norm is not None:
            raise DualencError(
                "a tower of kind mlp cannot be written as sentence-transformers modules; train one of kind dense"
            )
        device = self.down.weight.device
        identity = torch.eye(self.down.out_features, device=device)
        skip = self.skip.weight if isinstance(self.skip, nn.Linear) else identity
        zeros = torch.zeros(2 * self.down.out_features, device=device)
        up = self.scale * torch.cat([self.up.weight, skip, -skip])
        down = torch.cat([self.down.weight, identity, -identity], dim=1)
        return [
            _dense(up, torch.cat([self.up.bias, zeros]), nn.GELU()),
            _dense(down, self.down.bias, nn.Identity()),
        ]


def _dense(weight: Tensor, bias: Tensor, activation: nn.Module) -> nn.Module:
    """A Dense module of sentence-transformers with copies of a weight (D, input_dim) and a bias
    (D,)."""
    from sentence_transformers.sentence_transformer.modules import Dense

    dim, input_dim = weight.shape
    return Dense(
        input_dim,
        dim,
        activation_function=activation,
        init_weight=weight.detach().clone(),
        init_bias=bias.detach().clone(),
    )


def _near_identity(input_dim: int, dim: int, bias: bool) -> nn.Linear:
    """A linear map that begins as the identity; between different sizes, with orthonormal rows or
    columns."""
    linear = nn.Linear(input_dim, dim, bias=bias)
    if input_dim == dim:
        nn.init.eye_(linear.weight)
    else:
        nn.init.orthogonal_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class VectorPrepare(Prepare):
    """Stack vectors (input_dim,) to {"vector": (B, input_dim) float32}; seeds change nothing."""

    modality = "vector"

    def __init__(self, input_dim: int) -> None:
        self.input_dim = input_dim

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        """Collate B vectors, see `Prepare.__call__`."""
        for item in items:
            shape = getattr(item, "shape", None)
            if shape is None or len(shape) != 1:
                raise DualencError(
                    f"{str(item)[:40]!r} is no vector; give arrays ({self.input_dim},)"
                )
            if shape != (self.input_dim,):
                raise DualencError(
                    f"a vector has dimension {shape[0]}, but this side of the model takes {self.input_dim}; embed "
                    "the data with the model that made the training vectors"
                )
        return {"vector": torch.from_numpy(np.stack(items).astype(np.float32, copy=False))}
