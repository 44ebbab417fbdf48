"""The contrastive loss of given batches at given embeddings."""

from __future__ import annotations

import numpy as np

from dualenc.batching.selector import check_temperature


def batch_losses(
    left: np.ndarray,
    right: np.ndarray,
    batches: np.ndarray,
    temperature: float,
    chunk_bytes: int = 1 << 24,
) -> np.ndarray:
    """Loss of each batch: the `InfoNCE` objective of its pairs; `.mean()` is that of the epoch.

    The mean of both directions, so half of Eq. 2 in Cho et al., Mini-Batch Optimization of Contrastive Loss.

    Args:
        left: (N, D) unit-norm embeddings.
        right: (N, D) unit-norm embeddings.
        batches: (num_batches, B) pair indices.
        temperature: τ > 0.
        chunk_bytes: about how much memory to work in.

    Returns:
        (num_batches,) float64, in nats.

    Raises:
        DualencError: the temperature is not positive.
    """
    check_temperature(temperature)
    num_batches, batch_size = batches.shape
    per_batch = 4 * batch_size * (2 * left.shape[1] + 4 * batch_size)
    step = max(1, chunk_bytes // per_batch)
    losses = np.empty(num_batches)
    for start in range(0, num_batches, step):
        rows = batches[start : start + step]
        logits = np.matmul(left[rows], right[rows].swapaxes(1, 2)) / temperature  # (chunk, B, B)
        losses[start : start + step] = _info_nce(logits)
    return losses


def _info_nce(logits: np.ndarray) -> np.ndarray:
    """(chunk, B, B) logits s/τ to (chunk,): log Σ exp(logit) − positive logit, mean over anchors and directions."""
    positives = np.diagonal(logits, axis1=1, axis2=2)
    total = np.zeros(len(logits))
    for axis in (1, 2):
        highest = logits.max(axis=axis)
        log_sums = highest + np.log(np.exp(logits - np.expand_dims(highest, axis)).sum(axis=axis))
        total += (log_sums - positives).mean(axis=1, dtype=np.float64)
    return total / 2
