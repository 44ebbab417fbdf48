"""Recall under filters: compare search with exact search on a workload, and tune the settings.

    workload.jsonl    {"filter": "year >= 2020 AND lang = 'en'"} on each line; "" searches all rows

Filters are SQL for PostgreSQL, JSON for Qdrant, and conditions such as `year>=2020, lang=en,de` for
a FAISS index. The measurement and its queries are saved in the folder of the engine or index
(recall.json, queries.npy).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.lines import read_records
from dualenc.data.readers.vectors import load_npy
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.files import atomic_path, save_array, write_json
from dualenc.io.provenance import Provenance
from dualenc.io.reading import read_json_object
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.factory import open_engine
from dualenc.search.engines.pushed_folder import RESULT, is_pushed, refuse_url, sample_embeddings
from dualenc.search.index.open import Hit, Index
from dualenc.search.migration.migration_folder import check_unmigrated
from dualenc.types import one_or_several

DEPTH = 10
"""k of recall@k."""
QUERIES = 1000
"""Number of queries: half of them choose the settings, the other half measure those."""
MIN_QUERIES = 20
"""Minimum number of queries per filter, in each half."""
TIE = 1e-6
"""A score that is less than this below the k-th exact one ties with it."""
VECTORS = "queries.npy"
Z = 1.959964
"""Quantile of the normal distribution for a 95% interval."""


Searched = Engine | Index
"""Anything whose recall is measured: it has `search`, `ladder` and `workload_filter`."""


def open_searched(folder: Path) -> Searched:
    """Open an index, or the engine that a folder records."""
    refuse_url(folder)
    return open_engine(folder) if is_pushed(folder) else Index.open(folder)


class Measurement(NamedTuple):
    """Mean recall@10 over a number of searches with its 95% interval, and the means per filter.

    A target is met only if the lower end of the interval reaches it.

        measured = tune(Index.open("index"), queries, ["year>=2020"], target=0.95)
        print(measured.recall, measured.low)

    Attributes:
        recall: mean recall@10, 0 to 1.
        low: lower end of the interval.
        high: upper end of the interval.
        searches: number of searches.
        filters: recall, mean numbers of rows and milliseconds per search of each filter.
    """

    recall: float
    low: float
    high: float
    searches: int
    filters: list[dict[str, Any]]


class Workload:
    """Assign queries (Q, D) round-robin to F filters, and store the exact results of each.

    `measure` then compares searches with the current settings of the index.

        Workload(Index.open("index"), queries, ["", "year>=2020"]).measure().recall

    Args:
        index: index or engine to search.
        queries: (Q, D) vectors.
        filters: F filters; "" searches all rows.

    Raises:
        DualencError: no row meets a filter.
    """

    def __init__(self, index: Searched, queries: np.ndarray, filters: Sequence[str]) -> None:
        self.index = index
        self.cases: list[tuple[str, np.ndarray, list[list[Hit]], float]] = []
        for number, filter in enumerate(filters):
            filter_queries = queries[number :: len(filters)]
            arguments = index.workload_filter(filter)
            begin = time.perf_counter()
            exact = index.search(filter_queries, DEPTH, exact=True, **arguments)
            milliseconds = 1000 * (time.perf_counter() - begin) / len(filter_queries)
            # The same rows meet a filter whatever the query, so the first one suffices.
            if not exact[0]:
                raise DualencError(f"filter {filter[:200]!r}: no row meets it", fix="leave it out")
            self.cases.append((filter, filter_queries, exact, milliseconds))

    def measure(self) -> Measurement:
        """Measure searches with the current settings of the index."""
        recalls: list[float] = []
        results: list[dict[str, Any]] = []
        for filter, queries, exact, exact_milliseconds in self.cases:
            begin = time.perf_counter()
            hits = self.index.search(queries, DEPTH, **self.index.workload_filter(filter))
            milliseconds = 1000 * (time.perf_counter() - begin) / len(queries)
            filter_recalls = [recall_of_hits(*pair) for pair in zip(hits, exact)]
            recalls += filter_recalls
            entries = {
                "filter": filter,
                "recall": float(np.mean(filter_recalls)),
                "rows": _mean_rows(hits),
                "exact_rows": _mean_rows(exact),
                "milliseconds": milliseconds,
                "exact_milliseconds": exact_milliseconds,
            }
            results.append(entries)
        mean = float(np.mean(recalls))
        low, high = wilson_interval(mean, len(recalls))
        return Measurement(mean, low, high, len(recalls), results)


def _mean_rows(results: Sequence[Sequence[Hit]]) -> float:
    """Return the mean number of rows that a search returns, as an int if it is whole."""
    mean = float(np.mean([len(hits) for hits in results]))
    return int(mean) if mean.is_integer() else mean


def recall_of_hits(hits: Sequence[Hit], exact: Sequence[Hit]) -> float:
    """Return the fraction of exact results found; a tie with the last one counts as found.

    Args:
        hits: results of a search.
        exact: results of the exact search, best first.
    """
    threshold = exact[-1].score - TIE
    return min(sum(hit.score >= threshold for hit in hits) / len(exact), 1.0)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return the 95% score interval for the mean of n numbers from 0 to 1.

    Source: Wilson 1927, doi:10.2307/2276774. The interval is for proportions and thus conservative
    here: among numbers from 0 to 1 with a given mean, zeros and ones have the largest variance.

    Args:
        mean: their mean.
        count: n.
    """
    shrinkage = 1 + Z**2 / count
    center = (mean + Z**2 / (2 * count)) / shrinkage
    variance = mean * (1 - mean) / count + Z**2 / (4 * count**2)
    half = Z / shrinkage * math.sqrt(variance)
    return max(center - half, 0.0), min(center + half, 1.0)


def tune(
    index: Searched, queries: np.ndarray, filters: Sequence[str], target: float
) -> Measurement:
    """Choose the cheapest settings whose recall reaches a target, by the lower end of its interval.

    Queries of even number choose the settings and those of odd number measure them: measured on the
    same queries, the settings would look better than they are. If none suffice, the last ones stay.

    Args:
        index: index or engine; it keeps the chosen settings.
        queries: (Q, D) vectors.
        filters: filters of the workload; "" searches all rows.
        target: recall@10, 0 to 1.

    Returns:
        The measurement of the chosen settings on the queries of odd number.
    """
    filters = list(one_or_several(filters))
    to_choose = Workload(index, queries[::2], filters)
    to_check = Workload(index, queries[1::2], filters)
    for settings in index.ladder():
        index.record(settings=settings)
        if to_choose.measure().low >= target:
            measured = to_check.measure()
            if measured.low >= target:
                return measured
    return to_check.measure()


def read_filters(path: str | Path) -> list[str]:
    """Read the filters of a workload: a JSON object with `filter` on each line.

    Raises:
        DualencError: a line lacks a filter, or the file is empty.
    """
    filters = []
    bad_rows = BadRows(path)
    for number, record in read_records(Path(path), bad_rows):
        if isinstance(record.get("filter"), str):
            filters.append(record["filter"])
        else:
            bad_rows.add("line without a filter", f"{path}:{number}")
    if bad_rows.total or not filters:
        raise DualencError(
            f"contains {bad_rows.describe() or 'no filters'}",
            fix='write {"filter": "year >= 2020"} on each line',
            where=path,
        )
    return filters


def sample_queries(searched: Searched, folder: str | None, num_filters: int) -> np.ndarray:
    """Return vectors (Q, D) to use as queries: at least 1,000, and at least 40 per filter.

    Half of them choose the settings, and half measure. If there are fewer vectors, they repeat with
    other filters.

    Args:
        searched: what is measured; its own vectors are the default queries.
        folder: embeddings to sample the queries from, or None.
        num_filters: number of filters in the workload.
    """
    count = max(QUERIES, 2 * MIN_QUERIES * num_filters)
    if folder is None:
        return searched.sample_vectors(count)
    return sample_embeddings(Embeddings.open(folder), count)


def tune_folder(
    folder: Path, index: Searched, queries: np.ndarray, filters: Sequence[str], target: float
) -> Measurement:
    """Choose settings like `tune`, and write them and the measurement into the index folder.

    Args:
        folder: folder of the index or engine.
        index: the opened index or engine.
        queries: (Q, D) vectors.
        filters: filters of the workload; "" searches all rows.
        target: recall@10, 0 to 1.
    """
    check_unmigrated(folder)
    measured = tune(index, queries, filters, target)
    settings = index.provenance.settings
    # Read again: the opened index may be of an earlier generation of the folder.
    recorded = Provenance.unchecked(folder)
    recorded.updated(settings=settings).write(folder)
    with atomic_path(folder / VECTORS) as part:
        # Only the half that `tune` measures with: `measure_again` repeats that.
        save_array(part, queries[1::2])
    entries = {
        "target": target,
        "k": DEPTH,
        "settings": settings,
        **measured._asdict(),
    }
    write_json(folder / RESULT, entries)
    return measured


def measure_again(folder: Path, index: Searched) -> tuple[Measurement, float]:
    """Repeat the measurement that a folder records; return it and the promised recall.

    Raises:
        DualencError: no recall was measured yet.
    """
    if not (folder / RESULT).is_file():
        raise DualencError(
            "no recall was measured",
            fix="measure it on your filters with --filters workload.jsonl",
            where=folder,
        )
    recorded = read_json_object(folder / RESULT, {"target": float, "filters": list})
    filters = [entry["filter"] for entry in recorded["filters"]]
    return Workload(index, load_npy(folder / VECTORS), filters).measure(), recorded["target"]
