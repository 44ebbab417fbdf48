"""Write one HTML page with the curves of training runs, side by side if there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from dualenc.errors import DualencError
from dualenc.evaluation.plots import lines
from dualenc.evaluation.report_page import Figure, Table, check_report_target, write_report
from dualenc.training.log import read_metrics
from dualenc.types import StrPath

LOG = "metrics.jsonl"
MAX_VALUE = 1e100
EVALUATION = "evaluation/"
Row = dict[str, object]


@dataclass(frozen=True)
class TrainingReport:
    """A written page, and its table.

        page = report("runs/first", "runs/second").file

    Attributes:
        file: the HTML page.
        tables: metrics of each run before training, at their best and at the end; empty without
            metrics.
    """

    file: Path
    tables: Sequence[Table]


def report(run: StrPath, *others: StrPath, out: StrPath | None = None) -> TrainingReport:
    """Write one HTML page about training runs: curves and metrics before and after training.

    Several runs are drawn over one another. The page is self-contained. Curves need matplotlib:
    pip install 'dualenc[plots]'. Same as `dualenc report`.

        dualenc.report("runs/first", "runs/second", out="compare.html")

    Args:
        run: folder of a run, with the metrics.jsonl that training wrote.
        others: more runs to compare it with.
        out: file to write; by default report.html in `run`.

    Returns:
        The written page and its table of metrics.

    Raises:
        DualencError: if a folder is not a run, or matplotlib is not installed.
    """
    # Before the target, which is refused inside the parts of a run.
    if not (Path(run) / LOG).is_file():
        raise _no_run(Path(run))
    target = Path(out or Path(run) / "report.html")
    # Before the logs are read, which may be large.
    check_report_target(target)
    folders = [str(folder) for folder in (run, *others)]
    runs = [read_run(Path(folder)) for folder in folders]
    if len({each.name for each in runs}) < len(runs):
        # Folders with equal names are shown by their paths.
        runs = [each._replace(name=folder.rstrip("/")) for each, folder in zip(runs, folders)]
    ends = [row for each in runs for row in _ends(each)]
    # A run without an evaluator has curves of the loss only.
    tables = [Table("Metrics on held-out data", ends)] if ends else []
    figures = []
    for name in _drawn_names(runs):
        # A run without this metric would draw an empty line, and stand in the legend.
        curves = {each.name: curve for each in runs if (curve := each.curve(name))[0]}
        figures.append(Figure(name, lines(curves, xlabel="step", ylabel=name)))
    facts = {each.name: f"{each.lines[-1]['step']:,} steps" for each in runs}
    title = "Training" if len(runs) == 1 else "Trainings side by side"
    write_report(target, title, facts=facts, figures=figures, tables=tables)
    return TrainingReport(target, tables)


class RunRecords(NamedTuple):
    """Name and lines of a run's metrics.jsonl."""

    name: str
    lines: list[dict[str, Any]]

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return steps, and the values of a metric logged at them."""
        logged = [line for line in self.lines if line.get(name) is not None]
        steps = [line["step"] for line in logged]
        values = [line[name] for line in logged]
        return steps, values


def read_run(folder: Path) -> RunRecords:
    """Read metrics.jsonl of a run's folder.

    Raises:
        DualencError: if there is none, or it holds values that cannot be drawn.
    """
    log = folder / LOG
    logged = read_metrics(log)
    if not logged:
        raise _no_run(folder)
    for number, line in enumerate(logged, start=1):
        for name, value in line.items():
            if value is not None and not _is_drawable(value):
                raise DualencError(
                    f"{name!r} is not a number that can be drawn",
                    fix="restore the file",
                    where=f"{log}:{number}",
                )
    return RunRecords(folder.resolve().name, logged)


def _no_run(folder: Path) -> DualencError:
    """Return the error for a folder without a log; it points to the run that the folder is in."""
    is_part = (folder.parent / LOG).is_file()
    fix = f"name the run: {folder.parent}" if is_part else "name the trainer.output of a run"
    return DualencError("no metrics.jsonl with metrics in it", fix=fix, where=folder)


def _is_drawable(value: object) -> bool:
    """Return True for a finite number that matplotlib can scale."""
    # `type` and not `isinstance`: True is not a measurement.
    return type(value) in (int, float) and abs(value) < MAX_VALUE  # type: ignore[arg-type]


def _drawn_names(runs: Sequence[RunRecords]) -> list[str]:
    """Return the names of the logged metrics, of the loss and of its estimate, in this order."""
    # A dict keeps the order in which names were first logged.
    logged: dict[str, None] = {}
    for each in runs:
        for line in each.lines:
            logged |= dict.fromkeys(line)
    names = [name for name in logged if name.startswith(EVALUATION)]
    names += ["loss", "batch_estimate"]
    return [name for name in names if any(each.curve(name)[0] for each in runs)]


def _ends(run: RunRecords) -> list[Row]:
    """Return each metric of a run before training, at its best after training, and at the end."""
    rows: list[Row] = []
    for name in _drawn_names([run]):
        if not name.startswith(EVALUATION):
            continue
        steps, values = run.curve(name)
        points = list(zip(steps, values))
        # Step 0 is the untrained model; a run that stopped there has no other point.
        trained = [point for point in points if point[0] > 0]
        step, best = max(trained or points, key=itemgetter(1))
        rows.append(
            {
                "run": run.name,
                "metric": name.removeprefix(EVALUATION),
                "first": values[0],
                "best": best,
                "at step": int(step),
                "last": values[-1],
            }
        )
    return rows
