"""Convergence: the exact loss and the embeddings of every model of a run, on a finite set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dualenc import distributed
from dualenc.encoders.dual import SIDES
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import SimilarityHistogram
from dualenc.evaluation.images import random_rows
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.output import RESULT, Evaluation, display_name
from dualenc.evaluation.pair_sets import PairSet, measure_model, open_set
from dualenc.evaluation.report import Figure, Table
from dualenc.evaluation.run_models import find_models, load_models
from dualenc.reading import read_json_object
from dualenc.types import Inputs, Side

if TYPE_CHECKING:
    from dualenc.evaluation.options import ColumnOptions, ConvergenceOptions, OutputOptions

CURVES = {
    "loss": "Exact global loss",
    "squared_gradient_norm": "Squared norm of its gradient",
    "alignment": "Alignment: mean squared distance of positive pairs",
    "uniformity": "Uniformity: log mean exp(−2 ‖x − y‖²)",
    "effective_rank": "Effective rank of the embeddings",
    "overlap": "Overlap of the similarities of positive and negative pairs",
}

SHORT = {
    "squared_gradient_norm": "‖∇‖²",
    "effective_rank": "rank",
    "positive_cosine": "cos +",
    "negative_cosine": "cos −",
}


def evaluate(
    runs: Sequence[str], data: str, options: ConvergenceOptions, columns: ColumnOptions, output: OutputOptions
) -> None:
    """Measure every model of some runs that has not been measured yet."""
    evaluation = Evaluation("convergence", runs[0], data, output)
    names = _distinct_names(runs)
    folders = {names[folder]: str(Path(folder).resolve()) for folder in names}
    _check_folders(evaluation.folder, folders)
    models = {folder: find_models(folder) for folder in names}
    # The first model of each run decides what is read; whether it fits is known before anything is measured.
    sets = {}
    for folder, run_models in models.items():
        _, first = next(load_models(run_models[:1], evaluation.device))
        items = open_set(first, data, options.split, columns)
        rows = random_rows(len(items), options.pairs)
        sets[folder] = PairSet(items, rows, options.augmentation, options.seed)
    identities = {folder: own.data.identity() for folder, own in sets.items()} if distributed.is_main() else {}
    identities = distributed.broadcast_object(identities)
    places = {
        f"{names[folder]}, step {model.step}, model {model.contents()}, data {identities[folder]}": (folder, model)
        for folder, run_models in models.items()
        for model in run_models
    }

    facts = {
        "data": data,
        **{name: value for name, value in (vars(columns) | vars(options)).items() if value is not None},
    }
    ledger: Ledger[str] = Ledger(evaluation.folder / "finished", facts)
    own = {key: places[key] for key in ledger.missing(places)}
    for folder in dict.fromkeys(folder for folder, _ in own.values()):
        keys = {model: key for key, (owner, model) in own.items() if owner == folder}
        chunks: dict[Side, list[Inputs]] = {}
        for place, model in load_models(list(keys), evaluation.device):
            # Prepared once for all models of a run.
            chunks = chunks or {side: list(sets[folder].inputs(model, side)) for side in SIDES}
            ledger.add({keys[place]: measure_model(model, sets[folder], chunks, options.temperature)})
    measured = ledger.all_values()
    if distributed.is_main():
        curves: dict[str, list[Measurement]] = {name: [] for name in folders}
        for key, (folder, place) in places.items():
            histogram = SimilarityHistogram.from_plain(measured[key]["histogram"])
            curves[names[folder]].append(Measurement(place.step, measured[key]["metrics"], histogram))
        _report(evaluation, facts, folders, curves)
    distributed.barrier()


class Measurement(NamedTuple):
    """The measurements of one model of a run."""

    step: int
    metrics: dict[str, float]
    histogram: SimilarityHistogram


def _distinct_names(runs: Sequence[str]) -> dict[str, str]:
    """A name for each run: the last part of its path, or the whole where that is not distinct."""
    last_parts = [display_name(run) for run in runs]
    return {run: last if last_parts.count(last) == 1 else run for run, last in zip(runs, last_parts)}


def _check_folders(out: Path, folders: Mapping[str, str]) -> None:
    """Refuse an output folder that holds results of other runs of the same names."""
    if not (out / RESULT).is_file():
        return
    recorded = read_json_object(out / RESULT).get("folders")
    # Earlier versions did not record the folders.
    for name, folder in recorded.items() if isinstance(recorded, dict) else ():
        if folders.get(name, folder) != folder:
            raise DualencError(f"{out}: its run {name} is {folder}; choose another --out, or remove the folder")


def _report(
    evaluation: Evaluation,
    facts: Mapping[str, object],
    folders: Mapping[str, str],
    curves: Mapping[str, Sequence[Measurement]],
) -> None:
    """A table of all models, a curve per metric, and the similarities of each run's first and last model."""
    rows = []
    figures = []
    for name, points in curves.items():
        for point in points:
            shown: dict[str, object] = {SHORT.get(metric, metric): value for metric, value in point.metrics.items()}
            # Gradient norms fall by orders of magnitude, and four decimals would show zeros.
            shown[SHORT["squared_gradient_norm"]] = f"{point.metrics['squared_gradient_norm']:.3e}"
            rows.append({"run": name, "step": point.step, **shown})
    for metric, caption in CURVES.items():
        lines = {
            name: ([point.step for point in points], [point.metrics[metric] for point in points])
            for name, points in curves.items()
        }
        log_y = metric == "squared_gradient_norm"
        figures.append(Figure(caption, plots.lines(lines, xlabel="step", ylabel=metric, log_y=log_y)))
    for name, points in curves.items():
        for point in (points[0], points[-1])[: len(points)]:
            caption = f"{name}, step {point.step}: cosine of positive and negative pairs"
            plot = plots.similarities(point.histogram, "positive pairs", "negative pairs")
            figures.append(Figure(f"{caption}; overlap {point.histogram.overlap:.3f}", plot))
    runs = {name: [{"step": point.step, **point.metrics} for point in points] for name, points in curves.items()}
    evaluation.conclude(
        f"Convergence: {', '.join(runs)} on {facts['data']}",
        facts,
        {"folders": folders, "runs": runs},
        [Table("On the finite set", rows)],
        figures=figures,
    )
