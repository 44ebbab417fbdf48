"""Probes of frozen features: k nearest neighbours, and logistic regression."""

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
"""λ of λ/2·‖W‖² added to the mean cross-entropy."""
VALIDATION_SHARE = 0.1
MAX_ITERATIONS = 500
"""Of L-BFGS, for each λ."""


def unit_rows(features: Vectors, what: str = "features") -> Vectors:
    """Rows (N, D) scaled to unit norm, as contiguous float32; a zero row stays zero. Errors call
    them `what`."""
    rows = np.ascontiguousarray(features, dtype=np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        bad = int(np.flatnonzero(~np.isfinite(norms[:, 0]))[0])
        raise DualencError(f"row {bad} of the {what} is not finite; did the training end in NaN?")
    return rows / np.maximum(norms, np.finfo(np.float32).tiny)


def knn_predict(
    train: Vectors,
    train_labels: Integers,
    test: Vectors,
    *,
    k: int = 20,
    temperature: float = 0.07,
    device: str | torch.device = "cpu",
) -> Integers:
    """Class (A,) of each test vector by a vote of its k nearest training vectors (Wu et al. 2018,
    §3.4).

    A neighbour at cosine s votes exp(s/τ); equal votes go to the lower class, as in scikit-learn.

    Args:
        train, train_labels: (N, D) features, scaled to unit norm here, and (N,) class numbers from
            0.
        test: (A, D) features to classify.
        k: number of neighbours; 1 is the nearest-neighbour classifier.
        temperature: τ of the vote.
        device: where to search, as in `dualenc.search.exact_search.exact_search`.
    """
    train_labels = np.asarray(train_labels)
    if not 1 <= k <= len(train):
        raise DualencError(
            f"k={k}: there are {len(train)} training images; choose k from 1 to that"
        )
    if temperature <= 0:
        raise DualencError(f"temperature={temperature}: it must be above 0")
    rows = unit_rows(train, "training features")
    queries = unit_rows(test, "test features")
    with distributed.single_process():
        scores, neighbours = exact_search(queries, rows, k, device=device)
    # exp((s − best)/τ): the same vote up to a factor per query, and no overflow at a small τ.
    votes = np.exp((scores - scores[:, :1]) / temperature)
    totals = np.zeros((len(queries), int(train_labels.max()) + 1))
    np.add.at(totals, (np.arange(len(queries))[:, None], train_labels[neighbours]), votes)
    return totals.argmax(axis=1)


def accuracy(predicted: Integers, labels: Integers) -> float:
    """Share of right predictions, both (A,)."""
    return float(np.mean(predicted == labels))


class LinearProbe(NamedTuple):
    """A classifier fit with the chosen λ, and accuracies by λ on held-out training images."""

    classifier: Pipeline
    l2: float
    validation: dict[float, float]


def linear_probe(
    train: Vectors, train_labels: Integers, *, l2: Sequence[float] = L2_SWEEP, seed: int = 0
) -> LinearProbe:
    """Multinomial logistic regression on standardised features by full-batch L-BFGS (scikit-learn).

    With several λ each is fit on nine tenths of the images and scored on the rest; the best (the
    larger of equal ones) is fit on all of them.

    Args:
        train, train_labels: (N, D) features and (N,) class numbers.
        l2: the λ to try, of λ/2·‖W‖² added to the mean cross-entropy.
        seed: of the split for validation.
    """
    validation = _validate(train, train_labels, l2, seed) if len(l2) > 1 else {}
    best = max(l2, key=lambda value: (validation.get(value, 0.0), value))
    return LinearProbe(fit_linear(train, train_labels, best), best, validation)


def _validate(
    train: Vectors, labels: Integers, l2: Sequence[float], seed: int
) -> dict[float, float]:
    """Accuracy by λ on a tenth of the training images, after a fit on the others."""
    classes, sizes = np.unique(labels, return_counts=True)
    held_out = max(math.ceil(VALIDATION_SHARE * len(labels)), len(classes))
    if held_out >= len(labels):
        raise DualencError(
            f"{len(labels)} training images are too few for a probe, whose λ is chosen on a tenth of them; give more"
        )
    # Every class must be in the part that is fit; a class of one image cannot be in both.
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
    """Fit standardisation and a classifier of features (N, D): mean cross-entropy + λ/2·‖W‖², λ
    being `l2`."""
    if not np.isfinite(features).all():
        raise DualencError("the training features are not finite; did the training end in NaN?")
    num_classes = len(np.unique(labels))
    if num_classes < 2:
        raise DualencError(
            f"all training images have the label {labels[0]}; a probe needs two classes or more"
        )
    scaler = StandardScaler().fit(features)
    # scikit-learn sums the loss over images: C = 1/(λN). Of two classes it keeps the difference of
    # their rows, whose squared norm is twice that of both.
    inverse = (2 if num_classes == 2 else 1) / (l2 * len(labels))
    regression = LogisticRegression(C=inverse, max_iter=MAX_ITERATIONS, tol=1e-5)
    with warnings.catch_warnings():
        # A small λ stops at MAX_ITERATIONS by design; validation chooses among what is reached.
        warnings.simplefilter("ignore", ConvergenceWarning)
        regression.fit(scaler.transform(features), labels)
    return make_pipeline(scaler, regression)
