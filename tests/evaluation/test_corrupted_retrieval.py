"""Matches by hand and against a slow loop; directions, ties and cosine are what the paper's protocol says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import confusions, is_right, nearest_images, nearest_versions, summarise


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def slow(first: np.ndarray, second: np.ndarray) -> list[int]:
    """The row of `second` nearest to each row of `first`."""
    return [int(np.argmax([cosine(x, y) for y in second])) for x in first]


@given(seed=st.integers(0, 999), images=st.integers(1, 4), versions=st.integers(2, 6))
def test_versions_are_matched_within_their_image_only(seed: int, images: int, versions: int) -> None:
    features = np.random.default_rng(seed).normal(size=(images, 2, versions, 3))
    features[:, 1] += features[:, 0]
    found = nearest_versions(features)
    for i in range(images):
        assert found[i, 0].tolist() == slow(features[i, 0], features[i, 1])
        assert found[i, 1].tolist() == slow(features[i, 1], features[i, 0])


@given(seed=st.integers(0, 999), images=st.integers(2, 12))
def test_images_are_matched_among_all(seed: int, images: int) -> None:
    features = np.random.default_rng(seed).normal(size=(images, 2, 3))
    features[:, 1] += features[:, 0]
    found = nearest_images(features)
    assert found[:, 0].tolist() == slow(features[:, 0], features[:, 1])
    assert found[:, 1].tolist() == slow(features[:, 1], features[:, 0])


def test_length_does_not_count() -> None:
    first = np.array([[1.0, 0.0], [0.0, 1.0]])
    second = np.array([[1.0, 0.1], [9.0, 10.0]])  # the inner product would send both to row 1
    features = np.stack([first, second])[None]
    assert nearest_versions(features)[0, 0].tolist() == [0, 1]
    assert nearest_images(features[0].swapaxes(0, 1))[:, 0].tolist() == [0, 1]


def test_one_point_for_everything_finds_nothing() -> None:
    assert (nearest_versions(np.ones((3, 2, 4, 5))) == -1).all()
    assert (nearest_images(np.ones((6, 2, 5))) == -1).all()
    assert summarise(nearest_versions(np.ones((3, 2, 4, 5))))["top1"] == 0.0


def test_the_two_directions_may_differ() -> None:
    first = np.array([[1.0, 0.0], [0.0, 1.0]])
    second = np.array([[0.9, 0.1], [1.0, 0.05]])  # both lie near the first row of `first`
    found = nearest_versions(np.stack([first, second])[None])
    assert found.tolist() == [[[1, 0], [0, 0]]]
    assert is_right(found).tolist() == [[[False, False], [True, False]]]
    assert confusions(found).tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert summarise(found, ["fog", "snow"]) == {
        "top1": 0.25, "top1_first_to_second": 0.0, "top1_second_to_first": 0.5, "top1/fog": 0.5, "top1/snow": 0.0
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 1, 4, 5), (3, 2, 1, 5), (0, 2, 4, 5)])
def test_wrong_shapes_of_versions_are_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(DualencError, match="shape"):
        nearest_versions(np.ones(shape))


def test_other_mistakes_are_one_line() -> None:
    with pytest.raises(DualencError, match=r"shape \(1, 2, 5\); \(images, 2 views, dimension\) of two images"):
        nearest_images(np.ones((1, 2, 5)))
    with pytest.raises(DualencError, match="not finite"):
        nearest_images(np.full((3, 2, 5), np.nan))
    with pytest.raises(DualencError, match="no image was compared"):
        summarise(np.zeros((0, 2), int))
