"""Probes against scikit-learn, torch's own scheduler and votes counted by hand; none looks at the
test labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dualenc.errors import DualencError
from dualenc.evaluation.probe import (
    L2_SWEEP,
    fit_linear,
    knn_predict,
    linear_probe,
    unit_rows,
)


def clusters(
    count: int, classes: int, seed: int, spread: float = 1.0, dim: int = 6
) -> tuple[np.ndarray, np.ndarray]:
    """Points around class centres that do not depend on the seed; the features have different
    scales."""
    centres = np.random.default_rng(99).normal(size=(classes, dim))
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    features = (centres[labels] + spread * rng.normal(size=(count, dim))) * 10.0 ** np.arange(dim)
    return features.astype(np.float32), labels


@pytest.mark.parametrize("classes", [2, 4])
def test_the_gradient_of_the_stated_objective_vanishes(classes: int) -> None:
    features, labels = clusters(200, classes, 0)
    found = fit_linear(features, labels, l2=1e-2)
    weight, bias = found[-1].coef_, found[-1].intercept_
    if classes == 2:  # scikit-learn keeps the difference of the two rows
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    weight = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
    standardised = torch.tensor(
        (features - features.mean(0)) / features.std(0), dtype=torch.float64
    )
    logits = standardised @ weight.T + bias
    loss = (
        torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
        + 1e-2 / 2 * weight.square().sum()
    )
    loss.backward()
    assert weight.grad.abs().max() < 1e-3
    assert bias.grad.abs().max() < 1e-3


@pytest.mark.parametrize("classes", [2, 5])
def test_predictions_are_those_of_a_scikit_learn_pipeline(classes: int) -> None:
    (train, labels), (test, _) = clusters(150, classes, 0), clusters(100, classes, 1)
    reference = make_pipeline(
        StandardScaler(), LogisticRegression(C=1 / (1e-3 * 150), max_iter=5000, tol=1e-8)
    )
    expected = reference.fit(train.astype(np.float64), labels).predict(test)
    found = linear_probe(train, labels, l2=[1e-3])
    assert np.mean(found.classifier.predict(test) == expected) >= 0.99
    assert found.validation == {}


def test_the_sweep_chooses_the_best_on_a_tenth_of_the_images() -> None:
    train, labels = clusters(60, 3, 0, spread=2.0)
    found = linear_probe(train, labels, l2=[1e-5, 1e-2, 10.0])
    assert set(found.validation) == {1e-5, 1e-2, 10.0}
    assert found.validation[found.l2] == max(found.validation.values())
    rest, part = train_test_split(np.arange(60), test_size=6, random_state=0, stratify=labels)
    reference = make_pipeline(
        StandardScaler(), LogisticRegression(C=1 / (1e-2 * 54), max_iter=5000, tol=1e-8)
    )
    score = reference.fit(train[rest], labels[rest]).score(train[part], labels[part])
    assert found.validation[1e-2] == pytest.approx(score)


def features(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 20), classes=st.integers(1, 7))
def test_the_weighted_vote_is_that_of_scikit_learn(seed: int, k: int, classes: int) -> None:
    train, test = features(60, 5, seed), features(30, 5, seed + 1)
    labels = np.random.default_rng(seed).integers(0, classes, 60)
    reference = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    )
    expected = reference.fit(train, labels).predict(test)
    assert (knn_predict(train, labels, test, k=k) == expected).all()


def test_one_neighbour_is_that_of_scikit_learn() -> None:
    train, test, labels = features(200, 8, 0), features(80, 8, 1), np.arange(200) % 10
    reference = KNeighborsClassifier(1, metric="cosine").fit(train, labels)
    assert (knn_predict(train, labels, test, k=1) == reference.predict(test)).all()


def test_a_vote_counts_closeness_or_heads_by_temperature() -> None:
    train = np.array([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    labels, test = np.array([0, 1, 1]), np.array([[1.0, 0.0]])
    assert knn_predict(train, labels, test, k=3, temperature=100.0).tolist() == [1]
    for temperature in (0.07, 1e-4):  # the smaller one must not overflow
        assert knn_predict(train, labels, test, k=3, temperature=temperature).tolist() == [0]
    # A tie goes to the lower class.
    assert knn_predict(
        np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([4, 2]), test, k=2
    ).tolist() == [2]


def test_unit_rows_leave_a_zero_row_alone() -> None:
    assert unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [
        [pytest.approx(0.6), pytest.approx(0.8)],
        [0, 0],
    ]


def with_probe(**changes: Any) -> Callable[[], object]:
    rows, labels = clusters(20, 2, 0)
    arguments = {"train": rows, "train_labels": labels, "l2": [0.1]}
    return lambda: linear_probe(**arguments | changes)


def with_knn(**changes: Any) -> Callable[[], object]:
    arguments = {"train": np.eye(4, 2), "train_labels": np.zeros(4, int), "test": np.eye(2), "k": 1}
    return lambda: knn_predict(**arguments | changes)


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (with_probe(train_labels=np.zeros(20, int)), "all training images have the label 0"),
    (with_probe(train=np.full((20, 6), np.nan)), "not finite"),
    (
        with_probe(train=np.eye(2), train_labels=np.arange(2), l2=L2_SWEEP),
        "2 training images are too few",
    ),
    (with_knn(k=5), "k must be from 1 to 4, the number of training images, got 5"),
    (with_knn(temperature=0.0), "temperature must be above 0, got 0.0"),
    (with_knn(test=np.array([[0.0, np.nan]])), "row 0 of the test features is not finite"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_a_refusal_names_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        call()
