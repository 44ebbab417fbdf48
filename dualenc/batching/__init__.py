"""Who meets whom in a batch: at random, by falling loss, or by likeness."""

from dualenc.batching.selector import BatchSelector, OSGDBatches, RandomBatches, batch_losses
from dualenc.batching.spectral import SpectralBatches

__all__ = ["BatchSelector", "OSGDBatches", "RandomBatches", "SpectralBatches", "batch_losses"]
