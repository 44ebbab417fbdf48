"""What every selector promises, and the loss of batches against torch in double precision."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches, batch_losses
from dualenc.batching import selector as module
from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE
from tests.helpers.known_clusters import random_pairs

Make = Callable[..., BatchSelector]


METHODS = ("bisection", "spectral")
PARTITIONS: list[Make] = [
    RandomBatches,
    *(partial(SpectralBatches, method=method, k=3) for method in METHODS),
]


def degenerate(kind: str, num_pairs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings without, or with too much, structure."""
    left, right = random_pairs(num_pairs, 6, seed)
    if kind == "duplicates":
        few = np.random.default_rng(seed).integers(0, 3, num_pairs) % num_pairs
        return left[few], right[few]
    if kind == "collinear":
        sign = np.random.default_rng(seed).choice(np.float32([-1, 1]), (num_pairs, 1))
        return sign * left[:1], sign * left[:1]
    if kind == "zeros":
        return 0 * left, 0 * right
    return left, right


@pytest.mark.slow
@pytest.mark.parametrize("make", PARTITIONS)
@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 12)).filter(lambda pair: pair[0] >= pair[1]),
    kind=st.sampled_from(["random", "duplicates", "collinear", "zeros"]),
    seed=st.integers(0, 99),
)
@example(size=(72, 9), kind="collinear", seed=0)
def test_each_pair_appears_exactly_once_and_the_remainder_is_dropped(make, size, kind, seed):
    num_pairs, batch_size = size
    selector = make(num_pairs, batch_size, seed=seed)
    batches = selector.select(0, *degenerate(kind, num_pairs, seed))
    assert (
        batches.shape == (selector.num_batches, batch_size) == (num_pairs // batch_size, batch_size)
    )
    assert batches.dtype == np.int64
    assert len(np.unique(batches)) == batches.size
    assert 0 <= batches.min() <= batches.max() < num_pairs


@pytest.mark.parametrize("make", PARTITIONS)
def test_batches_are_a_function_of_seed_epoch_and_embeddings(make):
    left, right = random_pairs(60, 8)
    first = make(60, 5, seed=3).select(2, left, right)
    np.random.seed(1)  # noqa: NPY002 - the global generator must make no difference
    restored = pickle.loads(pickle.dumps(make(60, 5, seed=3)))
    np.testing.assert_array_equal(first, restored.select(2, left.astype(np.float64), right))
    assert not np.array_equal(first, make(60, 5, seed=3).select(3, left, right))
    assert not np.array_equal(first, make(60, 5, seed=4).select(2, left, right))
    np.testing.assert_array_equal(
        make(60, 5).select(0, left), make(60, 5).select(0, left, left.copy())
    )
    np.testing.assert_array_equal(
        make(50, 6, seed=1).select(4), RandomBatches(50, 6, seed=1).select(4)
    )
    assert make.needs_embeddings is False if make is RandomBatches else make(8, 2).needs_embeddings


@pytest.mark.parametrize("make", PARTITIONS[1:])
def test_embeddings_that_cannot_be_right_are_refused(make):
    left, right = random_pairs(40, 8)
    with pytest.raises(DualencError, match=r"left .* \(39, 8\); expected \(40, D\)"):
        make(40, 4).select(0, left[:-1], right)
    with pytest.raises(DualencError, match=r"left .* \(40, 8\) and right \(40, 7\)"):
        make(40, 4).select(0, left, right[:, :-1])
    for value in (np.nan, np.inf):
        right[17, 3] = value
        with pytest.raises(DualencError, match=r"^right .* in row 17"):
            make(40, 4).select(0, left, right)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (RandomBatches, {"num_pairs": 8, "batch_size": 9}, "batch_size 9 exceeds num_pairs 8"),
        (RandomBatches, {"batch_size": 0}, "batch_size is 0; choose at least 1"),
        (RandomBatches, {"seed": -1}, "seed is -1; choose at least 0"),
        (SpectralBatches, {"temperature": 0}, "temperature is 0"),
        (SpectralBatches, {"method": "bisect"}, "method is 'bisect'; choose one of bisection"),
        (SpectralBatches, {"k": 0}, "k is 0"),
    ],
)
def test_arguments_out_of_range_are_refused(kind, arguments, message):
    with pytest.raises(DualencError, match=message):
        kind(**{"num_pairs": 100, "batch_size": 5, **arguments})


def test_random_batches_are_uniform():
    selector = RandomBatches(6, 2)
    together = (
        np.mean(
            [[{0, 5} == set(batch) for batch in selector.select(epoch)] for epoch in range(3000)]
        )
        * 3
    )
    assert together == pytest.approx(1 / 5, abs=0.03)


def slow_loss(left: np.ndarray, right: np.ndarray, batch: np.ndarray, temperature: float) -> float:
    logits = (
        torch.from_numpy(left[batch]).double()
        @ torch.from_numpy(right[batch]).double().T
        / temperature
    )
    targets = torch.arange(len(batch))
    return float(cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.005])
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 24])
def test_losses_are_the_cross_entropy_batch_by_batch(monkeypatch, temperature, chunk_bytes):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    left, right = random_pairs(70, 12, noise=2.0)
    batches = np.random.default_rng(0).permutation(70).reshape(10, 7)
    expected = [slow_loss(left, right, batch, temperature) for batch in batches]
    np.testing.assert_allclose(batch_losses(left, right, batches, temperature), expected, rtol=1e-4)
    # A batch of one has nothing to tell apart.
    np.testing.assert_allclose(batch_losses(left, right, batches[:, :1], temperature), 0, atol=1e-6)


def test_the_loss_of_a_batch_is_that_of_the_objective():
    left, right = random_pairs(12, 6, noise=2.0)
    ids = torch.arange(12)
    out = InfoNCE(temperature=0.1)(torch.from_numpy(left), torch.from_numpy(right), ids)
    assert batch_losses(left, right, ids.numpy()[None], 0.1)[0] == pytest.approx(
        float(out.loss), rel=1e-5
    )
