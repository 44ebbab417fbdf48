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
    """Random batches from several sources, each drawn in proportion to its weight.

    From a source with M pairs and weight w, an epoch draws n = round(w·M) pairs: each pair ⌊n/M⌋
    times, and r = n mod M of them once more. From epoch to epoch these r pairs advance through one
    random order of the source, so with a weight below 1 every pair is used before any repeats. No
    pair occurs twice in a batch. Random pairs that do not fill a batch sit out the epoch.

    Example:
        batches = MixtureBatches(sizes=[100, 40], weights=[1.0, 0.5], batch_size=10)
        batches.select(epoch=0).shape  # (12, 10): 100 pairs of the first source, 20 of the second

    Args:
        sizes: (K,) numbers of pairs per source; pair indices are consecutive, source by source.
        weights: (K,) weights of the sources, above 0.
        batch_size: number of pairs in each global batch, B.
        seed: random seed; equal (seed, epoch) give equal batches.
        one_source: True to fill each batch from one source. Each source then gives ⌊n/B⌋ batches,
            in random order.
        names: (K,) names of the sources in error messages.

    Raises:
        DualencError: a source has too few pairs, or would occur twice in a batch at its weight.
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
        self.draws = [round(weight * size) for size, weight in zip(sizes, weights, strict=True)]
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
            raise DualencError(drawn, fix="raise its weight")
        if batches < 1 or (self.one_source and size < self.batch_size):
            origin = "in batches of one source" if self.one_source else "from all sources together"
            raise DualencError(
                f"{drawn}, too few for a batch of {self.batch_size} {origin}",
                fix="lower batch_size",
            )
        # The most frequent pair needs one batch per copy.
        copies = math.ceil(draws / size)
        if copies > batches:
            raise DualencError(
                f"{drawn}, in {batches} batches: some pair would come twice in a batch",
                fix="lower the weight or the batch size",
            )

    @property
    def num_batches(self) -> int:
        """Batches in one epoch, the same in each."""
        return sum(self.batches_of) if self.one_source else self.batches_of[0]

    def select(
        self, epoch: int, left: ndarray | None = None, right: ndarray | None = None
    ) -> ndarray:
        """Return (num_batches, B) int64 pair indices of an epoch; embeddings are ignored."""
        draw = self.generator(epoch)
        counts = [self.counts(number, epoch) for number in range(len(self.sizes))]
        if not self.one_source:
            all_counts = np.concatenate(counts)
            return deal(all_counts, self.num_batches, self.batch_size, draw)
        batches = []
        start = 0
        for own_counts, num_batches in zip(counts, self.batches_of, strict=True):
            dealt = deal(own_counts, num_batches, self.batch_size, draw)
            # `deal` counts pairs within the source.
            batches.append(start + dealt)
            start += len(own_counts)
        return draw.permutation(np.concatenate(batches))

    def counts(self, number: int, epoch: int) -> ndarray:
        """Return the number of times that an epoch draws each pair of a source, (M,)."""
        size = self.sizes[number]
        whole, rest = divmod(self.draws[number], size)
        counts = np.full(size, whole, dtype=np.int64)
        if rest:
            # Seeded without the epoch: all epochs advance through one order.
            generator = np.random.default_rng([self.seed, 0, number, 1])
            order = generator.permutation(size)
            positions = epoch * rest + np.arange(rest)
            once_more = order[positions % size]
            counts[once_more] += 1
        return counts


def deal(counts: ndarray, num_batches: int, batch_size: int, draw: Generator) -> ndarray:
    """Return (num_batches, B) random batches of pairs that occur several times, at most once each.

    The pairs are dealt like cards. They are put in random order, with copies of a pair next to each
    other, and dealt in rounds in which each batch gets one pair, in random order. Copies within a
    round therefore go to different batches. Only the pair that spans the end of a round can meet
    itself, and its copies are separated afterwards. With one copy each, the result is a uniform
    partition.

    Args:
        counts: (N,) copies of each pair, at most `num_batches` each and at least num_batches·B in
            total; the surplus is dropped.
        num_batches: number of batches.
        batch_size: number of pairs in each batch, B.
        draw: random generator.
    """
    order = draw.permutation(len(counts))
    cards = np.repeat(order, counts[order])
    cards = cards[: num_batches * batch_size]
    rounds = cards.reshape(batch_size, num_batches)
    # A pair spans two rounds if a round begins with the last pair of the round before. This must
    # be read off before the rounds are shuffled.
    first = rounds[1:, 0]
    last = rounds[:-1, -1]
    spanning = 1 + np.flatnonzero(first == last)
    pairs = rounds[spanning, 0]
    rounds = draw.permuted(rounds, axis=1)
    for number, pair in zip(spanning.tolist(), pairs.tolist(), strict=True):
        previous = rounds[number - 1] == pair
        current = rounds[number] == pair
        # A batch that got the pair in both rounds swaps one copy with a random batch that has
        # none. Enough such batches exist, as no pair has more copies than there are batches.
        twice = np.flatnonzero(previous & current)
        free = np.flatnonzero(~previous & ~current)
        partners = draw.permutation(free)[: len(twice)]
        copies = rounds[number, twice]
        rounds[number, twice] = rounds[number, partners]
        rounds[number, partners] = copies
    return np.ascontiguousarray(rounds.T)
