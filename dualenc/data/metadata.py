"""Further columns of a table that are kept with the ids of its items, to filter search results by."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.line_tables import LINE
from dualenc.data.tables import DataTable
from dualenc.errors import DualencError

RESERVED = ("id", "vector", "text", "snippet", "score")
"""Columns that dualenc or an engine adds itself."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# What a text of a csv or json line stands for; 007 and 1e999 are no numbers, 19 digits may not fit.
_LOOKS = {
    "bool": r"^(true|false)$",
    "int64": r"^-?(0|[1-9][0-9]{0,17})$",
    "double": r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?$",
}


def check_column_names(names: Sequence[str]) -> None:
    """Insist that columns can be named in a filter, and in every engine.

    Raises:
        DualencError: a name with other signs than letters, digits and _, one that is taken, or one that stands twice.
    """
    for place, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise DualencError(f"column {name!r} cannot be kept: give it a name of letters, digits and _ in the table")
        if name.lower() in RESERVED:
            raise DualencError(f"column {name!r} cannot be kept: every result has its own {name.lower()}; rename it")
        if name.lower() in [other.lower() for other in names[:place]]:
            raise DualencError(f"column {name!r} is asked for twice; name each column once")


def metadata_columns(table: DataTable, names: Sequence[str], rows: np.ndarray) -> pa.Table:
    """The values of some columns in some rows (N,), as large_string, int64, double or bool.

    Of lines every value arrives as a text: a column of nothing but numbers is one of numbers. Dates become texts in
    ISO's order. What is empty or NaN is missing.

    Raises:
        DualencError: a name that `check_column_names` refuses, or a column of lists, records or bytes.
    """
    check_column_names(names)
    columns: dict[str, pa.ChunkedArray] = {}
    for name in names:
        values = table.dataset.data.column(name).combine_chunks().take(pa.array(rows))
        kind = values.type
        try:
            if pa.types.is_integer(kind):
                values = values.cast(pa.int64())
            elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
                values = values.cast(pa.float64())
                values = pc.if_else(pc.is_finite(values), values, None)
            elif not pa.types.is_boolean(kind):
                values = values.cast(pa.large_string())
                values = pc.if_else(pc.equal(pc.utf8_trim_whitespace(values), ""), None, values)
                if LINE in table.dataset.column_names:
                    values = _read_as_looks(values)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            why = str(error).splitlines()[0][:100]
            raise DualencError(f"{table.source}: column {name!r} holds {kind}, which cannot be kept ({why})") from None
        columns[name] = values
    return pa.table(columns)


def _read_as_looks(values: pa.Array) -> pa.Array:
    """Texts as what they all look like: truth values, whole numbers, numbers, or texts."""
    # Among numbers nan is a missing one; among texts it may be a language.
    numbers = pc.if_else(pc.equal(pc.utf8_lower(values), "nan"), None, values)
    for kind, pattern in _LOOKS.items():
        if pc.all(pc.match_substring_regex(numbers, pattern)).as_py():
            return numbers.cast(kind)
    return values
