"""Self-contained `report.html`: tables, plots and a gallery, readable offline in any browser."""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2
import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Scores
from dualenc.evaluation.plots import as_svg
from dualenc.evaluation.retrieval import Result
from dualenc.evaluation.runs import ranked
from dualenc.files import atomic_path, check_file_target
from dualenc.reading import open_regular
from dualenc.terminal import printable

if TYPE_CHECKING:
    import matplotlib.figure


TEMPLATE = Path(__file__).with_name("report.html.jinja")
STYLE = b"body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24;"
"""The template's first rule of style, by which a page is known."""
SHOWN_QUERIES = 5
SHOWN_RESULTS = 5


class Table(NamedTuple):
    """Rows of named values; the columns are those of all rows, in order of appearance."""

    caption: str
    rows: Sequence[Mapping[str, object]]

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[str]]:
        """The rows as text, one cell for each column; what a row lacks is empty."""
        return [[as_text(row.get(name, "")) for name in self.columns] for row in self.rows]

    def is_numeric(self, name: str) -> bool:
        """Whether a column holds a number, and is set flush right."""
        values = [row.get(name) for row in self.rows]
        return any(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def as_text(value: object) -> str:
    """A value as text: four decimals for a fraction, thousands separated, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def print_table(table: Table) -> None:
    """Print a table to the terminal, control characters escaped.

    In a narrow terminal names and headings are folded, never numbers.
    """
    drawn = RichTable(title=printable(table.caption), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    drawn.pad_edge = False
    drawn.collapse_padding = True
    cells = [[printable(cell) for cell in row] for row in table.cells()]
    for name, values in zip(table.columns, zip(*cells)):
        drawn.add_column(printable(name), overflow="fold")
        if table.is_numeric(name):
            drawn.columns[-1].justify = "right"
            drawn.columns[-1].min_width = max(map(len, values))
    for row in cells:
        drawn.add_row(*row)
    # A pipe or a log file has no width of its own; rich would assume 80 columns.
    width = None if sys.stdout.isatty() else 1000
    Console(width=width, markup=False, emoji=False, highlight=False).print(drawn)


class Figure(NamedTuple):
    """A plot with a caption."""

    caption: str
    plot: matplotlib.figure.Figure


class Item(NamedTuple):
    """A query or a retrieved item in a gallery, with a note such as its score, and whether it is a right answer."""

    text: str = ""
    image: Image.Image | None = None
    note: str = ""
    relevant: bool | None = None


class Entry(NamedTuple):
    """A query and what was retrieved for it, best first."""

    query: Item
    results: Sequence[Item]


class Gallery(NamedTuple):
    """Queries worth looking at, such as the best and the worst."""

    caption: str
    entries: Sequence[Entry]


def write_report(
    path: str | os.PathLike[str],
    title: str,
    *,
    facts: Mapping[str, object] | None = None,
    tables: Sequence[Table] = (),
    figures: Sequence[Figure] = (),
    galleries: Sequence[Gallery] = (),
    figures_first: bool = False,
) -> Path:
    """Write a self-contained HTML page: style, plots (SVG) and thumbnails (JPEG) are inside.

    Args:
        path: The file to write, replaced as a whole.
        title: Heading of the page.
        facts: What was evaluated on what, by name, shown under the heading.
        tables, figures, galleries: Shown in this order.
        figures_first: Plots above the tables.
    """
    # Untrusted texts are shown without control characters; HTML in them is escaped.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_visible)
    environment.filters.update(snippet=snippet, thumbnail=thumbnail)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        facts={name: as_text(value) for name, value in (facts or {}).items()},
        tables=[(table, ["number" if table.is_numeric(name) else "" for name in table.columns]) for table in tables],
        figures=[(figure.caption, _data_uri("image/svg+xml", as_svg(figure.plot).encode())) for figure in figures],
        galleries=galleries,
        figures_first=figures_first,
    )
    with atomic_path(path) as part:
        part.write_text(page, encoding="utf-8")
    return Path(path)


def check_report_target(path: str | os.PathLike[str]) -> None:
    """Refuse to write a page over a folder, or a file that is no page of dualenc."""
    check_file_target(path)
    if os.path.exists(path):
        with open_regular(path) as stream:
            beginning = stream.read(1 << 16)
        if beginning and STYLE not in beginning:
            raise DualencError(f"{os.fspath(path)}: exists and is no report of dualenc; name another --out")


def snippet(text: str, characters: int = 400) -> str:
    """The beginning of a text in one line, cut at a word where it is too long."""
    line = " ".join(text.split())
    if len(line) <= characters:
        return line
    return line[:characters].rsplit(" ", 1)[0] + " …"


def thumbnail(image: Image.Image, pixels: int = 160) -> str:
    """A data URI of the picture as JPEG, no side longer than `pixels`; tiny pictures are enlarged, not smoothed."""
    scale = min(pixels / max(image.size), 4)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # Tiny pictures, such as CIFAR's, show their pixels.
    resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    stream = io.BytesIO()
    image.convert("RGB").resize(size, resample).save(stream, format="JPEG", quality=85)
    return _data_uri("image/jpeg", stream.getvalue())


def _visible(value: object) -> object:
    return printable(value) if type(value) is str else value


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


ShowItem = Callable[[int], Item]


def retrieval_galleries(
    result: Result,
    show_query: Callable[[str], str],
    show_document: Callable[[str], str],
) -> list[Gallery]:
    """The best and the worst queries by nDCG@10, with the documents found and the first relevant one that was missed.

    `show_query` and `show_document` give the texts by id.
    """
    metric = "ndcg@10"

    def entry(query: str) -> Entry:
        found = result.run.get(query, {})
        grades = result.qrels[query]
        rank_of = {document: rank for rank, document in enumerate(ranked(found), start=1)}
        items = [
            Item(show_document(name), note=f"{rank}. {name} · {found[name]:.3f}", relevant=grades.get(name, 0) > 0)
            for name, rank in islice(rank_of.items(), SHOWN_RESULTS)
        ]
        # The first relevant document is shown even where it was ranked far below.
        relevant = [name for name, grade in grades.items() if grade > 0]
        first = min(relevant, key=lambda name: rank_of.get(name, len(rank_of) + 1), default=None)
        if first is not None and rank_of.get(first, SHOWN_RESULTS + 1) > SHOWN_RESULTS:
            position = f"rank {rank_of[first]}" if first in rank_of else f"not in the first {len(rank_of)}"
            items.append(Item(show_document(first), note=f"relevant, missed: {first} · {position}", relevant=True))
        score = result.per_query[query][metric]
        return Entry(Item(show_query(query), note=f"query {query} · {metric} {score:.3f}"), items)

    best, worst = best_and_worst(result.per_query, metric, SHOWN_QUERIES)
    source = f"{result.dataset}, {result.system}, by {metric}"
    return [
        Gallery(f"Best queries ({source})", [entry(query) for query in best]),
        Gallery(f"Worst queries ({source})", [entry(query) for query in worst]),
    ]


def best_and_worst(per_query: Mapping[str, Scores], metric: str, count: int) -> tuple[list[str], list[str]]:
    """Ids of the `count` queries of highest and of lowest score, no query twice; equals in their given order."""
    order = sorted(per_query, key=lambda query: -per_query[query][metric])
    count = min(count, (len(order) + 1) // 2)
    lowest = sorted(per_query, key=lambda query: per_query[query][metric])
    best = order[:count]
    return best, list(islice((query for query in lowest if query not in best), count))


def rank_galleries(
    what: str,
    ranks: npt.NDArray[np.int64],
    queries: npt.NDArray[np.floating],
    candidates: npt.NDArray[np.floating],
    positives: Sequence[Sequence[int]],
    show_query: ShowItem,
    show_candidate: ShowItem,
) -> list[Gallery]:
    """The best and the worst queries of a rank evaluation, such as image to text, with the nearest candidates.

    Args:
        what: Names the direction in the captions.
        ranks: (A,) rank of each query's best right answer.
        queries, candidates: (A, D) and (N, D) embeddings.
        positives: For each query the columns that are right.
        show_query, show_candidate: What to show for a row, and for a column.
    """
    scores = {str(row): {"rank": -float(rank)} for row, rank in enumerate(ranks)}
    best, worst = best_and_worst(scores, "rank", SHOWN_QUERIES)

    def entry(row: int) -> Entry:
        similarity = candidates @ queries[row]
        nearest = np.argsort(-similarity, kind="stable")[:SHOWN_RESULTS].tolist()
        right = set(positives[row])
        items = [
            show_candidate(column)._replace(note=f"{similarity[column]:.3f}", relevant=column in right)
            for column in nearest
        ]
        return Entry(show_query(row)._replace(note=f"right answer at rank {ranks[row]}"), items)

    parts = {"best": best, "worst": worst}
    return [Gallery(f"{what}: {kind}", [entry(int(row)) for row in rows]) for kind, rows in parts.items()]
