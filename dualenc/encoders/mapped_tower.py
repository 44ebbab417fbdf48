"""A tower of images or texts followed by a map of its vectors."""

from __future__ import annotations

from torch import Tensor

from dualenc.encoders.dual import Tower
from dualenc.encoders.vector import VectorTower
from dualenc.errors import DualencError
from dualenc.types import Inputs, Output


class MappedTower(Tower):
    """Encode with a tower, and map the leading components of its vectors (B, input_dim) to (B, D).

        clip = ImageTextEncoder("ViT-B-32", "openai")
        tower = MappedTower(clip.right, VectorTower("linear", 512, 512, None))

    Args:
        base: any tower.
        mapping: map that was trained on vectors of the base, or on their leading components.
        output: which vectors of the base are mapped, "embedding" or "features".

    Raises:
        DualencError: the map takes more components than the base gives.
    """

    def __init__(self, base: Tower, mapping: VectorTower, output: Output = "embedding") -> None:
        super().__init__()
        given = base.feature_dim if output == "features" else base.dim
        if mapping.prepare.input_dim > given:
            raise DualencError(
                f"the map takes vectors of {mapping.prepare.input_dim} numbers, but the model "
                f"gives {given}",
                fix="give the model that made the vectors",
            )
        self.modality = base.modality
        self.prepare = base.prepare
        self.base = base
        self.mapping = mapping
        self.output = output
        self.dim = self.feature_dim = mapping.dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B prepared items to (B, D) unit-norm float32."""
        vectors = self.base.features(inputs) if self.output == "features" else self.base(inputs)
        mapped: Tensor = self.mapping({"vector": vectors[:, : self.mapping.prepare.input_dim]})
        return mapped
