"""Logs in the schema of User Behavior Insights (OpenSearch, Solr, Elasticsearch), version 1.3.

Two tables: `queries` with a row for each search (`query_id`, `user_query`,
`query_response_hit_ids`), and `events` with a row for each action (`query_id`, `action_name`,
`object_id` and `position.ordinal`, nested in `event_attributes` or not). See
https://github.com/o19s/ubi/tree/main/schema/1.3.0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import Column, positions_of
from dualenc.data.logs import log_names as names
from dualenc.data.logs.action_weights import ActionWeights
from dualenc.data.logs.click_log import LogColumns
from dualenc.data.logs.log_part import LogPart, one_showing_each
from dualenc.data.logs.log_table import (
    LogTable,
    by_appearance,
    codes_of,
    id_texts,
    read_numbers,
    refuse_two,
    values_of,
)
from dualenc.data.logs.showings import described_actions, row_times, whole_positions
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_names import columns_named, is_none
from dualenc.data.readers.tables import DataTable
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Integers

_PART = re.compile(r"(?:^|[._-])(queries|events)(?=$|[._-])")
_QUERY_ID = ("query_id", "queryid")
_TEXT = ("user_query", "user_query_query", "event_attributes_user_query")
_HITS = "query_response_hit_ids"
_OBJECT = (
    *("event_attributes_object_object_id", "object_id", "event_attributes_object_id"),
    "object_object_id",
)


class UbiFolder(NamedTuple):
    """The paths of the two tables."""

    queries: list[Path]
    events: list[Path]


def ubi_folder(folder: Path) -> UbiFolder | None:
    """Return the files or subfolders of queries and events in a folder, None without both."""
    if not folder.is_dir() or (folder / "qrels").exists():
        return None
    parts = UbiFolder([], [])
    for entry in sorted(folder.iterdir()):
        match = _PART.search(entry.name.lower())
        if match and not entry.name.startswith((".", "_")):
            getattr(parts, match[1]).append(entry)
    return parts if parts.queries and parts.events else None


def is_queries(table: LogTable) -> bool:
    """Return True for a table of searches: ids and texts of queries, and no actions."""
    has_query = columns_named(table.kinds, _QUERY_ID) and columns_named(table.kinds, _TEXT)
    return bool(has_query) and not columns_named(table.kinds, ("action_name",))


def is_events(table: LogTable) -> bool:
    """Return True for a table of actions on the results of queries."""
    has_action = columns_named(table.kinds, ("action_name",))
    return bool(has_action and columns_named(table.kinds, _QUERY_ID))


class _Entries(NamedTuple):
    """Documents in results lists: hits of queries, or objects of events; n of each.

    Attributes:
        query_id: id of the query as a text.
        document: id of the document as a text.
        action: name of the action, None for hits.
        position: from 1, 0 if unknown.
        time: seconds since 1970.
        data: table of the entries.
        rows: row of each entry in the table.
    """

    query_id: pa.Array
    document: pa.Array
    reward: np.ndarray
    position: Integers
    time: np.ndarray
    data: DataTable
    rows: Integers


def read_ubi(
    queries: Sequence[LogTable],
    events: Sequence[LogTable],
    documents: Embeddings,
    columns: LogColumns,
    weights: ActionWeights,
    bad_rows: BadRows,
) -> LogPart:
    """Join queries with events: a showing for each hit, and for each object without one.

    Args:
        queries: tables of queries.
        events: tables of events.
        documents: the index.
        columns: columns that the user named.
        weights: weights of actions.
        bad_rows: counts events of unknown queries, and documents that are not in the index.

    Raises:
        DualencError: a column is missing, or two columns have one role.
    """
    searches: list[tuple[pa.Array, pa.Array]] = []
    entries: list[_Entries] = []
    notes: list[str] = []
    for table in queries:
        data, search, hits = _read_queries(table, columns)
        searches.append(search)
        if hits is not None:
            entries.append(hits)
    num_searches = sum(len(ids) for ids, _ in searches)
    num_rows = num_searches
    actions: set[str] = set()
    for table in events:
        data, named, acted, own, own_notes = _read_events(table, columns, weights)
        num_rows += len(data)
        entries.append(acted)
        actions |= own
        notes += own_notes
        if named is not None:
            searches.append(named)
    ids = pa.concat_arrays([ids for ids, _ in searches] + [part.query_id for part in entries])
    codes = codes_of(pa.chunked_array([ids]))
    text_of, texts = _texts_of_queries(codes, [text for _, text in searches])
    session = codes[sum(len(ids) for ids, _ in searches) :]
    names_ = pa.concat_arrays([part.document for part in entries]).dictionary_encode()
    distinct = [str(value) for value in names_.dictionary.to_pylist()]
    known = positions_of(documents.ids, distinct)
    document = known[names_.indices.to_numpy()]
    if not (document >= 0).any():
        shown = repr(distinct[0][:60]) if distinct else "none"
        raise DualencError(
            f"no object is a document of the index (the first is {shown}, and an id of the index "
            f"is {documents.ids[0][:60]!r})",
            fix="name the column of ids as document_column (--document-column)",
            where=bad_rows.source,
        )
    query = text_of[session]
    _count_bad(entries, query < 0, "event of an unknown query", bad_rows)
    _count_bad(entries, (document < 0) & (query >= 0), "id without a vector", bad_rows)
    used = np.flatnonzero((query >= 0) & (document >= 0))
    bad_rows.require(len(used), "showing")
    first, number = by_appearance(query[used])
    part = LogPart(
        items=[texts[code] for code in query[used][first].tolist()],
        modality="text",
        shape="UBI queries and events",
        rows=num_rows,
        query=number,
        document=document[used],
        reward=np.concatenate([part.reward for part in entries])[used],
        position=np.concatenate([part.position for part in entries])[used],
        session=session[used],
        time=np.concatenate([part.time for part in entries])[used],
        missing={name for name, row in zip(distinct, known.tolist()) if row < 0},
        actions=actions,
        notes=[*dict.fromkeys(notes), *described_actions(actions, weights)],
    )
    return one_showing_each(part)


def _read_queries(
    table: LogTable, columns: LogColumns
) -> tuple[DataTable, tuple[pa.Array, pa.Array], _Entries | None]:
    """Return the ids and texts of searches, and their hits if the table has them."""
    query_id = _column(table, columns.session, _QUERY_ID, "query ids", "session_column")
    text = _column(table, columns.query, _TEXT, "texts of queries", "query_column")
    time = _optional(table, columns.time, names.TIME)
    hits = next(iter(columns_named(table.kinds, (_HITS,))), None)
    opened: dict[str, ColumnKind] = {} if time is None else {time: "value"}
    opened |= {query_id: "value", text: "value"}
    if hits is not None:
        opened[hits] = "list"
    data = table.open(opened)
    ids = _strings(data.column(query_id))
    search = ids, _strings(data.column(text))
    if hits is None:
        return data, search, None
    column = Column(data, hits, "text", lists=True)
    filled = np.flatnonzero(column.filled())
    rows = column.rows[filled]
    starts = np.searchsorted(column.rows, np.arange(len(data)))
    return data, search, _Entries(
        ids.take(pa.array(rows)),
        _strings(column.array).take(pa.array(filled)),
        np.zeros(len(rows), np.float32),
        filled - starts[rows] + 1,
        row_times(data, time, columns.time is not None)[rows],
        data,
        rows,
    )  # fmt: skip


def _read_events(
    table: LogTable, columns: LogColumns, weights: ActionWeights
) -> tuple[DataTable, tuple[pa.Array, pa.Array] | None, _Entries, set[str], list[str]]:
    """Return the objects of events; the texts of their queries, if they have them; the actions."""
    query_id = _column(table, columns.session, _QUERY_ID, "query ids", "session_column")
    action = _column(table, columns.action, ("action_name",), "actions", "action_column")
    document = _column(table, columns.document, _OBJECT, "ids of objects", "document_column")
    position = _optional(table, columns.position, names.POSITION)
    time = _optional(table, columns.time, names.TIME)
    text = _optional(table, columns.query, _TEXT)
    opened: dict[str, ColumnKind] = {
        name: "value"
        for name in (query_id, action, document, position, time, text)
        if name is not None
    }
    data = table.open(opened)
    ids = _strings(data.column(query_id))
    objects = _strings(data.column(document))
    known = pc.and_(_is_filled(ids), _is_filled(objects)).to_numpy(zero_copy_only=False)
    notes = []
    if not known.all():
        notes.append(f"{int((~known).sum()):,} events name no query or no object")
    rows = np.flatnonzero(known)
    # Only actions on documents: a page that was left is neither a click nor refused.
    acted = pa.chunked_array([_strings(data.column(action)).take(pa.array(rows))])
    where = f"{data.source}, column {action!r}"
    positions: Integers = np.zeros(len(rows), np.int64)
    if position is not None:
        positions, own = whole_positions(read_numbers(data, position)[0][rows], position)
        notes += own
    entries = _Entries(
        ids.take(pa.array(rows)),
        objects.take(pa.array(rows)),
        np.nan_to_num(values_of(acted, lambda name: weights.of(name, where))).astype(np.float32),
        positions,
        row_times(data, time, columns.time is not None)[rows],
        data,
        rows,
    )
    search = None if text is None else (ids, _strings(data.column(text)))
    return data, search, entries, {str(n) for n in acted.unique().to_pylist() if n}, notes


def _column(
    table: LogTable, named: str | None, usual: Sequence[str], what: str, option: str
) -> str:
    """Return the column that the user named, if this table has it, or the one with a usual name."""
    if named is not None and named in table.kinds:
        return named
    found = columns_named(table.kinds, usual)
    refuse_two(found, what, option, table.path)
    if not found:
        raise DualencError(
            f"no column of {what} ({usual[0]})",
            fix=f"name it as {option} (columns: {', '.join(table.kinds)}){table.wrapper}",
            where=table.path,
        )
    return found[0]


def _optional(table: LogTable, named: str | None, usual: Sequence[str]) -> str | None:
    if is_none(named):
        return None
    if named is not None and named in table.kinds:
        return named
    return next(iter(columns_named(table.kinds, usual)), None)


def _strings(array: pa.ChunkedArray) -> pa.Array:
    """Return values as one array of texts."""
    texts = id_texts(array)
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _is_filled(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return which texts are neither missing nor blank."""
    return pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(texts), ""), False)


def _texts_of_queries(codes: Integers, searched: Sequence[pa.Array]) -> tuple[Integers, list[str]]:
    """Return the number of the text of each query id's code, -1 without one, and the texts."""
    texts = pa.chunked_array(list(searched))
    filled = _is_filled(texts).to_numpy()
    coded = texts.dictionary_encode().combine_chunks()
    numbers = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    own = codes[: len(filled)]
    usable = np.flatnonzero(filled & (own >= 0))
    text_of = np.full(int(codes.max(initial=0)) + 1, -1, np.int64)
    # Reversed, so that the first text of an id stays.
    text_of[own[usable][::-1]] = numbers[usable][::-1]
    return text_of, coded.dictionary.to_pylist()


def _count_bad(
    entries: Sequence[_Entries], is_bad: np.ndarray, reason: str, bad_rows: BadRows
) -> None:
    start = 0
    for part in entries:
        bad = np.flatnonzero(is_bad[start : start + len(part.rows)])
        start += len(part.rows)
        if len(bad):
            position = part.data.position(int(part.rows[bad[0]]))
            bad_rows.add(reason, position, "check the ids", len(bad))
