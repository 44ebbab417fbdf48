"""Probe frozen features with k nearest neighbors and with logistic regression."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.search.exact_search import exact_search
from dualenc.types import Integers, Vectors

L2_SWEEP: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Values of λ to try: λ/2·‖W‖² is added to the mean cross-entropy."""
VALIDATION_SHARE = 0.1
MAX_ITERATIONS = 500
"""Maximum number of L-BFGS iterations for each λ."""


def unit_rows(features: Vectors, what: str = "features") -> Vectors:
    """Scale rows to unit norm, as contiguous float32; a zero row stays zero.

    Args:
        features: (N, D) vectors.
        what: name of the vectors in errors.

    Raises:
        DualencError: if a value is not finite.
    """
    rows = np.ascontiguousarray(features, dtype=np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        bad = int(np.flatnonzero(~np.isfinite(norms[:, 0]))[0])
        raise DualencError(
            f"row {bad} of the {what} is not finite", fix="did the training end in NaN?"
        )
    # 0/0 would make a zero row NaN.
    smallest = np.finfo(np.float32).tiny
    return rows / np.maximum(norms, smallest)


def knn_predict(
    train: Vectors,
    train_labels: Integers,
    test: Vectors,
    *,
    k: int = 20,
    temperature: float = 0.07,
    device: str | torch.device = "cpu",
) -> Integers:
    """Classify test vectors by a weighted vote of their k nearest training vectors.

    A neighbor with cosine s votes exp(s/τ) (Wu et al. 2018, arXiv 1805.01978, section 3.4). Equal
    votes go to the lower class, as in scikit-learn.

    Args:
        train: (N, D) features, scaled to unit norm here.
        train_labels: (N,) class numbers from 0.
        test: (A, D) features to classify.
        k: number of neighbors; 1 is the nearest-neighbor classifier.
        temperature: τ of the vote.
        device: device to search on, as in `dualenc.search.exact_search.exact_search`.

    Returns:
        (A,) class numbers.

    Raises:
        DualencError: if k or the temperature is out of range, or a feature is not finite.
    """
    train_labels = np.asarray(train_labels)
    if not 1 <= k <= len(train):
        raise DualencError(
            f"k must be from 1 to {len(train)}, the number of training images, got {k}"
        )
    if temperature <= 0:
        raise DualencError(f"temperature must be above 0, got {temperature}")
    rows = unit_rows(train, "training features")
    queries = unit_rows(test, "test features")
    # Each process searches on its own: some callers run on the main process only.
    with distributed.single_process():
        scores, neighbors = exact_search(queries, rows, k, device=device)
    # exp((s − best)/τ): the same vote up to a factor per query, and no overflow at a small τ.
    best = scores[:, :1]
    votes = np.exp((scores - best) / temperature)
    num_classes = int(train_labels.max()) + 1
    totals = np.zeros((len(queries), num_classes))
    query_rows = np.arange(len(queries))[:, None]
    # `add.at` and not `+=`: several neighbors of a query have the same class.
    np.add.at(totals, (query_rows, train_labels[neighbors]), votes)
    return totals.argmax(axis=1)


def accuracy(predicted: Integers, labels: Integers) -> float:
    """Return the share of correct predictions.

    Args:
        predicted: (A,) class numbers.
        labels: (A,) true class numbers.
    """
    return float(np.mean(predicted == labels))


class LinearProbe(NamedTuple):
    """A linear classifier, with the chosen λ and how it was chosen.

        probe = linear_probe(train_features, train_labels)
        predicted = probe.classifier.predict(test_features)

    Attributes:
        classifier: standardization and logistic regression, fit on all training images.
        l2: the chosen λ.
        validation: accuracy on held-out training images by λ; empty if there was one λ.
    """

    classifier: Pipeline
    l2: float
    validation: dict[float, float]


def linear_probe(
    train: Vectors,
    train_labels: Integers,
    *,
    l2: Sequence[float] = L2_SWEEP,
    seed: int = 0,
) -> LinearProbe:
    """Fit multinomial logistic regression on standardized features (scikit-learn, L-BFGS).

    With several λ, each is fit on nine tenths of the images and scored on the rest; the best is fit
    on all of them.

    Args:
        train: (N, D) features.
        train_labels: (N,) class numbers.
        l2: values of λ to try; λ/2·‖W‖² is added to the mean cross-entropy.
        seed: random seed of the split for validation.

    Raises:
        DualencError: if there are too few images or classes, or a feature is not finite.
    """
    validation = _validate(train, train_labels, l2, seed) if len(l2) > 1 else {}
    # Of equally good values the larger λ is the simpler classifier.
    best = max(l2, key=lambda value: (validation.get(value, 0.0), value))
    return LinearProbe(fit_linear(train, train_labels, best), best, validation)


def _validate(
    train: Vectors,
    labels: Integers,
    l2: Sequence[float],
    seed: int,
) -> dict[float, float]:
    """Return the accuracy by λ on a tenth of the training images, after a fit on the others."""
    classes, sizes = np.unique(labels, return_counts=True)
    held_out = max(math.ceil(VALIDATION_SHARE * len(labels)), len(classes))
    if held_out >= len(labels):
        raise DualencError(
            f"{len(labels)} training images are too few for a probe, "
            "whose λ is chosen on a tenth of them",
            fix="give more",
        )
    # A class of one image cannot be in both parts, as stratification requires.
    stratify = labels if sizes.min() > 1 else None
    fit, check = train_test_split(
        np.arange(len(labels)), test_size=held_out, random_state=seed, stratify=stratify
    )
    validation = {}
    for value in l2:
        classifier = fit_linear(train[fit], labels[fit], value)
        validation[value] = accuracy(classifier.predict(train[check]), labels[check])
    return validation


def fit_linear(features: Vectors, labels: Integers, l2: float) -> Pipeline:
    """Fit standardization and a linear classifier by mean cross-entropy + λ/2·‖W‖².

    Args:
        features: (N, D) features.
        labels: (N,) class numbers.
        l2: λ.

    Raises:
        DualencError: if a feature is not finite, or there is only one class.
    """
    if not np.isfinite(features).all():
        raise DualencError(
            "the training features are not finite", fix="did the training end in NaN?"
        )
    num_classes = len(np.unique(labels))
    if num_classes < 2:
        raise DualencError(
            f"all training images have the label {labels[0]}",
            fix="a probe needs two classes or more",
        )
    scaler = StandardScaler().fit(features)
    # scikit-learn sums the loss over images: C = 1/(λN). For two classes it fits the difference of
    # their rows only, whose squared norm is twice that of both rows.
    inverse = (2 if num_classes == 2 else 1) / (l2 * len(labels))
    regression = LogisticRegression(C=inverse, max_iter=MAX_ITERATIONS, tol=1e-5)
    with warnings.catch_warnings():
        # A small λ may stop at MAX_ITERATIONS; validation compares the classifiers reached there.
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression.fit(scaler.transform(features), labels)
    return make_pipeline(scaler, regression)
