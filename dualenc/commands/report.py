"""`dualenc report`: one HTML page with the curves of training runs."""

from __future__ import annotations

from dualenc.commands.output import print_line


def report(run: str, *others: str, out: str | None = None) -> None:
    """Write one HTML page about a training run: curves of the metrics and the loss, metrics before
    and after training.

    Several runs are drawn over one another. The page is self-contained, so it can be mailed. Curves
    need matplotlib: pip install 'dualenc[plots]'.

    Args:
        run: folder of a run, with the metrics.jsonl that training wrote.
        others: more runs to compare it with.
        out: file to write; by default report.html in RUN.
    """
    from dualenc.evaluation.report_page import print_table
    from dualenc.workflows import training_report

    written = training_report.report(run, *others, out=out)
    # The curves are for a browser; the terminal gets the numbers.
    for table in written.tables:
        print_table(table)
    print_line(f"report: {written.file}")
