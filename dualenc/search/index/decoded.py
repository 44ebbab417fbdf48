"""Decode vectors from the codes of a FAISS index, and search the decoded vectors exactly."""

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
"""The only block size (`bbs`) of fast-scan codes that FAISS decodes correctly."""
# These estimate distances without decoding, and have no `fine_quantizer`.
RABITQ = (faiss.IndexRaBitQFastScan, faiss.IndexIVFRaBitQFastScan)


def fast_scan_codes(index: Any) -> Any:
    """Return the fast-scan part of an index, or None if its codes are of another kind."""
    index = faiss.downcast_index(index)
    ivf = faiss.try_extract_index_ivf(index)
    part = index if ivf is None else faiss.downcast_index(ivf)
    return part if isinstance(part, (faiss.IndexFastScan, faiss.IndexIVFFastScan)) else None


def restore_quantizer(index: Any) -> None:
    """Set the quantizer with which an opened IVF fast-scan index decodes its codes.

    FAISS leaves the pointer null when it reads such an index, and `reconstruct` then crashes.
    """
    for part in split(index):
        codes: Any = None if part is None else fast_scan_codes(part)
        is_in_lists = isinstance(codes, faiss.IndexIVFFastScan)
        if is_in_lists and codes.fine_quantizer is None:
            # A product or an additive quantizer, depending on the kind.
            codes.fine_quantizer = getattr(codes, "pq", None) or getattr(codes, "aq", None)


def decode(index: Any, rows: np.ndarray) -> np.ndarray:
    """Decode the vectors (n, D) of rows (n,).

    Args:
        index: filled FAISS index.
        rows: (n,) row numbers, not negative.

    Raises:
        ValueError: FAISS cannot decode the codes.
        RuntimeError: FAISS's own error.
    """
    codes = fast_scan_codes(index)
    is_in_lists = isinstance(codes, faiss.IndexIVFFastScan) and not isinstance(codes, RABITQ)
    # FAISS would dereference a null pointer and crash.
    if is_in_lists and codes.fine_quantizer is None:
        raise ValueError(f"FAISS does not decode the codes of an {type(codes).__name__}")
    ivf = faiss.try_extract_index_ivf(index)
    # Finding a row in inverted lists needs a direct map from rows to list entries, which takes 8
    # bytes per vector; it is built only on demand.
    if ivf is not None and ivf.direct_map.no():
        ivf.make_direct_map(True)
    return index.reconstruct_batch(rows)


def search_decoded(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Search the decoded vectors of all allowed rows exactly, for kinds that FAISS cannot filter.

    Args:
        index: filled FAISS index.
        queries: (Q, D) float32.
        k: number of results per query.
        allowed: (N,) bool, the rows to compare.

    Returns:
        Scores and rows (Q, k), best first; row -1 pads missing results.

    Raises:
        DualencError: FAISS cannot decode the codes.
    """
    codes = fast_scan_codes(index)
    heap = faiss.ResultHeap(len(queries), k, keep_max=True)
    rows = np.flatnonzero(allowed)
    with explain_filter(index):
        # Other fast-scan codes decode to different vectors than those that FAISS searches.
        if codes is not None and (codes.bbs != DECODED_BLOCK or isinstance(codes, RABITQ)):
            raise ValueError("or decode its codes")
        # Decode in blocks: all vectors in float32 may exceed the memory. A heap merges the results.
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
