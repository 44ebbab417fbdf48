"""Exact search by inner product: FAISS on the CPU, a matrix product and topk on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.types import Vectors

# Rows per block of queries and of documents. They must not depend on the number of processes: a
# matrix product rounds differently for other shapes, and results would differ.
QUERY_BLOCK = 512
DOCUMENT_BLOCK = 32768

# Query blocks that are in memory together. Each block of documents is read, and copied to the GPU,
# once for all of them.
MAX_QUERY_BLOCKS = 64

# Documents to find beyond the k-th, to decide a tie across the k-th place. A longer tie takes a
# second search.
SPARE = 16

Results = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]
"""Scores (B, k) and columns (B, k) of each block of queries."""
_LOW = 2**32 - 1


def exact_search(
    queries: Vectors,
    documents: Vectors,
    k: int,
    *,
    document_ids: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Find the k documents with the highest inner product for each query, exactly.

    Documents are searched in blocks, so they may be memory-mapped and larger than memory. Equal
    scores are ordered by descending document id, or column without ids, also where they decide
    which documents are among the k. Several processes share the queries, and all of them get the
    whole result. A GPU computes in float32 without TF32; elsewhere FAISS searches.

        scores, columns = exact_search(queries, documents, k=10)

    Args:
        queries: (Q, D) embeddings.
        documents: (N, D) embeddings.
        k: number of documents; all N if k is larger.
        document_ids: (N,) ids, for the order of ties.
        device: device to search on.

    Returns:
        Scores (Q, k), descending, and columns (Q, k).

    Raises:
        DualencError: the shapes do not fit, or an embedding is not finite.
    """
    num_ids = len(documents) if document_ids is None else len(document_ids)
    is_comparable = len(queries.shape) == 2 and queries.shape[1:] == documents.shape[1:]
    if not is_comparable or not num_ids or num_ids != len(documents) or k < 1:
        raise DualencError(
            f"queries {queries.shape}, documents {documents.shape} with {num_ids} ids, k={k}",
            fix="give matrices of one dimension, an id for each document, and k of at least 1",
        )
    k = min(k, len(documents))
    precedence = _precedence(len(documents), document_ids)
    device = torch.device(device)
    search = search_by_torch if device.type == "cuda" else _search_by_faiss
    starts = range(0, len(queries), QUERY_BLOCK)
    own = starts[distributed.rank_slice(len(starts))]
    result: Results = []
    for first in range(0, len(own), MAX_QUERY_BLOCKS):
        blocks = [
            queries[start : start + QUERY_BLOCK] for start in own[first : first + MAX_QUERY_BLOCKS]
        ]
        result += search(blocks, documents, k, precedence, device)
    result = [block for blocks in distributed.gather_objects(result) for block in blocks]
    scores = [np.zeros((0, k), np.float32), *(block_scores for block_scores, _ in result)]
    columns = [np.zeros((0, k), np.int64), *(block_columns for _, block_columns in result)]
    return np.concatenate(scores), np.concatenate(columns)


def _precedence(num_documents: int, document_ids: Sequence[str] | None) -> npt.NDArray[np.int64]:
    """Return the rank (N,) of each document among equal scores, by descending id or column."""
    if document_ids is None:
        return np.arange(num_documents)[::-1]
    # Read the ids once, because they may be on disk.
    names = list(document_ids)
    descending = sorted(range(len(names)), key=names.__getitem__, reverse=True)
    precedence = np.empty(num_documents, np.int64)
    precedence[descending] = np.arange(len(names))
    return precedence


def _search_by_faiss(
    queries: Sequence[Vectors],
    documents: Vectors,
    k: int,
    precedence: npt.NDArray[np.int64],
    device: torch.device,
) -> Results:
    """Search all documents for blocks of queries, merging the best of each block of documents."""
    rows = [_float32(block, "a query") for block in queries]
    results: Results = [
        (np.zeros((len(own), 0), np.float32), np.zeros((len(own), 0), np.int64)) for own in rows
    ]
    before = faiss.cvar.distance_compute_blas_threshold
    # Use matrix products for small blocks of queries too: FAISS's default is several times slower.
    faiss.cvar.distance_compute_blas_threshold = 20
    try:
        for start in range(0, len(documents), DOCUMENT_BLOCK):
            block = _float32(documents[start : start + DOCUMENT_BLOCK], "a document")
            for number, own in enumerate(rows):
                block_scores, block_columns = _knn_with_ties(own, block, k)
                best_scores, best_columns = results[number]
                scores = np.concatenate([best_scores, block_scores], axis=1)
                columns = np.concatenate([best_columns, start + block_columns], axis=1)
                # The last key is the primary one: descending score, then precedence.
                order = np.lexsort((precedence[columns], -scores), axis=1)[:, :k]
                results[number] = (
                    np.take_along_axis(scores, order, 1),
                    np.take_along_axis(columns, order, 1),
                )
    finally:
        faiss.cvar.distance_compute_blas_threshold = before
    return results


def _knn_with_ties(
    queries: npt.NDArray[np.float32], documents: npt.NDArray[np.float32], k: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return at least the k nearest and all ties with the k-th; FAISS orders ties arbitrarily."""
    count = min(k + SPARE, len(documents))
    while True:
        scores, columns = faiss.knn(queries, documents, count, faiss.METRIC_INNER_PRODUCT)
        # The last score is below the k-th one, so no tie with the k-th was cut off.
        if count == len(documents) or (scores[:, -1] < scores[:, k - 1]).all():
            return scores, columns
        count = min(2 * count, len(documents))


def _float32(vectors: Vectors, what: str) -> npt.NDArray[np.float32]:
    rows = np.ascontiguousarray(vectors, np.float32)
    if not np.isfinite(rows).all():
        raise _not_finite(what)
    return rows


def search_by_torch(
    queries: Sequence[Vectors],
    documents: Vectors,
    k: int,
    precedence: npt.NDArray[np.int64],
    device: torch.device,
) -> Results:
    """Search like `_search_by_faiss`, on a device.

    It takes about 25 bytes of device memory for each pair of a query and a document of a block. A
    score and the precedence among equals are packed into one integer, so that topk also orders
    ties, and the host waits for the device only once, after the last block.

    Args:
        queries: blocks (B, D) of queries.
        documents: (N, D) embeddings.
        k: number of documents, at most N.
        precedence: (N,) rank of each document among equal scores.
        device: device to search on.
    """
    column_of = np.empty_like(precedence)
    column_of[precedence] = np.arange(len(precedence))
    with _full_precision(device):
        rows = [_on_device(block, device) for block in queries]
        # Checked at the end: reading a flag here would wait for the device.
        finite = [torch.stack([block.isfinite().all() for block in rows]).all()]
        last = torch.from_numpy(_LOW - precedence).to(device)
        best = [torch.empty((len(own), 0), dtype=torch.int64, device=device) for own in rows]
        for start in range(0, len(documents), DOCUMENT_BLOCK):
            block = _on_device(documents[start : start + DOCUMENT_BLOCK], device)
            finite.append(block.isfinite().all())
            for number, own in enumerate(rows):
                keys = _keys(own @ block.T, last[start : start + len(block)])
                keys = keys.topk(min(k, len(block)), dim=1, sorted=False).values
                both = torch.cat([best[number], keys], dim=1)
                best[number] = both.topk(min(k, both.shape[1]), dim=1).values
        queries_fit, *documents_fit = torch.stack(finite).tolist()
        if not queries_fit or not all(documents_fit):
            raise _not_finite("a document" if queries_fit else "a query")
        results: Results = []
        for keys in best:
            scores = _flipped((keys >> 32).int()).view(torch.float32)
            results.append((scores.cpu().numpy(), column_of[_LOW - (keys & _LOW).cpu().numpy()]))
    return results


def _keys(scores: Tensor, last: Tensor) -> Tensor:
    """Return integers (B, n) that sort like scores (B, n), and among equal ones like `last` (n,).

    The high 32 bits are the score, and the low ones are `last`, from 0 to 2³² − 1.
    """
    scores += 0.0  # turns -0 into 0, which has other bits but is equal
    keys = _flipped(scores.view(torch.int32)).long()
    keys <<= 32
    keys |= last
    return keys


def _flipped(bits: Tensor) -> Tensor:
    """Convert the bits of floats to integers of the same order, or back.

    Positive floats already sort like their bits. The bits of negative ones sort in reverse, so all
    but the sign are inverted.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _on_device(vectors: Vectors, device: torch.device) -> Tensor:
    """Copy vectors to a device as float32 (n, D); half precision is converted there."""
    rows = np.asarray(vectors)
    rows = np.array(rows, rows.dtype if rows.dtype == np.float16 else np.float32, order="C")
    return torch.from_numpy(rows).to(device).float()


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Disable TF32 and autocast in this context."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        settings.fp32_precision = before


def _not_finite(what: str) -> DualencError:
    return DualencError(
        f"the embedding of {what} is not finite", fix="did the training end in NaN?"
    )
