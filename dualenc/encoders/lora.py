"""LoRA for any tower: adapters of low rank in its linear and attention layers, and their merging into the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dualenc.errors import DualencError

WEIGHT_NAMES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "weight")
"""Matrices of linear and attention layers."""
ALPHA_PER_RANK = 2
"""LoRA's alpha / rank, the scale of BA."""


class LowRank(nn.Module):
    """W ↦ W + 2·BA of a matrix (rows, columns); A is drawn as in a linear layer and B begins at zero."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, columns))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """The changed matrix (rows, columns)."""
        return weight + (ALPHA_PER_RANK * self.lora_B @ self.lora_A).to(weight.dtype)


def adapt(module: nn.Module, rank: int, targets: Sequence[str] | None = None) -> None:
    """Freeze a module and add trainable adapters W + 2·BA to its linear and attention layers, in place.

    LoRA (Hu et al. 2021, arXiv 2106.09685). Unlike peft's, the adapters are part of the weights wherever a layer reads
    them, as torch's attention layers do with projections that nobody calls. `targets` are endings of layers' names.
    """
    if rank < 1:
        raise DualencError(f"lora_rank is {rank}; give 1 or more, such as 8, or 0 for none")
    layers = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.MultiheadAttention):
            layers[name] = layer
    chosen = [layer for name, layer in layers.items() if targets is None or name.endswith(tuple(targets))]
    if not chosen:
        raise DualencError(
            f"LoRA: no layer's name ends in {list(targets or [])}; names are such as {', '.join(list(layers)[:3])}"
        )
    module.requires_grad_(False)
    for layer in chosen:
        for name in WEIGHT_NAMES:
            weight = getattr(layer, name, None)
            if isinstance(weight, nn.Parameter):
                rows, columns = weight.shape
                low_rank = LowRank(rows, columns, rank)
                parametrize.register_parametrization(layer, name, low_rank.to(weight.device))


@torch.no_grad()
def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """A module's state dict, with adapters merged into the weights and under the names from before."""
    state: dict[str, Tensor] = module.state_dict()
    for place, layer in module.named_modules():
        if parametrize.is_parametrized(layer):
            prefix = f"{place}." if place else ""
            for name in layer.parametrizations:  # type: ignore[union-attr]
                state[prefix + name] = getattr(layer, name).detach()
    return {name: tensor for name, tensor in state.items() if "parametrizations." not in name}
