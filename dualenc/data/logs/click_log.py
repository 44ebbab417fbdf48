"""Click logs in memory: arrays with one entry per showing, whatever the shape of the log was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dualenc.data.corpus import Corpus
from dualenc.errors import DualencError
from dualenc.types import Integers

SHOWING = ("query", "document", "reward", "position", "session", "time")
"""Arrays of a log with one entry per showing."""


@dataclass(frozen=True)
class LogColumns:
    """Names of the columns of a log; None finds a column by its name and values.

    "none" reads no such column, even if one has a common name.

        LogColumns(query="q", document="asin", clicked="was_clicked")

    Args:
        query: texts or vectors of queries; or, for images, paths or file contents.
        document: ids of the documents shown or clicked, or lists of such ids.
        clicked: whether, or how often, a document was clicked; in a row a session, the list of
            clicked ids or of their ranks from 1.
        position: position in the results list, from 1.
        session: results list, search or user session that the row belongs to.
        time: ISO text, seconds or milliseconds since 1970, or Arrow timestamp.
        action: what the user did: click, cart, purchase, impression, …
        impressions: how often the document was shown for the query.
        weight: relevance of the document for the query, taken as it is; for instance the scores of
            a teacher.
    """

    query: str | None = None
    document: str | None = None
    clicked: str | None = None
    position: str | None = None
    session: str | None = None
    time: str | None = None
    action: str | None = None
    impressions: str | None = None
    weight: str | None = None


class Showings:
    """What a log and a part of one have in common: arrays with one entry per showing."""

    query: Integers

    def __len__(self) -> int:
        return len(self.query)

    def take(self, rows: Integers | np.ndarray) -> Self:
        """Return some showings, given as row numbers or as a mask (n,), with all queries."""
        arrays = {name: getattr(self, name)[rows] for name in SHOWING}
        return replace(self, **arrays)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class ClickLog(Showings):
    """What users were shown and did: n showings of Q queries and N documents.

    A showing is one document shown at one position of one results list.

        log = open_log("events.parquet", open_documents("index"))
        log.reward[log.query == 0]

    Args:
        queries: the Q distinct queries (texts, vectors or images), with ids "0" to "Q-1".
        query: row of the query, (n,).
        document: row of the document in the index, (n,).
        reward: largest weight of the actions on the showing, (n,) float32; 0 without an action.
        position: position in the results list, (n,), from 1; 0 if unknown.
        session: number of the results list, (n,); all different if unknown.
        time: seconds since 1970, (n,) float64; NaN if unknown.
        grades_are_relevance: True for judgements and scores of a teacher, from which nothing has
            to be inferred; False for behavior.
        finding: what was read, in one line.
        skipped: number of rows that could not be used.

    Raises:
        DualencError: arrays of different lengths.
    """

    queries: Corpus
    query: Integers
    document: Integers
    reward: np.ndarray
    position: Integers
    session: Integers
    time: np.ndarray
    grades_are_relevance: bool
    finding: str
    skipped: int

    def __post_init__(self) -> None:
        for name in SHOWING:
            if len(getattr(self, name)) != len(self.query):
                raise DualencError(
                    f"{name} has {len(getattr(self, name))} entries for {len(self.query)} showings",
                    fix="give one per showing",
                    where="ClickLog",
                )
