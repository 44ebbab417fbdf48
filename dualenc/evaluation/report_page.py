"""Tables on the terminal, and a self-contained `report.html`: settings, plots and tables, readable
offline."""

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
"""The template's first rule of style, by which a page is known."""


class Table(NamedTuple):
    """Rows of named values; the columns are those of all rows, in order of appearance."""

    caption: str
    rows: Sequence[Mapping[str, object]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[str]]:
        """The rows as text, one cell for each column; a missing value is empty."""
        return [[as_text(row.get(name, "")) for name in self.columns] for row in self.rows]

    def is_numeric(self, name: str) -> bool:
        """True if a column has numbers alone, which are set flush right."""
        values = [value for row in self.rows if (value := row.get(name, "")) not in ("", None)]
        return bool(values) and all(map(_is_number, values))


class Figure(NamedTuple):
    """A plot with a caption."""

    caption: str
    plot: matplotlib.figure.Figure


def as_text(value: object) -> str:
    """A value as text: four decimals for a fraction, thousands separated, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def print_table(table: Table) -> None:
    """Print a table that fits the terminal; control characters are escaped."""
    # A pipe or a log file has no width; rich would assume 80 columns.
    width = Console().width if sys.stdout.isatty() else None
    rows = [[printable(cell) for cell in row] for row in table.cells()]
    blocks = lay_out([printable(name) for name in table.columns], rows, width)
    console = Console(width=width or 1 << 16, markup=False, emoji=False, highlight=False)
    console.print(Text(printable(table.caption), style="bold", overflow="fold"))
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
    """Write a self-contained HTML page: heading, settings by name, plots (SVG inside) and tables,
    in this order."""
    # Untrusted texts are shown without control characters; HTML in them is escaped.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        facts={name: as_text(value) for name, value in facts.items()},
        figures=[(figure.caption, _data_uri(figure)) for figure in figures],
        tables=[
            (table, ["number" if table.is_numeric(name) else "" for name in table.columns])
            for table in tables
        ],
    )
    with atomic_path(path) as part:
        part.write_text(page, encoding="utf-8")


def check_report_target(path: StrPath, remedy: str = "name another --out") -> None:
    """Refuse to write a page over a folder, or over a file that is not a page of dualenc."""
    check_outside(path)
    check_file_target(path)
    if os.path.exists(path):
        with open_regular(path) as stream:
            beginning = stream.read(1 << 16)
        if beginning and STYLE not in beginning:
            problem = "exists and is not a report of dualenc"
            raise DualencError(f"{os.fspath(path)}: {problem}; {remedy}")


def _visible(value: object) -> object:
    return printable(value) if type(value) is str else value


def _data_uri(figure: Figure) -> str:
    content = base64.b64encode(as_svg(figure.plot).encode())
    return f"data:image/svg+xml;base64,{content.decode()}"
