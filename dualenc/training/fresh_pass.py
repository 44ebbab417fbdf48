"""Embeddings of all training pairs in evaluation mode, for the selection of batches."""

from __future__ import annotations

import numpy as np
import torch

from dualenc import distributed
from dualenc.training.embedding_table import EmbeddingTable
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import BatchLoader
from dualenc.training.random_state import random_state_kept
from dualenc.training.step import Step


def fresh_embeddings(step: Step, loader: BatchLoader, batch_size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Encode every pair without augmentation, dropout or batch statistics; every rank takes a share.

    Args:
        step: whose model is asked.
        loader: whose pairs; bad samples get random vectors.
        batch_size: pairs encoded at once on each rank.

    Returns:
        (M, D) and (M, D) float16 on the main process; empty arrays elsewhere.
    """
    pairs = loader.builder.pairs
    width = batch_size * distributed.world_size()
    encoding = PlainEncoding(step.model, step.device, step.accelerator.autocast)
    table = EmbeddingTable(len(pairs))
    step.model.eval()
    with torch.no_grad(), random_state_kept():
        # The last batch wraps around, so that all have the same width.
        order = np.resize(np.arange(len(pairs)), (-(-len(pairs) // width), width))
        for batch in loader.for_evaluation().batches(order):
            left = encoding.encode("left", batch.left)
            right = left if pairs.views else encoding.encode("right", batch.right)
            table.add(batch.indices, left, right, step=0)
    step.model.train()
    table.flush(step.device)
    nothing = np.zeros((0, 0), dtype=np.float16)
    return (nothing if table.left is None else table.left), (nothing if table.right is None else table.right)
