"""Exact search with trec_eval's order of ties, in bounded memory and shared among processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import faiss
import numpy as np
import numpy.typing as npt

from dualenc import distributed
from dualenc.errors import DualencError

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
