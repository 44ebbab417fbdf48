"""From one vector per token to one per text."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Pooling = Literal["mean", "cls", "last"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool the tokens of each text; padding may be on either side.

    Args:
        hidden: token vectors (B, T, D), any floating dtype.
        mask: (B, T), 1 for tokens and 0 for padding.
        pooling: "mean" of the tokens, the first ("cls") or the "last" token.

    Returns:
        (B, D) float32.
    """
    if pooling == "mean":
        total = (hidden * mask.unsqueeze(-1).to(hidden.dtype)).sum(1, dtype=torch.float32)
        return total / mask.sum(1, keepdim=True, dtype=torch.float32).clamp(min=1)
    first = mask.int().argmax(1)  # argmax gives the first of equal values
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    position = first if pooling == "cls" else last
    return hidden[torch.arange(len(hidden), device=hidden.device), position].float()
