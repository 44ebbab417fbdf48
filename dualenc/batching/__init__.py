"""Batch construction: random batches, those of the largest loss, and partitions by similarity."""

from dualenc.batching.selector import BatchSelector, OSGDBatches, RandomBatches, batch_losses
from dualenc.batching.spectral import SpectralBatches

__all__ = ["BatchSelector", "OSGDBatches", "RandomBatches", "SpectralBatches", "batch_losses"]
