"""Drift of queries: are today's queries still like those that the index was measured with?"""

from __future__ import annotations

import numpy as np

from dualenc.data.readers.vectors import load_npy
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.checks.findings import Finding, judged, skipped
from dualenc.search.checks.stored import Stored
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.filter_recall import VECTORS
from dualenc.search.index.open import Index

NAME = "drift"
LEVEL = 0.001
"""Probability of an alarm if nothing has changed: a daily check errs once in three years."""
PERMUTATIONS = 1999
MAX_QUERIES = 500
"""Different queries of each time that are compared."""
MIN_QUERIES = 20
OWN_SCORE = 0.999
"""Mean nearest score from which kept queries are documents of the index themselves."""


def check_drift(stored: Stored, queries: np.ndarray | None) -> Finding:
    """Compare queries with those that `dualenc evaluate engine --queries` has kept.

    Args:
        stored: an index or an engine.
        queries: (Q, D) vectors of recent queries; None without any.
    """
    if queries is None:
        return skipped(NAME, "no queries are given (--queries)")
    searched = stored.opened
    path = stored.folder / VECTORS
    if isinstance(searched, Embeddings) or not path.is_file():
        keep = "dualenc evaluate engine INDEX --filters FILE --queries EMBEDDINGS"
        return skipped(NAME, f"no {VECTORS} of earlier queries is kept ({keep})")
    try:
        before = load_npy(path).astype(np.float32)
    except DualencError as error:
        return skipped(NAME, str(error))
    if before.ndim != 2 or before.shape[1] != stored.dim:
        return skipped(NAME, f"{VECTORS} is of another dimension")
    before, now = _different(before), _different(queries)
    if min(len(before), len(now)) < MIN_QUERIES:
        counts = f"{len(now)} queries and {len(before)} kept ones"
        return skipped(NAME, f"{counts} are too few, {MIN_QUERIES} are needed")
    old_score, score = (_nearest_score(searched, part) for part in (before, now))
    if old_score > OWN_SCORE >= score:
        return skipped(NAME, "the kept queries are documents of the index: keep real queries")
    p = energy_test(before, now)
    line = (
        f"mean nearest score {score:.3f}, {old_score:.3f} when kept; "
        f"two-sample test p = {p:.4f}, level {LEVEL}"
    )
    numbers = {"score": score, "kept_score": old_score, "p": p, "queries": len(now)}
    return judged(NAME, p <= LEVEL, line, **numbers)


def _different(queries: np.ndarray) -> np.ndarray:
    """Return a sample of the different queries, of length one."""
    queries = queries[np.isfinite(queries).all(axis=1) & queries.any(axis=1)]
    # Copies are not independent, and would make the test see differences where there are none.
    unique = np.unique(queries, axis=0)
    random = np.random.default_rng(0)
    rows = random.choice(len(unique), min(MAX_QUERIES, len(unique)), replace=False)
    return unique[rows] / np.linalg.norm(unique[rows], axis=1, keepdims=True)


def _nearest_score(searched: Index | Engine, queries: np.ndarray) -> float:
    """Return the mean score of the best result."""
    scores = [hits[0].score for hits in searched.search(queries, 1) if hits]
    return float(np.mean(scores)) if scores else 0.0


def energy_test(left: np.ndarray, right: np.ndarray, seed: int = 0) -> float:
    """Return the p-value of the energy test that two sets of vectors have one distribution.

    By permutations, exact whatever the distribution. Source: Székely and Rizzo 2004, "Testing for
    equal distributions in high dimension", InterStat 5.

    Args:
        left: (n, D).
        right: (m, D).
        seed: of the permutations.
    """
    pooled = np.concatenate([left, right]).astype(np.float64)
    squares = np.einsum("nd,nd->n", pooled, pooled)
    distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * pooled @ pooled.T, 0))
    np.fill_diagonal(distances, 0)
    random = np.random.default_rng(seed)
    n, m = len(left), len(right)
    # Weights 1/n and -1/m: minus their quadratic form is 2·E|x−y| − E|x−x'| − E|y−y'|.
    weights = np.concatenate([np.full(n, 1 / n), np.full(m, -1 / m)])
    rows = np.stack([weights, *(random.permutation(weights) for _ in range(PERMUTATIONS))])
    energies = -np.einsum("pn,pn->p", rows @ distances, rows)
    return float((energies[1:] >= energies[0] - 1e-12).sum() + 1) / (PERMUTATIONS + 1)
