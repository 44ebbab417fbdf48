"""Cutting prepared inputs into chunks that hold as little padding as can be."""

from __future__ import annotations

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


def num_rows(inputs: Inputs) -> int:
    """n, the first dimension of every tensor."""
    return len(next(iter(inputs.values())))


def chunk_rows(inputs: Inputs, chunk_size: int) -> list[Tensor]:
    """Row numbers of each chunk: texts of like length together, longest first; images in their order.

    Args:
        inputs: n prepared items; texts have an "attention_mask" (n, T).
        chunk_size: rows per chunk.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return list(torch.arange(num_rows(inputs)).split(chunk_size))
    return list(torch.argsort(mask.sum(dim=1), descending=True, stable=True).split(chunk_size))


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some rows, without the columns that are padding in all of them."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return {name: tensor[rows] for name, tensor in inputs.items()}
    used = torch.nonzero(mask[rows].any(dim=0)).reshape(-1)
    columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(None)
    return {name: t[rows, columns] if t.shape == mask.shape else t[rows] for name, t in inputs.items()}
