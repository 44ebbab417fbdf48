"""Print lines, and the results of evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.workflows.evaluation_folder import EvaluationResult


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
