"""Open the logs of a search system, whatever the shape of their rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import matrix_faults
from dualenc.data.corpus import Corpus
from dualenc.data.item_lists import Joined, Picked, distinct_items
from dualenc.data.logs.action_weights import ActionWeights
from dualenc.data.logs.click_log import ClickLog, LogColumns
from dualenc.data.logs.judgements import read_judgements
from dualenc.data.logs.log_part import LogPart
from dualenc.data.logs.log_table import LogTable, by_appearance, flat_record
from dualenc.data.logs.result_lists import list_columns, read_result_lists
from dualenc.data.logs.showings import read_showings
from dualenc.data.logs.ubi import is_events, is_queries, read_ubi, ubi_folder
from dualenc.data.readers.detect import RETRIEVAL_KINDS, detect
from dualenc.data.readers.read_options import ReadOptions
from dualenc.data.readers.tables import TableSource
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.reading import with_home
from dualenc.types import OnError, StrPath

__all__ = ["ClickLog", "LogColumns", "open_log"]

logger = logging.getLogger("dualenc.data")

BY_NAME = LogColumns()
"""All columns by their common names."""


def open_log(
    sources: StrPath | Sequence[StrPath],
    documents: Embeddings,
    *,
    columns: LogColumns = BY_NAME,
    weights: Mapping[str, float] | None = None,
    split: str = "train",
    on_error: OnError = "skip",
) -> ClickLog:
    """Open one or several logs over the documents of an index.

    The shape of a log is detected from its columns: a row for a click; for an impression, with a
    column of clicks or counts; for an event, with a column of actions; for a results list, with
    lists of shown and of clicked documents; UBI queries and events; a BEIR folder; or pairs with
    the weights of a teacher. What was read is logged in one line, which is also `finding`.

        log = open_log("events.parquet", open_documents("index"), weights={"purchase": 5})
        log.finding

    Args:
        sources: tables (files, globs, folders of a day's parts, hub names), BEIR folders, folders
            with UBI queries and events; or several of them.
        documents: N vectors with ids, see `dualenc.search.documents.open_documents`.
        columns: names of columns that the log does not call by a common name.
        weights: weight of each action, such as {"click": 1, "cart": 2}; by default 1 for actions
            and 0 for impressions and views.
        split: which split of a BEIR folder, folder of tables, saved data set or hub name.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.

    Raises:
        DualencError: columns cannot be told apart, a weight is negative, or nothing was clicked.
        BadSample: a bad row under on_error="raise".
    """
    if not hasattr(documents, "ids"):
        raise DualencError(
            f"documents is {type(documents).__name__}",
            fix="give open_documents(INDEX)",
            where="open_log",
        )
    action_weights = ActionWeights(weights)
    several = (
        [sources] if isinstance(sources, (str, Path)) or hasattr(sources, "__fspath__") else sources
    )
    paths = [with_home(source) for source in several]  # type: ignore[union-attr]
    if not paths:
        raise DualencError("no log", fix="name at least one", where="open_log")
    read = _Reader(documents, columns, action_weights, split, on_error)
    parts = read.all(paths)
    skipped = sum(bad_rows.report() for bad_rows in read.bad_rows)
    actions = {action for part in parts for action in part.actions}
    action_weights.check_used(actions or {"click"})
    return _merged(parts, paths, skipped)


class _Reader:
    """Reads sources with the same options."""

    def __init__(
        self,
        documents: Embeddings,
        columns: LogColumns,
        weights: ActionWeights,
        split: str,
        on_error: OnError,
    ) -> None:
        self.documents = documents
        self.columns = columns
        self.weights = weights
        self.options = ReadOptions(split=split, on_error=on_error)
        self.bad_rows: list[BadRows] = []

    def all(self, paths: Sequence[StrPath]) -> list[LogPart]:
        """Return what each source holds; tables of UBI queries and events are one source."""
        parts: list[LogPart] = []
        tables: list[LogTable] = []
        for path in paths:
            folder = ubi_folder(Path(path))
            if folder is not None:
                own = self._bad_rows(path)
                queries = [self._table(entry, own) for entry in folder.queries]
                events = [self._table(entry, own) for entry in folder.events]
                parts.append(self._ubi(queries, events, own))
                continue
            bad_rows = self._bad_rows(path)
            if detect(path) in RETRIEVAL_KINDS:
                part = read_judgements(Path(path), self.options.split, self.documents, bad_rows)
                parts.append(self._usable(part, bad_rows))
            else:
                tables.append(self._table(path, bad_rows))
        searches = [table for table in tables if is_queries(table)]
        acted = [table for table in tables if is_events(table)]
        if searches and acted:
            parts.append(self._ubi(searches, acted, acted[0].bad_rows))
            tables = [table for table in tables if table not in (*searches, *acted)]
        return [*parts, *(self._usable(self._rows(t), t.bad_rows) for t in tables)]

    def _bad_rows(self, path: StrPath) -> BadRows:
        self.bad_rows.append(self.options.bad_rows(path))
        return self.bad_rows[-1]

    def _table(self, path: StrPath, bad_rows: BadRows) -> LogTable:
        source = TableSource(
            path, bad_rows, kind=detect(path), options=self.options, reshape=flat_record
        )
        return LogTable(source)

    def _ubi(self, queries: list[LogTable], events: list[LogTable], bad_rows: BadRows) -> LogPart:
        part = read_ubi(queries, events, self.documents, self.columns, self.weights, bad_rows)
        return self._usable(part, bad_rows)

    def _rows(self, table: LogTable) -> LogPart:
        lists = list_columns(table, self.documents, self.columns)
        if lists is None:
            return read_showings(table, self.documents, self.columns, self.weights)
        return read_result_lists(table, self.documents, self.columns, self.weights, lists)

    def _usable(self, part: LogPart, bad_rows: BadRows) -> LogPart:
        """Leave out documents whose vectors cannot be used; count clicks on them."""
        # Other documents may have faults, too: they stay, since row numbers are ids of the index.
        keep = np.ones(len(part), dtype=bool)
        for reason, (is_bad, fix) in matrix_faults(self.documents.vectors).items():
            for what, is_kind in (("click on", part.reward > 0), ("showing of", part.reward <= 0)):
                bad = part.document[is_bad[part.document] & is_kind]
                if len(bad):
                    first = self.documents.ids[int(bad[0])]
                    bad_rows.add(f"{what} a {reason}", first, fix, len(bad))
            keep &= ~is_bad[part.document]
        part = part if keep.all() else part.take(keep)
        bad_rows.require(len(part), "pair")
        return part


def _merged(parts: Sequence[LogPart], paths: Sequence[StrPath], skipped: int) -> ClickLog:
    """Return the showings of all sources as one log; equal queries are one."""
    modalities = sorted({part.modality for part in parts})
    if len(modalities) > 1:
        raise DualencError(
            f"queries are {modalities[0]}s in one log and {modalities[1]}s in another",
            fix="adapt to one kind of queries at a time",
            where=paths[0],
        )
    if len(parts) > 1:
        joined = Joined([part.items for part in parts])
        items, number = distinct_items(joined, np.arange(len(joined)))
        lists = np.cumsum([0, *(int(part.session.max()) + 1 for part in parts)])
        merged = LogPart(
            items=items,
            modality=parts[0].modality,
            shape=" and ".join(dict.fromkeys(part.shape for part in parts)),
            rows=sum(part.rows for part in parts),
            query=np.concatenate(
                [number[start + part.query] for part, start in zip(parts, joined.starts)]
            ),
            document=np.concatenate([part.document for part in parts]),
            reward=np.concatenate([part.reward for part in parts]),
            position=np.concatenate([part.position for part in parts]),
            session=np.concatenate([part.session + start for part, start in zip(parts, lists)]),
            time=np.concatenate([part.time for part in parts]),
            missing={name for part in parts for name in part.missing},
            grades_are_relevance=all(part.grades_are_relevance for part in parts),
            notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
        )
    else:
        (merged,) = parts
    if not (merged.reward > 0).any():
        raise DualencError(
            "nothing was clicked", fix="name a log with clicks", where=", ".join(map(str, paths))
        )
    # Only queries with a usable row are in the log, by first appearance.
    first, query = by_appearance(merged.query)
    merged = replace(
        merged,
        items=Picked(merged.items, merged.query[first]),
        query=query,
        session=by_appearance(merged.session)[1],
    )
    finding = merged.finding()
    logger.info("%s: %s", ", ".join(map(str, paths)), finding)
    return ClickLog(
        Corpus([str(number) for number in range(len(first))], merged.items, merged.modality),
        merged.query,
        merged.document,
        merged.reward,
        merged.position,
        merged.session,
        merged.time,
        merged.grades_are_relevance,
        finding,
        skipped,
    )
