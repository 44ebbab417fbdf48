"""Tables of results, for the terminal and for the report alike."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of named values.

    Attributes:
        caption: What the numbers are, in a few words.
        rows: One mapping of column name to value each; the columns are those of all rows, in order of appearance.
    """

    caption: str
    rows: Sequence[Mapping[str, object]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns, each once, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[str]]:
        """The rows as text, one cell for each column; what a row lacks is empty."""
        return [[as_text(row.get(name, "")) for name in self.columns] for row in self.rows]


def as_text(value: object) -> str:
    """A value as a reader wants it: four decimals for a fraction, thousands separated, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def is_number(value: object) -> bool:
    """Whether a column of such values is set flush right."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def print_table(table: Table) -> None:
    """Print a table to the terminal; numbers flush right, nothing cut off where the output is not a terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.caption, title_justify="left", title_style="bold")
    for name in table.columns:
        numeric = any(is_number(row.get(name)) for row in table.rows)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for cells in table.cells():
        drawn.add_row(*cells)
    # A pipe or a log file has no width of its own; rich would assume 80 columns and fold the numbers.
    width = None if sys.stdout.isatty() else 1000
    Console(width=width, markup=False, highlight=False).print(drawn)
