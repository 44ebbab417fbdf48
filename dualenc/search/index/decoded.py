"""Vectors read back from a FAISS index: what its codes decode to, and exact search over them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import faiss
import numpy as np

from dualenc.errors import explain
from dualenc.search.index.refined import split

BLOCK_ROWS = 2**14
"""Vectors decoded at once."""
DECODED_BLOCK = 32
"""Block size of the fast-scan codes that FAISS decodes right."""
RABITQ = (faiss.IndexRaBitQFastScan, faiss.IndexIVFRaBitQFastScan)


def fast_scan_codes(index: Any) -> Any:
    """Return the fast-scan part of an index, None if its codes are of another kind."""
    index = faiss.downcast_index(index)
    ivf = faiss.try_extract_index_ivf(index)
    part = index if ivf is None else faiss.downcast_index(ivf)
    return part if isinstance(part, (faiss.IndexFastScan, faiss.IndexIVFFastScan)) else None


def restore_quantizer(index: Any) -> None:
    """Set the quantizer by which an opened IVF fast-scan index decodes its codes.

    FAISS leaves the pointer null when it reads such an index, and `reconstruct` then ends the
    process.
    """
    for part in split(index):
        codes: Any = None if part is None else fast_scan_codes(part)
        is_in_lists = isinstance(codes, faiss.IndexIVFFastScan)
        if is_in_lists and codes.fine_quantizer is None:
            codes.fine_quantizer = getattr(codes, "pq", None) or getattr(codes, "aq", None)


def decode(index: Any, rows: np.ndarray) -> np.ndarray:
    """Return the vectors (n, D) that the codes of some rows (n,) stand for; FAISS's own errors are
    raised."""
    codes = fast_scan_codes(index)
    is_in_lists = isinstance(codes, faiss.IndexIVFFastScan) and not isinstance(codes, RABITQ)
    # Without it FAISS ends the process; RaBitQ has its own.
    if is_in_lists and codes.fine_quantizer is None:
        raise ValueError(f"FAISS does not decode the codes of an {type(codes).__name__}")
    ivf = faiss.try_extract_index_ivf(index)
    # FAISS finds a row in inverted lists only with a direct map, which takes 8 bytes per vector.
    if ivf is not None and ivf.direct_map.no():
        ivf.make_direct_map(True)
    return index.reconstruct_batch(rows)


def search_decoded(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare queries (Q, D) with the decoded vectors of all allowed rows (N,) bool, for kinds
    FAISS cannot filter."""
    codes = fast_scan_codes(index)
    heap = faiss.ResultHeap(len(queries), k, keep_max=True)
    rows = np.flatnonzero(allowed)
    with explain_filter(index):
        # Other fast-scan codes decode to other vectors than those that are searched.
        if codes is not None and (codes.bbs != DECODED_BLOCK or isinstance(codes, RABITQ)):
            raise ValueError("or decode its codes")
        for start in range(0, len(rows), BLOCK_ROWS):
            block = rows[start : start + BLOCK_ROWS]
            vectors = decode(index, block)
            scores, columns = faiss.knn(
                queries, vectors, min(k, len(block)), faiss.METRIC_INNER_PRODUCT
            )
            heap.add_result(scores, block[columns])
    heap.finalize()
    return heap.D, heap.I


def explain_filter(index: Any) -> AbstractContextManager[None]:
    """Report in one line that FAISS cannot filter a kind of index."""
    advice = "build the index with codes that it can filter: Flat, HNSW32, SQ8 or IVF256,PQ16"
    return explain(f"FAISS cannot filter an {type(index).__name__}", advice)
