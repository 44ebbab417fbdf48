"""Who meets whom in a batch: at random, by falling loss, or by likeness."""

from dualenc.batching.clustered import SpectralBatches
from dualenc.batching.losses import batch_losses
from dualenc.batching.ordered import OSGDBatches
from dualenc.batching.random_batches import RandomBatches
from dualenc.batching.selector import BatchSelector

__all__ = ["BatchSelector", "OSGDBatches", "RandomBatches", "SpectralBatches", "batch_losses"]
