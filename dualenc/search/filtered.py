"""Filtered search: a FAISS search restricted to the rows that meet conditions on columns."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np

from dualenc.errors import Unsupported
from dualenc.search.build import reason

_faiss: Any = faiss  # its stubs lack the signatures that take arrays and parameters
NPROBE_FACTOR = 2
"""Allowed rows are sparser and farther away than those that `nprobe` was tuned for: IVF visits twice as many lists."""
SCANNED_BELOW = 0.1
"""Share of allowed rows below which an HNSW index is scanned: a walk over its graph would meet mostly others."""


def search_among(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Filtered search: the k best of the allowed rows (N,) bool, selected during the search and not after it.

    A flat index is exact. IVF visits more lists, and HNSW more vertices, in proportion to the rows that are left out,
    so that as many allowed rows are compared as in a search without a filter.
    """
    share = float(allowed.mean())
    if not share:
        return np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1)
    if isinstance(index, faiss.IndexHNSW) and share < SCANNED_BELOW:
        index = index.storage
    index = faiss.downcast_index(index)
    selector = _faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    try:
        return index.search(queries, k, params=_parameters(index, selector, share, k))
    except RuntimeError as error:
        problem = f"FAISS cannot filter an {type(index).__name__} ({reason(error)})"
        raise Unsupported(f"{problem}; build the index as Flat, IVF or HNSW") from None


def _parameters(index: Any, selector: Any, share: float, k: int) -> Any:
    """FAISS search parameters for an index of any nesting: its own settings, scaled by the share of allowed rows."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        inner = _parameters(index.base_index, selector, share, math.ceil(k * index.k_factor))
        return _faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=inner)
    if isinstance(index, faiss.IndexPreTransform):
        return _faiss.SearchParametersPreTransform(
            index_params=_parameters(index.index, selector, share, k)
        )
    if isinstance(index, faiss.IndexIVF):
        lists = math.ceil(NPROBE_FACTOR * index.nprobe / share)
        return _faiss.SearchParametersIVF(sel=selector, nprobe=min(index.nlist, lists))
    if isinstance(index, faiss.IndexHNSW):
        candidates = math.ceil(max(index.hnsw.efSearch, k) / share)
        return _faiss.SearchParametersHNSW(sel=selector, efSearch=min(index.ntotal, candidates))
    return _faiss.SearchParameters(sel=selector)
