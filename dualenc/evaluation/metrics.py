"""Retrieval metrics: pure functions of runs and judgements, and of score matrices; comparison of two runs.

Runs and judgements follow trec_eval (`pytrec_eval-terrier` computes every number): a document is relevant
when its grade is 1 or more, nDCG gains are linear in the grade, MAP@k divides by all relevant documents,
equal scores (compared as float32, as trec_eval stores them) are ordered by descending document id. Two
points differ on purpose: a query of the judgements that the run lacks counts as 0, and a document whose id
equals the query's is removed, as BEIR does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytrec_eval
import scipy.stats

from dualenc.errors import DualencError

Run = Mapping[str, Mapping[str, float]]
Qrels = Mapping[str, Mapping[str, int]]
Scores = dict[str, float]

CUTOFFS: tuple[int, ...] = (1, 3, 5, 10, 100)

# Our name of a measure → trec_eval's; reciprocal rank has no cut-off there and is cut below.
_MEASURES = {"ndcg": "ndcg_cut", "recall": "recall", "map": "map_cut", "precision": "P", "hit": "success"}


def score_queries(
    qrels: Qrels, run: Run, cutoffs: Sequence[int] = CUTOFFS, *, keep_self_matches: bool = False
) -> dict[str, Scores]:
    """Every metric of every judged query.

    Args:
        qrels: Grade of each judged document by query id; grades below 1 are not relevant.
        run: Score of each retrieved document by query id; queries without judgements are ignored.
        cutoffs: The k of nDCG@k, recall@k, MRR@k, MAP@k, precision@k and hit@k.
        keep_self_matches: Keep a retrieved document whose id is the query's; by default it is removed.

    Returns:
        For each query of `qrels`, in its order, the metrics by name, such as "ndcg@10" or "mrr@10"; all 0
        for a query that the run lacks.

    Raises:
        DualencError: no query is judged, a cut-off is not positive, or a score is not a number.
    """
    qrels = {query: grades for query, grades in qrels.items() if grades}
    if not qrels:
        raise DualencError("the judgements (qrels) are empty; give the split that has judged queries")
    if not cutoffs or min(cutoffs) < 1:
        raise DualencError(f"cutoffs {list(cutoffs)}: each k must be 1 or more")
    judged = {query: run[query] for query in qrels if query in run}
    run = judged if keep_self_matches else remove_self_matches(judged)
    scores = {query: {doc: float(score) for doc, score in docs.items()} for query, docs in run.items()}
    for query, docs in scores.items():
        if not np.isfinite(np.fromiter(docs.values(), float, len(docs))).all():
            raise DualencError(f"query {query}: a score of the run is not finite; does the model give NaN embeddings?")
    ks = ",".join(str(k) for k in cutoffs)
    measures = {"recip_rank", *(f"{name}.{ks}" for name in _MEASURES.values())}
    # pytrec_eval accepts exact ints and floats only, no numpy scalars.
    grades = {query: {doc: int(grade) for doc, grade in docs.items()} for query, docs in qrels.items()}
    evaluated = pytrec_eval.RelevanceEvaluator(grades, measures).evaluate(scores)
    per_query = {}
    for query in qrels:
        measured = evaluated.get(query, {})
        reciprocal_rank = measured.get("recip_rank", 0.0)
        # 1/rank ≥ 1/k, rounded to a whole rank first so that 1/(1/k) cannot fall on the wrong side.
        rank = round(1 / reciprocal_rank) if reciprocal_rank else np.inf
        named = {f"{ours}@{k}": measured.get(f"{trec}_{k}", 0.0) for ours, trec in _MEASURES.items() for k in cutoffs}
        per_query[query] = named | {f"mrr@{k}": reciprocal_rank if rank <= k else 0.0 for k in cutoffs}
    return per_query


def mean_scores(per_query: Mapping[str, Mapping[str, float]]) -> Scores:
    """The mean over queries of each metric of `score_queries`.

    Args:
        per_query: Metrics by name for each query id; every query has the same metrics.

    Raises:
        DualencError: there is no query.
    """
    if not per_query:
        raise DualencError("no query was scored; the judgements (qrels) are empty")
    names = next(iter(per_query.values()))
    return {name: float(np.mean([scores[name] for scores in per_query.values()])) for name in names}


def remove_self_matches(run: Run) -> dict[str, dict[str, float]]:
    """The run without documents whose id is the query's: some collections hold a copy of the query."""
    return {query: {doc: score for doc, score in docs.items() if doc != query} for query, docs in run.items()}


def best_positive_ranks(
    queries: npt.NDArray[np.floating],
    candidates: npt.NDArray[np.floating],
    positives: Sequence[Iterable[int]],
    *,
    block: int | None = None,
) -> npt.NDArray[np.int64]:
    """Rank, from 1, of the best-scored positive of each query among all candidates, by inner product.

    A tie is counted against the model: a candidate that is not positive and scores the same as the best
    positive goes before it, so that a collapsed encoder gets no credit.

    Args:
        queries: (A, D) embeddings.
        candidates: (N, D) embeddings.
        positives: For each query the candidates that are right answers, as columns 0…N−1; several captions
            of one image are several positives. Negative numbers are padding.
        block: Queries scored at once; by default `rows_at_once`.

    Returns:
        (A,) ranks; N + 1 for a query without a positive.

    Raises:
        DualencError: the shapes do not fit, an embedding is not finite, or a positive is out of range.
    """
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1]:
        raise DualencError(
            f"embeddings of shapes {queries.shape} and {candidates.shape} cannot be compared; "
            "both must be matrices of the same dimension"
        )
    if len(positives) != len(queries):
        raise DualencError(f"{len(queries)} queries but positives of {len(positives)}; give one list per query")
    block = block or rows_at_once(len(candidates))
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(queries), block):
        scores = queries[start : start + block] @ candidates.T
        if not np.isfinite(scores).all():
            raise DualencError("some embeddings are not finite; was the training stopped by a NaN loss?")
        is_positive = np.zeros(scores.shape, bool)
        for row, columns in enumerate(positives[start : start + block]):
            right = np.fromiter((column for column in columns if column >= 0), np.int64)
            if right.size and right.max() >= len(candidates):
                raise DualencError(f"positive {right.max()} is out of range: there are {len(candidates)} candidates")
            is_positive[row, right] = True
        best = np.max(scores, axis=1, where=is_positive, initial=-np.inf)
        ranks.append(1 + np.sum((scores >= best[:, None]) & ~is_positive, axis=1, dtype=np.int64))
    return np.concatenate(ranks)


def rows_at_once(candidates: int) -> int:
    """How many queries to score at once against N candidates: 128 MB of float32 scores, and 256 at most."""
    return max(1, min(256, 2**25 // max(candidates, 1)))


def recall_at(ranks: npt.NDArray[np.int64], cutoffs: Sequence[int] = (1, 5, 10)) -> Scores:
    """Share of queries with a positive among the first k, as image-text retrieval counts it, for each k.

    Args:
        ranks: (A,) ranks from 1 of each query's best positive.
        cutoffs: The k of recall@k.

    Raises:
        DualencError: there is no query.
    """
    if len(ranks) == 0:
        raise DualencError("no query to rank; the data is empty")
    return {f"recall@{k}": float(np.mean(ranks <= k)) for k in cutoffs}


class Comparison(NamedTuple):
    """Paired bootstrap of run B against run A, for one metric.

    Attributes:
        queries: Number of queries, Q.
        mean_a: Mean of run A.
        mean_b: Mean of run B.
        difference: `mean_b` − `mean_a`.
        low: Lower end of the confidence interval of the difference.
        high: Upper end of it.
        p_value: Two-sided: how often the difference would be as large by the choice of queries alone.
        better: Queries on which B scores higher.
        worse: Queries on which B scores lower.
    """

    queries: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int


def paired_bootstrap(
    a: Sequence[float] | npt.NDArray[np.floating],
    b: Sequence[float] | npt.NDArray[np.floating],
    *,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two systems by resampling the queries on which both were scored.

    The interval holds the percentiles of the resampled mean difference. The p-value counts the resamples whose
    difference, shifted so that their mean is zero, is at least as far from zero as the observed one (Efron and
    Tibshirani 1993, §16.4); it is never 0, the observed sample being one of those possible.

    Args:
        a: (Q,) scores of run A.
        b: (Q,) scores of run B on the same queries.
        samples: Number of resamples.
        confidence: Share of the resamples inside the interval.
        seed: Of the resampling; the same seed gives the same numbers.

    Raises:
        DualencError: the lengths differ, there is no query, or an argument is out of range.
    """
    a = np.asarray(a, float)
    b = np.asarray(b, float)
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise DualencError(f"scores of shapes {a.shape} and {b.shape}; give one of each run for each query")
    if samples < 1 or not 0 < confidence < 1:
        raise DualencError(
            f"samples={samples}, confidence={confidence}: samples must be 1 or more, confidence in (0, 1)"
        )
    differences = b - a
    observed = float(differences.mean())
    means, low, high = _resampled_means(differences, samples, confidence, seed)
    # A little below the observed difference, so that equal ones are not lost to rounding.
    at_least = np.abs(means - observed) >= abs(observed) - 1e-12
    return Comparison(
        queries=len(a),
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        difference=observed,
        low=low,
        high=high,
        p_value=float((1 + at_least.sum()) / (1 + samples)),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )


def _resampled_means(
    differences: npt.NDArray[np.floating], samples: int, confidence: float, seed: int
) -> tuple[npt.NDArray[np.floating], float, float]:
    """Bootstrap distribution of the mean, and its confidence interval."""
    if len(differences) == 1:
        # scipy requires two observations; the mean of one never varies.
        observed = float(differences[0])
        return np.full(samples, observed), observed, observed
    resampled = scipy.stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=samples,
        # So that memory does not grow with queries x samples.
        batch=max(1, 2**20 // len(differences)),
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    )
    low, high = resampled.confidence_interval
    return resampled.bootstrap_distribution, float(low), float(high)


def compare_runs(
    a: Mapping[str, Scores],
    b: Mapping[str, Scores],
    metrics: Sequence[str],
    *,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Comparison]:
    """Compare the per-query scores of two runs, metric by metric, in paired resamples.

    Args:
        a: Metrics of run A by query id.
        b: Metrics of run B by query id.
        metrics: Names of the metrics to compare.
        samples: Number of resamples.
        confidence: Share of the resamples inside the interval.
        seed: Of the resampling.

    Raises:
        DualencError: the runs do not have the same queries, or one lacks a metric.
    """
    if a.keys() != b.keys():
        only = len(a.keys() ^ b.keys())
        raise DualencError(f"{only} queries are in one run only; compare runs on the same data and split")
    for name, run in (("A", a), ("B", b)):
        missing = next((metric for metric in metrics if any(metric not in scores for scores in run.values())), None)
        if missing is not None:
            available = ", ".join(next(iter(run.values())))
            raise DualencError(f"run {name} has no metric {missing!r}; it has {available}")
    return {
        metric: paired_bootstrap(
            [a[query][metric] for query in a],
            [b[query][metric] for query in a],
            samples=samples,
            confidence=confidence,
            seed=seed,
        )
        for metric in metrics
    }
