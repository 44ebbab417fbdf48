"""Matches by hand and against a slow loop; directions, ties and cosine are what the paper's protocol says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation.corrupted_retrieval import match_images, match_versions, summarise


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def slow(first: np.ndarray, second: np.ndarray) -> list[bool]:
    """For each row of `first`: is its own row of `second` the nearest?"""
    return [int(np.argmax([cosine(x, y) for y in second])) == k for k, x in enumerate(first)]


@given(seed=st.integers(0, 999), images=st.integers(1, 4), versions=st.integers(2, 6))
def test_versions_are_matched_within_their_image_only(seed: int, images: int, versions: int) -> None:
    features = np.random.default_rng(seed).normal(size=(images, 2, versions, 3))
    features[:, 1] += features[:, 0]
    hits = match_versions(features)
    for i in range(images):
        assert hits[i, 0].tolist() == slow(features[i, 0], features[i, 1])
        assert hits[i, 1].tolist() == slow(features[i, 1], features[i, 0])


@given(seed=st.integers(0, 999), images=st.integers(2, 12))
def test_images_are_matched_among_all(seed: int, images: int) -> None:
    features = np.random.default_rng(seed).normal(size=(images, 2, 3))
    features[:, 1] += features[:, 0]
    hits = match_images(features)
    assert hits[:, 0].tolist() == slow(features[:, 0], features[:, 1])
    assert hits[:, 1].tolist() == slow(features[:, 1], features[:, 0])


def test_length_does_not_count() -> None:
    first = np.array([[1.0, 0.0], [0.0, 1.0]])
    second = np.array([[1.0, 0.1], [9.0, 10.0]])  # the inner product would send both to row 1
    features = np.stack([first, second])[None]
    assert match_versions(features)[0, 0].tolist() == [True, True]
    assert match_images(features[0].swapaxes(0, 1))[:, 0].tolist() == [True, True]


def test_one_point_for_everything_finds_nothing() -> None:
    assert not match_versions(np.ones((3, 2, 4, 5))).any()
    assert not match_images(np.ones((6, 2, 5))).any()


def test_the_two_directions_may_differ() -> None:
    first = np.array([[1.0, 0.0], [0.0, 1.0]])
    second = np.array([[0.9, 0.1], [1.0, 0.05]])  # both lie near the first row of `first`
    hits = match_versions(np.stack([first, second])[None])
    assert hits.tolist() == [[[False, False], [True, False]]]
    found = summarise(hits, ["fog", "snow"])
    assert found == {
        "top1": 0.25, "top1_first_to_second": 0.0, "top1_second_to_first": 0.5, "top1/fog": 0.5, "top1/snow": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 1, 4, 5), (3, 2, 1, 5), (0, 2, 4, 5)])
def test_wrong_shapes_of_versions_are_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(DualencError, match="shape"):
        match_versions(np.ones(shape))


def test_other_mistakes_are_one_line() -> None:
    with pytest.raises(DualencError, match=r"shape \(1, 2, 5\); \(images, 2 views, dimension\) of two images"):
        match_images(np.ones((1, 2, 5)))
    with pytest.raises(DualencError, match="not finite"):
        match_images(np.full((3, 2, 5), np.nan))
    with pytest.raises(DualencError, match="no image was compared"):
        summarise(np.zeros((0, 2), bool))
