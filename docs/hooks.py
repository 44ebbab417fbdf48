"""Fill docs/commands.md when mkdocs builds the site: all commands with their arguments, as `--help` prints them."""

from __future__ import annotations

import os
from typing import Any

from dualenc.arguments import build_parser
from dualenc.cli import COMMANDS, Command, Commands, _load


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: the page of commands gets a section for each, others stay."""
    os.environ["COLUMNS"] = "100"
    return "\n\n".join([markdown, *sections(COMMANDS)]) if page.file.src_uri == "commands.md" else markdown


def sections(table: Commands, prog: str = "dualenc") -> list[str]:
    """A section for each command of a table and its sub-tables, in Markdown."""
    parts: list[str] = []
    for name, entry in table.items():
        if isinstance(entry, Command):
            help_text = build_parser(_load(entry), f"{prog} {name}").format_help()
            parts.append(f"## {prog} {name}\n\n```text\n{help_text}```")
        else:
            parts += sections(entry, f"{prog} {name}")
    return parts
