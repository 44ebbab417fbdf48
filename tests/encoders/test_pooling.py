"""Pooling against a loop over texts and tokens, with padding on either side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualenc.encoders.text import POOLINGS, pool


def slow_pool(hidden: np.ndarray, mask: np.ndarray, pooling: str) -> np.ndarray:
    """The definition, in float64."""
    rows = []
    for vectors, keep in zip(hidden.astype(np.float64), mask):
        tokens = [vector for vector, kept in zip(vectors, keep) if kept]
        rows.append({"mean": np.mean(tokens, axis=0), "cls": tokens[0], "last": tokens[-1]}[pooling])
    return np.stack(rows)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    left_padded=st.booleans(),
    pooling=st.sampled_from(POOLINGS),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(lengths: list[int], left_padded: bool, pooling: str, seed: int) -> None:
    longest = max(lengths)
    mask = np.zeros((len(lengths), longest), dtype=np.int64)
    for row, length in zip(mask, lengths):
        row[longest - length :] = 1 if left_padded else row[longest - length :]
        row[:length] = 1 if not left_padded else row[:length]
    hidden = np.random.default_rng(seed).normal(size=(*mask.shape, 3)).astype(np.float32)
    pooled = pool(torch.from_numpy(hidden), torch.from_numpy(mask), pooling)  # type: ignore[arg-type]
    np.testing.assert_allclose(pooled.numpy(), slow_pool(hidden, mask, pooling), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_half_precision_is_summed_in_float32(pooling: str) -> None:
    hidden = torch.full((1, 4000, 1), 1.0, dtype=torch.bfloat16)
    pooled = pool(hidden, torch.ones(1, 4000, dtype=torch.int64), pooling)  # type: ignore[arg-type]
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1.0
