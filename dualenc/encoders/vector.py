"""Adapters: towers over vectors that another model made, and their model folder."""

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
"""Larger layer sizes are taken for mistakes."""

TowerKind = Literal["linear", "mlp", "identity", "dense"]


class VectorEncoder(DualEncoder):
    """Train adapters over vectors, such as those of an API or of a large frozen model.

    Each tower scales its vectors to length one, maps them, and scales the result to length one. If
    input and output have the same size, an untrained model leaves all similarities unchanged.

        model = VectorEncoder(384, tower="dense", right_tower="identity")
        queries = model.encode(list(np.random.randn(3, 384)))

    Args:
        input_dim: size of the left vectors; filled in by recipes.
        tower: kind of the left tower. "linear": a matrix and a bias. "mlp": a residual perceptron
            with one hidden layer and a LayerNorm before it. "dense": the same without LayerNorm, so
            that sentence-transformers has modules for it. "identity": no change. If the sizes
            differ, the skip connection of "mlp" and "dense" is a matrix.
        dim: D, size of the embeddings; None for the size of the right vectors.
        hidden: width of the perceptron; None for twice the larger input size.
        right_tower: kind of the right tower; None for that of the left one. With "identity" only
            queries are adapted, and an existing index of the documents stays valid.
        right_input_dim: size of the right vectors; None for that of the left ones; filled in by
            recipes.
        shared: use the same weights on both sides; None if both towers have the same kind and size.
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
        # Recipes fill in the size of the data's vectors, None for texts and images.
        if input_dim is None:
            raise DualencError(
                "the data does not consist of vectors",
                fix="give embeddings, or choose another model",
            )
        right_tower = right_tower or tower
        right_input_dim = input_dim if right_input_dim is None else right_input_dim
        alike = (tower, input_dim) == (right_tower, right_input_dim)
        if shared and not alike:
            raise DualencError(
                f"shared towers must be alike, but the left one is {tower} of size {input_dim} "
                f"and the right one {right_tower} of size {right_input_dim}",
                fix="leave shared out, or give both the same kind and size",
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
        with explain(f"{folder}: does not load", "save the model again"):
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
    """Write a folder for `VectorEncoder.from_folder`.

    Args:
        left: left tower.
        right: right tower; None if it is the left one.
        weights: state dict of the model.
        folder: an empty folder.
    """
    right_config = None if right is None else right.config
    config = {"kind": "vector", "dim": left.dim, "left": left.config, "right": right_config}
    write_json(folder / DUALENC_FILE, config)
    save_weights(weights, folder / WEIGHTS_FILE)


class VectorTower(Tower):
    """Map vectors (B, input_dim) of any length to (B, D) unit-norm float32.

        tower = VectorTower("linear", input_dim=384, dim=128, hidden=None)
        vectors = tower(tower.prepare(list(np.random.randn(3, 384))))

    Args:
        kind: kind of map, see `VectorEncoder`.
        input_dim: size of the input vectors.
        dim: D, size of the output vectors.
        hidden: width of the perceptron of "mlp" and "dense"; ignored for others.
    """

    modality = "vector"

    def __init__(self, kind: TowerKind, input_dim: int, dim: int, hidden: int | None) -> None:
        super().__init__()
        hidden = hidden if kind in ("mlp", "dense") else None
        for name, size in (("input_dim", input_dim), ("dim", dim), ("hidden", hidden)):
            if size is not None and (not isinstance(size, int) or not 1 <= size <= MAX_DIM):
                raise DualencError(
                    f"{name} is {size!r}",
                    fix=f"give a whole number from 1 to {MAX_DIM:,}",
                )
        if kind not in get_args(TowerKind):
            raise DualencError(
                f"tower is {kind!r}",
                fix=f"choose one of {', '.join(get_args(TowerKind))}",
            )
        if kind == "identity" and input_dim != dim:
            raise DualencError(
                f"an identity cannot map vectors of size {input_dim} to size {dim}",
                fix="leave dim out, or choose another tower",
            )
        self.config = {"tower": kind, "input_dim": input_dim, "hidden": hidden}
        self.dim = self.feature_dim = dim
        self.prepare: VectorPrepare = VectorPrepare(input_dim)
        self.map: nn.Module = nn.Identity()
        if kind == "linear":
            self.map = _near_identity(input_dim, dim, bias=True)
        elif hidden is not None:
            self.map = Residual(input_dim, hidden, dim, normed=kind == "mlp")
        # The empty buffer records the device of an identity, which lacks weights. As it is not
        # persistent, it is not part of the checksum.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Map B vectors to (B, D) unit-norm float32."""
        return unit_norm(self.map(unit_norm(inputs["vector"])))

    def as_modules(self) -> list[nn.Module]:
        """Return the map as modules of sentence-transformers, with copies of the weights.

        They turn sentence embeddings (B, input_dim) into unit vectors (B, D).

        Raises:
            DualencError: the kind is "mlp"; sentence-transformers lacks a module for its LayerNorm.
        """
        from sentence_transformers.sentence_transformer.modules import Normalize

        layers: list[nn.Module] = []
        if isinstance(self.map, nn.Linear):
            layers = [_dense(self.map.weight, self.map.bias, nn.Identity())]
        elif isinstance(self.map, Residual):
            layers = self.map.as_dense()
        return [Normalize(), *layers, Normalize()]


class Residual(nn.Module):
    """Residual perceptron x ↦ √d·Sx + W₂ gelu(W₁ norm(x)), where W₂ starts at zero.

    S is the identity, or a matrix if the sizes differ. √d gives unit vectors the scale that
    LayerNorm outputs have, so that both terms are comparable.

        outputs = Residual(384, 768, 384, normed=True)(torch.randn(2, 384))

    Args:
        input_dim: d, size of the input.
        hidden: width of the hidden layer.
        dim: size of the output.
        normed: use a LayerNorm for norm(x); if False, norm(x) = √d·x.
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
        # Training starts from the similarities of the vectors as they came.
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors (B, input_dim) to (B, D)."""
        inputs = self.scale * vectors if self.norm is None else self.norm(vectors)
        change: Tensor = self.down(nn.functional.gelu(self.up(inputs)))
        return self.scale * self.skip(vectors) + change

    def as_dense(self) -> list[nn.Module]:
        """Return two equivalent Dense modules.

        The skip connection becomes 2·D more hidden units, because gelu(z) − gelu(−z) = z.
        """
        if self.norm is not None:
            raise DualencError(
                "a tower of kind mlp cannot be written as sentence-transformers modules",
                fix="train one of kind dense",
            )
        device = self.down.weight.device
        identity = torch.eye(self.down.out_features, device=device)
        skip = self.skip.weight if isinstance(self.skip, nn.Linear) else identity
        # Rows [W₁; S; -S] and columns [W₂, I, -I], scaled by √d like the input of `forward`.
        zeros = torch.zeros(2 * self.down.out_features, device=device)
        up = self.scale * torch.cat([self.up.weight, skip, -skip])
        down = torch.cat([self.down.weight, identity, -identity], dim=1)
        return [
            _dense(up, torch.cat([self.up.bias, zeros]), nn.GELU()),
            _dense(down, self.down.bias, nn.Identity()),
        ]


def _dense(weight: Tensor, bias: Tensor, activation: nn.Module) -> nn.Module:
    """Return a Dense module of sentence-transformers with copies of weight and bias."""
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
    """Return a linear map initialized to the identity, or orthonormal if the sizes differ."""
    linear = nn.Linear(input_dim, dim, bias=bias)
    if input_dim == dim:
        nn.init.eye_(linear.weight)
    else:
        nn.init.orthogonal_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class VectorPrepare(Prepare):
    """Stack vectors (input_dim,) to {"vector": (B, input_dim) float32}; nothing is random.

        VectorPrepare(2)([np.array([1.0, 0.0]), np.array([0.0, 1.0])])["vector"]  # (2, 2)

    Args:
        input_dim: required size of the vectors.
    """

    modality = "vector"

    def __init__(self, input_dim: int) -> None:
        self.input_dim = input_dim

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        """Collate B vectors.

        Args:
            items: B arrays (input_dim,).
            seeds: ignored, since vectors are not augmented.
        """
        for item in items:
            if len(item) != self.input_dim:
                raise DualencError(
                    f"a vector has dimension {len(item)}, but this side of the model "
                    f"takes {self.input_dim}",
                    fix="embed the data with the model that made the training vectors",
                )
        return {"vector": torch.from_numpy(np.stack(items).astype(np.float32, copy=False))}
