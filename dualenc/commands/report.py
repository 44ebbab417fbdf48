"""`dualenc report`: one HTML page for training runs, side by side where there are several."""

from __future__ import annotations

from pathlib import Path

from dualenc.terminal import printable


def report(run: str, *others: str, out: str | None = None) -> None:
    """Write one HTML page about a training run: curves, similarities, best and worst queries, and its settings.

    Curves are of metrics, loss, learning rate, speed and the objective's memory. Histograms show the similarities of
    held-out pairs from evaluation to evaluation, and tables the metrics, the settings, and the queries that were best
    and worst before and after.

    Several runs are drawn over one another, with a table of the settings in which they differ. The page holds all it
    shows, and can be mailed.

    Args:
        run: folder of a run, with the metrics.jsonl that training wrote.
        others: more runs to compare it with.
        out: the file to write; by default report.html in RUN.
    """
    from dualenc.evaluation.report import check_report_target
    from dualenc.evaluation.run_report import write_run_report

    target = Path(out or Path(run) / "report.html")
    check_report_target(target)
    write_run_report(target, [run, *others])
    print(printable(f"report: {target}"))
