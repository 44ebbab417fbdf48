"""Batches of several sources: what is drawn of each, and that no batch holds a pair twice."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dualenc.batching.mixture_batches import MixtureBatches, deal
from dualenc.errors import DualencError

SOURCES = st.lists(
    st.tuples(st.integers(8, 60), st.sampled_from([0.25, 0.5, 1.0, 1.7, 3.0])),
    min_size=1,
    max_size=4,
)


def made(sources, batch_size, seed, **arguments):
    """A selector, unless the sources are too small for it."""
    try:
        return MixtureBatches(*zip(*sources), batch_size, seed, **arguments)
    except DualencError:
        assume(False)


@given(SOURCES, st.integers(1, 8), st.integers(0, 5), st.integers(0, 9), st.booleans())
def test_no_batch_holds_a_pair_twice_and_every_pair_comes_as_often_as_its_weight_says(
    sources, batch_size, seed, epoch, one_source
):
    selector = made(sources, batch_size, seed, one_source=one_source)
    batches = selector.select(epoch)
    assert batches.shape == (selector.num_batches, batch_size)
    assert all(len(set(batch)) == batch_size for batch in batches.tolist())
    sizes = [size for size, _ in sources]
    times = np.bincount(batches.ravel(), minlength=sum(sizes))
    left_out = 0
    for number, of_source in enumerate(np.split(times, np.cumsum(sizes)[:-1])):
        size, weight = sources[number]
        drawn = round(weight * size)
        counts = selector.counts(number, epoch)
        assert counts.sum() == drawn
        assert counts.max() - counts.min() <= 1
        assert (of_source <= counts).all()
        left_out += drawn - of_source.sum()
        if one_source:
            assert drawn - of_source.sum() < batch_size
    assert one_source or left_out < batch_size
    sources_of = np.searchsorted(np.cumsum(sizes), batches, side="right")
    assert not one_source or (sources_of == sources_of[:, :1]).all()


@given(st.integers(8, 100), st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.6, 0.75, 1.25, 1.7]))
def test_all_pairs_come_before_one_comes_again(size, weight):
    selector = made([(size, weight)], 1, 3)
    drawn = np.zeros(size, dtype=np.int64)
    for epoch in range(12):
        counts = selector.counts(0, epoch)
        drawn += counts
        assert counts.sum() == round(weight * size)
        assert drawn.max() - drawn.min() <= 1


def test_sources_come_in_random_order_and_seed_and_epoch_decide():
    def select(seed, epoch, one_source=False):
        return MixtureBatches([50, 30], [1, 2.5], 8, seed, one_source=one_source).select(epoch)

    order = (select(1, 0, one_source=True)[:, 0] >= 50).tolist()
    assert order != sorted(order)
    assert np.array_equal(select(3, 2), select(3, 2))
    assert not np.array_equal(select(3, 2), select(4, 2))
    assert not np.array_equal(select(3, 2), select(3, 3))


@pytest.mark.slow
def test_any_two_pairs_meet_equally_often():
    """Once each: the expected number of meetings of a random partition. Twice as often, a pair
    meets twice as many."""
    size, batch_size, epochs = 12, 3, 6000
    for counts in (np.ones(size, int), np.repeat([1, 2], size // 2)):
        draw, met = np.random.default_rng(0), np.zeros((size, size))
        num_batches = counts.sum() // batch_size
        for _ in range(epochs):
            for batch in deal(counts, num_batches, batch_size, draw):
                met[np.ix_(batch, batch)] += 1
        together = met / epochs
        expected = np.outer(counts, counts) * (batch_size - 1) / (counts.sum() - 1)
        off = ~np.eye(size, dtype=bool)
        # A pair does not meet itself, so that copies meet the others a little more often.
        slack = 0.03 if counts.max() == 1 else 0.15
        assert np.abs(together - expected)[off].max() < slack
        assert np.allclose(np.diag(together), counts)


@pytest.mark.parametrize(
    ("sizes", "weights", "arguments", "message"),
    [
        (
            [100, 20],
            [1, 0.01],
            {},
            "source 1 has 20 pairs, of which an epoch draws 0 at weight 0.01",
        ),
        (
            [100, 20],
            [1, 1],
            {"one_source": True},
            "too few for a batch of 32 in batches of one source",
        ),
        ([20, 20], [0.5, 0.5], {}, "too few for a batch of 32 from all sources together"),
        (
            [100, 10],
            [1, 100],
            {"names": ["a", "b"]},
            "b has 10 pairs, .* 1000 at weight 100, in 34 batches",
        ),
    ],
)
def test_sources_too_small_are_named(sizes, weights, arguments, message):
    with pytest.raises(DualencError, match=message):
        MixtureBatches(sizes, weights, 32, **arguments)
