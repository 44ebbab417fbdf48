"""How much of an exact search an index finds, and the search parameter that makes it find enough."""

from __future__ import annotations

from typing import Any, NamedTuple

import faiss
import numpy as np
from faiss.contrib.exhaustive_search import knn_ground_truth

from dualenc.errors import DualencError
from dualenc.index.database import Database
from dualenc.index.factory import reason

SCORE_TOLERANCE = 1e-6
"""Two scores are a tie if they differ by less than this times both norms: sums in another order differ so much."""

LARGEST_PARAMETER = 2**24
"""A thread of HNSW keeps 8 bytes for each of `efSearch` candidates."""


class Probe(NamedTuple):
    """Queries with the outcome of an exact search.

    Attributes:
        queries: (Q, D) float32.
        rows: (Q,) row of each query in the database, -1 for those from elsewhere.
        threshold: (Q,) exact score of the k-th neighbour, the query itself not counted.
        k: how many neighbours.
    """

    queries: np.ndarray
    rows: np.ndarray
    threshold: np.ndarray
    k: int


def exact_probe(database: Database, queries: np.ndarray, rows: np.ndarray, k: int = 10) -> Probe | None:
    """Search a database exactly for every query, streaming it; None if there is nobody to find.

    Args:
        database: N vectors.
        queries: (Q, D).
        rows: (Q,) row of a query in the database, which is not to find itself; -1 if it is not in there.
        k: neighbours to look for; fewer if the database is smaller.
    """
    k = min(k, len(database) - int((rows >= 0).any()))
    if k < 1 or not len(queries):
        return None
    # One more than k, in case the query itself is among them.
    scores, found = knn_ground_truth(
        queries, database.blocks(), min(k + 1, len(database)), faiss.METRIC_INNER_PRODUCT, ngpu=0
    )
    scores = np.where(found == rows[:, None], -np.inf, scores)
    return Probe(queries, rows, -np.sort(-scores, axis=1)[:, k - 1], k)


def recall(index: Any, database: Database, probe: Probe) -> float:
    """The share of exact neighbours that the index finds; a tie with the k-th neighbour is as good as it.

    Args:
        index: a FAISS index of the database.
        database: N vectors.
        probe: queries and their exact k-th scores.
    """
    _, found = index.search(probe.queries, probe.k + 1)
    found = np.where(found == probe.rows[:, None], -1, found)
    own_last = np.argsort(found < 0, axis=1, kind="stable")[:, : probe.k]
    found = np.take_along_axis(found, own_last, axis=1)
    vectors = database.rows(np.maximum(found, 0).ravel()).reshape(*found.shape, -1)
    scores = np.einsum("qd,qkd->qk", probe.queries, vectors, dtype=np.float64)
    slack = SCORE_TOLERANCE * np.linalg.norm(probe.queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=2)
    hits = (found >= 0) & (scores >= probe.threshold[:, None] - slack)
    return float(hits.mean())


def set_parameter(index: Any, name: str, value: int) -> None:
    """Set a search parameter such as "nprobe" or "efSearch", also inside pre-transformed and refined indexes.

    Raises:
        DualencError: the index has no such parameter, or the value is beyond what it can use.
    """
    ivf = faiss.try_extract_index_ivf(index)
    largest = int(ivf.nlist) if name == "nprobe" and ivf is not None else LARGEST_PARAMETER
    if not 1 <= value <= largest:
        raise DualencError(f"{name} is {value}; give a number from 1 to {largest}")
    try:
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    except RuntimeError as error:
        raise DualencError(f"{name}={value} does not apply to this index ({reason(error)}); leave it out") from None


def parameter_range(index: Any) -> tuple[str, int] | None:
    """The parameter that trades time for recall, and its largest useful value; None if there is none."""
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        return "nprobe", int(ivf.nlist)
    inner = index
    while isinstance(inner, (faiss.IndexPreTransform, faiss.IndexRefine)):
        inner = faiss.downcast_index(inner.index if isinstance(inner, faiss.IndexPreTransform) else inner.base_index)
    return ("efSearch", 4096) if isinstance(inner, faiss.IndexHNSW) else None


def tune(index: Any, database: Database, probe: Probe, target: float, least_gain: float = 0.002) -> dict[str, int]:
    """Double the search parameter until the recall reaches a target, or stops growing (quantized vectors).

    Returns:
        The parameter that is now set in the index, by name; empty if the index has none.
    """
    parameter = parameter_range(index)
    if parameter is None:
        return {}
    name, largest = parameter
    value = 1 if name == "nprobe" else 16
    set_parameter(index, name, value)
    best = recall(index, database, probe)
    while best < target and value < largest:
        larger = min(2 * value, largest)
        set_parameter(index, name, larger)
        now = recall(index, database, probe)
        if now < best + least_gain and best > 0:
            set_parameter(index, name, value)
            break
        best, value = now, larger
    return {name: value}
