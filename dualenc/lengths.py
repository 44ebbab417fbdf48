"""Prepared items in chunks of like length, so that almost nothing of a batch is padding."""

from __future__ import annotations

import torch
from torch import Tensor

from dualenc.types import Inputs


def chunk_rows(inputs: Inputs, chunk_size: int) -> list[Tensor]:
    """Row numbers of each chunk: texts of like length together, longest first; images in their order.

    Longest first: if memory runs out, it does so at once.

    Args:
        inputs: n prepared items; texts have an "attention_mask" (n, T).
        chunk_size: rows per chunk.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return list(torch.arange(len(next(iter(inputs.values())))).split(chunk_size))
    return list(torch.argsort(mask.sum(dim=1), descending=True, stable=True).split(chunk_size))


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some rows of prepared items, without the columns that are padding in all of them."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return {name: tensor[rows] for name, tensor in inputs.items()}
    used = torch.nonzero(mask[rows].any(dim=0)).reshape(-1)
    columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(None)
    return {name: t[rows, columns] if t.shape == mask.shape else t[rows] for name, t in inputs.items()}
