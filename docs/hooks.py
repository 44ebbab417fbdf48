"""Fill docs/commands.md when mkdocs builds the site: all commands with their arguments, as `--help` prints them."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

from dualenc.cli import COMMANDS, build_app


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: the page of commands gets a section for each, others stay."""
    os.environ["COLUMNS"] = "100"
    return "\n\n".join([markdown, *sections()]) if page.file.src_uri == "commands.md" else markdown


def sections() -> list[str]:
    """A section for each command, in Markdown."""
    app = build_app()
    parts: list[str] = []
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            app.help_print(command.split())
        parts.append(f"## dualenc {command}\n\n```text\n{shown.getvalue()}```")
    return parts
