"""`dualenc evaluate convergence`: the exact loss and the embeddings of every model of a run, on a finite set."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from dualenc import distributed
from dualenc.commands.evaluation import (
    HIGHEST_SEED,
    begin,
    check_range,
    conclude,
    display_name,
    random_rows,
    simclr_prepare,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import (
    FiniteSet,
    SimilarityHistogram,
    alignment,
    effective_rank,
    exact_gradient,
    pair_similarities,
    uniformity,
)
from dualenc.evaluation.corrupted import Prepare
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.report import Figure, Table
from dualenc.types import Inputs

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset
    from dualenc.encoders import DualEncoder


class Place(NamedTuple):
    """Where one model of a run is.

    Attributes:
        step: optimizer steps done, or the model's number among the folders.
        path: a model folder, or a checkpoint of the trainer.
        base: with a checkpoint: the model folder of the same run, which tells the architecture.
    """

    step: int
    path: Path
    base: Path | None = None

    def contents(self) -> str:
        """Checksum of its files, and of the model folder it needs: another one for other weights. "" for a hub name."""
        from dualenc.data.identity import digest_of, file_identity

        folders = [folder for folder in (self.path, self.base) if folder is not None and folder.is_dir()]
        files = [(folder, file) for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [file.relative_to(folder).as_posix() for folder, file in files]
        # With a checkpoint the weights of the model folder do not count: they change when the training resumes.
        counted = [(name, file) for name, (folder, file) in zip(names, files) if folder == self.path or ".json" in name]
        return digest_of(*(part for name, file in counted for part in (name, file_identity(file)))) if files else ""


def find_models(run: str) -> list[Place]:
    """The models of a run in order.

    Args:
        run: The output folder of a training (its checkpoints are taken), a folder of model folders (ordered by the
            number in their names, then by name), or one model folder or name.

    Raises:
        DualencError: a training without a model folder yet, or a folder without a model.
    """
    from dualenc.training.checkpoint import Checkpoints

    folder = Path(run)
    if folder.exists() and not folder.is_dir():
        raise DualencError(f"{folder}: is no folder; give a run, a folder of models, or a model")
    if not folder.is_dir() or _is_model(folder):
        return [Place(0, folder)]
    checkpoints = Checkpoints(folder / "checkpoints").complete()
    if checkpoints:
        if not _is_model(folder / "model"):
            raise DualencError(f"{folder}: has checkpoints but no model folder yet; wait until one is written")
        return [Place(step, path, folder / "model") for step, path in checkpoints]
    models = sorted((path for path in folder.iterdir() if _is_model(path)), key=_number_and_name)
    if not models:
        raise DualencError(f"{folder}: no checkpoints and no model folders in it; give a run or a folder of models")
    numbers = [_number_and_name(path)[0] for path in models]
    distinct = len(set(numbers)) == len(numbers)
    return [Place(numbers[place] if distinct else place, path) for place, path in enumerate(models)]


def load_models(places: list[Place], device: torch.device) -> Iterator[tuple[Place, DualEncoder]]:
    """Load one model after another, in evaluation mode; those of one run may be the same object with other weights.

    Raises:
        DualencError: a model cannot be loaded, or a checkpoint does not fit its model folder.
    """
    from dualenc.encoders import load_model

    base: DualEncoder | None = None
    for place in places:
        if place.base is None:
            yield place, load_model(str(place.path), device=str(device)).eval()
            continue
        base = load_model(str(place.base), device=str(device)) if base is None else base
        try:
            state = torch.load(place.path / "state.pt", map_location="cpu", weights_only=True)
            base.load_state_dict(state["model"])
        except Exception as error:
            reason = " ".join(str(error).split())[:120]
            raise DualencError(f"{place.path}: does not fit the model folder of its run ({reason})") from None
        yield place, base.eval()


def _is_model(folder: Path) -> bool:
    from dualenc.encoders.dual import MODEL_FILES

    return any((folder / name).is_file() for name in MODEL_FILES)


def _number_and_name(folder: Path) -> tuple[int, str]:
    found = re.findall(r"\d+", folder.name)
    return (int(found[-1]) if found else -1), folder.name


Augmentation = Literal["simclr", "model"]
CHUNK = 64


class Source(NamedTuple):
    """Where the finite set comes from."""

    data: str
    split: str
    left_column: str | None
    right_column: str | None
    pairs: int
    augmentation: Augmentation
    seed: int


class Finite(NamedTuple):
    """The finite set as a model takes it: prepared inputs of both sides, chunk by chunk, and who belongs to whom."""

    left: list[Inputs]
    right: list[Inputs]
    pairs: FiniteSet


def open_set(model: DualEncoder, source: Source) -> Corpus | PairDataset:
    """Open what a run is measured on: images for models of kind image, pairs for all others."""
    from dualenc.data import open_corpus, open_pairs

    found: Corpus | PairDataset
    if model.kind == "image":
        found = open_corpus(source.data, modality="image", split=source.split)
        kinds = {"left": found.modality}
    else:
        columns = {"left_column": source.left_column, "right_column": source.right_column}
        found = open_pairs(source.data, split=source.split, **columns)  # type: ignore[arg-type]
        kinds = {"left": found.left_modality, "right": found.right_modality}
    for side, modality in kinds.items():
        wanted = model.tower(side).modality  # type: ignore[arg-type]
        if modality != wanted:
            raise DualencError(
                f"{source.data}: its {side} items are {modality}, but the model's {side} tower takes {wanted}"
            )
    if len(found) < 2:
        raise DualencError(f"{source.data}: holds one item; a set of two or more is needed")
    return found


def prepare_set(model: DualEncoder, found: Corpus | PairDataset, source: Source) -> Finite:
    """Choose the finite set and prepare it once for all models of a run."""
    from dualenc.data import Corpus
    from dualenc.training.loader import augmentation_seeds

    numbers = random_rows(len(found), source.pairs)
    if isinstance(found, Corpus):  # each image in two augmentations that are the same for every model
        items = [found[number] for number in numbers.tolist()]
        prepare: Prepare = model.left.prepare
        if source.augmentation == "simclr":
            prepare = simclr_prepare(prepare)
        left, right = (
            _chunks(prepare, items, augmentation_seeds(source.seed, 0, numbers.tolist(), side))
            for side in ("left", "right")
        )
        ids = torch.arange(len(items))
        return Finite(left, right, FiniteSet(ids, ids, views=True))
    rows = [found[number] for number in numbers.tolist()]
    left_id, right_id = found.left_id[numbers], found.right_id[numbers]
    return Finite(
        _chunks(model.left.prepare, [row.left for row in rows]),
        _chunks(model.right.prepare, [row.right for row in rows]),
        FiniteSet(
            torch.from_numpy(left_id),
            torch.from_numpy(right_id),
            left_positives=torch.from_numpy(found.positives("left", left_id)),
            right_positives=torch.from_numpy(found.positives("right", right_id)),
        ),
    )


def _chunks(prepare: Prepare, items: Sequence[Any], seeds: Sequence[int] | None = None) -> list[Inputs]:
    starts = range(0, len(items), CHUNK)
    if seeds is None:
        return [prepare(items[start : start + CHUNK]) for start in starts]
    return [prepare(items[start : start + CHUNK], seeds[start : start + CHUNK]) for start in starts]


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

    step: int
    metrics: dict[str, float]
    histogram: SimilarityHistogram


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
    target, device_to_use = begin("convergence", run, data, out, device)
    source = Source(data, split, left_column, right_column, pairs, augmentation, seed)
    # The last part of each run's path, or the whole where that is not distinct.
    short = [display_name(name) for name in (run, *more)]
    names = {name: last if short.count(last) == 1 else name for name, last in zip((run, *more), short)}
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
        runs: dict[str, list[_Point]] = {}
        rows = []
        for key, (name, place) in places.items():
            histogram = SimilarityHistogram.from_plain(done[key]["histogram"])
            point = _Point(place.step, done[key]["metrics"], histogram)
            runs.setdefault(names[name], []).append(point)
            shown: dict[str, object] = {SHORT.get(metric, metric): value for metric, value in point.metrics.items()}
            # Gradient norms fall by orders of magnitude, and four decimals would show zeros.
            shown["‖∇‖²"] = f"{point.metrics['squared_gradient_norm']:.3e}"
            rows.append({"run": names[name], "step": point.step, **shown})
        document = {name: [{"step": p.step, **p.metrics} for p in points] for name, points in runs.items()}
        conclude(
            target,
            f"Convergence: {', '.join(runs)} on {data}",
            {"task": "convergence", **facts, "runs": document},
            facts,
            [Table("On the finite set", rows)],
            figures=_figures(runs),
        )
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


def _figures(runs: dict[str, list[_Point]]) -> list[Figure]:
    figures = []
    for metric, caption in CURVES.items():
        curves = {name: ([p.step for p in own], [p.metrics[metric] for p in own]) for name, own in runs.items()}
        log_y = metric == "squared_gradient_norm"
        figures.append(Figure(caption, plots.lines(curves, xlabel="step", ylabel=metric, log_y=log_y)))
    for name, own in runs.items():
        for point in (own[0], own[-1])[: len(own)]:
            caption = f"{name}, step {point.step}: cosine of positive and negative pairs"
            plot = plots.similarities(point.histogram, "positive pairs", "negative pairs")
            figures.append(Figure(f"{caption}; overlap {point.histogram.overlap:.3f}", plot))
    return figures
