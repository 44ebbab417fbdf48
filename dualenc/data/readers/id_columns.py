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

# Names that only the ids of the rows have: a repeated value is a bad row, not another meaning.
_OWN = ("_id", "id", "docid", "doc_id", "document_id")
# Up to 10 repeated values, or a tenth of them, may be mistakes; more are ids of something else.
_FEW = 10
_MAX_REPEATED = 0.1


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
    values = {name: source.examined(name) for name in usual}
    fitting = [name for name in usual if normalized(name) in _OWN or not _repeats(values[name])]
    if not fitting:
        name = usual[0]
        raise DualencError(
            f"column {name!r} repeats its values, so they cannot be ids of the rows",
            fix=(
                f"name the column of ids with id_column (--id-column): {name!r} keeps one row per "
                "value, none numbers the rows"
            ),
            where=source.path,
        )
    best = next((name for name in fitting if not are_row_numbers(values[name])), fitting[0])
    if best != usual[0]:
        reason = "repeats its values" if usual[0] not in fitting else "numbers the rows"
        logger.warning(
            "%s: column %r is read as ids, since %r %s; id_column (--id-column) selects another",
            source.path,
            best,
            usual[0],
            reason,
        )
    return best


def are_row_numbers(values: Sequence[Any]) -> bool:
    """Return True if values count up by one, as in an index column."""
    # pandas writes 7.0 beside missing values. Nobody has 10^18 rows: such numbers are ids.
    texts = [str(value).strip().removesuffix(".0") for value in values]
    are_integers = all(text.isdecimal() and len(text) < 19 for text in texts)
    if len(texts) < 2 or not are_integers:
        return False
    numbers = [int(text) for text in texts]
    return all(after == before + 1 for before, after in pairwise(numbers))


def _repeats(values: Sequence[Any]) -> bool:
    """Return True if many values occur more than once; lists are left for the reader to refuse."""
    texts = ["" if value is None else str(value) for value in values]
    filled = [text for text in texts if text.strip()]
    repeated = len(filled) - len(set(filled))
    return repeated > _FEW and repeated > _MAX_REPEATED * len(filled)
