"""`dualenc report`: one HTML page for training runs, side by side where there are several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualenc.errors import DualencError
from dualenc.files import check_file_target
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.evaluation.observed import Observed
    from dualenc.evaluation.report import Figure, Table

CAPTIONS = {
    "loss": "the objective's estimate of the loss",
    "batch_estimate": "the loss over the batch alone, comparable between objectives",
    "accuracy": "share of anchors whose positive is the nearest in the batch",
    "positive_similarity": "mean cosine of pairs",
    "temperature": "τ",
    "gradient_norm": "norm of the gradient, before clipping",
    "learning_rate": "learning rate",
    "samples_per_second": "pairs per second",
    "state/chains_moved": "share of chains that left their item in a step",
    "state/chains_begun": "share of chains that began anew in a step",
    "state/log_mean_exp": "log of the mean of exp(s/τ) over all negatives, as remembered; mean over anchors",
    "state/log_mean_exp_spread": "its standard deviation between anchors",
    "state/log_partition": "log of the sum of exp(s/τ) over all negatives; mean over anchors",
    "state/log_partition_spread": "its standard deviation between anchors",
    "state/log_scale": "log of the kernel's scale 1/s; mean over anchors",
    "state/log_scale_spread": "its standard deviation between anchors",
    "state/own_temperature": "the anchors' own temperatures; their mean",
    "state/own_temperature_spread": "their standard deviation",
    "state/effective_items": "over how many items the draws of negatives are spread, 1/Σ q²",
    "state/remembered": "share of the corpus that has a remembered embedding",
}
MAX_RIDGES = 8
MAX_VALUE = 1e100


class RunFolder(NamedTuple):
    """The records of a run.

    Attributes:
        name: of the folder.
        lines: of its metrics.jsonl.
        settings: of its recipe.yaml, flat, "section.key"; empty for a run from Python.
        observed: similarities and scores of queries from its evaluations, by step in order.
    """

    name: str
    lines: list[dict[str, Any]]
    settings: dict[str, object]
    observed: dict[int, Observed]

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps, and the logged values of a metric at them."""
        points = [(line["step"], line[name]) for line in self.lines if line.get(name) is not None]
        steps, values = zip(*points) if points else ((), ())
        return list(steps), list(values)


def report(run: str, *others: str, out: str | None = None) -> None:
    """Write one HTML page about a training run: curves, similarities, best and worst queries, and its settings.

    Curves are of loss, metrics, learning rate, speed and the objective's memory. Histograms show the similarities of
    held-out pairs from evaluation to evaluation, and tables the queries that were best and worst before and after.

    Several runs are drawn over one another, with a table of the settings in which they differ. The page holds all it
    shows, and can be mailed.

    Args:
        run: folder of a run, with the metrics.jsonl that training wrote.
        others: more runs to compare it with.
        out: the file to write; by default report.html in RUN.
    """
    from dualenc.evaluation.report import print_table, write_report

    target = Path(out) if out is not None else Path(run) / "report.html"
    check_file_target(target)
    folders = (run, *others)
    runs = [read_run(Path(folder)) for folder in folders]
    if len({record.name for record in runs}) < len(runs):
        runs = [record._replace(name=folder.rstrip("/")) for record, folder in zip(runs, folders, strict=True)]
    tables = [table for table in (ends(runs), ends_of_sources(runs), differences(runs)) if table.rows]
    facts = {record.name: f"{record.lines[-1]['step']:,} steps" for record in runs}
    for table in tables:
        print_table(table)
    title = "Training" if len(runs) == 1 else "Trainings side by side"
    figures = [*curves(runs), *similarities(runs)]
    page = write_report(target, title, facts=facts, tables=[*tables, *queries(runs)], figures=figures)
    print(printable(f"report: {page}"))


def read_run(folder: Path) -> RunFolder:
    """Read the folder of a run.

    Raises:
        DualencError: it holds no metrics, a recipe that is no YAML, garbage, or records of evaluations that are none.
    """
    import yaml

    from dualenc.evaluation.observed import Observed
    from dualenc.training.log import read_metrics

    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        raise DualencError(f"{folder}: no metrics.jsonl with metrics in it; name the trainer.output of a run")
    for number, line in enumerate(lines, start=1):
        for name, value in line.items():
            if value is not None and not (type(value) in (int, float) and abs(value) < MAX_VALUE):
                problem = f"{name!r} is no number that can be drawn"
                raise DualencError(
                    f"{folder / 'metrics.jsonl'}:{number}: {problem}; restore the file, or remove the line"
                )
    recipe = folder / "recipe.yaml"
    try:
        settings = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.exists() else {}
        flat = _flat(settings if isinstance(settings, dict) else {})
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DualencError(f"{recipe}: cannot be read as YAML; restore it, or remove it") from error
    observed = {}
    for number, line in enumerate(read_metrics(folder / "evaluations.jsonl"), start=1):
        try:
            observed[int(line["step"])] = Observed.from_plain(line)
        except (DualencError, KeyError, TypeError, ValueError) as error:
            raise DualencError(f"{folder / 'evaluations.jsonl'}:{number}: {error}") from error
    return RunFolder(folder.resolve().name, lines, flat, observed)


def ends(runs: list[RunFolder]) -> Table:
    """What was evaluated: untrained, best and last, per run and metric."""
    from dualenc.evaluation.report import Table

    rows: list[dict[str, object]] = []
    for run in runs:
        for name in _names([run], evaluated=True):
            steps, values = run.curve(name)
            best = max(values)
            found = {"run": run.name, "metric": name.removeprefix("evaluation/"), "first": values[0], "best": best}
            rows.append({**found, "at step": int(steps[values.index(best)]), "last": values[-1]})
    return Table("Metrics on held-out data", rows)


def ends_of_sources(runs: list[RunFolder]) -> Table:
    """Of mixtures: the loss of each source, first and last, per run."""
    from dualenc.evaluation.report import Table

    rows: list[dict[str, object]] = []
    for run in runs:
        for name in _names([run], evaluated=False):
            if source := _source(name):
                _, values = run.curve(name)
                rows.append({"run": run.name, "source": source, "first": values[0], "last": values[-1]})
    return Table("Loss by source", rows)


def differences(runs: list[RunFolder]) -> Table:
    """Settings that are not the same in all runs."""
    from dualenc.evaluation.report import Table

    names = dict.fromkeys(name for run in runs for name in run.settings)
    differ = [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1]
    rows = [{"setting": name, **{run.name: str(run.settings.get(name, "–")) for run in runs}} for name in differ]
    return Table("Settings that differ", rows)


def curves(runs: list[RunFolder]) -> list[Figure]:
    """One plot per quantity, with a curve per run, or per run and source of a mixture: evaluations first."""
    from dualenc.evaluation.plots import lines
    from dualenc.evaluation.report import Figure

    figures: list[Figure] = []
    by_source: dict[str, dict[str, Any]] = {}
    for name in (*_names(runs, evaluated=True), *_names(runs, evaluated=False)):
        drawn = {run.name: run.curve(name) for run in runs if run.curve(name)[0]}
        short = name.removeprefix("evaluation/")
        if source := _source(name):
            found = {f"{run}: {source}" if len(runs) > 1 else source: curve for run, curve in drawn.items()}
            by_source.setdefault(name.split("/")[0], {}).update(found)
            continue
        figures.append(Figure(f"{short}: {CAPTIONS[name]}" if name in CAPTIONS else short, lines(drawn, xlabel="step")))
    for kind, drawn in by_source.items():
        figures.append(Figure(f"{kind} by source: {CAPTIONS[kind]}", lines(drawn, xlabel="step")))
    return figures


def similarities(runs: list[RunFolder]) -> list[Figure]:
    """Per run the cosines of held-out pairs at up to eight of its evaluations, the first and the last among them."""
    from dualenc.evaluation.plots import ridges
    from dualenc.evaluation.report import Figure

    figures = []
    for run in runs:
        all_steps = [step for step, seen in run.observed.items() if seen.similarities is not None]
        if not all_steps:
            continue
        number = min(MAX_RIDGES, len(all_steps))
        steps = [all_steps[round(place * (len(all_steps) - 1) / max(number - 1, 1))] for place in range(number)]
        found = {f"step {step:,}": histogram for step in steps if (histogram := run.observed[step].similarities)}
        overlaps = " → ".join(f"{found[name].overlap:.3f}" for name in dict.fromkeys((next(iter(found)), [*found][-1])))
        caption = f"{run.name}: cosines of held-out pairs, and of their items with one another; overlap {overlaps}"
        figures.append(Figure(caption, ridges(found, "positive pairs", "negative pairs")))
    return figures


def queries(runs: list[RunFolder]) -> list[Table]:
    """Per run the queries that were best and worst before and after, each with its score in all runs."""
    from dualenc.evaluation.observed import SHOWN
    from dualenc.evaluation.report import Table, best_and_worst

    tables = []
    for run in runs:
        scored = [(step, seen) for step, seen in run.observed.items() if seen.scores]
        for step, seen in dict(scored[:1] + scored[-1:]).items():
            best, worst = best_and_worst(
                {name: {seen.metric: v} for name, v in seen.scores.items()}, seen.metric, SHOWN
            )
            rows: list[dict[str, object]] = []
            for kind, names in (("best", best), ("worst", worst)):
                for name in names:
                    row: dict[str, object] = {"": kind, "query": name, "text": seen.texts.get(name, "")}
                    rows.append(row | _scores_in(runs, name, seen.metric))
            when = "before training" if step == 0 else f"after step {step:,}"
            tables.append(Table(f"{run.name}: best and worst queries {when}, by {seen.metric}", rows))
    return tables


def _scores_in(runs: list[RunFolder], query: str, metric: str) -> dict[str, object]:
    """The score of a query at the first and the last evaluation of each run that measured it."""
    found: dict[str, object] = {}
    for run in runs:
        scored = [seen.scores.get(query) for seen in run.observed.values() if seen.scores and seen.metric == metric]
        name = f"{run.name}: " if len(runs) > 1 else ""
        if scored:
            found |= {f"{name}before": scored[0], f"{name}after": scored[-1]}
    return found


def _source(name: str) -> str:
    """The source of a mixture whose loss is logged under a name, such as "loss/papers"; "" of anything else."""
    kind, _, source = name.partition("/")
    return source if kind in ("loss", "batch_estimate") else ""


def _names(runs: list[RunFolder], evaluated: bool) -> list[str]:
    """Of what was logged in any run, known names first."""
    logged = dict.fromkeys([*CAPTIONS, *(name for run in runs for line in run.lines for name in line)])
    wanted = [name for name in logged if name not in ("step", "epoch") and name.startswith("evaluation/") == evaluated]
    return [name for name in wanted if any(run.curve(name)[0] for run in runs)]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested sections as "section.key"."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
