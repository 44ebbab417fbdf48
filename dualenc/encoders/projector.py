"""The head that contrastive training puts behind an image backbone and probes leave out."""

from __future__ import annotations

from typing import Any

from torch import nn

from dualenc.errors import DualencError


def projector(features: int, dim: int, hidden: int, layers: int) -> nn.Sequential:
    """A perceptron with batch normalisation and ReLU between its layers (SimCLR, Chen et al. 2020, section 4.2).

    Args:
        features: size of the backbone's features.
        dim: D, size of the output.
        hidden: size between layers.
        layers: number of linear layers, at least 1; SimCLR has 2, VICReg's expander 3.

    Raises:
        DualencError: a size is not positive.
    """
    if min(dim, hidden, layers) < 1:
        raise DualencError(f"projector of {layers} layers, hidden {hidden}, dim {dim}: give positive numbers")
    parts: list[Any] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(features, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()]
        features = hidden
    return nn.Sequential(*parts, nn.Linear(features, dim, bias=False))
