"""The report of training runs: curves, similarities, queries and settings, side by side where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from dualenc.data.urls import display_name
from dualenc.errors import DualencError
from dualenc.evaluation.observed import SHOWN, Observed
from dualenc.evaluation.plots import lines, ridges
from dualenc.evaluation.report import Figure, Table, best_and_worst, print_table, write_report
from dualenc.training.log import read_metrics

QUANTITIES = {
    "loss": "training loss: the objective's estimate of its loss",
    "batch_estimate": "loss over the batch alone: comparable between objectives",
    "accuracy": "accuracy in the batch: share of anchors whose positive is the nearest in the batch",
    "positive_similarity": "similarity of training pairs: mean cosine",
    "temperature": "temperature τ",
    "gradient_norm": "gradient norm: before clipping",
    "learning_rate": "learning rate",
    "samples_per_second": "pairs per second",
    "items_encoded": "items encoded outside the batch: per step",
    "state/chains_moved": "chains that moved: share of chains that left their item in a step",
    "state/chains_begun": "chains begun anew: share of chains in a step",
    "state/log_mean_exp": "remembered log mean exp: log of the mean of exp(s/τ) over all negatives; mean over anchors",
    "state/log_mean_exp_spread": "spread of the remembered log mean exp: standard deviation over anchors",
    "state/log_partition": "log partition function: log of the sum of exp(s/τ) over all negatives; mean over anchors",
    "state/log_partition_spread": "spread of the log partition function: standard deviation over anchors",
    "state/log_scale": "log scale: log of the kernel's scale 1/s; mean over anchors",
    "state/log_scale_spread": "spread of the log scale: standard deviation over anchors",
    "state/own_temperature": "the anchors' own temperatures: mean",
    "state/own_temperature_spread": "spread of the anchors' own temperatures: standard deviation",
    "state/effective_items": "effective number of negatives: over how many items the draws are spread, 1/Σ q²",
    "state/remembered": "remembered share of the corpus: items that have a remembered embedding",
}
"""What a logged quantity is called on the page and, where its name does not say it, what it is."""
METRICS = {"ndcg": "nDCG", "mrr": "MRR", "map": "MAP", "hit": "hit rate"}
DIRECTIONS = {"image_to_text_": "image-to-text", "text_to_image_": "text-to-image"}
WORDS = {"knn_accuracy": "nearest-neighbour accuracy", "mean_recall": "mean recall"}
MAX_RIDGES = 8
MAX_VALUE = 1e100


class RunFolder(NamedTuple):
    """The records of a run.

    Attributes:
        name: of the folder.
        lines: of its metrics.jsonl.
        settings: of its recipe.yaml, flat, "section.key" as overrides name them; empty for a run from Python.
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


def write_run_report(target: Path, folders: Sequence[str]) -> None:
    """Print tables of some runs, and write a page about them."""
    runs = [read_run(Path(folder)) for folder in folders]
    if len({record.name for record in runs}) < len(runs):
        runs = [record._replace(name=folder.rstrip("/")) for record, folder in zip(runs, folders, strict=True)]
    tables = [table for table in (ends(runs), ends_of_sources(runs), differences(runs)) if table.rows]
    facts = {record.name: f"{record.lines[-1]['step']:,} steps" for record in runs}
    for table in tables:
        print_table(table)
    # On the page only: with every default filled in they are too many lines for a terminal.
    if len(runs) == 1 and runs[0].settings:
        rows = [{"setting": name, "value": _shown(value)} for name, value in runs[0].settings.items()]
        tables.append(Table("Settings", rows))
    title = "Training" if len(runs) == 1 else "Trainings side by side"
    figures = [*curves(runs), *similarities(runs)]
    write_report(target, title, facts=facts, tables=[*tables, *queries(runs)], figures=figures, figures_first=True)


def read_run(folder: Path) -> RunFolder:
    """Read the folder of a run.

    Raises:
        DualencError: it holds no metrics, a recipe that is no YAML, garbage, or records of evaluations that are none.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        raise DualencError(f"{folder}: no metrics.jsonl with metrics in it; name the trainer.output of a run")
    for number, line in enumerate(lines, start=1):
        for name, value in line.items():
            if value is not None and not (type(value) in (int, float) and abs(value) < MAX_VALUE):
                place = f"{folder / 'metrics.jsonl'}:{number}"
                raise DualencError(f"{place}: {name!r} is no number that can be drawn; restore the file")
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
            row = {"run": run.name, "metric": metric_label(name.removeprefix("evaluation/")), "first": values[0]}
            rows.append(row | {"best": best, "at step": int(steps[values.index(best)]), "last": values[-1]})
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
    rows = [{"setting": name, **{run.name: _shown(run.settings.get(name)) for run in runs}} for name in differ]
    return Table("Settings that differ", rows)


def _shown(value: object) -> str:
    """A setting as text; of a URL without what may be a key."""
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return "–" if value is None else display_name(value)


def label(name: str) -> str:
    """What a logged quantity is called on the page: "nDCG@10 on held-out data" for "evaluation/ndcg@10"."""
    if name in QUANTITIES:
        return QUANTITIES[name].partition(":")[0]
    section, _, rest = name.partition("/")
    if section == "selection":
        return f"selection of batches, {rest.replace('_', ' ')}"
    if section != "evaluation":
        return name.replace("_", " ")
    folder, _, metric = rest.rpartition("/")
    return f"{metric_label(metric)} on {folder or 'held-out data'}"


def metric_label(name: str) -> str:
    """A metric's name as the literature writes it: "nDCG@10" for "ndcg@10"; of one folder, "FOLDER: nDCG@10"."""
    folder, _, metric = name.rpartition("/")
    direction = next((prefix for prefix in DIRECTIONS if metric.startswith(prefix)), "")
    kind, at, rank = metric.removeprefix(direction).partition("@")
    written = WORDS.get(metric) or f"{METRICS.get(kind, kind)}{at}{rank}"
    if direction:
        written = f"{DIRECTIONS[direction]} {written}"
    return f"{folder}: {written}" if folder else written


def curves(runs: list[RunFolder]) -> list[Figure]:
    """One plot per quantity, with a curve per run, or per run and source of a mixture: evaluations first."""
    from dualenc.evaluation.report import Figure

    figures: list[Figure] = []
    by_source: dict[str, dict[str, Any]] = {}
    for name in (*_names(runs, evaluated=True), *_names(runs, evaluated=False)):
        drawn = {run.name: run.curve(name) for run in runs if run.curve(name)[0]}
        if source := _source(name):
            found = {f"{run}: {source}" if len(runs) > 1 else source: curve for run, curve in drawn.items()}
            by_source.setdefault(name.split("/")[0], {}).update(found)
            continue
        figures.append(Figure(QUANTITIES.get(name) or label(name), lines(drawn, xlabel="step")))
    for kind, drawn in by_source.items():
        figures.append(Figure(QUANTITIES[kind].replace(":", ", by source:"), lines(drawn, xlabel="step")))
    return figures


def similarities(runs: list[RunFolder]) -> list[Figure]:
    """Per run the cosines of held-out pairs at up to eight of its evaluations, the first and the last among them."""
    from dualenc.evaluation.report import Figure

    figures = []
    for run in runs:
        all_steps = [step for step, seen in run.observed.items() if seen.similarities is not None]
        if not all_steps:
            continue
        places = np.linspace(0, len(all_steps) - 1, min(MAX_RIDGES, len(all_steps))).round().astype(int)
        steps = [all_steps[place] for place in places]
        found = {f"step {step:,}": histogram for step in steps if (histogram := run.observed[step].similarities)}
        overlaps = " → ".join(f"{histogram.overlap:.3f}" for histogram in [*found.values()][:: max(1, len(found) - 1)])
        caption = f"{run.name}: cosines of held-out pairs, and of their items with one another; overlap {overlaps}"
        figures.append(Figure(caption, ridges(found, "positive pairs", "negative pairs")))
    return figures


def queries(runs: list[RunFolder]) -> list[Table]:
    """Per run the queries that were best and worst before and after, each with its score in all runs."""
    from dualenc.evaluation.report import Table

    tables = []
    for run in runs:
        scored = [(step, seen) for step, seen in run.observed.items() if seen.scores]
        for step, seen in dict(scored[:1] + scored[-1:]).items():
            scores = {name: {seen.metric: score} for name, score in seen.scores.items()}
            rows: list[dict[str, object]] = [
                {"": kind, "query": name, "text": seen.texts.get(name, ""), **_scores_in(runs, name, seen.metric)}
                for kind, names in zip(("best", "worst"), best_and_worst(scores, seen.metric, SHOWN))
                for name in names
            ]
            when = "before training" if step == 0 else f"after step {step:,}"
            tables.append(Table(f"{run.name}: best and worst queries {when}, by {metric_label(seen.metric)}", rows))
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
    logged = dict.fromkeys([*QUANTITIES, *(name for run in runs for line in run.lines for name in line)])
    shown = [name for name in logged if name not in ("step", "epoch") and name.startswith("evaluation/") == evaluated]
    return [name for name in shown if any(run.curve(name)[0] for run in runs)]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested sections as "section.key", as overrides name them: the class of a section as "section"."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if key == "class_path" and prefix and isinstance(value, str):
            flat[prefix.removesuffix(".")] = value.rsplit(".", 1)[-1]
        elif isinstance(value, dict):
            flat |= _flat(value, prefix if key == "init_args" else f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
