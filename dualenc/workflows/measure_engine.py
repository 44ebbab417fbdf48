"""Measure recall under filters of an index or an engine, and tune settings to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.errors import BelowTarget, DualencError
from dualenc.io.files import locked
from dualenc.search.engines.filter_recall import (
    measure_again,
    open_searched,
    read_filters,
    sample_queries,
    tune_folder,
)

if TYPE_CHECKING:
    from dualenc.search.engines.filter_recall import Searched

DEFAULT_RECALL = 0.95


@dataclass(frozen=True)
class EngineRecall:
    """Mean recall@10 under filters, with a 95% interval.

        recall = evaluate_engine("index", filters="workload.jsonl")
        recall.check()

    Attributes:
        folder: folder of the index, or the one that `push` wrote.
        recall: mean recall@10 over all searches.
        low: lower end of the 95% interval.
        high: upper end of the 95% interval.
        searches: number of searches.
        filters: recall, number of rows and milliseconds of each filter.
        settings: search settings that were measured; empty for exact search.
        target: recall that was requested, or promised by the recorded measurement.
    """

    folder: Path
    recall: float
    low: float
    high: float
    searches: int
    filters: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    target: float

    def check(self) -> None:
        """Raise `BelowTarget` if the lower end of the interval is below the target."""
        if self.low < self.target:
            raise BelowTarget(
                f"recall@10 may be {self.low:.3f}, below {self.target:g}",
                fix="index the columns of the filters, "
                "or search exactly (--index none, --factory Flat)",
            )


def evaluate_engine(
    folder: str,
    *,
    filters: str | None = None,
    queries: str | None = None,
    recall: float | None = None,
) -> EngineRecall:
    """Measure recall@10 and the rows returned under filters, against exact search.

    With `filters`, the cheapest settings that reach the target are chosen and written into the
    folder together with the measurement; without, the recorded measurement is repeated. Same as
    `dualenc evaluate engine`, except that a recall below the target is returned: call `check`.

        dualenc.evaluate_engine("index", filters="workload.jsonl", recall=0.9).check()

    Args:
        folder: an index, or what `push` wrote.
        filters: file with one {"filter": "year >= 2020"} per line: SQL for PostgreSQL, JSON for
            Qdrant, conditions for an index.
        queries: embeddings of real queries to measure with; by default a sample of the documents.
        recall: recall@10 to reach, by the lower end of its 95% interval; by default 0.95, or the
            recorded target.

    Returns:
        The recall of all filters and of each.

    Raises:
        DualencError: if the folder does not record a measurement, or no row meets a filter.
    """
    # Mistakes in the file are reported before an engine is connected.
    checked = checked_filters(filters, queries)
    # Locked, since the chosen settings are written into the folder.
    with closing(open_searched(Path(folder))) as searched, locked(folder, wait=False):
        return measure_recall(Path(folder), searched, checked, queries, recall)


def checked_filters(filters: str | None, queries: str | None) -> list[str] | None:
    """Return the filters of a file, or None without one; raise if `queries` would be ignored."""
    if queries is not None and filters is None:
        raise DualencError("--queries are for --filters", fix="leave them out")
    return None if filters is None else read_filters(filters)


def measure_recall(
    folder: Path,
    searched: Searched,
    filters: Sequence[str] | None,
    queries: str | None,
    recall: float | None,
) -> EngineRecall:
    """Choose settings for new filters, or repeat the measurement that the folder records."""
    if filters is None:
        # The recorded target is a promise, unless another one is requested.
        measured, target = measure_again(folder, searched)
        target = target if recall is None else recall
    else:
        target = DEFAULT_RECALL if recall is None else recall
        vectors = sample_queries(searched, queries, len(filters))
        measured = tune_folder(folder, searched, vectors, filters, target)
    settings = dict(searched.provenance.settings)
    return EngineRecall(folder, *measured, settings=settings, target=target)
