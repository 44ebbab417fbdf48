"""One tower: raw items in, unit-norm vectors out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Modality = Literal["text", "image"]
Side = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")


class Prepare:
    """Raw items to the tensors of one tower: picklable and without weights, so DataLoader workers can run it."""

    modality: Modality

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Collate items into one batch.

        Args:
            items: B raw items: `str` for text, RGB `PIL.Image` for images.
            seeds: None for the preprocessing of evaluation; otherwise one integer per item, and the training
                augmentation is a pure function of the item and its seed. Text ignores seeds.

        Returns:
            The tower's inputs by name; every tensor's first dimension is B.
        """
        raise TypeError(f"{type(self).__name__} does not define __call__")

    def lengths(self, items: Sequence[Any]) -> list[int]:
        """A cheap measure of each item's cost, for batches sorted by length; images all cost the same."""
        return [1] * len(items)


class Tower(nn.Module):
    """A module that encodes prepared inputs to unit vectors.

    Attributes:
        modality: "text" or "image".
        dim: D, the size of the vectors.
        feature_dim: size of what `features` returns.
        prepare: turns raw items into this tower's inputs.
    """

    modality: Modality
    dim: int
    feature_dim: int
    prepare: Prepare

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Encode B prepared items to (B, D) unit-norm float32, also under autocast."""
        raise TypeError(f"{type(self).__name__} does not define forward")

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """What embedding and probes use, (B, feature_dim): the vectors themselves unless a projector follows."""
        return self(inputs)


def unit_norm(vectors: Tensor) -> Tensor:
    """Scale (B, D) vectors of any floating dtype to length one, in float32."""
    return nn.functional.normalize(vectors.to(torch.float32), dim=-1)
