"""Print lines, and the results of evaluations."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.workflows.evaluation_folder import EvaluationResult

QUERY = '"…"'
"""Stands for a text that the user will search for."""


def print_evaluation(
    result: EvaluationResult,
    *,
    num_tables: int | None = None,
    files: str = "metrics and report.html",
) -> None:
    """Print an evaluation on the main process.

    Args:
        result: what was measured.
        num_tables: number of tables to print; by default all. The page has the others.
        files: names of the written files.
    """
    # Heavy libraries are imported when a command runs, so that its help appears at once.
    from dualenc import distributed
    from dualenc.evaluation.report_page import print_table

    # All processes return the same result.
    if not distributed.is_main():
        return
    for table in result.tables[:num_tables]:
        print_table(table)
    print_line(f"{files} are in {result.folder}")


def print_line(text: str) -> None:
    """Print a line with control characters escaped."""
    # Names of files, columns and models come from strangers, and could steer a terminal.
    print(printable(text))


def print_next(words: Iterable[str], query: str | None = None) -> None:
    """Print a command to run next; a terminal gets it in lines that fit and can be pasted.

    Args:
        words: words after `dualenc`.
        query: stands at the end for what the user will search for, and is not quoted.
    """
    quoted = [printable(shlex.quote(word)) for word in words] + ([query] if query else [])
    # Lines end neither within a word in quotes nor between an option and its value.
    command = " ".join(word.replace(" ", "\0") for word in quoted)
    command = re.sub(r" (--[\w-]+) (?!-)", " \\1\0", command)
    # A log keeps the command in one line, which grep finds.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = textwrap.wrap(
        f"next:  dualenc {command}",
        max(width, 40) - len(" \\"),
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(" \\\n".join(lines).replace("\0", " "))
