"""Find the column that holds the ids of a table's items if the user does not name it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from dualenc.data.readers.column_names import IDS, QUERY_IDS, columns_named, normalized
from dualenc.data.readers.tables import TableSource
from dualenc.errors import DualencError

logger = logging.getLogger("dualenc.data")

_OWN = ("_id", "id", "docid", "doc_id", "document_id")  # of the rows: a repeated one is a bad row
_FEW = 10  # repeated values, as of mistakes
_MAX_REPEATED = 0.1  # of the values of a column of ids; of more they are ids of something else


def usual_id_column(source: TableSource, main: str, *, of_queries: bool = False) -> str | None:
    """Return the column of ids, found by name and values; None if rows are to be numbered.

    Row numbers are skipped if another column has a common name of ids. So is a column that repeats
    its values: it may hold ids of something else, such as the products of reviews.

    Args:
        source: the table.
        main: column of the items, which is never their id.
        of_queries: whether the items are queries, whose ids have other common names.

    Raises:
        DualencError: all columns with a common name repeat their values.
    """
    names: Sequence[str] = ("_id", "id", *QUERY_IDS) if of_queries else IDS
    usual = [name for name in columns_named(source.kinds, names) if name != main]
    if not usual:
        return None
    values = {name: [record.get(name) for record in source.examined] for name in usual}
    fitting = [name for name in usual if normalized(name) in _OWN or not _repeats(values[name])]
    if not fitting:
        name = usual[0]
        raise DualencError(
            f"column {name!r} repeats its values, so that they are no ids of the rows",
            fix=(
                f"name the column of ids by id_column (--id-column): {name!r} keeps one row of "
                "each, none numbers the rows"
            ),
            where=source.path,
        )
    best = next((name for name in fitting if not are_row_numbers(values[name])), fitting[0])
    if best != usual[0]:
        reason = "repeats its values" if usual[0] not in fitting else "numbers the rows"
        message = "%s: column %r is read as ids, for %r %s; id_column (--id-column) names another"
        logger.warning(message, source.path, best, usual[0], reason)
    return best


def are_row_numbers(values: Sequence[Any]) -> bool:
    """Return True if values count up by one, as in an index column."""
    texts = [str(value).strip().removesuffix(".0") for value in values]
    if len(texts) < 2 or not all(text.isdecimal() and len(text) < 19 for text in texts):
        return False
    numbers = [int(text) for text in texts]
    return all(after == before + 1 for before, after in pairwise(numbers))


def _repeats(values: Sequence[Any]) -> bool:
    """Return True if many values occur more than once; lists are left for the reader to refuse."""
    filled = [str(value) for value in values if value is not None and str(value).strip()]
    repeated = len(filled) - len(set(filled))
    return repeated > _FEW and repeated > _MAX_REPEATED * len(filled)
