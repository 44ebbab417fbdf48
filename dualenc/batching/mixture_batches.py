"""Batches of a mixture: several sources, each drawn in proportion to its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from dualenc.batching.selector import BatchSelector
from dualenc.errors import DualencError


class MixtureBatches(BatchSelector):
    """Random batches of pairs that are ordered by source, each source drawn in proportion to its
    weight.

    Of a source of M pairs and weight w an epoch draws n = round(w·M): each pair ⌊n/M⌋ times, and r
    = n mod M of them once more. From epoch to epoch these r walk round a random order of the
    source: with a weight below 1 all pairs come before one comes again. A batch holds a pair at
    most once; random pairs that do not fill a batch are left out of the epoch.

    Args:
        sizes: (K,) pairs in each source; their indices follow one another.
        weights: (K,) of each source, above 0.
        batch_size: B, pairs in each (global) batch.
        seed: of all random choices; equal (seed, epoch) give equal batches.
        one_source: all pairs of a batch come from one source; each source then gives ⌊n/B⌋ batches,
            in random order.
        names: of the sources, for errors.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        seed: int = 0,
        *,
        one_source: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(sum(sizes), batch_size, seed)
        self.sizes = list(sizes)
        self.one_source = one_source
        self.draws: list[int] = []
        for size, weight in zip(sizes, weights, strict=True):
            self.draws.append(round(weight * size))
        if one_source:
            self.batches_of = [draws // batch_size for draws in self.draws]
        else:
            together = sum(self.draws) // batch_size
            self.batches_of = [together] * len(self.draws)
        for number, weight in enumerate(weights):
            name = names[number] if names else f"source {number}"
            self._check_source(name, number, weight)

    def _check_source(self, name: str, number: int, weight: float) -> None:
        size = self.sizes[number]
        draws = self.draws[number]
        batches = self.batches_of[number]
        drawn = f"{name} has {size} pairs, of which an epoch draws {draws} at weight {weight:g}"
        if draws < 1:
            raise DualencError(f"{drawn}; raise its weight")
        if batches < 1 or (self.one_source and size < self.batch_size):
            whole = "in batches of one source" if self.one_source else "from all sources together"
            raise DualencError(
                f"{drawn}, too few for a batch of {self.batch_size} {whole}; lower batch_size"
            )
        # The most frequent pair needs as many batches as it comes.
        if math.ceil(draws / size) > batches:
            raise DualencError(
                f"{drawn}, in {batches} batches: some pair would come twice in a batch; lower the weight or the batch "
                "size"
            )

    @property
    def num_batches(self) -> int:
        """Batches in one epoch, the same in each."""
        return sum(self.batches_of) if self.one_source else self.batches_of[0]

    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """(num_batches, B) int64 pair indices of an epoch ≥ 0; embeddings are ignored."""
        draw = self.generator(epoch)
        counts = [self.counts(number, epoch) for number in range(len(self.sizes))]
        if not self.one_source:
            return deal(np.concatenate(counts), self.num_batches, self.batch_size, draw)
        batches = []
        start = 0
        for number, size in enumerate(self.sizes):
            num_batches = self.batches_of[number]
            dealt = deal(counts[number], num_batches, self.batch_size, draw)
            batches.append(start + dealt)
            start += size
        return draw.permutation(np.concatenate(batches))

    def counts(self, number: int, epoch: int) -> ndarray:
        """(M,) the number of times that each pair of a source is drawn in an epoch."""
        size = self.sizes[number]
        whole, rest = divmod(self.draws[number], size)
        counts = np.full(size, whole, dtype=np.int64)
        if rest:
            # Not by the epoch's generator: all epochs walk through one order.
            order = np.random.default_rng([self.seed, 0, number, 1]).permutation(size)
            once_more = order[(epoch * rest + np.arange(rest)) % size]
            counts[once_more] += 1
        return counts


def deal(counts: ndarray, num_batches: int, batch_size: int, draw: Generator) -> ndarray:
    """(num_batches, B) random batches of pairs that occur several times, but never twice in a
    batch.

    Like cards: the pairs are put in random order, copies of one next to each other, and dealt out
    in rounds in which each batch gets one, in random order. So copies in a round go to different
    batches; those of the one pair that spans the end of a round are separated afterwards. With one
    copy each it is a uniform partition.

    Args:
        counts: (N,) copies of each pair, at most `num_batches`, together at least num_batches·B;
            the rest is left out.
        num_batches: number of batches.
        batch_size: B.
        draw: random generator.
    """
    order = draw.permutation(len(counts))
    cards = np.repeat(order, counts[order])
    cards = cards[: num_batches * batch_size]
    rounds = cards.reshape(batch_size, num_batches)
    # Rounds that begin with the last pair of the round before.
    first = rounds[1:, 0]
    last = rounds[:-1, -1]
    spanning = 1 + np.flatnonzero(first == last)
    pairs = rounds[spanning, 0]
    rounds = draw.permuted(rounds, axis=1)
    for number, pair in zip(spanning.tolist(), pairs.tolist(), strict=True):
        previous = rounds[number - 1] == pair
        current = rounds[number] == pair
        # A batch that has the pair from both rounds swaps one copy with a random batch that has
        # none.
        twice = np.flatnonzero(previous & current)
        free = np.flatnonzero(~previous & ~current)
        partners = draw.permutation(free)[: len(twice)]
        copies = rounds[number, twice]
        rounds[number, twice] = rounds[number, partners]
        rounds[number, partners] = copies
    return np.ascontiguousarray(rounds.T)
