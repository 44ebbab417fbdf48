"""Retrieval metrics of runs and of score matrices, and the paired bootstrap. Pure functions.

Metrics follow trec_eval (`pytrec_eval-terrier` computes every number): a document is relevant if
its grade is 1 or more, nDCG gains are linear in the grade, MAP@k divides by all relevant documents,
and equal scores (compared as float32) are ordered by descending document id. One point differs on
purpose: a judged query that the run lacks counts as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytrec_eval
import scipy.stats

from dualenc.errors import DualencError
from dualenc.types import Integers, Vectors

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]
Scores = dict[str, float]

CUTOFFS: tuple[int, ...] = (1, 3, 5, 10, 100)
CONFIDENCE = 0.95

# trec_eval's name of each measure. Its reciprocal rank does not take a cutoff, so it is cut below.
_MEASURES = {
    "ndcg": "ndcg_cut",
    "recall": "recall",
    "map": "map_cut",
    "precision": "P",
    "hit": "success",
}
METRICS: tuple[str, ...] = tuple(f"{name}@{k}" for name in (*_MEASURES, "mrr") for k in CUTOFFS)
"""Names of the default metrics of `score_queries`."""


def score_queries(qrels: Qrels, run: Run, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, Scores]:
    """Compute every metric of every judged query; all are 0 for a query that the run lacks.

    Args:
        qrels: grade of each judged document by query id; grades below 1 are not relevant.
        run: score of each retrieved document by query id; queries without judgements are ignored.
            Copies of the queries among the documents count like others: see `remove_self_matches`.
        cutoffs: the values of k of nDCG@k, recall@k, MRR@k, MAP@k, precision@k and hit@k.

    Returns:
        Scores such as "ndcg@10" or "mrr@10" by query id.

    Raises:
        DualencError: if `qrels` is empty, or a score is not finite.
    """
    qrels = {query: grades for query, grades in qrels.items() if grades}
    if not qrels:
        raise DualencError(
            "the judgements (qrels) are empty", fix="give the split that has judged queries"
        )
    scores = {}
    for query in qrels:
        if query not in run:
            continue
        documents = {name: float(score) for name, score in run[query].items()}
        scores[query] = documents
        if not np.isfinite(list(documents.values())).all():
            raise DualencError(
                "a score of the run is not finite",
                fix="does the model give NaN embeddings?",
                where=f"query {query}",
            )
    ks = ",".join(str(k) for k in cutoffs)
    # trec_eval's "recall.1,3,5" measures a metric at several cutoffs.
    measures = {f"{name}.{ks}" for name in _MEASURES.values()}
    measures.add("recip_rank")
    # pytrec_eval takes Python ints and floats only, not numpy scalars, and crashes if all grades of
    # a query are below -1.
    grades = {
        query: {name: max(int(grade), 0) for name, grade in judged.items()}
        for query, judged in qrels.items()
    }
    evaluated = pytrec_eval.RelevanceEvaluator(grades, measures).evaluate(scores)
    return {query: _named_scores(evaluated.get(query, {}), cutoffs) for query in qrels}


def _named_scores(measured: Mapping[str, float], cutoffs: Sequence[int]) -> Scores:
    """Return the scores of one query under our names; missing ones are 0."""
    named: Scores = {}
    for ours, trec in _MEASURES.items():
        for k in cutoffs:
            named[f"{ours}@{k}"] = measured.get(f"{trec}_{k}", 0.0)
    reciprocal_rank = measured.get("recip_rank", 0.0)
    # Compare whole ranks: 1/(1/k) may be rounded to the wrong side of k.
    rank = round(1 / reciprocal_rank) if reciprocal_rank else np.inf
    for k in cutoffs:
        named[f"mrr@{k}"] = reciprocal_rank if rank <= k else 0.0
    return named


def mean_scores(per_query: Mapping[str, Mapping[str, float]]) -> Scores:
    """Average each metric of `score_queries` over queries.

    Args:
        per_query: scores by metric by query id; at least one query.
    """
    names = next(iter(per_query.values()))
    return {name: float(np.mean([scores[name] for scores in per_query.values()])) for name in names}


def remove_self_matches(run: Run, qrels: Qrels) -> dict[str, dict[str, float]]:
    """Remove documents with the id of the query, which in some collections are copies of it.

    Args:
        run: score of each retrieved document by query id.
        qrels: grades by query id; a judged document stays.
    """
    remaining = {query: dict(documents) for query, documents in run.items()}
    for query, documents in remaining.items():
        if query not in qrels.get(query, {}):
            documents.pop(query, None)
    return remaining


def best_positive_ranks(
    queries: Vectors,
    candidates: Vectors,
    positives: Sequence[Iterable[int]],
) -> Integers:
    """Rank the best positive of each query among all candidates by inner product.

    A tie counts against the model, so that a collapsed encoder gets no credit.

    Args:
        queries: (A, D) embeddings.
        candidates: (N, D) embeddings.
        positives: rows of the relevant candidates, from 0 to N - 1, for each query.

    Returns:
        (A,) ranks from 1; N + 1 for a query without a positive.

    Raises:
        DualencError: if an embedding is not finite.
    """
    block = rows_at_once(len(candidates))
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(queries), block):
        stop = start + block
        # (block, N) scores; the whole matrix may not fit in memory.
        scores = queries[start:stop] @ candidates.T
        if not np.isfinite(scores).all():
            raise DualencError(
                "some embeddings are not finite", fix="was the training stopped by a NaN loss?"
            )
        is_positive = np.zeros(scores.shape, bool)
        for row, columns in enumerate(positives[start:stop]):
            is_positive[row, list(columns)] = True
        best = np.max(scores, axis=1, where=is_positive, initial=-np.inf)
        # Without a positive the best is -inf, and all N candidates are before it.
        is_before = (scores >= best[:, None]) & ~is_positive
        num_before = is_before.sum(axis=1, dtype=np.int64)
        ranks.append(1 + num_before)
    return np.concatenate(ranks)


def rows_at_once(candidates: int) -> int:
    """Return the number of queries to score at once: 128 MB of float32 scores, at most 256.

    Args:
        candidates: number of candidates N.
    """
    in_memory = 2**25 // max(candidates, 1)
    return max(1, min(256, in_memory))


def recall_at(ranks: Integers, cutoffs: Sequence[int] = (1, 5, 10)) -> Scores:
    """Return the share of queries with a positive among the first k, as "recall@k".

    Args:
        ranks: (A,) ranks from 1 of each query's best positive.
        cutoffs: the values of k.
    """
    return {f"recall@{k}": float(np.mean(ranks <= k)) for k in cutoffs}


class Difference(NamedTuple):
    """Mean difference of two systems over queries, with a 95% confidence interval.

        change = paired_bootstrap(before, after)
        is_better = change.low > 0

    Attributes:
        difference: mean of B − A.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    difference: float
    low: float
    high: float


def paired_bootstrap(
    a: Sequence[float] | Vectors,
    b: Sequence[float] | Vectors,
    *,
    groups: Sequence[int] | Integers | None = None,
    samples: int = 10_000,
) -> Difference:
    """Compare two systems by resampling the queries on which both were scored.

    The interval is that of the percentiles of the resampled mean difference (Efron and Tibshirani
    1993, section 13.3). With groups, whole groups are resampled (Davison and Hinkley 1997, section
    3.8): queries of one document are alike, so that many queries of few documents say less than
    as many of many.

        paired_bootstrap([0.1, 0.2, 0.9], [0.3, 0.4, 0.8], groups=[7, 7, 12])

    Args:
        a: (Q,) scores of the first system.
        b: (Q,) scores of the second system on the same queries.
        groups: (Q,) group of each query, such as the row of its document; None makes each query a
            group.
        samples: number of resamples.
    """
    before = np.asarray(a, float)
    after = np.asarray(b, float)
    differences = after - before
    observed = float(differences.mean())
    number = np.arange(len(differences))
    if groups is not None:
        number = np.unique(np.asarray(groups), return_inverse=True)[1]
    sums = np.bincount(number, differences)
    sizes = np.bincount(number).astype(float)
    # A single group says nothing about others: the interval is all that a difference can be.
    if len(sums) < 2:
        return Difference(observed, -1.0, 1.0)
    low, high = scipy.stats.bootstrap(
        (sums, sizes),
        _mean_of_groups,
        paired=True,
        vectorized=True,
        n_resamples=samples,
        # In batches, so that memory does not grow with groups × samples.
        batch=max(1, 2**20 // len(sums)),
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Difference(observed, float(low), float(high))


def _mean_of_groups(sums: Vectors, sizes: Vectors, axis: int) -> Vectors:
    """Return means over all queries, from the sums and sizes of their groups along an axis."""
    means: Vectors = sums.sum(axis=axis) / sizes.sum(axis=axis)
    return means
