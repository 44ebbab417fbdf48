"""The linear probe minimises its stated objective, agrees with scikit-learn, and never looks at the test labels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dualenc.errors import DualencError
from dualenc.evaluation.probe import draw_per_class, few_shot, fit_linear, linear_probe


def clusters(count: int, classes: int, seed: int, spread: float = 1.0, dim: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Points around class centres that do not depend on the seed; the features have different scales."""
    centres = np.random.default_rng(99).normal(size=(classes, dim))
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    features = (centres[labels] + spread * rng.normal(size=(count, dim))) * 10.0 ** np.arange(dim)
    return features.astype(np.float32), labels


@pytest.mark.parametrize("classes", [2, 4])
def test_the_gradient_of_the_stated_objective_vanishes(classes: int) -> None:
    features, labels = clusters(200, classes, 0)
    found = fit_linear(features, labels, l2=1e-2)
    weight = torch.tensor(found.weight, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(found.bias, dtype=torch.float64, requires_grad=True)
    standardised = torch.tensor((features - features.mean(0)) / features.std(0), dtype=torch.float64)
    logits = standardised @ weight.T + bias
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)) + 1e-2 / 2 * weight.square().sum()
    loss.backward()
    assert weight.grad.abs().max() < 1e-3
    assert bias.grad.abs().max() < 1e-3


@pytest.mark.parametrize("classes", [2, 5])
def test_predictions_are_those_of_a_scikit_learn_pipeline(classes: int) -> None:
    (train, labels), (test, test_labels) = clusters(150, classes, 0), clusters(100, classes, 1)
    reference = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (1e-3 * 150), max_iter=5000, tol=1e-8))
    expected = reference.fit(train.astype(np.float64), labels).predict(test)
    found = linear_probe(train, labels, test, test_labels, l2=[1e-3])
    assert np.mean(found.classifier.predict(test) == expected) >= 0.99
    assert found.accuracy == np.mean(found.classifier.predict(test) == test_labels)
    assert found.validation == {}


def test_the_sweep_chooses_on_training_images_only() -> None:
    (train, labels), (test, test_labels) = clusters(60, 3, 0, spread=2.0), clusters(60, 3, 1, spread=2.0)
    found = linear_probe(train, labels, test, test_labels, l2=[1e-5, 1e-2, 10.0])
    shuffled = linear_probe(train, labels, test, np.roll(test_labels, 1), l2=[1e-5, 1e-2, 10.0])
    assert set(found.validation) == {1e-5, 1e-2, 10.0}
    assert found.validation[found.l2] == max(found.validation.values())
    assert (found.l2, found.validation) == (shuffled.l2, shuffled.validation)


def test_class_numbers_may_have_gaps() -> None:
    features, labels = clusters(90, 3, 0, spread=0.1)
    numbers = np.array([2, 7, 40])[labels]
    assert linear_probe(features, numbers, features, numbers, l2=[1e-3]).accuracy == 1.0


def test_a_feature_that_never_varies_does_no_harm() -> None:
    features, labels = clusters(90, 3, 0, spread=0.1)
    features[:, 2] = 1e3
    assert linear_probe(features, labels, features, labels, l2=[1e-3]).accuracy == 1.0


@given(count=st.integers(1, 5), sizes=st.lists(st.integers(5, 9), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_draw_has_so_many_different_images_of_each_class(count: int, sizes: list[int], seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    rows = draw_per_class(labels, count, np.random.default_rng(seed))
    assert len(set(rows.tolist())) == len(rows)
    assert np.bincount(labels[rows]).tolist() == [count] * len(sizes)


def test_few_shot_is_mean_and_deviation_over_different_draws() -> None:
    (train, labels), (test, test_labels) = clusters(300, 3, 0, spread=1.5), clusters(300, 3, 1, spread=1.5)
    found = few_shot(train, labels, test, test_labels, shots=(1, 10), draws=5)
    again = few_shot(train, labels, test, test_labels, shots=(10,), draws=5)
    assert found[10] == again[10], "a draw depends on its own seed only"
    assert found[1][0] < found[10][0]
    assert found[1][1] > 0
    standardised = (train - train.mean(0)) / train.std(0), (test - train.mean(0)) / train.std(0)
    scores = []
    for draw in range(5):
        rows = draw_per_class(labels, 10, np.random.default_rng((0, 10, draw)))
        reference = LogisticRegression(C=1 / (1e-2 * 30), max_iter=1000).fit(standardised[0][rows], labels[rows])
        scores.append(reference.score(standardised[1], test_labels))
    assert found[10] == (pytest.approx(np.mean(scores), abs=0.005), pytest.approx(np.std(scores, ddof=1), abs=0.01))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"train_labels": np.zeros(3, int)}, "train: 20 images but labels of shape"),
        ({"test_labels": -np.ones(20, int)}, "test: image 0 has the label -1"),
        ({"train_labels": np.zeros(20, int)}, "all training images have the label 0"),
        ({"l2": [0.0]}, "l2="),
        ({"l2": []}, "l2="),
        ({"test": np.zeros((20, 3))}, "fit on dimension 6"),
        ({"train": np.full((20, 6), np.nan)}, "not finite"),
    ],
)
def test_a_mistake_is_one_line(arguments: dict, line: str) -> None:
    features, labels = clusters(20, 2, 0)
    given_arguments = {"train": features, "train_labels": labels, "test": features, "test_labels": labels, "l2": [0.1]}
    with pytest.raises(DualencError, match=line) as error:
        linear_probe(**(given_arguments | arguments))
    assert "\n" not in str(error.value)


def test_too_few_images_are_one_line() -> None:
    features, labels = clusters(4, 2, 0)
    with pytest.raises(DualencError, match="shots=3: class 0 has 2 training images"):
        few_shot(features, labels, features, labels, shots=(3,))
    features, labels = clusters(2, 2, 0)
    with pytest.raises(DualencError, match="2 training images are too few to choose"):
        linear_probe(features, labels, features, labels)
