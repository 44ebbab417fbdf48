"""Tables of results, for the terminal and for the report alike."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dualenc.terminal import printable


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
    """Print a table to the terminal, control characters escaped.

    Where there is no room, names and headings are folded, never numbers.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(title=printable(table.caption), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    drawn.pad_edge, drawn.collapse_padding = False, True
    cells = [[printable(cell) for cell in row] for row in table.cells()]
    for name, values in zip(table.columns, zip(*cells)):
        numeric = any(is_number(row.get(name)) for row in table.rows)
        least = max(map(len, values)) if numeric else None
        drawn.add_column(printable(name), justify="right" if numeric else "left", overflow="fold", min_width=least)
    for row in cells:
        drawn.add_row(*row)
    # A pipe or a log file has no width of its own; rich would assume 80 columns.
    width = None if sys.stdout.isatty() else 1000
    Console(width=width, markup=False, emoji=False, highlight=False).print(drawn)
