"""Synthetic vectors lie where they should, and recall counts what is found."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.eval_scripts import load_script


def test_vectors_near_centers_have_the_length_and_noise_that_were_asked_for() -> None:
    vectors = load_script("bench/search.py")
    centers = np.random.default_rng(0).standard_normal((3, 4000), dtype=np.float32)
    found = vectors.around(centers, 20, 0.5, np.random.default_rng(1))
    directions = centers / np.linalg.norm(centers, axis=1, keepdims=True)
    nearest = (found @ directions.T).max(axis=1)
    assert found.dtype == np.float32
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)
    assert nearest == pytest.approx((1 + 0.5**2) ** -0.5, abs=0.02)


def test_recall_is_the_share_of_expected_rows() -> None:
    recall = load_script("bench/search.py").recall
    assert recall(np.array([[3, 1, -1], [7, 8, 9]]), np.array([[1, 2], [9, 8]])) == 0.75
