"""Retrieval metrics: pure functions of runs and judgements, and of score matrices.

Runs and judgements follow trec_eval (`pytrec_eval-terrier` computes every number): a document is relevant
when its grade is 1 or more, nDCG gains are linear in the grade, MAP@k divides by all relevant documents,
equal scores (compared as float32, as trec_eval stores them) are ordered by descending document id. Two
points differ on purpose: a query of the judgements that the run lacks counts as 0, and a document whose id
equals the query's is removed, as BEIR does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import faiss
import numpy as np
import numpy.typing as npt
import pytrec_eval

from dualenc import distributed
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
    evaluated = _trec_eval(qrels, run, cutoffs)
    return {query: _our_names(evaluated.get(query, {}), cutoffs) for query in qrels}


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
    ranks = [
        _block_ranks(queries[start : start + block], candidates, positives[start : start + block])
        for start in range(0, len(queries), block)
    ]
    return np.concatenate(ranks) if ranks else np.zeros(0, np.int64)


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


def _trec_eval(qrels: Qrels, run: Run, cutoffs: Sequence[int]) -> dict[str, dict[str, float]]:
    ks = ",".join(str(k) for k in cutoffs)
    measures = {"recip_rank", *(f"{name}.{ks}" for name in _MEASURES.values())}
    grades = {query: {doc: int(grade) for doc, grade in docs.items()} for query, docs in qrels.items()}
    scores = {query: {doc: float(score) for doc, score in docs.items()} for query, docs in run.items()}
    for query, docs in scores.items():
        if not np.isfinite(np.fromiter(docs.values(), float, len(docs))).all():
            raise DualencError(f"query {query}: a score of the run is not finite; does the model give NaN embeddings?")
    return pytrec_eval.RelevanceEvaluator(grades, measures).evaluate(scores)


def _our_names(measured: Mapping[str, float], cutoffs: Sequence[int]) -> Scores:
    """Names of this package, cut-off by cut-off; an empty `measured` gives zeros."""
    reciprocal_rank = measured.get("recip_rank", 0.0)
    # 1/rank ≥ 1/k, rounded to a whole rank first so that 1/(1/k) cannot fall on the wrong side.
    rank = round(1 / reciprocal_rank) if reciprocal_rank else np.inf
    scores = {f"{ours}@{k}": measured.get(f"{trec}_{k}", 0.0) for ours, trec in _MEASURES.items() for k in cutoffs}
    scores.update({f"mrr@{k}": reciprocal_rank if rank <= k else 0.0 for k in cutoffs})
    return scores


def _block_ranks(
    queries: npt.NDArray[np.floating],
    candidates: npt.NDArray[np.floating],
    positives: Sequence[Iterable[int]],
) -> npt.NDArray[np.int64]:
    scores = queries @ candidates.T
    if not np.isfinite(scores).all():
        raise DualencError("some embeddings are not finite; was the training stopped by a NaN loss?")
    is_positive = np.zeros(scores.shape, bool)
    for row, columns in enumerate(positives):
        wanted = np.fromiter((column for column in columns if column >= 0), np.int64)
        if wanted.size and wanted.max() >= len(candidates):
            raise DualencError(f"positive {wanted.max()} is out of range: there are {len(candidates)} candidates")
        is_positive[row, wanted] = True
    best = np.max(scores, axis=1, where=is_positive, initial=-np.inf)
    return 1 + np.sum((scores >= best[:, None]) & ~is_positive, axis=1, dtype=np.int64)


Vectors = npt.NDArray[np.floating]

# Rows of queries and of documents that meet at once. The blocks never depend on the number of processes: a matrix
# product rounds differently for other shapes, and results must not.
QUERY_BLOCK = 512
DOCUMENT_BLOCK = 32768

# Documents found beyond the k-th: a tie across the k-th place is settled among them, a longer one by a second search.
SPARE = 16


def exact_search(
    queries: Vectors,
    documents: Vectors,
    k: int,
    *,
    document_ids: Sequence[str] | None = None,
    query_block: int = QUERY_BLOCK,
    document_block: int = DOCUMENT_BLOCK,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The k documents of highest inner product with each query, exactly.

    FAISS finds them block by block, so `documents` may be memory-mapped and larger than memory. Equal scores are
    ordered by descending document id (by descending column without ids), also where they decide who is among the k.
    Under several processes each searches its share of the queries and all get the whole result.

    Args:
        queries: (Q, D) embeddings.
        documents: (N, D) embeddings.
        k: How many documents to find; all N if k is larger.
        document_ids: (N,) ids, for the order of ties.
        query_block: Queries searched at once.
        document_block: Documents searched at once.

    Returns:
        Scores (Q, k) in descending order, and columns (Q, k) of the documents.

    Raises:
        DualencError: the shapes do not fit, there is no document, or an embedding is not finite.
    """
    _check(queries, documents, k)
    k = min(k, len(documents))
    precedence = _precedence(document_ids, len(documents))
    starts = range(0, len(queries), query_block)
    own = [
        _search_queries(queries[start : start + query_block], documents, k, precedence, document_block)
        for start in starts[distributed.rank_slice(len(starts))]
    ]
    found = [block for blocks in distributed.gather_objects(own) for block in blocks]
    scores = [np.zeros((0, k), np.float32), *(block_scores for block_scores, _ in found)]
    columns = [np.zeros((0, k), np.int64), *(block_columns for _, block_columns in found)]
    return np.concatenate(scores), np.concatenate(columns)


def as_run(
    query_ids: Sequence[str],
    document_ids: Sequence[str],
    scores: npt.NDArray[np.float32],
    columns: npt.NDArray[np.int64],
) -> dict[str, dict[str, float]]:
    """The result of `exact_search` as a run: score of each found document by query id."""
    return {
        query: {document_ids[column]: score for column, score in zip(found.tolist(), values.tolist())}
        for query, found, values in zip(query_ids, columns, scores, strict=True)
    }


def _search_queries(
    queries: Vectors, documents: Vectors, k: int, precedence: npt.NDArray[np.int64], document_block: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Search all documents for one block of queries, merging the best of each block of documents."""
    rows = _float32(queries, "a query")
    scores, columns = np.zeros((len(rows), 0), np.float32), np.zeros((len(rows), 0), np.int64)
    for start in range(0, len(documents), document_block):
        block = _float32(documents[start : start + document_block], "a document")
        block_scores, block_columns = _search_block(rows, block, k)
        scores = np.concatenate([scores, block_scores], axis=1)
        columns = np.concatenate([columns, start + block_columns], axis=1)
        order = np.lexsort((precedence[columns], -scores), axis=1)[:, :k]
        scores, columns = np.take_along_axis(scores, order, 1), np.take_along_axis(columns, order, 1)
    return scores, columns


def _search_block(
    queries: npt.NDArray[np.float32], documents: npt.NDArray[np.float32], k: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """At least the k best of a block, with everything that ties with the k-th: FAISS returns ties in no fixed order."""
    k = min(k, len(documents))
    asked = min(k + SPARE, len(documents))
    while True:
        with _matrix_product():
            scores, columns = faiss.knn(queries, documents, asked, faiss.METRIC_INNER_PRODUCT)
        if asked == len(documents) or (scores[:, -1] < scores[:, k - 1]).all():
            return scores, columns
        asked = min(2 * asked, len(documents))


@contextmanager
def _matrix_product() -> Iterator[None]:
    """Let FAISS multiply matrices for small blocks of queries too; its own rule is several times slower for them."""
    before = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 20
    try:
        yield
    finally:
        faiss.cvar.distance_compute_blas_threshold = before


def _precedence(document_ids: Sequence[str] | None, count: int) -> npt.NDArray[np.int64]:
    """(N,) place of each document among equals: the highest id goes first."""
    if document_ids is None:
        return np.arange(count)[::-1]
    if len(document_ids) != count:
        raise DualencError(f"{len(document_ids)} document ids for {count} embeddings; give one each")
    order = sorted(range(count), key=document_ids.__getitem__, reverse=True)
    precedence = np.empty(count, np.int64)
    precedence[order] = np.arange(count)
    return precedence


def _float32(vectors: Vectors, what: str) -> npt.NDArray[np.float32]:
    rows = np.ascontiguousarray(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise DualencError(f"the embedding of {what} is not finite; did the training end in NaN?")
    return rows


def _check(queries: Vectors, documents: Vectors, k: int) -> None:
    if len(queries.shape) != 2 or len(documents.shape) != 2 or queries.shape[1] != documents.shape[1]:
        raise DualencError(
            f"embeddings of shapes {queries.shape} and {documents.shape} cannot be compared; "
            "both must be matrices of the same dimension"
        )
    if len(documents) == 0:
        raise DualencError("there is no document to search")
    if k < 1:
        raise DualencError(f"k={k}: ask for one document or more")
