"""Nearest-neighbour classification on frozen features, by cosine; FAISS finds the neighbours."""

from __future__ import annotations

import faiss
import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError

Features = npt.NDArray[np.floating]
Labels = npt.NDArray[np.integer]


def unit_rows(features: Features, what: str = "features") -> npt.NDArray[np.float32]:
    """Rows scaled to unit norm, as contiguous float32; a zero row stays zero.

    Args:
        features: (N, D) vectors.
        what: How the error names them.

    Raises:
        DualencError: not a matrix, empty, or not finite.
    """
    if features.ndim != 2 or len(features) == 0:
        raise DualencError(f"{what} have shape {features.shape}; a matrix (items, dimension) with items is needed")
    rows = np.ascontiguousarray(features, dtype=np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        bad = int(np.flatnonzero(~np.isfinite(norms[:, 0]))[0])
        raise DualencError(f"row {bad} of the {what} is not finite; did the training end in NaN?")
    return rows / np.maximum(norms, np.finfo(np.float32).tiny)


def check_labels(features: Features, labels: Labels, what: str) -> npt.NDArray[np.int64]:
    """The labels as int64, after making sure that there is one, not negative, for every row.

    Args:
        features: (N, D) vectors.
        labels: (N,) class numbers from 0.
        what: Which part of the data the error names, such as "train".

    Raises:
        DualencError: a length differs, or a label is missing (negative) or not a whole number.
    """
    labels = np.asarray(labels)
    if labels.shape != (len(features),):
        raise DualencError(
            f"{what}: {len(features)} images but labels of shape {labels.shape}; give one label per image"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise DualencError(f"{what}: labels are {labels.dtype}; give class numbers from 0")
    if labels.size and labels.min() < 0:
        row = int(np.argmax(labels < 0))
        raise DualencError(f"{what}: image {row} has the label {labels[row]}; every image needs a class from 0")
    return labels.astype(np.int64)


def knn_predict(
    train: Features, train_labels: Labels, test: Features, *, k: int = 20, temperature: float | None = 0.07
) -> npt.NDArray[np.int64]:
    """Class of each test vector by a vote of its k nearest training vectors (Wu et al. 2018, §3.4).

    A neighbour at cosine s votes exp(s/τ); equal votes go to the lower class, as in scikit-learn.

    Args:
        train: (N, D) features of the training images; scaled to unit norm here.
        train_labels: (N,) class numbers from 0.
        test: (A, D) features to classify.
        k: Number of neighbours; 1 is the nearest-neighbour classifier.
        temperature: τ of the vote; None gives every neighbour one vote.

    Returns:
        (A,) predicted classes.

    Raises:
        DualencError: lengths or dimensions differ, a label is missing, or k is out of range.
    """
    train_labels = check_labels(train, train_labels, "train")
    if not 1 <= k <= len(train):
        raise DualencError(f"k={k}: there are {len(train)} training images; choose k from 1 to that")
    if temperature is not None and temperature <= 0:
        raise DualencError(f"temperature={temperature}: it must be above 0")
    rows, queries = unit_rows(train, "training features"), unit_rows(test, "test features")
    if rows.shape[1] != queries.shape[1]:
        raise DualencError(f"training features have dimension {rows.shape[1]}, test features {queries.shape[1]}")
    scores, neighbours = faiss.knn(queries, rows, k, faiss.METRIC_INNER_PRODUCT)
    # exp((s − best)/τ): the same vote up to a factor per query, and no overflow at a small τ.
    votes = np.ones_like(scores) if temperature is None else np.exp((scores - scores[:, :1]) / temperature)
    return _most_votes(train_labels[neighbours], votes, int(train_labels.max()) + 1)


def accuracy(predicted: Labels, labels: Labels) -> float:
    """Share of right predictions, both (A,)."""
    if len(predicted) != len(labels) or len(labels) == 0:
        raise DualencError(f"{len(predicted)} predictions for {len(labels)} labels; one for each is needed")
    return float(np.mean(predicted == labels))


def _most_votes(classes_AK: Labels, votes_AK: Features, num_classes: int) -> npt.NDArray[np.int64]:
    totals = np.zeros((len(classes_AK), num_classes))
    np.add.at(totals, (np.arange(len(classes_AK))[:, None], classes_AK), votes_AK)
    return totals.argmax(axis=1)
