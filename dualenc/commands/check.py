"""`dualenc check`: an alarm for stored vectors, for cron."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dualenc.commands.output import print_line

if TYPE_CHECKING:
    from dualenc.evaluation.report_page import Table
    from dualenc.workflows.check_vectors import CheckResult

WIDTH = 56
"""Characters of a finding on a line, beside its check and state."""


def check(
    folder: str,
    *,
    model: str | None = None,
    queries: str | None = None,
    data: str | None = None,
    json_file: Annotated[str | None, Parameter(name="--json")] = None,
    device: str | None = None,
) -> None:
    """Check an index, embeddings or a pushed collection; exit code 1 after an alarm.

    Stored texts, or the images that vectors are of, are embedded again and compared with the stored
    vectors: another prompt, pooling, length, preprocessing or other weights are named. Vectors,
    ids, texts, recall, drift of queries and unfinished migrations are checked, too. Nothing is
    written to FOLDER.

    Args:
        folder: an index, embeddings, or what `dualenc push` wrote.
        model: model folder or name; by default the recorded one.
        queries: table of recent queries (texts, images or vectors), to measure recall and drift
            with.
        data: where the images are now; by default the recorded place.
        json_file: file for the findings and their numbers.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    # Imported here: with torch at the top, `--help` would take seconds.
    from dualenc.evaluation.report_page import print_table
    from dualenc.io.files import check_file_target, write_json
    from dualenc.io.targets import check_outside
    from dualenc.workflows import check_vectors

    if json_file is not None:
        check_file_target(json_file)
        check_outside(json_file)
    result = check_vectors.check(folder, model=model, queries=queries, data=data, device=device)
    print_table(_wrapped(result))
    if json_file is not None:
        write_json(json_file, result.as_json())
        print_line(f"findings are in {json_file}")
    # In a log of both streams the alarm must come after the table.
    sys.stdout.flush()
    result.check()


def _wrapped(result: CheckResult) -> Table:
    """Return the findings as a table of 80 columns, also for a log file or a mail of cron."""
    from dualenc.evaluation.report_page import Table

    rows = []
    for finding in result.findings:
        first, *others = textwrap.wrap(finding.line, WIDTH, break_on_hyphens=False) or [""]
        rows.append({"check": finding.name, "state": finding.state, "finding": first})
        rows += [{"check": "", "state": "", "finding": line} for line in others]
    return Table(f"Check of {result.folder}", rows)
