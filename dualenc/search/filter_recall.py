"""Recall under filters: an engine's search against exact search on a user's own filters, and settings that keep it.

    workload.jsonl    {"filter": "year >= 2020 AND lang = 'en'"} on each line; "" searches all rows

The measurement and its queries are saved in the folder of the engine (recall.json, queries.npy).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.vectors import load_npy
from dualenc.errors import DualencError
from dualenc.files import atomic_path, save_array, write_json
from dualenc.reading import read_json_object
from dualenc.search.index import Hit
from dualenc.search.postgres import PostgresIndex

DEPTH = 10
"""k of recall@k."""
QUERIES = 1000
"""Half of them choose the settings, the other half measure these."""
MIN_QUERIES = 20
"""For each filter."""
TIE = 1e-6
"""A score that is less than this below the k-th exact one is a tie with it."""
RESULT = "recall.json"
VECTORS = "queries.npy"
FIELDS = {"target": float, "filters": list}
Z = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""


class FilterResult(NamedTuple):
    """The searches under one filter: means over their queries."""

    filter: str
    recall: float
    rows: float
    exact_rows: float
    milliseconds: float
    exact_milliseconds: float


class Measurement(NamedTuple):
    """Mean recall@10 over n searches with an interval of 95 %, and the results of each filter."""

    recall: float
    low: float
    high: float
    searches: int
    filters: list[FilterResult]


class Workload:
    """Queries (Q, D) dealt to F filters in turn, with the exact results of each."""

    def __init__(self, index: PostgresIndex, queries: np.ndarray, filters: Sequence[str]) -> None:
        self.index = index
        self.filters = list(filters)
        self.queries = [queries[number :: len(filters)] for number in range(len(filters))]
        self.exact: list[list[list[Hit]]] = []
        self.exact_seconds: list[float] = []
        for filter, filter_queries in zip(self.filters, self.queries):
            begin = time.perf_counter()
            results = index.search(filter_queries, DEPTH, filter, exact=True)
            self.exact_seconds.append(time.perf_counter() - begin)
            if not results[0]:
                raise DualencError(
                    f"filter {filter[:200]!r}: no row meets it; leave it out of the workload"
                )
            self.exact.append(results)

    def measure(self) -> Measurement:
        """Search with the settings of the index."""
        recalls: list[float] = []
        results = []
        for number, (filter, queries) in enumerate(zip(self.filters, self.queries)):
            begin = time.perf_counter()
            hits_of_query = self.index.search(queries, DEPTH, filter)
            seconds = time.perf_counter() - begin
            pairs = list(zip(hits_of_query, self.exact[number]))
            filter_recalls = [_recall(hits, exact) for hits, exact in pairs]
            recalls += filter_recalls
            means: list[Any] = [
                np.mean(filter_recalls),
                np.mean([len(hits) for hits, _ in pairs]),
                np.mean([len(exact) for _, exact in pairs]),
                1000 * seconds / len(queries),
                1000 * self.exact_seconds[number] / len(queries),
            ]
            results.append(FilterResult(filter, *[float(mean) for mean in means]))
        low, high = wilson_interval(float(np.mean(recalls)), len(recalls))
        return Measurement(float(np.mean(recalls)), low, high, len(recalls), results)


def _recall(hits: Sequence[Hit], exact: Sequence[Hit]) -> float:
    """The share of the exact results that a search returns; a tie with the last one counts as it."""
    threshold = exact[-1].score - TIE
    return min(sum(hit.score >= threshold for hit in hits) / len(exact), 1.0)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """The score interval of 95 % for the mean of n numbers from 0 to 1 (Wilson 1927, doi:10.2307/2276774).

    It is that of a proportion: numbers from 0 to 1 with the same mean vary at most as much.
    """
    centre = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def tune(index: PostgresIndex, queries: np.ndarray, filters: Sequence[str], target: float) -> Measurement:
    """Choose the cheapest settings whose recall is at least a target by the lower end of its interval.

    The settings are chosen by the queries (Q, D) of even number and measured by the others: chosen and measured by the
    same ones they would look better than they are. If none suffice, the last ones stay.

    Returns:
        The measurement by the others, of the settings that the meta of the index then holds.
    """
    to_choose = Workload(index, queries[::2], filters)
    to_check = Workload(index, queries[1::2], filters)
    checked = None
    for settings in _ladder(index):
        index.meta["settings"] = settings
        checked = None
        if to_choose.measure().low >= target:
            checked = to_check.measure()
            if checked.low >= target:
                break
    return checked or to_check.measure()


def _ladder(index: PostgresIndex) -> Iterator[dict[str, Any]]:
    """Settings that look at more and more rows, always until k meet the filter."""
    kind = index.meta["index"]
    if kind == "hnsw":
        for step, ef_search in enumerate((40, 80, 160, 320, 640, 1000)):
            limits = {"max_scan_tuples": 20_000 * 4**step, "scan_mem_multiplier": 2**step}
            yield {"ef_search": ef_search, "iterative_scan": "relaxed_order", **limits}
    elif kind == "ivfflat":
        lists = index.meta["settings"]["max_probes"]
        for step in range(lists.bit_length()):
            yield {"probes": 2**step, "iterative_scan": "relaxed_order", "max_probes": lists}
    else:
        yield {}


def read_filters(path: str | Path) -> list[str]:
    """The filters of a workload, a JSON object with `filter` on each line."""
    filters = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            filter = json.loads(line)["filter"]
        except (ValueError, KeyError, TypeError, RecursionError):
            filter = None
        if not isinstance(filter, str):
            example = '{"filter": "year >= 2020"}'
            raise DualencError(f"{path}:{number}: holds no filter; write {example} on each line")
        filters.append(filter)
    if not filters:
        raise DualencError(f"{path}: holds no filters; write one on each line")
    return filters


def sample_queries(vectors: np.ndarray, num_filters: int, seed: int = 0) -> np.ndarray:
    """Vectors (Q, D) for queries, drawn from N vectors: 1,000, or 20 and 20 for each filter if that is more."""
    count = max(QUERIES, 2 * MIN_QUERIES * num_filters)
    rows = np.random.default_rng(seed).permutation(len(vectors))
    # With fewer vectors than queries, they repeat with other filters.
    rows = np.resize(rows, count) if len(rows) < count else rows[:count]
    return np.asarray(vectors[rows], dtype=np.float32)


def save_measurement(
    folder: Path, index: PostgresIndex, queries: np.ndarray, measured: Measurement, target: float
) -> None:
    """Write the target, the measurement and its queries (Q, D) beside the engine's meta.json."""
    with atomic_path(folder / VECTORS) as part:
        save_array(part, queries)
    entries = {"target": target, "k": DEPTH, "settings": index.meta["settings"], **measured._asdict()}
    entries["filters"] = [result._asdict() for result in measured.filters]
    write_json(folder / RESULT, entries)


def measure_again(folder: Path, index: PostgresIndex) -> tuple[Measurement, float]:
    """Repeat the measurement that a folder records; returns it, and the recall that was promised."""
    if not (folder / RESULT).is_file():
        remedy = "push with --recall 0.95 --filters workload.jsonl"
        raise DualencError(f"{folder}: no recall was measured; {remedy}")
    recorded = read_json_object(folder / RESULT, FIELDS)
    filters = [entry["filter"] for entry in recorded["filters"]]
    return Workload(index, load_npy(folder / VECTORS), filters).measure(), recorded["target"]
