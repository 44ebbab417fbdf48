"""Recall of searches against exact search, compared with what was measured at build time."""

from __future__ import annotations

import numpy as np

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.checks.findings import Finding, judged, skipped
from dualenc.search.checks.stored import Sample, Stored
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.filter_recall import (
    DEPTH,
    measure_again,
    recall_of_hits,
    wilson_interval,
)
from dualenc.search.engines.pushed_folder import RESULT
from dualenc.search.index.open import Hit, Index

NAME = "recall"
UNDER_FILTERS = "filters"
QUERIES = 200
"""Queries at most; an exact search compares each with all vectors."""
MAX_COMPARED = 2**31
"""Numbers of an index that exact search reads at most: 5.6 million vectors of dimension 384."""
LEAST = 0.8
"""Required recall if none was recorded."""


def check_recall(stored: Stored, sample: Sample | None, queries: np.ndarray | None) -> Finding:
    """Measure recall@10, and compare it with the recorded one.

    Args:
        stored: an index or an engine.
        sample: vectors that were read, which are the queries by default.
        queries: (Q, D) vectors of real queries; None without any.
    """
    searched = stored.opened
    if isinstance(searched, Embeddings):
        return skipped(NAME, "embeddings are always searched exactly")
    if len(searched) * stored.dim > MAX_COMPARED:
        again = f"dualenc evaluate engine {stored.folder}"
        return skipped(NAME, f"{len(searched):,} vectors are too many to compare; run {again}")
    if len(searched) <= DEPTH + 1:
        return skipped(NAME, f"{len(searched)} vectors are too few")
    if queries is not None:
        # Evenly from the whole table, which may be sorted.
        rows = np.linspace(0, len(queries) - 1, min(QUERIES, len(queries))).astype(int)
        recalls = _recalls(searched, queries[np.unique(rows)], None)
    else:
        if sample is None:
            return skipped(NAME, "the vectors cannot be read, and no --queries are given")
        recalls = _recalls(searched, *_stored_queries(stored, sample))
    if not len(recalls):
        return skipped(NAME, "no stored vector can be searched with")
    return _compared(stored, recalls, is_given=queries is not None)


def check_filters(stored: Stored) -> Finding:
    """Repeat the measurement of `dualenc evaluate engine`, if the folder records one."""
    if isinstance(stored.opened, Embeddings) or not (stored.folder / RESULT).is_file():
        return skipped(UNDER_FILTERS, "no recall under filters is recorded (evaluate engine)")
    try:
        measured, target = measure_again(stored.folder, stored.opened)
    except DualencError as error:
        return skipped(UNDER_FILTERS, str(error))
    line = (
        f"recall@10 {measured.recall:.3f} [{measured.low:.3f}, {measured.high:.3f}] over "
        f"{measured.searches:,} searches, target {target:g}"
    )
    numbers = {"recall": round(measured.recall, 4), "target": target}
    # Settings were chosen so that the lower end reached the target: below it is no more than noise
    # until the whole interval is.
    return judged(UNDER_FILTERS, measured.high < target, line, **numbers)


def _stored_queries(stored: Stored, sample: Sample) -> tuple[np.ndarray, list[str]]:
    """Return stored vectors (Q, D) as queries, and their ids."""
    is_usable = np.isfinite(sample.vectors).all(axis=1) & sample.vectors.any(axis=1)
    places = np.flatnonzero(is_usable)
    # Another seed than that of the queries that tuned the index.
    random = np.random.default_rng(2)
    chosen = np.sort(random.choice(places, min(QUERIES, len(places)), replace=False))
    return sample.vectors[chosen], [stored.ids[row] for row in sample.rows[chosen]]


def _recalls(searched: Index | Engine, queries: np.ndarray, own: list[str] | None) -> np.ndarray:
    """Return the recall@10 of each query (Q,), without the query's own item if it is stored."""
    if not len(queries):
        return np.empty(0)
    depth = DEPTH if own is None else DEPTH + 1
    found = searched.search(queries, depth)
    exact = searched.search(queries, depth, exact=True)
    if own is not None:
        found = [_without(*pair) for pair in zip(found, own)]
        exact = [_without(*pair) for pair in zip(exact, own)]
    return np.array([recall_of_hits(*pair) for pair in zip(found, exact) if pair[1]])


def _without(hits: list[Hit], id: str) -> list[Hit]:
    return [hit for hit in hits if hit.id != id][:DEPTH]


def _compared(stored: Stored, recalls: np.ndarray, is_given: bool) -> Finding:
    """Return the finding for measured recalls (Q,)."""
    mean = float(recalls.mean())
    low, high = wilson_interval(mean, len(recalls))
    tenth = float(np.sort(recalls)[: max(1, len(recalls) // 10)].mean())
    line = (
        f"recall@10 {mean:.3f} [{low:.3f}, {high:.3f}] over {len(recalls)} queries, "
        f"worst tenth {tenth:.2f}"
    )
    numbers = {"recall": round(mean, 4), "worst_tenth": round(tenth, 4), "queries": len(recalls)}
    built = stored.provenance.measured
    expected = built.recall_at_10
    if expected is None:
        return judged(NAME, mean < LEAST, f"{line}; {LEAST} is required", **numbers)
    least = wilson_interval(expected, built.recall_queries or len(recalls))[0]
    line = f"{line}; {expected:.3f} when built"
    # Real queries may find less than documents do, and such a difference is no change.
    if (built.recall_queries_from == "given") != is_given:
        least = min(least, LEAST)
        line += " with other queries"
    return judged(NAME, high < least, line, recorded=expected, **numbers)
