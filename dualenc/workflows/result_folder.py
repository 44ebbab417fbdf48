"""The folder of a task with metrics.json and report.html: checked before the work, then written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dualenc.evaluation.report_page import Figure, Table, check_report_target, write_report
from dualenc.io.files import check_file_target, check_folder_target, check_writable, write_json
from dualenc.io.reading import read_json_object
from dualenc.io.targets import check_outside

RESULT = "metrics.json"
PAGE = "report.html"


def check_result_folder(
    folder: Path, task: str, what: str, is_unfinished: Callable[[Path], bool]
) -> None:
    """Raise if a task cannot write its results to a folder.

    Args:
        folder: path of the folder, which need not exist.
        task: name of the task in metrics.json.
        what: description of such a folder, for the error.
        is_unfinished: function that returns True for a folder that an interrupted run left.
    """

    def is_own(found: Path) -> bool:
        if (found / RESULT).is_file():
            return read_json_object(found / RESULT).get("task") == task
        return is_unfinished(found)

    check_outside(folder)
    check_writable(folder)
    check_folder_target(folder, is_own, what)
    check_file_target(folder / RESULT)
    check_report_target(folder / PAGE)


def write_results(
    folder: Path,
    title: str,
    task: str,
    facts: Mapping[str, object],
    metrics: Mapping[str, object],
    tables: Sequence[Table],
    figures: Sequence[Figure] = (),
) -> None:
    """Write metrics.json and report.html.

    Args:
        folder: folder that `check_result_folder` has passed.
        title: heading of the page.
        task: name of the task.
        facts: settings by name, for both files.
        metrics: measured values by name, for metrics.json.
        tables: tables of the page.
        figures: plots of the page.
    """
    # The page comes last: without metrics.json, the next run would not know the folder as its own.
    write_json(folder / RESULT, {"task": task, **facts, **metrics})
    write_report(folder / PAGE, title, facts=facts, figures=figures, tables=tables)
