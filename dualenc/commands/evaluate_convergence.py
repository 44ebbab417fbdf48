"""`dualenc evaluate convergence`: the exact global loss and gradient of every checkpoint of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dualenc import distributed
from dualenc.commands.evaluation import HIGHEST_SEED, check_range, display_name, output_folder, start_processes
from dualenc.commands.figures import similarity_figure
from dualenc.commands.finite_set import Augmentation, Finite, Source, open_set, prepare_set
from dualenc.commands.run_models import find_models, load_models
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import Inputs, exact_gradient
from dualenc.evaluation.geometry import SimilarityHistogram, alignment, effective_rank, pair_similarities, uniformity
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.report import Figure, write_report
from dualenc.evaluation.tables import Table, print_table
from dualenc.files import write_json
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.encoders import DualEncoder

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


class _Point(NamedTuple):
    """One model of a run, measured."""

    run: str
    step: int
    metrics: dict[str, float]
    histogram: SimilarityHistogram

    @classmethod
    def restored(cls, run: str, step: int, found: dict[str, Any]) -> _Point:
        """The point that `_measure` found."""
        return cls(run, step, found["metrics"], SimilarityHistogram.from_plain(found["histogram"]))


def convergence(
    run: str,
    data: str,
    *more: str,
    out: str | None = None,
    split: str = "train",
    left_column: str | None = None,
    right_column: str | None = None,
    pairs: int = 500,
    temperature: float = 0.07,
    augmentation: Augmentation = "simclr",
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Measure the exact global loss, its gradient and the embeddings of every model of a run, on a finite set.

    Writes metrics.json and report.html with the curves. Under `accelerate launch` the processes share the models.
    Interrupted, or with new checkpoints, it measures only those models that it has not measured yet.

    Args:
        run: output folder of a training (its checkpoints are measured), folder of model folders, or one model.
        data: images, of which two stored augmentations are a pair; or for other models pairs, as `train` reads them.
        more: further runs, to lay their curves over one another.
        out: folder to write; by default evaluations/convergence/RUN-DATA.
        split: of the data.
        left_column: of a table of pairs.
        right_column: of a table of pairs.
        pairs: size of the finite set: so many images or pairs, chosen at random and always the same.
        temperature: of the loss; one for all models, so that they can be compared.
        augmentation: SimCLR's, or the training augmentation that the model folder knows.
        seed: of the augmentations, which are those of the first epoch of a training with this seed.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(2, math.inf, pairs=pairs)
    check_range(1e-4, 1e4, temperature=temperature)
    check_range(0, HIGHEST_SEED, seed=seed)
    target = output_folder(out, "convergence", run, data)
    device_to_use = start_processes(device)
    source = Source(data, split, left_column, right_column, pairs, augmentation, seed)
    names = _short_names([run, *more])
    found = {name: find_models(name) for name in (run, *more)}
    # The first model of each run tells what to read; whether it fits is known before anything is measured.
    sets = {name: open_set(next(load_models(models[:1], device_to_use))[1], source) for name, models in found.items()}
    contents = {name: set_of_run.identity() for name, set_of_run in sets.items()} if distributed.is_main() else {}
    contents = distributed.broadcast_object(contents)
    places = {
        f"{names[name]}, step {place.step}, model {place.contents()}, data {contents[name]}": (name, place)
        for name, models in found.items()
        for place in models
    }
    facts = {name: value for name, value in source._asdict().items() if value is not None}
    facts["temperature"] = temperature
    ledger: Ledger[str] = Ledger(target / "finished", facts)
    own = {key: places[key] for key in ledger.missing(places)}
    for name in dict.fromkeys(name for name, _ in own.values()):
        keys = {place: key for key, (owner, place) in own.items() if owner == name}
        finite: Finite | None = None
        for place, model in load_models(list(keys), device_to_use):
            finite = finite or prepare_set(model, sets[name], source)
            ledger.add({keys[place]: _measure(model, finite, temperature)})
    done = ledger.all_values()
    if distributed.is_main():
        points = [_Point.restored(names[name], place.step, done[key]) for key, (name, place) in places.items()]
        _conclude(points, target, facts)
    distributed.barrier()


def _measure(model: DualEncoder, finite: Finite, temperature: float) -> dict[str, Any]:
    """Metrics and the histogram of similarities of one model, as plain values."""
    device = next(model.parameters()).device

    def encode(side: str, inputs: Inputs) -> torch.Tensor:
        return model.encode(side, {name: tensor.to(device) for name, tensor in inputs.items()})  # type: ignore[arg-type]

    found = exact_gradient(model, encode, finite.left, finite.right, finite.pairs, temperature)
    pairs = finite.pairs
    positives = None if pairs.left_positives is None else pairs.left_positives.numpy()
    histogram = pair_similarities(found.left, found.right, pairs.left_id.numpy(), pairs.right_id.numpy(), positives)
    sides = (found.left, found.right)
    metrics = {
        "loss": found.loss,
        "squared_gradient_norm": found.squared_gradient_norm,
        "alignment": alignment(found.left, found.right),
        "uniformity": float(np.mean([uniformity(side) for side in sides])),
        "effective_rank": float(np.mean([effective_rank(side) for side in sides])),
        "positive_cosine": histogram.positive_mean,
        "negative_cosine": histogram.negative_mean,
        "overlap": histogram.overlap,
    }
    return {"metrics": metrics, "histogram": histogram.to_plain()}


def _conclude(points: list[_Point], out: Path, facts: dict[str, object]) -> None:
    """Write and print what came out."""
    runs = {name: [p for p in points if p.run == name] for name in dict.fromkeys(p.run for p in points)}
    document = {name: [{"step": p.step, **p.metrics} for p in own] for name, own in runs.items()}
    write_json(out / "metrics.json", {"task": "convergence", **facts, "runs": document})
    rows = [{"run": p.run, "step": p.step, **_shown(p.metrics)} for p in points]
    table = Table("On the finite set", rows)
    title = f"Convergence: {', '.join(runs)} on {facts['data']}"
    write_report(out / "report.html", title, facts=facts, tables=[table], figures=_figures(runs))
    print_table(table)
    print(printable(f"metrics and report.html are in {out}"))


def _figures(runs: dict[str, list[_Point]]) -> list[Figure]:
    figures = []
    for metric, caption in CURVES.items():
        curves = {name: ([p.step for p in own], [p.metrics[metric] for p in own]) for name, own in runs.items()}
        log_y = metric == "squared_gradient_norm"
        figures.append(Figure(caption, plots.lines(curves, xlabel="step", ylabel=metric, log_y=log_y)))
    for name, own in runs.items():
        for point in (own[0], own[-1])[: len(own)]:
            caption = f"{name}, step {point.step}: cosine of positive and negative pairs"
            figures.append(similarity_figure(point.histogram, "positive pairs", "negative pairs", caption))
    return figures


def _shown(metrics: dict[str, float]) -> dict[str, object]:
    """Short headings; gradient norms fall by orders of magnitude, and four decimals would show zeros."""
    shown: dict[str, object] = {SHORT.get(name, name): value for name, value in metrics.items()}
    return {**shown, "‖∇‖²": f"{metrics['squared_gradient_norm']:.3e}"}


def _short_names(runs: Sequence[str]) -> dict[str, str]:
    """The last part of each run's path, or the whole where that is not distinct."""
    short = [display_name(run) for run in runs]
    return {run: name if short.count(name) == 1 else run for run, name in zip(runs, short)}
