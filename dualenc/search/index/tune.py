"""Search parameters of a FAISS index: measure recall and latency, and choose the cheapest ones."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import faiss
import numpy as np
from faiss.contrib.exhaustive_search import knn_ground_truth

from dualenc.errors import DualencError, explain
from dualenc.search.index.database import Database, as_queries

NEIGHBORS = 10
"""k of the measured recall and latency."""
SCORE_TOLERANCE = 1e-6
"""Scores tie if they differ by less than this times both norms: a sum in another order does."""
PATIENCE = 3
"""Steps without a gain that end the search for a parameter. One flat step is not enough: the
neighbors may lie in the lists that the next doubling reaches."""
MIN_GAIN = 0.002
"""Smallest increase of recall that counts as a gain."""
MIN_QUERIES_TO_SPLIT = 100
"""From this many queries on, half of them tune and the other half measure."""
MAX_PARAMETER = 2**24
"""An HNSW search thread allocates 8 bytes for each of `efSearch` candidates."""


class Probe(NamedTuple):
    """Queries with the exact score of their k-th neighbor, to measure recall with.

    A query that is itself in the database does not count as its own neighbor.

        probe = exact_probe(database, queries, np.full(len(queries), -1))
        recall(faiss_index, database, probe)

    Attributes:
        queries: (Q, D) float32.
        rows: (Q,) database row of each query, -1 for queries from elsewhere.
        threshold: (Q,) exact score of the k-th neighbor.
        k: number of neighbors.
    """

    queries: np.ndarray
    rows: np.ndarray
    threshold: np.ndarray
    k: int

    def part(self, queries: slice) -> Probe:
        """Return the probe of a slice of the queries."""
        return Probe(self.queries[queries], self.rows[queries], self.threshold[queries], self.k)


def exact_probe(database: Database, queries: np.ndarray, rows: np.ndarray) -> Probe | None:
    """Search a streamed database exactly; return None without queries or neighbors.

    Args:
        database: N vectors.
        queries: (Q, D), ready for the metric of the database.
        rows: (Q,) database row of each query, -1 for queries from elsewhere.
    """
    k = min(NEIGHBORS, len(database) - int((rows >= 0).any()))
    if k < 1 or not len(queries):
        return None
    # One more than k, because a database query finds itself.
    depth = min(k + 1, len(database))
    blocks = database.blocks()
    metric = faiss.METRIC_INNER_PRODUCT
    scores, columns = knn_ground_truth(queries, blocks, depth, metric, ngpu=0)
    scores = np.where(columns == rows[:, None], -np.inf, scores)
    return Probe(queries, rows, -np.sort(-scores, axis=1)[:, k - 1], k)


def recall(index: Any, database: Database, probe: Probe) -> float:
    """Return recall@k: the fraction of exact neighbors that an index finds.

    A result that ties with the k-th neighbor counts as a hit, because the exact ranking among ties
    is arbitrary. Results are scored by their exact vectors, not by the codes of the index.
    """
    columns = index.search(probe.queries, probe.k + 1)[1]
    columns = np.where(columns == probe.rows[:, None], -1, columns)
    # A stable sort moves the query itself (-1) behind its neighbors, where the cut drops it.
    missing_last = np.argsort(columns < 0, axis=1, kind="stable")[:, : probe.k]
    columns = np.take_along_axis(columns, missing_last, axis=1)
    vectors = database.rows(np.maximum(columns, 0).ravel()).reshape(*columns.shape, -1)
    scores = np.einsum("qd,qkd->qk", probe.queries, vectors, dtype=np.float64)
    norms = np.linalg.norm(probe.queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=2)
    is_neighbor = scores >= probe.threshold[:, None] - SCORE_TOLERANCE * norms
    return float((is_neighbor & (columns >= 0)).mean())


def set_parameter(index: Any, name: str, value: int) -> None:
    """Set `nprobe`, `efSearch` or `k_factor_rf`, also inside pre-transformed and refined indexes.

    Raises:
        DualencError: the value is out of range, or the index does not have the parameter.
    """
    ivf = faiss.try_extract_index_ivf(index)
    maximum = int(ivf.nlist) if name == "nprobe" and ivf is not None else MAX_PARAMETER
    if not 1 <= value <= maximum:
        raise DualencError(f"{name} is {value}", fix=f"give a number from 1 to {maximum}")
    with explain(f"{name}={value} does not apply to this index", "leave it out"):
        faiss.ParameterSpace().set_index_parameter(index, name, value)


def parameter_values(index: Any) -> dict[str, list[int]]:
    """Return the values to try for `nprobe` or `efSearch`, and for `k_factor_rf` if refined.

    They are those of `faiss.ParameterSpace`, ascending.
    """
    space = faiss.ParameterSpace()
    space.initialize(index)
    values = {}
    for number in range(space.parameter_ranges.size()):
        parameter = space.parameter_ranges.at(number)
        if parameter.name in ("nprobe", "efSearch", "k_factor_rf"):
            numbers = faiss.vector_to_array(parameter.values)
            values[parameter.name] = [int(value) for value in numbers if value >= 1]
    ivf = faiss.try_extract_index_ivf(index)
    # FAISS stops below the number of lists, so add the exhaustive setting.
    if "nprobe" in values and ivf is not None:
        values["nprobe"] = sorted({*values["nprobe"], int(ivf.nlist)})
    return values


def tune(index: Any, database: Database, probe: Probe, target: float) -> dict[str, int]:
    """Set and return the smallest search parameters that reach a target recall.

    If none reach it, the parameters within `MIN_GAIN` of the best recall are chosen. Each parameter
    grows until the target is reached or `PATIENCE` steps have gained nothing, for each refinement
    factor in turn. Nothing is timed, so the same vectors always give the same index.
    """
    values = parameter_values(index)
    if not values:
        return {}
    factors = values.pop("k_factor_rf", [0])  # 0: not refined
    name, steps = next(iter(values.items()), ("", [0]))
    best: dict[str, int] = {}
    best_recall = -1.0
    for factor in factors:
        recalls: list[float] = []
        for step in steps:
            # Parameters that the index lacks have the value 0.
            both = {"k_factor_rf": factor, name: step}
            setting = {key: value for key, value in both.items() if value}
            for key, value in setting.items():
                set_parameter(index, key, value)
            latest = recall(index, database, probe)
            recalls.append(latest)
            if latest >= target or latest > best_recall + MIN_GAIN:
                best = setting
                best_recall = latest
            if latest >= target or _is_flat(recalls):
                break
        if best_recall >= target:
            break
    for key, value in best.items():
        set_parameter(index, key, value)
    return best


def _is_flat(recalls: list[float]) -> bool:
    """Return True if the last `PATIENCE` steps gained nothing; recall 0 never counts as flat."""
    if len(recalls) <= PATIENCE:
        return False
    return 0 < recalls[-1 - PATIENCE] > recalls[-1] - MIN_GAIN


def latency(index: Any, queries: np.ndarray) -> dict[str, float]:
    """Return the latency of single queries in milliseconds: percentiles 50, 95 and 99."""
    index.search(queries[:1], NEIGHBORS)  # warm-up
    times = []
    for query in queries:
        started = time.perf_counter()
        index.search(query[None], NEIGHBORS)
        times.append(1000 * (time.perf_counter() - started))
    percentiles = {percent: float(np.percentile(times, percent)) for percent in (50, 95, 99)}
    return {f"p{percent}": round(value, 3) for percent, value in percentiles.items()}


def tune_and_measure(
    index: Any,
    database: Database,
    queries: np.ndarray | None,
    max_queries: int,
    target_recall: float,
) -> dict[str, Any]:
    """Tune the search parameters of a filled index, measure it, and return entries for meta.json.

    Args:
        index: a filled FAISS index.
        database: the vectors in it.
        queries: (Q, D) queries to measure with; None samples the database.
        max_queries: maximum number of queries; 0 skips tuning and measuring.
        target_recall: recall@10 to reach.
    """
    if queries is None:
        # Another seed than that of the training sample, whose rows the codes fit best.
        rows = database.sample(max_queries, seed=1)
        queries = database.rows(rows)
    else:
        queries = as_queries(queries, database.embeddings.dim, database.metric)[:max_queries]
        rows = np.full(len(queries), -1)
    # One exact pass over the database serves all settings that are tried.
    probe = exact_probe(database, queries, rows)
    if probe is None:
        return {"search_parameters": {}}
    tuning_probe = probe
    # Recall on the queries that chose the parameters would be biased upwards.
    if len(queries) >= MIN_QUERIES_TO_SPLIT and parameter_values(index):
        tuning_probe = probe.part(slice(0, None, 2))
        probe = probe.part(slice(1, None, 2))
    return {
        "target_recall": target_recall,
        "search_parameters": tune(index, database, tuning_probe, target_recall),
        "recall_at_10": round(recall(index, database, probe), 4),
        "recall_queries": len(probe.queries),
        "recall_queries_from": "database" if (rows >= 0).any() else "given",
        "latency_ms": latency(index, probe.queries),
    }
