"""Retrieval metrics: pure functions of runs and judgements, and of score matrices; the paired
bootstrap.

Runs and judgements follow trec_eval (`pytrec_eval-terrier` computes every number): a document is
relevant when its grade is 1 or more, nDCG gains are linear in the grade, MAP@k divides by all
relevant documents, equal scores (compared as float32) are ordered by descending document id. One
point differs on purpose: a query of the judgements that the run lacks counts as 0.
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

# Our name of a measure → trec_eval's; reciprocal rank has no cut-off there and is cut below.
_MEASURES = {
    "ndcg": "ndcg_cut",
    "recall": "recall",
    "map": "map_cut",
    "precision": "P",
    "hit": "success",
}
METRICS: tuple[str, ...] = tuple(f"{name}@{k}" for name in (*_MEASURES, "mrr") for k in CUTOFFS)
"""Names of the metrics of `score_queries` by default."""


def score_queries(qrels: Qrels, run: Run, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, Scores]:
    """Every metric of every judged query, such as "ndcg@10" or "mrr@10"; all 0 for a query that the
    run lacks.

    Args:
        qrels: grade of each judged document by query id; grades below 1 are not relevant.
        run: score of each retrieved document by query id; queries without judgements are ignored.
            Copies of the queries among the documents count like others: see `remove_self_matches`.
        cutoffs: the k of nDCG@k, recall@k, MRR@k, MAP@k, precision@k and hit@k.
    """
    qrels = {query: grades for query, grades in qrels.items() if grades}
    if not qrels:
        raise DualencError(
            "the judgements (qrels) are empty; give the split that has judged queries"
        )
    judged = {query: run[query] for query in qrels if query in run}
    scores = {}
    for query, documents in judged.items():
        scores[query] = {name: float(score) for name, score in documents.items()}
        if not np.isfinite(list(scores[query].values())).all():
            raise DualencError(
                f"query {query}: a score of the run is not finite; does the model give NaN embeddings?"
            )
    ks = ",".join(str(k) for k in cutoffs)
    measures = {"recip_rank", *(f"{name}.{ks}" for name in _MEASURES.values())}
    # pytrec_eval accepts exact ints and floats only, no numpy scalars, and crashes where all grades
    # are below -1.
    grades = {
        query: {doc: max(int(grade), 0) for doc, grade in docs.items()}
        for query, docs in qrels.items()
    }
    evaluated = pytrec_eval.RelevanceEvaluator(grades, measures).evaluate(scores)
    per_query = {}
    for query in qrels:
        measured = evaluated.get(query, {})
        reciprocal_rank = measured.get("recip_rank", 0.0)
        # 1/rank ≥ 1/k, rounded to a whole rank first so that 1/(1/k) cannot fall on the wrong side.
        rank = round(1 / reciprocal_rank) if reciprocal_rank else np.inf
        named: Scores = {}
        for ours, trec in _MEASURES.items():
            named |= {f"{ours}@{k}": measured.get(f"{trec}_{k}", 0.0) for k in cutoffs}
        per_query[query] = named | {
            f"mrr@{k}": reciprocal_rank if rank <= k else 0.0 for k in cutoffs
        }
    return per_query


def mean_scores(per_query: Mapping[str, Mapping[str, float]]) -> Scores:
    """The mean over queries of each metric of `score_queries`."""
    names = next(iter(per_query.values()))
    return {name: float(np.mean([scores[name] for scores in per_query.values()])) for name in names}


def remove_self_matches(run: Run, qrels: Qrels) -> dict[str, dict[str, float]]:
    """The run without the documents whose id is the query's, its copy in some collections, unless
    judged for it."""
    left: dict[str, dict[str, float]] = {}
    for query, documents in run.items():
        judged = qrels.get(query, {})
        left[query] = {
            name: score for name, score in documents.items() if name != query or name in judged
        }
    return left


def best_positive_ranks(
    queries: Vectors, candidates: Vectors, positives: Sequence[Iterable[int]]
) -> Integers:
    """Rank, from 1, of the best-scored positive of each query among all candidates, by inner
    product.

    A tie counts against the model, so that a collapsed encoder gets no credit.

    Args:
        queries, candidates: (A, D) and (N, D) embeddings.
        positives: for each query the right candidates, as columns 0…N−1.

    Returns:
        (A,) ranks; N + 1 for a query without a positive.
    """
    block = rows_at_once(len(candidates))
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(queries), block):
        scores = queries[start : start + block] @ candidates.T
        if not np.isfinite(scores).all():
            raise DualencError(
                "some embeddings are not finite; was the training stopped by a NaN loss?"
            )
        is_positive = np.zeros(scores.shape, bool)
        for row, columns in enumerate(positives[start : start + block]):
            is_positive[row, list(columns)] = True
        best = np.max(scores, axis=1, where=is_positive, initial=-np.inf)
        is_before = (scores >= best[:, None]) & ~is_positive
        ranks.append(1 + is_before.sum(axis=1, dtype=np.int64))
    return np.concatenate(ranks)


def rows_at_once(candidates: int) -> int:
    """How many queries to score at once against N candidates: 128 MB of float32 scores, and 256 at
    most."""
    return max(1, min(256, 2**25 // max(candidates, 1)))


def recall_at(ranks: Integers, cutoffs: Sequence[int] = (1, 5, 10)) -> Scores:
    """Share of queries with a positive among the first k, by ranks (A,) from 1 of each query's best
    positive."""
    return {f"recall@{k}": float(np.mean(ranks <= k)) for k in cutoffs}


class Difference(NamedTuple):
    """Mean of B − A over queries, and the ends of its 95 % confidence interval."""

    difference: float
    low: float
    high: float


def paired_bootstrap(
    a: Sequence[float] | Vectors, b: Sequence[float] | Vectors, *, samples: int = 10_000
) -> Difference:
    """Compare two systems by resampling the queries on which both were scored, (Q,) each.

    The interval holds the percentiles of the resampled mean difference (Efron and Tibshirani 1993,
    §13.3).
    """
    differences = np.asarray(b, float) - np.asarray(a, float)
    observed = float(differences.mean())
    # scipy requires two observations; the mean of one never varies.
    if len(differences) < 2:
        return Difference(observed, observed, observed)
    low, high = scipy.stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=samples,
        # So that memory does not grow with queries x samples.
        batch=max(1, 2**20 // len(differences)),
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Difference(observed, float(low), float(high))
