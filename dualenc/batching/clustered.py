"""Batches of pairs that are hard to tell apart."""

from __future__ import annotations

from typing import Literal

import numpy as np

from dualenc.batching.bandwidth import bandwidth_batches
from dualenc.batching.bisection import bisection_batches
from dualenc.batching.selector import (
    BatchSelector,
    Remainder,
    check_at_least,
    check_choice,
    check_temperature,
)
from dualenc.batching.spectral import Laplacian, spectral_batches
from dualenc.errors import DualencError

Method = Literal["bisection", "spectral", "bandwidth"]


class SpectralBatches(BatchSelector):
    """A partition of all pairs into equal batches of large contrastive loss.

    Methods:

    - "bisection": balanced recursive bisection along leading directions of the pair embeddings, over all pairs
      at once; seconds for 50,000 pairs.
    - "spectral": spectral clustering with equal clusters within random groups of k batches (Cho et al., Mini-Batch
      Optimization of Contrastive Loss, Algorithm 1).
    - "bandwidth": runs along a reverse Cuthill–McKee order of the nearest-neighbour graph (Sachidananda et al.
      2023, Global Selection of Contrastive Batches).

    Args:
        num_pairs: N, the number of training pairs.
        batch_size: B, pairs in each (global) batch.
        seed: of all random choices.
        method: how to partition.
        temperature: τ of the affinity ("spectral").
        k: batches in a random group ("spectral"): the time grows with k²·B²·N.
        laplacian: which eigenvectors ("spectral"): see `spectral.spectral_rows`.
        neighbors: edges from each pair ("bandwidth"); by default 8, or B − 1 if that is less.
        share: of the batches that are selected, in [0, 1]; the pairs of the others meet at random, which
            limits how often false negatives meet.
        remainder: when B does not divide N: "drop" leaves N mod B random pairs out of the epoch; "wrap" adds
            one random batch of them, filled up with other random pairs.

    Raises:
        DualencError: an argument is out of its range.
    """

    needs_embeddings = True

    def __init__(
        self,
        num_pairs: int,
        batch_size: int,
        seed: int = 0,
        method: Method = "bisection",
        temperature: float = 0.1,
        k: int = 40,
        laplacian: Laplacian = "normalized",
        neighbors: int | None = None,
        share: float = 1.0,
        remainder: Remainder = "drop",
    ) -> None:
        super().__init__(num_pairs, batch_size, seed, remainder)
        check_choice("method", method, ("bisection", "spectral", "bandwidth"))
        check_choice("laplacian", laplacian, ("normalized", "unnormalized"))
        check_temperature(temperature)
        check_at_least(1, k=k, neighbors=1 if neighbors is None else neighbors)
        if not 0 <= share <= 1:
            raise DualencError(f"share is {share}; choose a number from 0 to 1")
        self.method, self.temperature, self.k, self.laplacian = method, temperature, k, laplacian
        self.neighbors, self.share = neighbors, share

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """As `BatchSelector.select`; the order of the batches is random."""
        draw = self.generator(epoch)
        batches = self.random_batches(draw)
        if left is None:
            return batches
        left, right = self.check_embeddings(left, right)
        arrange = {"bisection": self._bisection, "spectral": self._spectral, "bandwidth": self._bandwidth}
        whole = self.num_pairs // self.batch_size  # all batches but the one that "wrap" fills up
        selected = arrange[self.method](left, right, batches[:whole], draw)
        return draw.permutation(np.concatenate([self._mix(selected, draw), batches[whole:]]))

    def _bisection(
        self, left: np.ndarray, right: np.ndarray, batches: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        rows = np.sort(batches, axis=None)  # in order of memory
        points = left[rows]
        points += right[rows]
        return rows[bisection_batches(points, self.batch_size, draw)]

    def _spectral(
        self, left: np.ndarray, right: np.ndarray, batches: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        selected = []
        for first in range(0, len(batches), self.k):
            rows = batches[first : first + self.k].ravel()
            seed = int(draw.integers(2**31))
            found = spectral_batches(left[rows], right[rows], self.batch_size, self.temperature, seed, self.laplacian)
            selected.append(rows[found])
        return np.concatenate(selected)

    def _bandwidth(
        self, left: np.ndarray, right: np.ndarray, batches: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        rows = np.sort(batches, axis=None)
        return rows[bandwidth_batches(left[rows], right[rows], self.batch_size, self.neighbors)]

    def _mix(self, selected: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Keep a random share of the batches; the pairs of the others meet at random."""
        order = draw.permutation(len(selected))
        kept, others = np.split(selected[order], [round(self.share * len(selected))])
        return np.concatenate([kept, draw.permutation(others.ravel()).reshape(others.shape)])
