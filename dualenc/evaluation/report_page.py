"""Print tables on a terminal, and write a self-contained report.html that is readable offline."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dualenc.errors import DualencError
from dualenc.evaluation.layout import lay_out
from dualenc.evaluation.plots import as_svg
from dualenc.io.files import atomic_path, check_file_target
from dualenc.io.reading import open_regular
from dualenc.io.targets import check_outside
from dualenc.io.terminal import printable
from dualenc.types import StrPath

if TYPE_CHECKING:
    import matplotlib.figure
    from rich.console import JustifyMethod

TEMPLATE = Path(__file__).with_name("report.html.jinja")
STYLE = b"body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24;"
"""First style rule of the template, which identifies our pages."""


class Table(NamedTuple):
    """A table of named values. Its columns are those of all rows, in order of appearance.

        print_table(Table("Recall", [{"k": 1, "recall": 0.5}, {"k": 10, "recall": 0.9}]))

    Attributes:
        caption: heading of the table.
        rows: values by column; a row may lack some.
    """

    caption: str
    rows: Sequence[Mapping[str, object]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[str]]:
        """Return the rows as text, one cell for each column; a missing value is empty."""
        names = self.columns
        return [[as_text(row.get(name, "")) for name in names] for row in self.rows]

    def is_numeric(self, name: str) -> bool:
        """Return True if a column has only numbers, which are set flush right."""
        values = [row.get(name, "") for row in self.rows]
        present = [value for value in values if value not in ("", None)]
        return bool(present) and all(map(_is_number, present))


class Figure(NamedTuple):
    """A plot with a caption. `write_report` embeds it as SVG.

        Figure("loss", lines({"first": ([0, 1], [2.0, 1.5])}))

    Attributes:
        caption: text above the plot.
        plot: figure of matplotlib.
    """

    caption: str
    plot: matplotlib.figure.Figure


def as_text(value: object) -> str:
    """Format a value: four decimals for fractions, separated thousands, a dash for None.

    Args:
        value: any value; others than numbers and None are converted by `str`.
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def as_interval(mean: float, low: float, high: float, *, signed: bool = False) -> str:
    """Format a mean and its interval for one column: "0.127 [0.094, 0.161]".

    The interval of queries with equal scores has no width and is left out.

    Args:
        mean: the mean.
        low: lower end of the interval.
        high: upper end.
        signed: show the sign of positive numbers, too.
    """
    sign = "+" if signed else ""
    shown = [f"{value:{sign}.3f}" for value in (mean, low, high)]
    return shown[0] if low == high else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _is_number(value: object) -> bool:
    """Return True for a number that is not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def print_table(table: Table, beginnings: str | None = None) -> None:
    """Print a table that fits the terminal, with control characters escaped.

    Args:
        table: the table; without a terminal its width is not limited.
        beginnings: name of a column of texts, of which a terminal shows three lines each.
    """
    # rich would assume 80 columns for a pipe or a log file.
    width = Console().width if sys.stdout.isatty() else None
    rows = [[printable(cell) for cell in row] for row in table.cells()]
    blocks = lay_out([printable(name) for name in table.columns], rows, width, beginnings)
    console = Console(width=width or 1 << 16, markup=False, emoji=False, highlight=False)
    console.print(Text(printable(table.caption), style="bold", overflow="fold"))
    # Columns that do not fit side by side follow in further blocks.
    for block in blocks:
        drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for number, cells, header in zip(block.columns, block.widths, block.headers):
            side: JustifyMethod = "right" if table.is_numeric(table.columns[number]) else "left"
            drawn.add_column(header, justify=side, min_width=cells, overflow="fold")
        for row in block.rows:
            drawn.add_row(*row)
        console.print(drawn)


def write_report(
    path: StrPath,
    title: str,
    *,
    facts: Mapping[str, object],
    figures: Sequence[Figure] = (),
    tables: Sequence[Table] = (),
) -> None:
    """Write a self-contained HTML page: heading, settings, plots (as SVG) and tables.

    Args:
        path: file to write.
        title: heading.
        facts: settings by name.
        figures: plots.
        tables: tables.
    """
    # Texts are untrusted: HTML and control characters in them are escaped.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        facts={name: as_text(value) for name, value in facts.items()},
        figures=[(figure.caption, _data_uri(figure)) for figure in figures],
        tables=[(table, _alignments(table)) for table in tables],
    )
    with atomic_path(path) as part:
        part.write_text(page, encoding="utf-8")


def check_report_target(path: StrPath, remedy: str = "name another --out") -> None:
    """Raise if a page would replace a folder, or a file that is not a page of dualenc.

    Args:
        path: file to write.
        remedy: advice for the error.

    Raises:
        DualencError: if the path is taken, or lies in a folder that is replaced as a whole.
    """
    check_outside(path)
    check_file_target(path)
    if os.path.exists(path):
        # The style is at the beginning; the file may be large.
        with open_regular(path) as stream:
            beginning = stream.read(1 << 16)
        if beginning and STYLE not in beginning:
            raise DualencError(
                "already exists and is not a dualenc report", fix=remedy, where=os.fspath(path)
            )


def _alignments(table: Table) -> list[str]:
    """Return the CSS class of each column: numbers, numbers with intervals, or text."""
    classes = []
    for name, cells in zip(table.columns, zip(*table.cells())):
        has_letters = any(map(str.isalpha, "".join(cells)))
        other = "" if has_letters else "interval"
        classes.append("number" if table.is_numeric(name) else other)
    return classes


def _visible(value: object) -> object:
    """Escape control characters of a text; jinja's `Markup` and other values stay."""
    return printable(value) if type(value) is str else value


def _data_uri(figure: Figure) -> str:
    """Return a figure as a data URI."""
    content = base64.b64encode(as_svg(figure.plot).encode())
    return f"data:image/svg+xml;base64,{content.decode()}"
