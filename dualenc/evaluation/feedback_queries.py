"""Counterfactual Rocchio: queries moved towards the documents that were clicked for them."""

from __future__ import annotations

import numpy as np

from dualenc.errors import DualencError
from dualenc.types import Integers, Vectors


def feedback_queries(
    queries: Vectors, documents: Vectors, query: Integers, document: Integers, weight: np.ndarray
) -> Vectors:
    """Add to each query the weighted mean of its clicked documents; nothing is trained.

    The vector of a query is q + Σ_d w_d·d / Σ_d w_d, scaled to length one: Rocchio's formula with
    equal shares and clicks for feedback, debiased by weights (Zhuang, Li and Zuccon 2022,
    arXiv:2204.00718). It serves queries that occur in the log; others stay as they are.

        feedback_queries(queries, documents.vectors, pairs.left_id, pairs.right_id, pairs.weights)

    Args:
        queries: unit vectors, (Q, D).
        documents: unit vectors, (N, D); only rows of pairs are read.
        query: row of the query of each pair, (M,).
        document: row of the document, (M,).
        weight: relevance of each pair, (M,) ≥ 0, such as the posterior of a click model.

    Returns:
        (Q, D) float32 unit vectors.

    Raises:
        DualencError: the arrays of pairs have different lengths, or a weight is negative.
    """
    query, document = np.asarray(query, np.int64), np.asarray(document, np.int64)
    weight = np.asarray(weight, dtype=np.float64)
    if not len(query) == len(document) == len(weight):
        raise DualencError(
            f"{len(query)} queries, {len(document)} documents and {len(weight)} weights",
            fix="give one of each per pair",
        )
    if not (weight >= 0).all():
        raise DualencError("weights must be 0 or more")
    sums = np.zeros(queries.shape)
    # Only documents in pairs: an index may have millions.
    used, place = np.unique(document, return_inverse=True)
    vectors = np.asarray(documents[used], dtype=np.float64)
    np.add.at(sums, query, weight[:, None] * vectors[place])
    total = np.bincount(query, weight, len(queries))[:, None]
    has_feedback = total > 0
    moved = queries + np.divide(sums, total, out=np.zeros_like(sums), where=has_feedback)
    # A mean opposite to the query would leave nothing to scale.
    length = np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-12)
    return np.where(has_feedback, moved / length, queries).astype(np.float32)
