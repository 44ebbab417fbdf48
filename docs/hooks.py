"""Hooks of the mkdocs site: the help of all commands, the Markdown of each page, and redirects."""

from __future__ import annotations

import io
import os.path
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
