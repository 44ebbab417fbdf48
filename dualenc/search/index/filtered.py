"""Filtered search: a FAISS search restricted to the rows that meet conditions on columns."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np

from dualenc.search.index.decoded import explain_filter, search_decoded
from dualenc.search.index.kinds import EXACT_VALUES

_faiss: Any = faiss  # its stubs lack the signatures that take arrays and parameters
NPROBE_FACTOR = 2
"""Allowed rows are sparser and farther away than those that `nprobe` was tuned for: IVF visits
twice as many lists."""


def default_exact_rows(dim: int) -> int:
    """As many rows of size D as `auto` searches exactly, too."""
    return EXACT_VALUES // dim


def search_among(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray, exact_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Filtered search: the k best of the allowed rows (N,) bool, selected during the search and not
    after it.

    Up to `exact_rows` allowed rows are all compared. Of more, IVF visits more lists, and HNSW more
    vertices, in proportion to the rows that are left out, so that as many are compared as in a
    search without a filter. Kinds that FAISS cannot filter (PQ, RQ, NSG, …) compare all allowed
    rows, however many.
    """
    count = int(allowed.sum())
    if not count:
        return np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1)
    if count <= exact_rows or not _takes_filter(index):
        return scan(index, queries, k, allowed)
    return _search(
        index, queries, k, _parameters(index, _selector(allowed), count / len(allowed), k)
    )


def scan(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare queries (Q, D) with all allowed rows (N,) bool, as the most precise stage of an index
    stores them."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return scan(index.refine_index, queries, k, allowed)
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        for number in range(chain.size()):
            queries = faiss.downcast_VectorTransform(chain.at(number)).apply(queries)
        return scan(index.index, queries, k, allowed)
    if isinstance(index, (faiss.IndexHNSW, faiss.IndexNSG)):
        graph: Any = index
        return scan(graph.storage, queries, k, allowed)
    if not _takes_filter(index):
        return search_decoded(index, queries, k, allowed)
    parameters = _faiss.SearchParameters(sel=_selector(allowed))
    if isinstance(index, faiss.IndexIVF):
        parameters = _faiss.SearchParametersIVF(sel=_selector(allowed), nprobe=index.nlist)
    return _search(index, queries, k, parameters)


def _takes_filter(index: Any) -> bool:
    """True if FAISS can restrict the search of an index, and compares by inner product."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return _takes_filter(index.base_index)
    if isinstance(index, faiss.IndexPreTransform):
        return _takes_filter(index.index)
    if isinstance(index, faiss.IndexHNSW):
        return True
    # FAISS has HNSW and NSG over PQ by distance only.
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        return False
    additive = (faiss.IndexIVFAdditiveQuantizer, faiss.IndexIVFAdditiveQuantizerFastScan)
    if isinstance(index, faiss.IndexIVF):
        return not isinstance(index, additive)
    return isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexRaBitQ))


def _selector(allowed: np.ndarray) -> Any:
    return _faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def _search(
    index: Any, queries: np.ndarray, k: int, parameters: Any
) -> tuple[np.ndarray, np.ndarray]:
    with explain_filter(index):
        return index.search(queries, k, params=parameters)


def _parameters(index: Any, selector: Any, share: float, k: int) -> Any:
    """FAISS search parameters for an index of any nesting: its own settings, scaled by the share of
    allowed rows."""
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
