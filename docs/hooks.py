"""Fill docs/commands.md when mkdocs builds the site: all commands with their arguments, as `--help` prints them."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from dualenc.arguments import build_app
from dualenc.cli import COMMANDS, Commands, load


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: the page of commands gets a section for each, others stay."""
    os.environ["COLUMNS"] = "100"
    return "\n\n".join([markdown, *sections(COMMANDS)]) if page.file.src_uri == "commands.md" else markdown


def sections(table: Commands, *words: str) -> list[str]:
    """A section for each command of a table and its sub-tables, in Markdown."""
    parts: list[str] = []
    for name, entry in table.items():
        if isinstance(entry, dict):
            parts += sections(entry, *words, name)
            continue
        prog = " ".join(["dualenc", *words, name])
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            build_app(load(*words, name), prog).help_print()
        parts.append(f"## {prog}\n\n```text\n{shown.getvalue()}```")
    return parts
