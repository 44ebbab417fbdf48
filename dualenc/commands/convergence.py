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
    MAX_SEED,
    RESULT,
    Evaluation,
    check_range,
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
from dualenc.evaluation.corrupted import PrepareImages
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.report import Figure, Table
from dualenc.files import read_json_object
from dualenc.types import Inputs

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset
    from dualenc.encoders import DualEncoder


class Place(NamedTuple):
    """Where one model of a run is."""

    step: int  # optimizer steps done, or the model's number among the folders
    path: Path  # a model folder, or a checkpoint of the trainer
    base: Path | None = None  # with a checkpoint: the model folder of the same run, which tells the architecture

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
    """The models of a run in order: a training's checkpoints, a folder's models, or the one model (or hub name).

    Folders are ordered by the number in their names, then by name.
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
    """Load one model after another, in evaluation mode; those of one run may be the same object with other weights."""
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


def open_set(
    model: DualEncoder, data: str, split: str, left_column: str | None, right_column: str | None
) -> Corpus | PairDataset:
    """Open what a run is measured on: images for models of kind image, pairs for all others."""
    from dualenc.data import open_corpus, open_pairs

    found: Corpus | PairDataset
    if model.kind == "image":
        found = open_corpus(data, modality="image", split=split)
        modalities: tuple[str, ...] = (found.modality,)
    else:
        found = open_pairs(data, left_column, right_column, split=split)
        modalities = (found.left_modality, found.right_modality)
    for side, tower, modality in zip(("left", "right"), (model.left, model.right), modalities):
        if modality != tower.modality:
            raise DualencError(
                f"{data}: its {side} items are {modality}, but the model's {side} tower takes {tower.modality}"
            )
    if len(found) < 2:
        raise DualencError(f"{data}: holds one item; a set of two or more is needed")
    return found


def prepare_set(
    model: DualEncoder, found: Corpus | PairDataset, pairs: int, augmentation: Augmentation, seed: int
) -> tuple[list[Inputs], list[Inputs], FiniteSet]:
    """The finite set: prepared inputs of the left and of the right items, in chunks, and who belongs to whom."""
    from dualenc.data import Corpus
    from dualenc.training.loader import augmentation_seeds

    def chunks(prepare: PrepareImages, items: Sequence[Any], *seeds: Sequence[int]) -> list[Inputs]:
        """Prepared with seeds (augmented), or without."""
        parts = [slice(start, start + CHUNK) for start in range(0, len(items), CHUNK)]
        return [prepare(items[part], *(numbers[part] for numbers in seeds)) for part in parts]

    numbers = random_rows(len(found), pairs)
    if isinstance(found, Corpus):  # each image in two augmentations that are the same for every model
        images = [found[number] for number in numbers.tolist()]
        prepare: PrepareImages = model.left.prepare
        if augmentation == "simclr":
            prepare = simclr_prepare(prepare)
        left, right = (
            chunks(prepare, images, augmentation_seeds(seed, 0, numbers.tolist(), side)) for side in ("left", "right")
        )
        ids = torch.arange(len(images))
        return left, right, FiniteSet(ids, ids, views=True)
    rows = [found[number] for number in numbers.tolist()]
    left_id, right_id = found.left_id[numbers], found.right_id[numbers]
    belonging = FiniteSet(
        torch.from_numpy(left_id),
        torch.from_numpy(right_id),
        left_positives=torch.from_numpy(found.positives("left", left_id)),
        right_positives=torch.from_numpy(found.positives("right", right_id)),
    )
    left = chunks(model.left.prepare, [row.left for row in rows])
    return left, chunks(model.right.prepare, [row.right for row in rows]), belonging


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
        out: folder to write; by default evaluations/convergence/RUN-DATA-HASH.
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
    check_range(0, MAX_SEED, seed=seed)
    evaluation = Evaluation("convergence", run, data, out, device)
    # The last part of each run's path, or the whole where that is not distinct.
    short = [display_name(name) for name in (run, *more)]
    names = {name: last if short.count(last) == 1 else name for name, last in zip((run, *more), short)}
    found = {name: find_models(name) for name in (run, *more)}
    folders = {names[name]: str(Path(name).resolve()) for name in found}
    if (evaluation.folder / RESULT).is_file():
        recorded = read_json_object(evaluation.folder / RESULT).get(
            "folders"
        )  # earlier versions did not write them down
        for name, folder in recorded.items() if isinstance(recorded, dict) else ():
            if folders.get(name, folder) != folder:
                raise DualencError(
                    f"{evaluation.folder}: its run {name} is {folder}; choose another --out, or remove the folder"
                )
    # The first model of each run tells what to read; whether it fits is known before anything is measured.
    sets = {}
    for name, models in found.items():
        _, first = next(load_models(models[:1], evaluation.device))
        sets[name] = open_set(first, data, split, left_column, right_column)
    contents = {name: set_of_run.identity() for name, set_of_run in sets.items()} if distributed.is_main() else {}
    contents = distributed.broadcast_object(contents)
    places = {
        f"{names[name]}, step {place.step}, model {place.contents()}, data {contents[name]}": (name, place)
        for name, models in found.items()
        for place in models
    }
    facts: dict[str, object] = {"data": data, "split": split}
    facts |= {"left_column": left_column, "right_column": right_column}
    facts |= {"pairs": pairs, "augmentation": augmentation, "seed": seed, "temperature": temperature}
    facts = {name: value for name, value in facts.items() if value is not None}
    ledger: Ledger[str] = Ledger(evaluation.folder / "finished", facts)
    own = {key: places[key] for key in ledger.missing(places)}
    for name in dict.fromkeys(name for name, _ in own.values()):
        keys = {place: key for key, (owner, place) in own.items() if owner == name}
        finite = None
        for place, model in load_models(list(keys), evaluation.device):
            finite = finite or prepare_set(model, sets[name], pairs, augmentation, seed)
            ledger.add({keys[place]: _measure(model, *finite, temperature)})
    done = ledger.all_values()
    if distributed.is_main():
        runs: dict[str, list[dict[str, Any]]] = {names[name]: [] for name in found}
        histograms: dict[str, list[SimilarityHistogram]] = {names[name]: [] for name in found}
        rows = []
        for key, (name, place) in places.items():
            metrics = done[key]["metrics"]
            runs[names[name]].append({"step": place.step, **metrics})
            histograms[names[name]].append(SimilarityHistogram.from_plain(done[key]["histogram"]))
            shown = {SHORT.get(metric, metric): value for metric, value in metrics.items()}
            # Gradient norms fall by orders of magnitude, and four decimals would show zeros.
            shown["‖∇‖²"] = f"{metrics['squared_gradient_norm']:.3e}"
            rows.append({"run": names[name], "step": place.step, **shown})
        figures = []
        for metric, caption in CURVES.items():
            curves = {name: ([p["step"] for p in own], [p[metric] for p in own]) for name, own in runs.items()}
            log_y = metric == "squared_gradient_norm"
            figures.append(Figure(caption, plots.lines(curves, xlabel="step", ylabel=metric, log_y=log_y)))
        for name, points in runs.items():
            for number in (0, -1)[: len(points)]:  # the first and the last model
                histogram = histograms[name][number]
                caption = f"{name}, step {points[number]['step']}: cosine of positive and negative pairs"
                plot = plots.similarities(histogram, "positive pairs", "negative pairs")
                figures.append(Figure(f"{caption}; overlap {histogram.overlap:.3f}", plot))
        evaluation.conclude(
            f"Convergence: {', '.join(runs)} on {data}",
            facts,
            {"folders": folders, "runs": runs},
            [Table("On the finite set", rows)],
            figures=figures,
        )
    distributed.barrier()


def _measure(
    model: DualEncoder, left: list[Inputs], right: list[Inputs], pairs: FiniteSet, temperature: float
) -> dict[str, Any]:
    """Metrics and the histogram of similarities of one model, as plain values."""
    device = next(model.parameters()).device

    def encode(side: str, inputs: Inputs) -> torch.Tensor:
        return model.encode(side, {name: tensor.to(device) for name, tensor in inputs.items()})  # type: ignore[arg-type]

    found = exact_gradient(model, encode, left, right, pairs, temperature)
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
