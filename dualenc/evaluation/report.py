"""One self-contained `report.html`: tables, plots and a gallery, readable offline in any browser."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dualenc.evaluation.plots import as_svg
from dualenc.evaluation.tables import Table, as_text, is_number
from dualenc.files import atomic_path
from dualenc.terminal import printable

if TYPE_CHECKING:
    import jinja2
    import matplotlib.figure
    from PIL import Image

_THUMBNAIL_PIXELS = 160
_SNIPPET_CHARACTERS = 400


class Figure(NamedTuple):
    """A plot with a caption that says what to see in it."""

    caption: str
    plot: matplotlib.figure.Figure


class Item(NamedTuple):
    """A query or a retrieved item in a gallery.

    Attributes:
        text: The text, a caption or a label; long texts are cut.
        image: The picture, shown as a thumbnail.
        note: A few words beside it, such as the id, the score or a metric.
        relevant: Whether it is a right answer; None where this has no meaning.
    """

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
) -> Path:
    """Write an HTML page that holds everything it shows: style, plots (SVG) and thumbnails (JPEG) are inside.

    Args:
        path: The file to write, replaced as a whole.
        title: Heading of the page.
        facts: What was evaluated on what, by name, shown under the heading.
        tables: Tables, in order.
        figures: Plots, in order.
        galleries: Groups of queries with their results, in order.

    Returns:
        The path of the page.
    """
    page = _template().render(
        title=title,
        facts={name: as_text(value) for name, value in (facts or {}).items()},
        tables=[(table, _alignments(table)) for table in tables],
        figures=[(figure.caption, _svg_uri(figure.plot)) for figure in figures],
        galleries=galleries,
    )
    with atomic_path(path) as beside:
        beside.write_text(page, encoding="utf-8")
    return Path(path)


def snippet(text: str, characters: int = _SNIPPET_CHARACTERS) -> str:
    """The beginning of a text in one line, cut at a word where it is too long."""
    line = " ".join(text.split())
    if len(line) <= characters:
        return line
    return line[:characters].rsplit(" ", 1)[0] + " …"


def thumbnail(image: Image.Image, pixels: int = _THUMBNAIL_PIXELS) -> str:
    """A data URI of the picture as JPEG, no side longer than `pixels`; tiny pictures are enlarged, not smoothed."""
    from PIL import Image

    scale = min(pixels / max(image.size), 4)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    stream = io.BytesIO()
    image.convert("RGB").resize(size, resample).save(stream, format="JPEG", quality=85)
    return _data_uri("image/jpeg", stream.getvalue())


def _alignments(table: Table) -> list[str]:
    return ["number" if any(is_number(row.get(name)) for row in table.rows) else "" for name in table.columns]


def _svg_uri(plot: matplotlib.figure.Figure) -> str:
    return _data_uri("image/svg+xml", as_svg(plot).encode())


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _template() -> jinja2.Template:
    import jinja2
    import markupsafe

    def shown(value: object) -> object:
        """Texts of strangers without control characters; what is HTML in them is escaped afterwards."""
        return printable(value) if isinstance(value, str) and not isinstance(value, markupsafe.Markup) else value

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=shown)
    environment.filters.update(snippet=snippet, thumbnail=thumbnail)
    return environment.from_string(_PAGE)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; margin: 0 auto; padding: 1.5rem;
         max-width: 72rem; }
  h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
  h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; color: #57606a; }
  dd { margin: 0; overflow-wrap: anywhere; }
  .scroll { overflow: auto; max-height: 32rem; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .3rem .8rem; border-bottom: 1px solid #d8dee4; text-align: left; }
  th { border-bottom: 2px solid #8c959f; }
  .number { text-align: right; white-space: nowrap; }
  figure { display: inline-block; margin: 0 1rem 1rem 0; max-width: 100%; vertical-align: top; }
  figure img { width: 34rem; max-width: 100%; display: block; }
  figcaption { color: #57606a; max-width: 34rem; }
  .entry { border: 1px solid #d8dee4; border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 1rem; }
  .query { font-weight: 600; }
  .results { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .5rem;
             margin: .5rem 0 0; padding: 0; list-style: none; }
  .results li { border-left: 4px solid #d8dee4; padding: 0 .6rem;
                font-size: .85rem; overflow-wrap: anywhere; }
  .results li.right { border-color: #009e73; background: #f0faf6; }
  .results li.wrong { border-color: #d55e00; }
  .note { color: #57606a; font-weight: 400; font-size: .85rem; }
</style>
</head>
<body>
{% macro show(item) %}
{% if item.image is not none %}<img src="{{ item.image | thumbnail }}" alt="{{ item.text | snippet(80) }}">
{% endif %}
<div class="note">{{ item.note }}{% if item.relevant %} ✓{% elif item.relevant is false %} ✗{% endif %}</div>
<div>{{ item.text | snippet }}</div>
{% endmacro %}
<h1>{{ title }}</h1>
<dl>
{% for name, value in facts.items() %}
  <dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% for table, alignments in tables %}
<h2>{{ table.caption }}</h2>
<div class="scroll"><table>
<thead>
<tr>{% for name in table.columns %}<th class="{{ alignments[loop.index0] }}">{{ name }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for cells in table.cells() %}
<tr>{% for cell in cells %}<td class="{{ alignments[loop.index0] }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% if figures %}
<h2>Plots</h2>
{% for caption, uri in figures %}
<figure><img src="{{ uri }}" alt="{{ caption }}"><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
{% endif %}
{% for gallery in galleries %}
<h2>{{ gallery.caption }}</h2>
{% for entry in gallery.entries %}
<div class="entry">
<div class="query">{{ show(entry.query) }}</div>
<ol class="results">
{% for item in entry.results %}
<li class="{{ 'right' if item.relevant else 'wrong' if item.relevant is false else '' }}">{{ show(item) }}</li>
{% endfor %}
</ol>
</div>
{% endfor %}
{% endfor %}
</body>
</html>
"""
