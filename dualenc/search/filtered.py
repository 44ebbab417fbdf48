"""Search among some rows of a FAISS index: those that meet conditions on columns."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np

from dualenc.errors import Unsupported
from dualenc.search.build import reason

_faiss: Any = faiss
"""Its types do not tell how Python gives it arrays and parameters."""
LISTS_MORE = 2
"""What is kept is sparser and lies farther away than what the lists were counted for, so IVF visits twice as many."""
SCANNED_BELOW = 0.1
"""Of an HNSW index a smaller share than this is compared vector by vector: a walk over its graph would meet mostly
others."""


def search_among(index: Any, queries: np.ndarray, k: int, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The k best of some rows, filtered within the search and not after it.

    A flat index compares what is kept, exactly. IVF visits as many more lists, and HNSW as many more vertices, as rows
    are left out, so that no fewer that count are compared than in a search without a filter: where few are kept, that
    is all of them.

    Args:
        index: of N vectors.
        queries: (Q, D) float32, as the index wants them.
        k: how many.
        kept: (N,) bool.

    Returns:
        Scores (Q, k) and rows (Q, k); -1 where fewer are found.

    Raises:
        Unsupported: FAISS cannot filter an index of this kind.
    """
    share = float(kept.mean())
    if not share:
        return np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1)
    if isinstance(index, faiss.IndexHNSW) and share < SCANNED_BELOW:
        index = index.storage
    index = faiss.downcast_index(index)
    selector = _faiss.IDSelectorBitmap(np.packbits(kept, bitorder="little"))
    try:
        return index.search(queries, k, params=_parameters(index, selector, share, k))
    except RuntimeError as error:
        kind = type(index).__name__
        raise Unsupported(
            f"FAISS cannot filter an {kind} ({reason(error)}); build the index as Flat, IVF or HNSW"
        ) from None


def _parameters(index: Any, selector: Any, share: float, k: int) -> Any:
    """How to search an index of any nesting, its own settings scaled by the share of rows that is kept."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        wanted = math.ceil(k * index.k_factor)
        inner = _parameters(index.base_index, selector, share, wanted)
        return _faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=inner)
    if isinstance(index, faiss.IndexPreTransform):
        return _faiss.SearchParametersPreTransform(index_params=_parameters(index.index, selector, share, k))
    if isinstance(index, faiss.IndexIVF):
        lists = math.ceil(LISTS_MORE * index.nprobe / share)
        return _faiss.SearchParametersIVF(sel=selector, nprobe=min(index.nlist, lists))
    if isinstance(index, faiss.IndexHNSW):
        candidates = math.ceil(max(index.hnsw.efSearch, k) / share)
        return _faiss.SearchParametersHNSW(sel=selector, efSearch=min(index.ntotal, candidates))
    return _faiss.SearchParameters(sel=selector)
