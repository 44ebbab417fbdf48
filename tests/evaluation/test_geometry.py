"""Alignment, uniformity, effective rank and histograms against slow loops and cases known in closed form."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation import convergence as geometry
from dualenc.evaluation.convergence import alignment, effective_rank, label_similarities, pair_similarities, uniformity


def vectors(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim))


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_BLOCK", 4)


@given(seed=st.integers(0, 999), power=st.sampled_from([1, 2, 3]))
def test_alignment_is_the_loop(seed: int, power: float) -> None:
    left, right = vectors(9, 4, seed), vectors(9, 4, seed + 1)
    expected = np.mean([np.linalg.norm(unit(x) - unit(y)) ** power for x, y in zip(left, right, strict=True)])
    assert alignment(left, right, power) == pytest.approx(expected, rel=1e-5)


@given(seed=st.integers(0, 999), count=st.integers(2, 11))
def test_uniformity_is_the_loop_over_different_rows(seed: int, count: int) -> None:
    rows = vectors(count, 3, seed)
    pairs = itertools.combinations([unit(row) for row in rows], 2)
    expected = math.log(np.mean([np.exp(-2 * np.sum((x - y) ** 2)) for x, y in pairs]))
    assert uniformity(rows) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_collapsed_embedding_is_aligned_and_not_uniform() -> None:
    rows = np.ones((10, 4))
    assert alignment(rows, rows) == 0.0
    assert uniformity(rows) == pytest.approx(0.0, abs=1e-5)
    assert uniformity(np.eye(4)) == pytest.approx(-4.0), "orthogonal rows are √2 apart: −t·2"


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


def test_label_histograms_count_every_pair_once() -> None:
    rows, labels = vectors(13, 3, 0), np.arange(13) % 3
    found = label_similarities(rows, labels)
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for (x, a), (y, b) in itertools.combinations(zip(rows, labels, strict=True), 2):
        cosines[bool(a == b)].append(float(unit(x) @ unit(y)))
    assert found.positives.tolist() == np.histogram(cosines[True], found.edges)[0].tolist()
    assert found.negatives.tolist() == np.histogram(cosines[False], found.edges)[0].tolist()
    assert found.positive_mean == pytest.approx(np.mean(cosines[True]), abs=1e-6)
    assert found.negative_mean == pytest.approx(np.mean(cosines[False]), abs=1e-6)


@pytest.mark.parametrize("listed", [False, True])
def test_pair_histograms_leave_out_positives_by_id(listed: bool) -> None:
    left, right = vectors(9, 3, 0), vectors(9, 3, 1)
    left_id, right_id = np.array([0, 0, 1, 2, 3, 4, 5, 6, 7]), np.array([0, 1, 2, 2, 3, 4, 5, 6, 7])
    positives = np.full((9, 2), -1)
    positives[:, 0], positives[4, 1] = right_id, 7
    found = pair_similarities(left, right, left_id, right_id, positives if listed else None)
    negatives = [
        unit(left[i]) @ unit(right[j])
        for i, j in itertools.product(range(9), range(9))
        if left_id[i] != left_id[j] and right_id[i] != right_id[j] and not (listed and right_id[j] in positives[i])
    ]
    assert len(negatives) == 81 - 9 - 4 - listed
    assert found.negatives.tolist() == np.histogram(negatives, found.edges)[0].tolist()
    expected = [unit(x) @ unit(y) for x, y in zip(left, right, strict=True)]
    assert found.positives.tolist() == np.histogram(expected, found.edges)[0].tolist()


def test_overlap_runs_from_apart_to_alike() -> None:
    apart = label_similarities(np.repeat(np.eye(2), 3, axis=0), np.repeat([0, 1], 3))
    assert apart.overlap == 0.0
    assert (apart.positive_mean, apart.negative_mean) == (pytest.approx(1.0), pytest.approx(0.0))
    alike = label_similarities(np.ones((6, 2)), np.repeat([0, 1], 3))
    assert alike.overlap == pytest.approx(1.0)


def test_mistakes_are_one_line() -> None:
    rows = vectors(4, 3, 0)
    with pytest.raises(DualencError, match=r"left has shape \(4, 3\), right \(3, 3\)"):
        alignment(rows, rows[:3])
    with pytest.raises(DualencError, match="1 embedding"):
        uniformity(rows[:1])
    with pytest.raises(DualencError, match="no negative pair"):
        label_similarities(rows, np.zeros(4, int))
    with pytest.raises(DualencError, match="no negative pair"):
        pair_similarities(rows, rows, np.zeros(4, int))
    with pytest.raises(DualencError, match="4 images but labels of shape"):
        label_similarities(rows, np.zeros(3, int))
    with pytest.raises(DualencError, match="row 2 of the embeddings is not finite"):
        uniformity(np.where(np.arange(4)[:, None] == 2, np.nan, rows))
