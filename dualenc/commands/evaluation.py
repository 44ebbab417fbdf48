"""What the evaluation commands share: options in range, processes, models, kept embeddings, images, the report."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import EncodeInputs, PrepareImages
from dualenc.evaluation.corruptions import Images
from dualenc.evaluation.ledger import read_signature
from dualenc.evaluation.report import Figure, Gallery, Table, print_table, write_report
from dualenc.files import (
    check_file_target,
    check_folder_target,
    read_json_object,
    remove,
    write_json,
)
from dualenc.terminal import printable
from dualenc.types import Inputs, Output

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder, Tower
    from dualenc.search.embeddings import Embeddings
    from dualenc.types import Side

# Which command takes which kind of model, for the mistake of mixing them up.
_COMMAND_OF = {
    "query-document": "`dualenc evaluate retrieval`",
    "image-text": "`dualenc evaluate image-text` or `zero-shot`",
    "image": "`dualenc evaluate probe` or `corrupted`",
    "vector": "`dualenc evaluate retrieval`",
}

MOST_WORKERS = 1024
MOST_ITEMS = 1 << 20
"""In a batch."""
RESULT = "metrics.json"
PAGE = "report.html"
UNFINISHED = {"embeddings", "features", "finished", "run.trec", "per_query.ndjson"}
UNFINISHED |= {"bm25", "hybrid", "reranked", "engine", "image_to_text", "text_to_image"}
"""What an evaluation that was interrupted before its results has left."""
KEPT_EMBEDDINGS = [f"{place}/*/meta.json" for place in ("embeddings", "*/embeddings", "features", "finished")]
HIGHEST_SEED = (1 << 32) - 1


def begin(task: str, model: str, data: str, out: str | None, device: str | None) -> tuple[Path, torch.device]:
    """Where an evaluation writes (OUT, or a folder named after task, model and data), and the device to work on.

    A folder that cannot be written or holds something else, and a device that is not there, are errors before any work.
    """
    folder = Path(out or f"evaluations/{task}/{display_name(model)}-{Path(data).stem}")
    check_writable(folder)
    check_folder_target(folder, functools.partial(_is_evaluation, task=task), f"evaluation of {task}")
    check_file_target(folder / RESULT)
    check_file_target(folder / PAGE)
    return folder, start_processes(device)


def _is_evaluation(folder: Path, task: str) -> bool:
    """Whether a folder holds the results of a task, or nothing but unfinished work of one."""
    if (folder / RESULT).is_file():
        return read_json_object(folder / RESULT).get("task") == task
    return _is_unfinished(folder) or all(child.is_dir() and _is_unfinished(child) for child in folder.iterdir())


def _is_unfinished(folder: Path) -> bool:
    return all(name in UNFINISHED or name.startswith(".") for name in os.listdir(folder))


def check_weights(folder: Path, model: str, *towers: Tower) -> list[str]:
    """Checksums of the towers that are evaluated; an error if the folder holds an evaluation of other ones."""
    from dualenc.search.embed import tower_checksum

    weights = sorted({tower_checksum(tower) for tower in towers})
    if not _evaluated_weights(folder) <= set(weights):
        remedy = "choose another --out, or remove the folder"
        raise DualencError(f"{folder}: holds an evaluation of other weights than {model} has now; {remedy}")
    return weights


def _evaluated_weights(folder: Path) -> set[str]:
    """Checksums of the towers whose results or unfinished work a folder holds."""
    if (folder / RESULT).is_file():
        recorded = read_json_object(folder / RESULT).get("weights")
        if isinstance(recorded, list):  # earlier versions did not write them down
            return set(map(str, recorded))
    paths = [path for pattern in KEPT_EMBEDDINGS for path in folder.glob(pattern)]
    kept = {str(read_json_object(path).get("model_checksum")) for path in paths}
    signatures = [read_signature(part) or {} for part in folder.glob("finished/**/part-*.ndjson")]
    models = [signature["model"] for signature in signatures if "model" in signature]
    return kept.union(*([model] if isinstance(model, str) else map(str, model) for model in models))


def conclude(
    out: Path,
    task: str,
    title: str,
    facts: Mapping[str, object],
    results: Mapping[str, object],
    tables: Sequence[Table],
    *,
    weights: Sequence[str] = (),
    printed: int | None = None,
    figures: Sequence[Figure] = (),
    galleries: Sequence[Gallery] = (),
    wrote: str = "metrics and report.html",
) -> None:
    """Write metrics.json (facts and results) and report.html; print the first tables and where the files are.

    `weights` are those that `check_weights` has returned, for the next evaluation into the same folder.
    """
    write_json(out / RESULT, {"task": task, **facts, **({"weights": list(weights)} if weights else {}), **results})
    write_report(out / PAGE, title, facts=facts, tables=tables, figures=figures, galleries=galleries)
    for table in tables[:printed]:
        print_table(table)
    print(printable(f"{wrote} are in {out}"))


def start_processes(device: str | None = None) -> torch.device:
    """Join the other processes of `accelerate launch`, if there are any, and tell the device to work on.

    Without a name it is this process's GPU, or the CPU where there is none. A device that is not there is an error.
    """
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        # Only use tells whether a device is there; "meta" has no values.
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DualencError(f"device {device!r}: {reason}; choose another, such as cpu or cuda:0") from None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else chosen
    return chosen


def check_range(least: float, most: float, **values: float | None) -> None:
    """Make sure that numeric options, by name, lie in a range: None is not given and fine, NaN in no range."""
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            allowed = f"be at least {least:,}" if most == math.inf else f"lie between {least:,} and {most:,}"
            raise DualencError(f"--{name.replace('_', '-')} is {value}; it must {allowed}")


def open_model(model: str, kinds: Sequence[str], device: torch.device) -> DualEncoder:
    """Load a model and make sure that it is of a kind that the task can use."""
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.kind not in kinds:
        needed, other = " or ".join(kinds), _COMMAND_OF[encoder.kind]
        raise DualencError(f"{model}: is of kind {encoder.kind}, but this task needs kind {needed}; use {other}")
    return encoder


def embed_into(
    folder: Path,
    tower: Tower,
    corpus: Corpus,
    batch_size: int,
    *,
    side: Side | None = None,
    model: str = "",
    **how: Any,
) -> Embeddings:
    """Embed into a folder below an evaluation's output; what another model or other data left there is replaced.

    Finished shards of an interrupted run are kept where weights and items are the same, by their contents: equal names
    do not make equal data. `side` is given for models with two; `model` is what the user calls it, for the record;
    `how` is what else `dualenc.search.embed.embed` takes.
    """
    from dualenc.data.identity import digest_of
    from dualenc.search.embed import embed, tower_checksum
    from dualenc.search.embeddings import is_embeddings

    # Changed items under the same ids are noticed by `embed` itself; of other ids it would keep nothing either.
    identity = ({} if side is None else {"side": side}) | {"ids": digest_of(corpus.ids)}
    if distributed.is_main():
        check_folder_target(folder, is_embeddings, "embeddings")
        meta = read_json_object(folder / "meta.json") if (folder / "meta.json").is_file() else {}
        wanted = {**identity, "model_checksum": tower_checksum(tower)}
        if any(meta.get(name) != value for name, value in wanted.items()):
            remove(folder)
    distributed.barrier()
    how |= {"identity": identity, "notes": {"model": model} if model else None}
    return embed(tower, corpus, folder, batch_size=batch_size, progress=distributed.is_main(), **how)


def check_writable(folder: Path) -> None:
    """Make sure that a folder is there, or can be made, and takes files; nothing is left behind."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise DualencError(f"{folder}: cannot be written, {there} is a file; choose another --out")
        with tempfile.TemporaryFile(dir=there):
            pass
    except (OSError, ValueError) as error:
        if isinstance(error, DualencError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DualencError(f"{folder}: cannot be written ({reason}); choose another --out") from None


def display_name(model: str) -> str:
    """What tables call a model: its run if it is RUN/model, or else the last part of its path or name."""
    path = Path(model)
    if path.is_dir() and path.resolve().name == "model":
        path = path.resolve().parent
    return path.name or model


def random_rows(total: int, limit: int | None) -> np.ndarray:
    """All numbers below `total`, or `limit` of them, always the same: files are often sorted by class."""
    return np.sort(np.random.default_rng(0).permutation(total)[:limit])


def open_images(data: str, split: str, *, label_column: str | None = None, limit: int | None = None) -> Corpus:
    """The images of whatever `data.open_corpus` reads, with their labels if there are any.

    `data` may also be a folder of images with a subfolder for each split; without such a subfolder it is taken whole.
    `limit` takes so many images, chosen at random, always the same ones.
    """
    from dualenc.data import open_corpus
    from dualenc.data.sources import is_image_folder

    folder = Path(data) / split
    # A split is a name, not a way out of the folder.
    is_subfolder = Path(split).name == split != ".." and is_image_folder(data) and folder.is_dir()
    source = folder if is_subfolder else data
    images = open_corpus(source, modality="image", split=split, label_column=label_column)
    if images.modality != "image":
        raise DualencError(f"{data}: holds {images.modality}; give images")
    if limit is None or limit >= len(images):
        return images
    return images.take(random_rows(len(images), limit))


def require_labels(corpus: Corpus, what: str, *, for_training: bool = False) -> np.ndarray:
    """The (N,) labels of a corpus, which every image must have; for training two classes or more."""
    if corpus.labels is None:
        raise DualencError(f"{what}: there are no labels; name their column with --label-column, or use class folders")
    if (corpus.labels < 0).any():
        raise DualencError(f"{what}: image {int(np.argmax(corpus.labels < 0))} has no label; give every image one")
    if for_training and len(np.unique(corpus.labels)) < 2:
        raise DualencError(f"{what}: all images are of one class; a probe needs two or more")
    return corpus.labels


class Labelled(NamedTuple):
    """Images, their features (N, D) and labels (N,); images that cannot be read are left out of all three."""

    items: Images
    features: np.ndarray
    labels: np.ndarray


def labelled_features(
    tower: Tower, corpus: Corpus, labels: np.ndarray, folder: Path, batch_size: int, num_workers: int
) -> Labelled:
    """What probes are fit on and tested with; features are kept in `folder`, from which an interrupted run resumes."""
    from dualenc.data.columns import Picked

    embeddings = embed_into(folder, tower, corpus, batch_size, output="features", num_workers=num_workers)
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    rows = np.array([row_of[name] for name in embeddings.ids])
    return Labelled(Picked(corpus.items, rows), np.asarray(embeddings.vectors, np.float32), labels[rows])


def align_labels(labels: np.ndarray, names: Sequence[str] | None, onto: Sequence[str] | None, what: str) -> np.ndarray:
    """Class numbers (N,) of one source, with their names, in the numbering of another, by the names of the classes.

    A name matches its equal, or one that begins with it as a word ("n01443537" and "n01443537 goldfish"). Where one
    source has no names the numbers stay; a class that occurs and is not among the others is an error, which `what`
    opens.
    """
    if names is None or onto is None or list(names) == list(onto):
        return labels
    numbers = {key: number for number, name in reversed(list(enumerate(onto))) for key in (name.split()[0], name)}
    numbers |= {name: number for number, name in enumerate(onto)}
    mapped = labels.copy()
    for number in np.unique(labels).tolist():
        if names[number] not in numbers:
            raise DualencError(
                f"{what}: class {names[number]} is not among the {len(onto)} classes of the training images"
            )
        mapped[labels == number] = numbers[names[number]]
    return mapped


def open_image_tower(model: str, device: torch.device) -> Tower:
    """The image tower of a model of kind image or image-text, in evaluation mode."""
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.left.modality != "image":
        raise DualencError(f"{model}: is of kind {encoder.kind} and encodes no images; give a model of kind image")
    encoder.eval()
    return encoder.left


class AugmentedPrepare:
    """A tower's evaluation preprocessing, of images augmented before it: the same for all models; picklable.

    `augment` takes an image and a seed to pixels (3, H, W) in [0, 1] or to an image.
    """

    def __init__(self, prepare: PrepareImages, augment: Callable[[Image.Image, int], Any]) -> None:
        self.prepare, self.augment = prepare, augment

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> Inputs:
        if seeds is None:
            return self.prepare(items)
        views = [self.augment(item, seed) for item, seed in zip(items, seeds, strict=True)]
        for place, view in enumerate(views):
            if isinstance(view, torch.Tensor):
                pixels = (view.permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8)
                views[place] = Image.fromarray(pixels.numpy())
        return self.prepare(views)


def simclr_prepare(prepare: PrepareImages) -> AugmentedPrepare:
    """SimCLR's augmentation at the size of the tower's input, before the tower's preprocessing."""
    from dualenc.data.views import SimCLR

    side = prepare([Image.new("RGB", (64, 64))])["image"].shape[-1]
    return AugmentedPrepare(prepare, SimCLR(size=side))


def encoder_of(tower: Tower, output: Output) -> EncodeInputs:
    """Inputs of the tower to (B, D) float32 embeddings, or to the features that probes use."""
    device = next(tower.parameters()).device

    @torch.inference_mode()
    def encode(inputs: Inputs) -> np.ndarray:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        vectors: torch.Tensor = tower(on_device) if output == "embedding" else tower.features(on_device)
        return vectors.float().cpu().numpy()

    return encode
