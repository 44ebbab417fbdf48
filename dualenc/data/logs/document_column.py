"""Find the column of document ids in a log: by names and by values that are ids of the index."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dualenc.data.columns import positions_of
from dualenc.data.logs.log_names import DOCUMENT, LISTED, SHOWN
from dualenc.data.logs.log_table import LogTable
from dualenc.data.readers.column_names import (
    QUERY_IDS,
    columns_named,
    normalized,
)
from dualenc.data.readers.id_columns import are_row_numbers
from dualenc.data.readers.relevance import looks_like_labels
from dualenc.errors import DualencError

_FITS = 0.5  # share of a column's values that must be ids of documents


def document_column(
    table: LogTable,
    but: Collection[str | None],
    ids: Sequence[str],
    names: Sequence[str] = (*DOCUMENT, *LISTED),
) -> str:
    """Return the column of document ids: one with a common name whose values are such ids.

    Labels are excluded, and so are row numbers if the values of another column are ids.

    Args:
        table: the log.
        but: columns with other roles.
        ids: (N,) ids of the index.
        names: common names of the column.

    Raises:
        DualencError: no column fits, or two do.
    """
    values = {
        name: table.examined_values(name)
        for name, kind in table.kinds.items()
        if name not in but
        and kind != "vector"
        and normalized(name) not in QUERY_IDS
        and not looks_like_labels(table.examined_values(name), name)
    }
    usual = columns_named(values, names)
    usual += [name for name in columns_named(values, SHOWN) if table.holds_lists(name)]
    fitting = [name for name in values if are_ids(values[name], ids)]
    own = [name for name in usual if name in fitting]
    # A column `id` may hold ids of the rows, so it only counts if no other column fits.
    own = [name for name in own if normalized(name) not in ("id", "_id")] or own[:1]
    others = [name for name in fitting if name not in usual and not are_row_numbers(values[name])]
    fix = "name one as document_column (--document-column)"
    if len(own) > 1:
        raise DualencError(
            f"columns {own[0]!r} and {own[1]!r} both hold document ids",
            fix=fix,
            where=table.path,
        )
    if own and others and are_row_numbers(values[own[0]]):
        raise DualencError(
            f"column {own[0]!r} numbers the rows, and the values of {others[0]!r} are document "
            "ids, too",
            fix=fix,
            where=table.path,
        )
    if not own and (others or not usual):
        hint = f": the values of {others[0]!r} are ids of documents" if others else ""
        raise DualencError(
            "it is unclear which column is document_column",
            fix=f"name it (--document-column; columns: {', '.join(table.kinds)}){hint}",
            where=table.path,
        )
    return own[0] if own else usual[0]


def are_ids(values: Sequence[str], ids: Sequence[str]) -> bool:
    """Return True if most values are among ids."""
    return bool(values and np.mean(positions_of(ids, values) >= 0) >= _FITS)
