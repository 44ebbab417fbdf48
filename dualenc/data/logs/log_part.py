"""One source of a log as arrays: what each reader returns, before logs are merged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from dualenc.data.logs.click_log import Showings
from dualenc.data.logs.log_table import by_appearance
from dualenc.types import Integers, Items, Modality


@dataclass(frozen=True)
class LogPart(Showings):
    """The showings (n,) of one source, and what its reader found.

    Args:
        items: the distinct queries.
        modality: "text", "image" or "vector".
        shape: what a row is, such as "impressions".
        rows: number of rows read.
        query, document, reward, position, session, time: see `ClickLog`.
        missing: ids that are not in the index.
        actions: names of the actions in the source.
        grades_are_relevance: see `ClickLog`.
        notes: further findings.
    """

    items: Items
    modality: Modality
    shape: str
    rows: int
    query: Integers
    document: Integers
    reward: np.ndarray
    position: Integers
    session: Integers
    time: np.ndarray
    missing: Collection[str] = ()
    actions: Collection[str] = ()
    grades_are_relevance: bool = False
    notes: list[str] = field(default_factory=list)

    def finding(self) -> str:
        """Return what was read, in one line."""
        num_clicks = int((self.reward > 0).sum())
        parts = [
            _counted(self.rows, "row", "rows"),
            _counted(len(np.unique(self.query)), "query", "queries"),
            _counted(num_clicks, "relevant pair", "relevant pairs")
            if self.grades_are_relevance
            else _counted(num_clicks, "click", "clicks"),
        ]
        known = self.position[self.position > 0]
        if len(known):
            parts.append(f"positions {known.min()}–{known.max()}")
        times = self.time[np.isfinite(self.time)]
        if len(times):
            parts.append(f"{_day(times.min())} to {_day(times.max())}")
        text = f"read as {self.shape}: {', '.join(parts)}"
        number = len(self.missing)
        if number:
            text += f"; {_counted(number, 'document is', 'documents are')} not in the index"
        return "; ".join([text, *self.notes])


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _day(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(float(seconds), UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):
        return "?"


def one_showing_each(part: LogPart) -> LogPart:
    """Merge rows of one document in one results list: its largest reward, its first position.

    Lists of two queries are two lists, even if they share a number. Lists are numbered anew, by
    appearance.
    """
    if not len(part):
        return part
    # Numbers are made contiguous after each step, so that their products stay below 2^63.
    first, session = by_appearance(part.session * (int(part.query.max()) + 1) + part.query)
    part = replace(part, session=session)
    if len(first) == len(part):
        return part
    first, number = by_appearance(session * (int(part.document.max()) + 1) + part.document)
    if len(first) == len(part):
        return part
    order = np.argsort(number, kind="stable")
    starts = np.searchsorted(number[order], np.arange(len(first)))
    position = np.where(part.position > 0, part.position, np.iinfo(np.int64).max)[order]
    position = np.minimum.reduceat(position, starts)
    merged = part.take(first)
    return replace(
        merged,
        reward=np.maximum.reduceat(part.reward[order], starts),
        position=np.where(position == np.iinfo(np.int64).max, 0, position),
        time=np.fmin.reduceat(part.time[order], starts),
    )
