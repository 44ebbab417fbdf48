"""`dualenc report`: one HTML page with the curves of training runs, side by side where there are
several."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from dualenc.errors import DualencError
from dualenc.io.terminal import printable

MAX_VALUE = 1e100
EVALUATION = "evaluation/"
Row = dict[str, object]


def report(run: str, *others: str, out: str | None = None) -> None:
    """Write one HTML page about a training run: curves of the metrics and the loss, metrics before
    and after training.

    Several runs are drawn over one another. The page holds all it shows, and can be mailed.
    Curves need matplotlib: pip install 'dualenc[plots]'.

    Args:
        run: folder of a run, with the metrics.jsonl that training wrote.
        others: more runs to compare it with.
        out: the file to write; by default report.html in RUN.
    """
    from dualenc.evaluation.plots import lines
    from dualenc.evaluation.report_page import (
        Figure,
        Table,
        check_report_target,
        print_table,
        write_report,
    )

    target = Path(out or Path(run) / "report.html")
    check_report_target(target)
    folders = [run, *others]
    runs = [read_run(Path(folder)) for folder in folders]
    if len({each.name for each in runs}) < len(runs):
        runs = [each._replace(name=folder.rstrip("/")) for each, folder in zip(runs, folders)]
    ends = [row for each in runs for row in _ends(each)]
    tables = [Table("Metrics on held-out data", ends)] if ends else []
    figures = []
    for name in _drawn_names(runs):
        curves = {each.name: each.curve(name) for each in runs if each.curve(name)[0]}
        figures.append(Figure(name, lines(curves, xlabel="step")))
    for table in tables:
        print_table(table)
    facts = {each.name: f"{each.lines[-1]['step']:,} steps" for each in runs}
    title = "Training" if len(runs) == 1 else "Trainings side by side"
    write_report(target, title, facts=facts, figures=figures, tables=tables)
    print(printable(f"report: {target}"))


class RunRecords(NamedTuple):
    """Lines of a run's metrics.jsonl."""

    name: str
    lines: list[dict[str, Any]]

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps, and the logged values of a metric at them."""
        logged = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in logged], [line[name] for line in logged]


def read_run(folder: Path) -> RunRecords:
    """Read the folder of a run; garbage in its files is refused."""
    from dualenc.training.log import read_metrics

    log = folder / "metrics.jsonl"
    lines = read_metrics(log)
    if not lines:
        raise DualencError(
            f"{folder}: no metrics.jsonl with metrics in it; name the trainer.output of a run"
        )
    for number, line in enumerate(lines, start=1):
        for name, value in line.items():
            if value is not None and not (type(value) in (int, float) and abs(value) < MAX_VALUE):
                raise DualencError(
                    f"{log}:{number}: {name!r} is no number that can be drawn; restore the file"
                )
    return RunRecords(folder.resolve().name, lines)


def _drawn_names(runs: Sequence[RunRecords]) -> list[str]:
    """Names of the logged metrics, of the loss and of its estimate by the batch, in this order."""
    logged = dict.fromkeys(name for each in runs for line in each.lines for name in line)
    names = [name for name in logged if name.startswith(EVALUATION)] + ["loss", "batch_estimate"]
    return [name for name in names if any(each.curve(name)[0] for each in runs)]


def _ends(run: RunRecords) -> list[Row]:
    """Each metric of a run before training, at the best of the trained weights and at the end."""
    rows: list[Row] = []
    for name in _drawn_names([run]):
        if name.startswith(EVALUATION):
            steps, values = run.curve(name)
            row: Row = {
                "run": run.name,
                "metric": name.removeprefix(EVALUATION),
                "first": values[0],
            }
            points = list(zip(steps, values))
            trained = [point for point in points if point[0] > 0]
            step, best = max(trained or points, key=itemgetter(1))
            rows.append(row | {"best": best, "at step": int(step), "last": values[-1]})
    return rows
