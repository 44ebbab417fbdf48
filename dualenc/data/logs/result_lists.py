"""Logs with a row for a results list: the ids shown, and the ids or ranks of those clicked."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa

from dualenc.data.columns import Column, ItemColumn, positions_of, read_column, read_ids
from dualenc.data.item_lists import Picked, VectorItems
from dualenc.data.logs import log_names as names
from dualenc.data.logs.action_weights import ActionWeights
from dualenc.data.logs.click_log import LogColumns
from dualenc.data.logs.document_column import are_ids
from dualenc.data.logs.log_part import LogPart, one_showing_each
from dualenc.data.logs.log_table import (
    LogTable,
    codes_of,
    id_texts,
    number_of,
    number_queries,
    refuse_two,
    values_of,
)
from dualenc.data.logs.showings import (
    check_ids,
    missing_ids,
    query_column,
    query_modality,
    row_times,
    time_column,
    unread,
)
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_names import LABELS, columns_named, is_none, normalized
from dualenc.data.readers.relevance import label_columns
from dualenc.data.readers.tables import DataTable
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Integers

logger = logging.getLogger("dualenc.data")

Meaning = Literal["ids", "ranks", "labels"]

_SEPARATOR = re.compile(r"\s*[|;,\s]\s*")
_FALSE = {"0", "False", "false"}
_TRUTH = {"1", "True", "true"} | _FALSE


class ListColumns(NamedTuple):
    """The column of lists of shown ids, and the column of clicked ones."""

    shown: str
    clicked: str


def list_columns(table: LogTable, documents: Embeddings, columns: LogColumns) -> ListColumns | None:
    """Return the columns of a log with a row for a results list, None for other logs.

    Raises:
        DualencError: two columns may be the shown or the clicked ones, or nothing was clicked.
    """
    lists = [name for name in table.kinds if table.kinds[name] == "list"]
    shown = columns.document
    if shown is None:
        given = {name for name in vars(columns).values() if name is not None}
        free = [name for name in lists if name not in given]
        shown = _shown_column(table, free, documents)
        _report_joined_ids(table, documents)
    if shown not in lists:
        return None
    clicked = columns.clicked
    if clicked is None:
        clicked = _clicked_column(table, shown, columns.position)
    elif normalized(clicked) in LABELS and normalized(clicked) not in names.CLICKED_LISTS:
        return None
    if clicked is None or is_none(clicked) or _labels_rows(table, shown, clicked):
        return None
    return ListColumns(shown, clicked)


def _report_joined_ids(table: LogTable, documents: Embeddings) -> None:
    """Report texts such as d1|d2, of which a csv cannot say whether they are one id or several."""
    for name in columns_named(table.kinds, (*names.SHOWN, *names.CLICKED_LISTS)):
        if table.holds_lists(name):
            continue
        values = table.examined_values(name)
        parts = [part for value in values for part in _SEPARATOR.split(value.strip())]
        if len(parts) > len(values) and are_ids(parts, documents.ids):
            joined = next(value for value in values if _SEPARATOR.search(value.strip()))
            logger.warning(
                "%s: column %r joins ids in one text (%r), which is not read as a list; write "
                '["d1", "d2"]',
                *(table.path, name, joined[:40]),
            )


def _labels_rows(table: LogTable, shown: str, clicked: str) -> bool:
    """Return True if 0 and 1 label whole rows of clicked documents.

    Raises:
        DualencError: they label lists of what was shown, so that nothing says what was clicked.
    """
    values = set(table.examined_values(clicked))
    if table.holds_lists(clicked) or not values <= _TRUTH or not values & _FALSE:
        return False
    if columns_named([shown], names.SHOWN):
        raise DualencError(
            f"column {clicked!r} says whether a document of {shown!r} was clicked, and not which",
            fix="name the clicked ids or ranks as label_column (--label-column)",
            where=table.path,
        )
    return True


def _shown_column(table: LogTable, free: Sequence[str], documents: Embeddings) -> str | None:
    """Return the column of lists of shown ids among those without a role, None without one."""
    clicks = columns_named(free, names.CLICKED_LISTS)
    # `doc_ids` may list clicks, so that it comes after names such as `results`.
    for usual in (names.SHOWN, (*names.LISTED, *names.DOCUMENT)):
        found = [name for name in columns_named(free, usual) if name not in clicks]
        found = [name for name in found if are_ids(table.examined_values(name), documents.ids)]
        refuse_two(found, "lists of what was shown", "document_column", table.path)
        if found:
            return found[0]
    return None


def _clicked_column(table: LogTable, shown: str, position: str | None) -> str | None:
    """Return the column of clicked ids, ranks or labels; None if the lists may be of clicks."""
    clicks = (*names.CLICKED_LISTS, *names.CLICKED_RANKS)
    found = [name for name in columns_named(table.kinds, clicks) if name != shown]
    if position in found:
        found = [cast(str, position)]
    if not found:
        # Lists of 0 and 1 beside the lists of ids; grades are for the reader of labels.
        found = [name for name in label_columns(table.kinds, [shown]) if table.holds_lists(name)]
        if not all(set(table.examined_values(name)) <= _TRUTH for name in found):
            return None
    refuse_two(found, "what was clicked", "label_column", table.path)
    if not found and columns_named([shown], names.SHOWN):
        raise DualencError(
            f"column {shown!r} lists what was shown, and no column says what was clicked",
            fix="name the clicked ids or ranks as label_column (--label-column)",
            where=table.path,
        )
    return found[0] if found else None


def read_result_lists(
    table: LogTable,
    documents: Embeddings,
    columns: LogColumns,
    weights: ActionWeights,
    lists: ListColumns,
) -> LogPart:
    """Read a log whose rows are results lists with their clicks.

    Args:
        table: the log.
        documents: the index.
        columns: columns that the user named.
        weights: weights of actions.
        lists: the columns of shown and clicked documents.

    Raises:
        DualencError: it is unclear whether ids or ranks were clicked.
    """
    given = {name for name in vars(columns).values() if name is not None}
    query = columns.query or query_column(table, {*given, *lists})
    free = [name for name in table.kinds if name not in {query, *lists, *given}]
    time = time_column(table, columns.time, free)
    kind, modality = query_modality(table, query)
    opened: dict[str, ColumnKind] = {} if time is None else {time: "value"}
    is_list = table.holds_lists(lists.clicked)
    opened |= {lists.shown: "list", lists.clicked: "list" if is_list else "value", query: kind}
    data = table.open(opened)
    left = read_column(data, query, modality)
    shown = read_ids(data, lists.shown, documents.ids, VectorItems(documents.vectors))
    check_ids(data, lists.shown, shown, documents)
    if left.is_list:
        raise DualencError(
            f"column {query!r} holds lists", fix="name a column of queries", where=data.source
        )
    starts = np.searchsorted(shown.rows, np.arange(len(data)))
    entries, extra_rows, extra_ids = _clicked_entries(
        data, lists, shown, starts, columns.position == lists.clicked, documents
    )
    reward = np.zeros(len(shown.rows), np.float32)
    reward[entries] = weights.of("click")
    # A click on a document that is not in its list, which may be cut at ten: position unknown.
    rows = np.concatenate([shown.rows, extra_rows])
    document = np.concatenate([cast(Picked, shown.items).positions, extra_ids])
    rank = np.arange(len(shown.rows)) - starts[shown.rows] + 1
    position = np.concatenate([rank, np.zeros(len(extra_rows), np.int64)])
    reward = np.concatenate([reward, np.full(len(extra_rows), weights.of("click"), np.float32)])
    good = left.usable()
    left.skip()
    is_empty = np.bincount(rows, minlength=len(data)) == 0
    shown.skip(good[shown.rows], np.flatnonzero(is_empty & good))
    used = np.flatnonzero(good[rows] & (document >= 0))
    data.bad_rows.require(len(used), "showing")
    if not (reward[used] > 0).any():
        raise DualencError(
            f"column {lists.clicked!r} names no click on a document of the index",
            fix="name the column of clicked ids or ranks as label_column (--label-column)",
            where=data.source,
        )
    items, number = number_queries(left, rows[used])
    part = LogPart(
        items=items,
        modality=left.modality,
        shape="results lists",
        rows=len(data),
        query=number,
        document=document[used],
        reward=reward[used],
        position=position[used],
        session=rows[used],
        time=row_times(data, time, columns.time is not None)[rows[used]],
        missing=missing_ids(data, lists.shown, shown),
        actions={"click"},
        notes=unread(table, data),
    )
    return one_showing_each(part)


def _clicked_entries(
    data: DataTable,
    lists: ListColumns,
    shown: ItemColumn,
    starts: Integers,
    are_ranks: bool,
    documents: Embeddings,
) -> tuple[Integers, Integers, Integers]:
    """Return which of the shown entries were clicked, and clicks on documents not in their list.

    Returns:
        Positions among the shown entries; the row and the document of each other click, -1 for a
        document that is not in the index.
    """
    nothing = np.zeros(0, np.int64)
    clicked = Column(data, lists.clicked, "text", lists=True)
    filled = np.flatnonzero(clicked.filled())
    rows = clicked.rows[filled]
    numbers = values_of(clicked.array, number_of)[filled]
    lengths = np.bincount(shown.rows, minlength=len(data))
    names_ = clicked.array.take(filled)
    keys, shown_keys = _keys(names_, rows, Column(data, lists.shown, "text", lists=True))
    order = np.argsort(shown_keys, kind="stable")
    place = np.minimum(np.searchsorted(shown_keys[order], keys), len(order) - 1)
    place = order[place]
    is_shown = shown_keys[place] == keys
    meaning = _meaning(data, lists, clicked, numbers, lengths[rows], is_shown, shown, are_ranks)
    if meaning == "labels":
        return filled[numbers > 0], nothing, nothing
    if meaning == "ranks":
        first = 0 if (numbers == 0).any() else 1
        valid = np.isfinite(numbers) & (numbers % 1 == 0)
        valid &= (numbers >= first) & (numbers < lengths[rows] + first)
        if not valid.all():
            bad = int(rows[~valid][0])
            fix = f"column {lists.clicked!r} names a rank that its list does not have"
            data.bad_rows.add("clicked rank beyond the list", data.position(bad), fix,
                              int((~valid).sum()))  # fmt: skip
        return starts[rows[valid]] + numbers[valid].astype(np.int64) - first, nothing, nothing
    others = ["" if value is None else str(value) for value in names_.filter(~is_shown).to_pylist()]
    return place[is_shown], rows[~is_shown], positions_of(documents.ids, others)


def _keys(names_: pa.ChunkedArray, rows: Integers, shown: Column) -> tuple[Integers, Integers]:
    """Return numbers of clicked (n,) and shown (m,) values, equal for equal ids of one row."""
    arrays = [id_texts(names_), id_texts(shown.array)]
    chunks = [chunk for array in arrays for chunk in array.chunks]
    codes = codes_of(pa.chunked_array(chunks, pa.large_string()))
    span = int(codes.max(initial=0)) + 2
    own = codes[: len(names_)] + 1
    return rows * span + own, shown.rows * span + codes[len(names_) :] + 1


def _meaning(
    data: DataTable,
    lists: ListColumns,
    clicked: Column,
    numbers: np.ndarray,
    lengths: Integers,
    is_shown: np.ndarray,
    shown: ItemColumn,
    are_ranks: bool,
) -> Meaning:
    """Return whether clicked values are ids, ranks, or labels of the shown ids."""
    name = normalized(lists.clicked)
    is_parallel = clicked.is_list and np.array_equal(clicked.rows, shown.rows)
    if is_parallel and len(numbers) and np.isin(numbers, (0, 1)).all():
        return "labels"
    if are_ranks or names.IS_RANKS.search(name):
        return "ranks"
    if name.endswith(("_id", "_ids")):
        return "ids"
    are_whole = bool(len(numbers)) and bool((numbers % 1 == 0).all())
    may_be_ranks = are_whole and bool(((numbers >= 0) & (numbers <= lengths)).all())
    may_be_ids = bool(len(numbers)) and is_shown.mean() > 0.5
    if may_be_ranks and may_be_ids:
        raise DualencError(
            f"column {lists.clicked!r} may hold ids or ranks: its numbers are both",
            fix=f"name it as position_column (--position-column) if they are ranks, or call it "
            f"{lists.clicked}_ids",
            where=data.source,
        )
    return "ranks" if may_be_ranks else "ids"
