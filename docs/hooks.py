"""Hooks of the mkdocs site: the help of all commands, where lines and table cells may break, the
Markdown of each page, and redirects."""

from __future__ import annotations

import io
import os.path
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from dualenc.cli import COMMANDS, build_app

REDIRECTS = {
    "adapt-or-migrate": "adapt",
    "choosing": "which-objective",
    "growing": "scaling-up",
    "index-stays-valid": "adapt",
}
"""Addresses of pages that were renamed, each with the page's present name."""

CODE = re.compile(r"(?<!<pre>)(<code>)([^<]*)(?=</code>)")
HYPHENATED = re.compile(r"[^\s-]*-[^\s]*")
MAX_UNBROKEN = 24
"""Characters of a name that fit into a column on a telephone."""
CELL = re.compile(r"<td>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
MIN_LONG = 60
"""Characters of a table cell from which on it needs a wide column."""

REDIRECT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{target}">
<meta http-equiv="refresh" content="0; url={target}">
</head>
<body>This page has moved to <a href="{target}">{target}</a>.</body>
</html>
"""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add a section for each command to the page of commands; return other pages unchanged."""
    if page.file.src_uri != "commands.md":
        return markdown
    sections = [f"## dualenc {command}\n\n```text\n{help_text(command)}```" for command in COMMANDS]
    return "\n\n".join([markdown, *sections])


def on_page_content(html: str, **_: Any) -> str:
    """Keep options such as `--top-k` on one line, and mark table cells with long text."""
    html = CODE.sub(lambda match: match[1] + HYPHENATED.sub(_unbroken, match[2]), html)
    return CELL.sub(_cell, html)


def _unbroken(name: re.Match[str]) -> str:
    """Return a name with hyphens, at which a browser would break the line, as HTML."""
    if len(name[0]) > MAX_UNBROKEN:
        return name[0]
    return f'<span class="unbroken">{name[0]}</span>'


def _cell(cell: re.Match[str]) -> str:
    """Return a table cell, with the class `long` if its text is; ± stays with its number."""
    content = cell[1].replace("± ", "±&nbsp;")
    is_long = len(TAG.sub("", content)) >= MIN_LONG
    return f'<td class="long">{content}</td>' if is_long else f"<td>{content}</td>"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Publish the Markdown of a finished page, which llms.txt links to."""
    target = Path(config["site_dir"], page.file.src_uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.markdown, encoding="utf-8")
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Write a page that redirects for each old address."""
    for old, new in REDIRECTS.items():
        target = f"{new}/" if config["use_directory_urls"] else f"{new}.html"
        page = Path(old, "index.html") if config["use_directory_urls"] else Path(f"{old}.html")
        file = Path(config["site_dir"], page)
        file.parent.mkdir(parents=True, exist_ok=True)
        # A relative link works at any address of the site, and offline.
        link = os.path.relpath(target, page.parent) + target[len(target.rstrip("/")) :]
        file.write_text(REDIRECT.format(target=link), encoding="utf-8")


def help_text(command: str, columns: int = 100) -> str:
    """Return what `dualenc COMMAND --help` prints on a terminal of that many columns."""
    printed = io.StringIO()
    build_app().help_print(command.split(), console=Console(file=printed, width=columns))
    return printed.getvalue()
