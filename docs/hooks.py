"""Fill docs/commands.md when mkdocs builds the site: all commands with their arguments, as `--help` prints them."""

from __future__ import annotations

import re
from typing import Any

from dualenc.arguments import help_of
from dualenc.cli import COMMANDS, Command, Commands, _load


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: the page of commands gets a section for each, others stay."""
    return "\n\n".join([markdown, *sections(COMMANDS)]) if page.file.src_uri == "commands.md" else markdown


def sections(table: Commands, prog: str = "dualenc") -> list[str]:
    """A section for each command of a table and its sub-tables, in Markdown."""
    parts: list[str] = []
    for name, entry in table.items():
        parts += [section(entry, f"{prog} {name}")] if isinstance(entry, Command) else sections(entry, f"{prog} {name}")
    return parts


def section(command: Command, prog: str) -> str:
    """One command: its usage, what it does, and a table of its arguments."""
    usage, description, arguments = help_of(_load(command), prog)
    rows = [f"| `` {name.replace('|', chr(92) + '|')} `` | {_cell(meaning)} |" for name, meaning in arguments]
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    return f"## {prog}\n\n```bash\n{usage}\n```\n\n{_text(description)}\n\n{table}"


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


def _text(text: str) -> str:
    """Plain text as Markdown: nothing outside backquotes is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]{}#])", r"\\\1", part) for part in parts)
