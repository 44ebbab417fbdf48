"""Batch construction: random batches, and partitions by similarity."""

from dualenc.batching.selector import BatchSelector, RandomBatches, batch_losses
from dualenc.batching.spectral import SpectralBatches

__all__ = ["BatchSelector", "RandomBatches", "SpectralBatches", "batch_losses"]
