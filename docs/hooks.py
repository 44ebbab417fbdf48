"""What mkdocs calls for each page of the site: add the help of all commands, publish the
Markdown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from dualenc.cli import COMMANDS, build_app


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: the page of commands gets a section for each, others
    stay."""
    if page.file.src_uri != "commands.md":
        return markdown
    sections = [f"## dualenc {command}\n\n```text\n{help_text(command)}```" for command in COMMANDS]
    return "\n\n".join([markdown, *sections])


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Called by mkdocs for every finished page: publish its Markdown as well, which llms.txt links
    to."""
    target = Path(config["site_dir"], page.file.src_uri)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.markdown, encoding="utf-8")
    return output


def help_text(command: str, columns: int = 100) -> str:
    """What `dualenc COMMAND --help` prints on a terminal of so many columns."""
    printed = io.StringIO()
    build_app().help_print(command.split(), console=Console(file=printed, width=columns))
    return printed.getvalue()
