"""`dualenc report`: one HTML page for training runs, side by side where there are several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualenc.errors import DualencError
from dualenc.terminal import printable, without_credentials

if TYPE_CHECKING:
    from dualenc.evaluation.query_scores import QueryScores
    from dualenc.evaluation.report import Table

MAX_VALUE = 1e100
Row = dict[str, object]


def report(run: str, *others: str, out: str | None = None) -> None:
    """Write one HTML page about a training run: curves, metrics before and after, best and worst queries, settings.

    Several runs are drawn over one another, with a table of the settings in which they differ. The page holds all it
    shows, and can be mailed.

    Args:
        run: folder of a run, with the metrics.jsonl that training wrote.
        others: more runs to compare it with.
        out: the file to write; by default report.html in RUN.
    """
    from dualenc.evaluation.plots import lines
    from dualenc.evaluation.report import Figure, Table, check_report_target, print_table, write_report

    target = Path(out or Path(run) / "report.html")
    check_report_target(target)
    folders = [run, *others]
    runs = [read_run(Path(folder)) for folder in folders]
    if len({each.name for each in runs}) < len(runs):
        runs = [each._replace(name=folder.rstrip("/")) for each, folder in zip(runs, folders)]
    tables = [
        Table("Metrics on held-out data", _ends(runs)),
        Table("Settings that differ", _differences(runs)),
    ]
    tables = [table for table in tables if table.rows]
    for table in tables:
        print_table(table)
    facts: Row = {each.name: f"{each.lines[-1]['step']:,} steps" for each in runs}
    # On the page only: with every default filled in they are too many lines for a terminal.
    if len(runs) == 1:
        facts |= runs[0].settings
    title = "Training" if len(runs) == 1 else "Trainings side by side"
    figures = []
    for name in _logged_names(runs):
        curves = {each.name: each.curve(name) for each in runs if each.curve(name)[0]}
        figures.append(Figure(name, lines(curves, xlabel="step")))
    write_report(target, title, facts=facts, figures=figures, tables=[*tables, *_queries(runs)])
    print(printable(f"report: {target}"))


class RunRecords(NamedTuple):
    """Lines of a run's metrics.jsonl, its recipe's settings by "section.key", and scores of single queries by step."""

    name: str
    lines: list[dict[str, Any]]
    settings: dict[str, object]
    scores: dict[int, QueryScores]

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps, and the logged values of a metric at them."""
        logged = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in logged], [line[name] for line in logged]


def read_run(folder: Path) -> RunRecords:
    """Read the folder of a run; garbage in its files is refused."""
    import yaml

    from dualenc.evaluation.query_scores import QueryScores
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
    recipe = folder / "recipe.yaml"
    try:
        settings = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.exists() else {}
        flat = _flat(settings if isinstance(settings, dict) else {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DualencError(f"{recipe}: cannot be read as YAML; restore it, or remove it") from error
    scores = {}
    for number, line in enumerate(read_metrics(folder / "evaluations.jsonl"), start=1):
        try:
            scores[int(line["step"])] = QueryScores.from_plain(line)
        except DualencError as error:
            raise DualencError(f"{folder / 'evaluations.jsonl'}:{number}: {error}") from error
    return RunRecords(folder.resolve().name, lines, flat, scores)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested sections as "section.key", as overrides name them: the class of a section as "section"."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if key == "class_path" and prefix and isinstance(value, str):
            flat[prefix.removesuffix(".")] = value.rsplit(".", 1)[-1]
        elif isinstance(value, dict):
            flat |= _flat(value, prefix if key == "init_args" else f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _as_setting(value)
    return flat


def _as_setting(value: object) -> str:
    """A setting as text; a URL without credentials."""
    if isinstance(value, list):
        return ", ".join(map(_as_setting, value))
    return "–" if value is None else without_credentials(str(value))


def _logged_names(runs: Sequence[RunRecords]) -> list[str]:
    """Names of everything that was logged, evaluations first."""
    logged = dict.fromkeys(name for each in runs for line in each.lines for name in line)
    names = []
    for name in logged:
        if name not in ("step", "epoch") and any(each.curve(name)[0] for each in runs):
            names.append(name)
    return sorted(names, key=lambda name: not name.startswith("evaluation/"))


def _ends(runs: Sequence[RunRecords]) -> list[Row]:
    """Each metric of each run before training, at its best and at the end."""
    rows: list[Row] = []
    for each in runs:
        for name in _logged_names([each]):
            if not name.startswith("evaluation/"):
                continue
            steps, values = each.curve(name)
            best = max(values)
            row = {
                "run": each.name,
                "metric": name.removeprefix("evaluation/"),
                "first": values[0],
                "best": best,
            }
            rows.append(row | {"at step": int(steps[values.index(best)]), "last": values[-1]})
    return rows


def _differences(runs: Sequence[RunRecords]) -> list[Row]:
    """The settings that are not the same in all runs."""
    rows: list[Row] = []
    for name in dict.fromkeys(name for each in runs for name in each.settings):
        values = {each.name: each.settings.get(name, "–") for each in runs}
        if len(set(values.values())) > 1:
            rows.append({"setting": name, **values})
    return rows


def _queries(runs: Sequence[RunRecords]) -> list[Table]:
    """For each run the best and worst queries at its last evaluation, with their scores before training."""
    from dualenc.evaluation.query_scores import SHOWN_QUERIES, best_and_worst_rows
    from dualenc.evaluation.report import Table

    tables = []
    for each in runs:
        if not each.scores:
            continue
        before = each.scores[min(each.scores)].scores
        after = each.scores[max(each.scores)]
        columns = {
            query: {"before": before.get(query), "text": after.texts.get(query, "")}
            for query in after.scores
        }
        rows = best_and_worst_rows(after.scores, after.metric, columns.__getitem__, SHOWN_QUERIES)
        tables.append(Table(f"{each.name}: best and worst queries after training", rows))
    return tables
