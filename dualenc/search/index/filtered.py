"""Filtered search: a FAISS search restricted to a set of allowed rows."""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np

from dualenc.search.index.decoded import explain_filter, search_decoded
from dualenc.search.index.kinds import EXACT_VALUES

_faiss: Any = faiss  # its stubs lack the signatures that take arrays and parameters
NPROBE_FACTOR = 2
"""Allowed rows are sparser and farther away than the neighbors that `nprobe` was tuned for, so IVF
visits twice as many lists."""


def default_exact_rows(dim: int) -> int:
    """Return how many rows of size D are searched exactly, the same as for the factory "auto".

    Args:
        dim: D.
    """
    return EXACT_VALUES // dim


def search_among(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray, exact_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best of the allowed rows, filtered during the search rather than after it.

    Up to `exact_rows` allowed rows are all compared. With more, IVF visits more lists and HNSW more
    vertices, inversely to the fraction of allowed rows, so that as many of them are compared as in
    an unfiltered search. Kinds that FAISS cannot filter (PQ, RQ, NSG, …) always compare all allowed
    rows.

    Args:
        index: filled FAISS index.
        queries: (Q, D) float32, ready for the metric.
        k: number of results per query.
        allowed: (N,) bool.
        exact_rows: number of rows up to which all are compared.

    Returns:
        Scores and rows (Q, k), best first; row -1 pads missing results.

    Raises:
        DualencError: FAISS can neither filter nor decode this kind of index.
    """
    count = int(allowed.sum())
    if not count:
        shape = (len(queries), k)
        return np.full(shape, -np.inf, np.float32), np.full(shape, -1)
    if count <= exact_rows or not _takes_filter(index):
        return scan(index, queries, k, allowed)
    # A filter during the search fills k results; one afterwards could leave fewer.
    parameters = _parameters(index, _selector(allowed), count / len(allowed), k)
    return _search(index, queries, k, parameters)


def scan(
    index: Any, queries: np.ndarray, k: int, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compare queries with all allowed rows, in the most precise form that the index stores.

    Args:
        index: filled FAISS index.
        queries: (Q, D) float32, ready for the metric.
        k: number of results per query.
        allowed: (N,) bool.

    Returns:
        Scores and rows (Q, k), best first; row -1 pads missing results.
    """
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
        # Skip the graph: its storage is a flat index of the same rows.
        return scan(graph.storage, queries, k, allowed)
    if not _takes_filter(index):
        return search_decoded(index, queries, k, allowed)
    parameters = _faiss.SearchParameters(sel=_selector(allowed))
    if isinstance(index, faiss.IndexIVF):
        parameters = _faiss.SearchParametersIVF(sel=_selector(allowed), nprobe=index.nlist)
    return _search(index, queries, k, parameters)


def _takes_filter(index: Any) -> bool:
    """Return True if FAISS can filter the search of an index, and compares by inner product."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return _takes_filter(index.base_index)
    if isinstance(index, faiss.IndexPreTransform):
        return _takes_filter(index.index)
    if isinstance(index, faiss.IndexHNSW):
        return True
    # FAISS has some kinds, such as NSG over PQ, by L2 distance only.
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        return False
    additive = (faiss.IndexIVFAdditiveQuantizer, faiss.IndexIVFAdditiveQuantizerFastScan)
    if isinstance(index, faiss.IndexIVF):
        return not isinstance(index, additive)
    return isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer, faiss.IndexRaBitQ))


def _selector(allowed: np.ndarray) -> Any:
    # One bit per row, the least significant first.
    return _faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def _search(
    index: Any, queries: np.ndarray, k: int, parameters: Any
) -> tuple[np.ndarray, np.ndarray]:
    with explain_filter(index):
        return index.search(queries, k, params=parameters)


def _parameters(index: Any, selector: Any, share: float, k: int) -> Any:
    """Return FAISS search parameters: the index's own settings, scaled by 1 / allowed share."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        # The base index must return enough candidates to rescore.
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
