"""Recall under filters: a search against exact search on a user's own filters, and settings that
keep it.

    workload.jsonl    {"filter": "year >= 2020 AND lang = 'en'"} on each line; "" searches all rows

Filters are SQL for PostgreSQL, JSON for Qdrant, and conditions, `year>=2020, lang=en,de`, for a
FAISS index. The measurement and its queries are saved in the folder of the engine or index
(recall.json, queries.npy).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.lines import read_records
from dualenc.data.readers.vectors import load_npy
from dualenc.data.store.vector_shards import Embeddings, is_embeddings
from dualenc.errors import DualencError
from dualenc.io.files import atomic_path, save_array, write_json
from dualenc.io.reading import read_json_object
from dualenc.search.engines.engine import RESULT, Engine, is_pushed, refuse_url
from dualenc.search.engines.factory import embeddings_fingerprint, open_engine
from dualenc.search.index.filtered import default_exact_rows
from dualenc.search.index.open import Hit, Index
from dualenc.search.migration.migration_folder import check_unmigrated
from dualenc.search.where import meets, parse_conditions
from dualenc.types import one_or_several

DEPTH = 10
"""k of recall@k."""
QUERIES = 1000
"""Half of them choose the settings, the other half measure these."""
MIN_QUERIES = 20
"""For each filter."""
ENGINE_ROWS = 1024
"""Vectors asked of an engine at once."""
TIE = 1e-6
"""A score that is less than this below the k-th exact one is a tie with it."""
VECTORS = "queries.npy"
Z = 1.959964
"""Quantile of the normal distribution for an interval of 95 %."""


class ConditionSearch:
    """A FAISS index whose filters are conditions, such as "year>=2020, lang=en,de"."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.meta = index.meta

    def close(self) -> None:
        """An index needs no closing."""

    def search(
        self, queries: np.ndarray, k: int, filter: str, *, exact: bool = False
    ) -> list[list[Hit]]:
        """The nearest items that meet the filter, best first; with `exact` all of them are
        compared."""
        allowed = np.ones(len(self.index), bool)
        if filter:
            allowed = meets(parse_conditions([filter], self.index.column_kinds), self.index.columns)
        elif not exact:
            return self.index.search(queries, k)
        exact_rows = len(self.index) if exact else None
        return self.index.search(queries, k, allowed_rows=allowed, exact_rows=exact_rows)

    def ladder(self) -> Iterator[dict[str, Any]]:
        """Numbers of rows up to which all that meet a filter are compared."""
        rows = default_exact_rows(self.index.dim)
        while rows < len(self.index):
            yield {"exact_rows": rows}
            rows *= 4
        yield {"exact_rows": rows}


Searched = Engine | ConditionSearch


def open_searched(folder: Path) -> Searched:
    """Open an index, or the engine that a folder remembers."""
    refuse_url(folder)
    return open_engine(folder) if is_pushed(folder) else ConditionSearch(Index.open(folder))


class Measurement(NamedTuple):
    """Mean recall@10 over n searches with an interval of 95 %, and the means of each filter."""

    recall: float
    low: float
    high: float
    searches: int
    filters: list[dict[str, Any]]


class Workload:
    """Queries (Q, D) dealt to F filters in turn, with the exact results of each."""

    def __init__(self, index: Searched, queries: np.ndarray, filters: Sequence[str]) -> None:
        self.index = index
        self.cases: list[tuple[str, np.ndarray, list[list[Hit]], float]] = []
        for number, filter in enumerate(filters):
            filter_queries = queries[number :: len(filters)]
            begin = time.perf_counter()
            exact = index.search(filter_queries, DEPTH, filter, exact=True)
            milliseconds = 1000 * (time.perf_counter() - begin) / len(filter_queries)
            if not exact[0]:
                raise DualencError(f"filter {filter[:200]!r}: no row meets it", fix="leave it out")
            self.cases.append((filter, filter_queries, exact, milliseconds))

    def measure(self) -> Measurement:
        """Search with the settings of the index."""
        recalls: list[float] = []
        results: list[dict[str, Any]] = []
        for filter, queries, exact, exact_milliseconds in self.cases:
            begin = time.perf_counter()
            hits = self.index.search(queries, DEPTH, filter)
            milliseconds = 1000 * (time.perf_counter() - begin) / len(queries)
            filter_recalls = [_recall(*pair) for pair in zip(hits, exact)]
            recalls += filter_recalls
            result = {
                "filter": filter,
                "recall": float(np.mean(filter_recalls)),
                "rows": _mean_rows(hits),
                "exact_rows": _mean_rows(exact),
                "milliseconds": milliseconds,
                "exact_milliseconds": exact_milliseconds,
            }
            results.append(result)
        mean = float(np.mean(recalls))
        low, high = wilson_interval(mean, len(recalls))
        return Measurement(mean, low, high, len(recalls), results)


def _mean_rows(results: Sequence[Sequence[Hit]]) -> float:
    """The mean number of rows that a search returns, as a whole number where it is one."""
    mean = float(np.mean([len(hits) for hits in results]))
    return int(mean) if mean.is_integer() else mean


def _recall(hits: Sequence[Hit], exact: Sequence[Hit]) -> float:
    """The share of the exact results that a search returns; a tie with the last one counts as
    it."""
    threshold = exact[-1].score - TIE
    return min(sum(hit.score >= threshold for hit in hits) / len(exact), 1.0)


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """The score interval of 95 % for the mean of n numbers from 0 to 1 (Wilson 1927,
    doi:10.2307/2276774).

    It is that of a proportion: numbers from 0 to 1 with the same mean vary at most as much.
    """
    centre = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def tune(
    index: Searched, queries: np.ndarray, filters: Sequence[str], target: float
) -> Measurement:
    """Choose the cheapest settings whose recall is at least a target by the lower end of its
    interval.

    The settings are chosen by the queries (Q, D) of even number and measured by the others: chosen
    and measured by the same ones they would look better than they are. If none suffice, the last
    ones stay.

    Returns:
        The measurement of the chosen settings by the queries of odd number; the index's meta holds
        the settings.
    """
    filters = list(one_or_several(filters))
    to_choose = Workload(index, queries[::2], filters)
    to_check = Workload(index, queries[1::2], filters)
    for settings in index.ladder():
        index.meta["settings"] = settings
        if to_choose.measure().low >= target:
            measured = to_check.measure()
            if measured.low >= target:
                return measured
    return to_check.measure()


def read_filters(path: str | Path) -> list[str]:
    """The filters of a workload, a JSON object with `filter` on each line."""
    filters = []
    bad_rows = BadRows(path)
    for number, record in read_records(Path(path), bad_rows):
        if isinstance(record.get("filter"), str):
            filters.append(record["filter"])
        else:
            bad_rows.add("line without a filter", f"{path}:{number}")
    if bad_rows.total or not filters:
        raise DualencError(
            f"holds {bad_rows.describe() or 'no filters'}",
            fix='write {"filter": "year >= 2020"} on each line',
            where=path,
        )
    return filters


def sample_queries(searched: Searched, folder: str | None, num_filters: int) -> np.ndarray:
    """Vectors (Q, D) for queries from a folder of embeddings, by default from the searched vectors
    themselves.

    They are 1,000, or 20 to choose settings and 20 to measure for each filter if that is more;
    where there are fewer vectors, these repeat with other filters.
    """
    count = max(QUERIES, 2 * MIN_QUERIES * num_filters)
    if folder is None and isinstance(searched, ConditionSearch):
        rows = np.random.default_rng(0).permutation(len(searched.index))
        return searched.index.reconstruct(np.resize(rows, count))
    embeddings = None if folder is None else Embeddings.open(folder)
    if isinstance(searched, Engine) and embeddings is None:
        embeddings = _pushed_embeddings(searched)
        if embeddings is None:
            ids = sorted(searched.texts_by_id())
            rows = np.random.default_rng(0).permutation(len(ids))[:count]
            starts = range(0, len(rows), ENGINE_ROWS)
            parts = [[ids[row] for row in rows[start : start + ENGINE_ROWS]] for start in starts]
            vectors = np.concatenate([searched.vectors(part) for part in parts])
            return vectors[np.resize(np.arange(len(vectors)), count)]
    assert embeddings is not None
    rows = np.random.default_rng(0).permutation(len(embeddings))
    return np.asarray(embeddings.vectors[np.resize(rows, count)], dtype=np.float32)


def _pushed_embeddings(engine: Engine) -> Embeddings | None:
    """The embeddings that were pushed, if their folder is recorded and still has them."""
    recorded = engine.meta.get("embeddings")
    if not isinstance(recorded, str) or not is_embeddings(recorded):
        return None
    with suppress(DualencError):
        embeddings = Embeddings.open(recorded)
        fingerprint = embeddings_fingerprint(embeddings, engine.meta["metric"])
        return embeddings if fingerprint == engine.items_checksum else None
    return None


def tune_folder(
    folder: Path, index: Searched, queries: np.ndarray, filters: Sequence[str], target: float
) -> Measurement:
    """Choose settings as `tune` does, and write them and the measurement into the folder of the
    index."""
    check_unmigrated(folder)
    measured = tune(index, queries, filters, target)
    meta = read_json_object(folder / "meta.json")
    write_json(folder / "meta.json", meta | {"settings": index.meta["settings"]})
    with atomic_path(folder / VECTORS) as part:
        # The half that `tune` measures with.
        save_array(part, queries[1::2])
    entries = {
        "target": target,
        "k": DEPTH,
        "settings": index.meta["settings"],
        **measured._asdict(),
    }
    write_json(folder / RESULT, entries)
    return measured


def measure_again(folder: Path, index: Searched) -> tuple[Measurement, float]:
    """Repeat the measurement that a folder records; returns it, and the recall that was
    promised."""
    if not (folder / RESULT).is_file():
        raise DualencError(
            "no recall was measured",
            fix="measure it on your filters by --filters workload.jsonl",
            where=folder,
        )
    recorded = read_json_object(folder / RESULT, {"target": float, "filters": list})
    filters = [entry["filter"] for entry in recorded["filters"]]
    return Workload(index, load_npy(folder / VECTORS), filters).measure(), recorded["target"]
