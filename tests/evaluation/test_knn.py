"""kNN equals scikit-learn's classifier with the same weighting, and a vote counted by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from dualenc.errors import DualencError
from dualenc.evaluation.probe import accuracy, knn_predict, unit_rows


def features(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 20), classes=st.integers(1, 7))
def test_the_weighted_vote_is_that_of_scikit_learn(seed: int, k: int, classes: int) -> None:
    train, test = features(60, 5, seed), features(30, 5, seed + 1)
    labels = np.random.default_rng(seed).integers(0, classes, 60)
    reference = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    expected = reference.fit(train, labels).predict(test)
    assert (knn_predict(train, labels, test, k=k) == expected).all()


def test_one_neighbour_is_that_of_scikit_learn() -> None:
    train, test, labels = features(200, 8, 0), features(80, 8, 1), np.arange(200) % 10
    reference = KNeighborsClassifier(1, metric="cosine").fit(train, labels)
    assert (knn_predict(train, labels, test, k=1) == reference.predict(test)).all()


def test_an_equal_vote_counts_heads_and_a_weighted_one_closeness() -> None:
    train = np.array([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    labels, test = np.array([0, 1, 1]), np.array([[1.0, 0.0]])
    assert knn_predict(train, labels, test, k=3, temperature=None).tolist() == [1]
    assert knn_predict(train, labels, test, k=3, temperature=0.07).tolist() == [0]


def test_a_tie_goes_to_the_lower_class() -> None:
    train, test = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1.0, 0.0]])
    assert knn_predict(train, np.array([4, 2]), test, k=2).tolist() == [2]


def test_a_tiny_temperature_does_not_overflow() -> None:
    train, labels = features(50, 4, 0), np.arange(50) % 5
    assert (knn_predict(train, labels, train, k=5, temperature=1e-4) == labels).all()


def test_unit_rows_leave_a_zero_row_alone() -> None:
    assert unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0, 0]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"train_labels": np.zeros(3, int)}, "train: 4 images but labels of shape"),
        ({"train_labels": np.array([0, 1, -1, 0])}, "image 2 has the label -1"),
        ({"train_labels": np.zeros(4)}, "labels are float64"),
        ({"k": 5}, "k=5: there are 4 training images"),
        ({"k": 0}, "k=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"test": np.zeros((2, 3))}, "dimension 2, test features 3"),
        ({"test": np.array([[0.0, np.nan]])}, "row 0 of the test features is not finite"),
        ({"test": np.zeros((0, 2))}, "shape \\(0, 2\\)"),
    ],
)
def test_a_mistake_is_one_line(change: dict, line: str) -> None:
    arguments = {"train": np.eye(4, 2), "train_labels": np.zeros(4, int), "test": np.eye(2), "k": 1} | change
    with pytest.raises(DualencError, match=line) as error:
        knn_predict(**arguments)
    assert "\n" not in str(error.value)


def test_accuracy_wants_one_prediction_per_label() -> None:
    assert accuracy(np.array([1, 2, 3]), np.array([1, 2, 0])) == pytest.approx(2 / 3)
    with pytest.raises(DualencError, match="2 predictions for 3 labels"):
        accuracy(np.zeros(2, int), np.zeros(3, int))
