"""Batches of pairs that meet at random."""

from __future__ import annotations

import numpy as np

from dualenc.batching.selector import BatchSelector


class RandomBatches(BatchSelector):
    """A random partition of the pairs in each epoch (SGD without replacement).

    Source: Cho et al., Mini-Batch Optimization of Contrastive Loss, Algorithm 4.

    Args:
        num_pairs: N, the number of training pairs.
        batch_size: B, pairs in each (global) batch.
        seed: of the permutations.
        remainder: when B does not divide N: "drop" leaves N mod B random pairs out of the epoch; "wrap" adds
            one batch of them, filled up with other random pairs.

    Raises:
        DualencError: an argument is out of its range.
    """

    uniform = True

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """(num_batches, B) int64 pair indices of an epoch ≥ 0; embeddings make no difference."""
        return self.random_batches(self.generator(epoch))
