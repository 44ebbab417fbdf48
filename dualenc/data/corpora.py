"""Corpora from the columns of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualenc.data.columns import Column, Images, Picked, Texts, Titled, filled
from dualenc.data.corpus import Corpus
from dualenc.data.labels import labels_of_column
from dualenc.data.pairs import Items
from dualenc.data.tables import Table


def text_corpus(
    table: Table,
    text_column: str,
    title_column: str | None = None,
    id_column: str | None = None,
    what: str = "document",
) -> Corpus:
    """The texts of a table, in the order of its rows, without empty ones and without repeated ids.

    Args:
        table: the rows; bad ones are told to its `skips`.
        text_column: texts, or lists of texts, whose ids then are `ID#0`, `ID#1`, …
        title_column: joined in front of the text.
        id_column: ids; by default the row's number.
        what: names an item in errors.

    Raises:
        DualencError: nothing usable, or a column of something else.
        BadSample: an empty text, a missing or repeated id, under on_error="raise".
    """
    column = Column.of(table, text_column, "text", lists=True)
    items: Items = Texts(column)
    there = filled(column)
    if title_column is not None and not column.is_list:
        titles = Column.of(table, title_column, "text")
        items, there = Titled(titles, column), there | filled(titles)
    rows = column.row_of_values()
    _tell(table, rows[~there], f"empty {what}", "fill it in or remove it")
    ids = _ids(table, id_column)
    names = ids if not column.is_list else [f"{ids[row]}#{k}" for row, k in zip(rows, _place_in_list(rows))]
    kept = _usable(table, names, rows, np.flatnonzero(there), what)
    return Corpus([names[i] for i in kept], Picked(items, kept))


def image_corpus(
    table: Table, image_column: str, label_column: str | None = None, id_column: str | None = None
) -> Corpus:
    """The images of a table, in the order of its rows, with labels where there is a column of them.

    Raises:
        DualencError: nothing usable, or a column of something else.
        BadSample: a row without an image, a missing or repeated id, under on_error="raise".
    """
    column = Column.of(table, image_column, "image")
    there = filled(column)
    _tell(table, np.flatnonzero(~there), f"no image in column {image_column!r}", "fill it in or remove the row")
    ids = _ids(table, id_column)
    kept = _usable(table, ids, np.arange(len(table)), np.flatnonzero(there), "image")
    labels = None if label_column is None else labels_of_column(table, label_column).take(kept)
    items = Picked(Images(table, column), kept)
    numbers, names = (None, None) if labels is None else labels
    return Corpus([ids[i] for i in kept], items, "image", labels=numbers, class_names=names)


def _ids(table: Table, id_column: str | None) -> Sequence[str | None]:
    if id_column is None:
        return [str(row) for row in range(len(table))]
    column = Column.of(table, id_column, "text")
    values = column.values(np.arange(len(column))).tolist()
    return [None if value is None else str(value) for value in values]


def _place_in_list(rows: np.ndarray) -> np.ndarray:
    """0, 1, 2, … within each run of equal rows."""
    starts = np.searchsorted(rows, rows, side="left")
    return np.arange(len(rows)) - starts


def _tell(table: Table, rows: np.ndarray, reason: str, mend: str) -> None:
    if len(rows):
        table.skips.bad(reason, table.where(int(rows[0])), mend, len(rows))


def _usable(
    table: Table, names: Sequence[str | None], rows: np.ndarray, candidates: np.ndarray, what: str
) -> np.ndarray:
    """The candidates whose names are there and new."""
    seen: set[str] = set()
    kept = []
    for i in candidates.tolist():
        name = names[i]
        if name is None:
            table.skips.bad(f"{what} without an id", table.where(int(rows[i])), "give it one")
        elif name in seen:
            table.skips.bad(f"{what} with an id used before", table.where(int(rows[i])), f"{name!r} stands twice")
        else:
            seen.add(name)
            kept.append(i)
    table.skips.demand(len(kept), what)
    return np.array(kept, dtype=np.int64)
