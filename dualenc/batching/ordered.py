"""Ordered SGD: of random batches, those with the largest loss."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np

from dualenc.batching.losses import batch_losses
from dualenc.batching.selector import BatchSelector, Remainder, check_at_least, check_temperature
from dualenc.errors import DualencError

logger = logging.getLogger(__name__)

MAX_COMBINATIONS = 1_000_000


class OSGDBatches(BatchSelector):
    """Of each k random batches, the q with the largest loss; the other pairs are left out of the epoch.

    By default the k batches are disjoint (Algorithm 6, without replacement): an epoch is a random partition into
    N/B batches, cut into windows of k. With `exhaustive` the q come from all C(N, B) batches (Algorithm 5 with
    k = C(N, B)), for small N: one call of `select` is one iteration, and its batches may share pairs.
    How many pairs an epoch leaves out is logged; `left_out` counts them.

    Source: Cho et al., Mini-Batch Optimization of Contrastive Loss, Algorithms 5 and 6; Kawaguchi & Lu 2020.

    Args:
        num_pairs: N, the number of training pairs.
        batch_size: B, pairs in each (global) batch.
        seed: of the partitions.
        k: batches to choose from, as in the paper; a window of fewer (the last, or all if k > N/B) gives in
            proportion. Unused if exhaustive.
        q: batches to choose, at most k.
        temperature: τ of the loss.
        exhaustive: Algorithm 5 instead of 6.
        remainder: of the partition, when B does not divide N: "drop" or "wrap".

    Raises:
        DualencError: an argument is out of its range, or C(N, B) exceeds a million.
    """

    needs_embeddings = True

    def __init__(
        self,
        num_pairs: int,
        batch_size: int,
        seed: int = 0,
        k: int = 1500,
        q: int = 150,
        temperature: float = 0.1,
        exhaustive: bool = False,
        remainder: Remainder = "drop",
    ) -> None:
        super().__init__(num_pairs, batch_size, seed, remainder)
        check_at_least(1, k=k, q=q)
        check_temperature(temperature)
        if q > k and not exhaustive:
            raise DualencError(f"q is {q} but k is {k}; choose a q of at most k")
        if exhaustive and math.comb(num_pairs, batch_size) > MAX_COMBINATIONS:
            raise DualencError(
                f"C({num_pairs}, {batch_size}) batches are more than {MAX_COMBINATIONS:,}; set exhaustive=False"
            )
        self.k, self.q, self.temperature, self.exhaustive = k, q, temperature, exhaustive

    @property
    def num_batches(self) -> int:
        """Batches that one call of `select` returns once it is given embeddings."""
        if self.exhaustive:
            return min(self.q, math.comb(self.num_pairs, self.batch_size))
        full, rest = divmod(self.partition_size, self.k)
        return full * self.q + self._share_of(rest)

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """As `BatchSelector.select`: the batches of the largest loss, by falling loss within each window of k."""
        candidates = self.random_batches(self.generator(epoch))
        if left is None:
            return candidates
        left, right = self.check_embeddings(left, right)
        if self.exhaustive:
            pairs = itertools.combinations(range(self.num_pairs), self.batch_size)
            candidates = np.array(list(pairs), dtype=np.int64)
        losses = batch_losses(left, right, candidates, self.temperature)
        chosen = candidates[self._hardest(losses)]
        logger.info("epoch %d leaves out %d of %d pairs", epoch, self.left_out(chosen), self.num_pairs)
        return chosen

    def _hardest(self, losses: np.ndarray) -> np.ndarray:
        """(num_batches,): which candidates to take, given the loss of each."""
        if self.exhaustive:
            return np.argsort(-losses, kind="stable")[: self.q]
        windows = np.split(np.arange(len(losses)), range(self.k, len(losses), self.k))
        ordered = [window[np.argsort(-losses[window], kind="stable")] for window in windows]
        return np.concatenate([window[: self._share_of(len(window))] for window in ordered])

    def _share_of(self, window: int) -> int:
        return math.ceil(self.q * window / self.k)
