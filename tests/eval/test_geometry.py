"""Uniformity and effective rank, against slow loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from tests.helpers.eval_scripts import load_script

geometry = load_script("geometry.py")
effective_rank = geometry.effective_rank
uniformity = geometry.uniformity


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "BLOCK_ROWS", 4)


def vectors(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def unit_row(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@given(seed=st.integers(0, 999), count=st.integers(2, 11))
def test_uniformity_is_the_loop_over_different_rows(seed: int, count: int) -> None:
    rows = vectors(count, 3, seed)
    pairs = itertools.combinations([unit_row(row) for row in rows], 2)
    expected = math.log(np.mean([np.exp(-2 * np.sum((x - y) ** 2)) for x, y in pairs]))
    # Of opposite rows the sum is little more than the ones of each row with itself, in float32.
    assert math.exp(uniformity(rows)) == pytest.approx(math.exp(expected), rel=1e-4, abs=1e-6)


def test_effective_rank_of_known_spectra() -> None:
    assert effective_rank(np.eye(7)) == pytest.approx(7)
    assert effective_rank(np.outer(np.arange(1, 6), np.arange(1, 4))) == pytest.approx(1)
    assert effective_rank(np.zeros((3, 2))) == 0.0
    half = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(np.diag([3.0, 1.0])) == pytest.approx(half)


@given(seed=st.integers(0, 99), rows=st.integers(1, 30), dim=st.integers(1, 30))
def test_effective_rank_is_the_entropy_of_singular_values(seed: int, rows: int, dim: int) -> None:
    matrix = vectors(rows, dim, seed)
    shares = np.linalg.svd(matrix, compute_uv=False)
    shares = shares / shares.sum()
    assert effective_rank(matrix) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert effective_rank(matrix) == pytest.approx(effective_rank(matrix.T))


def test_mistakes_are_one_line_in_geometry() -> None:
    rows = vectors(4, 3, 0)
    with pytest.raises(DualencError, match="two or more"):
        uniformity(rows[:1])
    with pytest.raises(DualencError, match="row 2 of the embeddings"):
        uniformity(np.where(np.arange(4)[:, None] == 2, np.nan, rows))


def test_known_values() -> None:
    assert uniformity(np.eye(4)) == pytest.approx(-4.0), "orthogonal rows are √2 apart: −t·2"
