"""Shared parts of the evaluation commands: ranges of options, processes, models, embeddings, images, the report."""

from __future__ import annotations

import hashlib
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

# The commands for each kind of model, for the error message when the kind is wrong.
_COMMAND_OF = {
    "query-document": "`dualenc evaluate retrieval`",
    "image-text": "`dualenc evaluate image-text` or `zero-shot`",
    "image": "`dualenc evaluate probe` or `corrupted`",
    "vector": "`dualenc evaluate retrieval`",
}

MAX_WORKERS = 1024
MAX_ITEMS = 1 << 20
"""In a batch."""
RESULT = "metrics.json"
PAGE = "report.html"
UNFINISHED = {"embeddings", "features", "finished", "run.trec", "per_query.ndjson"}
UNFINISHED |= {"bm25", "hybrid", "reranked", "engine", "image_to_text", "text_to_image"}
"""Files of an evaluation that was interrupted before its results."""
KEPT_EMBEDDINGS = [f"{place}/*/meta.json" for place in ("embeddings", "*/embeddings", "features", "finished")]
MAX_SEED = (1 << 32) - 1


class Evaluation:
    """The output of one evaluation: checked before any work, written at the end.

    Args:
        task: such as "retrieval".
        model: model folder or name.
        data: what is evaluated on.
        out: folder to write; by default one below `evaluations/TASK`, named after the model and the data.
        device: such as cpu or cuda:0; by default a GPU if there is one.

    Raises:
        DualencError: a folder that cannot be written or holds something else, or a device that is not there.
    """

    def __init__(self, task: str, model: str, data: str, out: str | None, device: str | None) -> None:
        self.task = task
        self.model = model
        self.folder = Path(out or f"evaluations/{task}/{display_name(model)}-{_distinct_name(data)}")
        self.weights: list[str] = []
        check_writable(self.folder)
        check_folder_target(self.folder, self._is_own_folder, f"evaluation of {task}")
        check_file_target(self.folder / RESULT)
        check_file_target(self.folder / PAGE)
        self.device = start_processes(device)

    def _is_own_folder(self, folder: Path) -> bool:
        """Whether a folder holds the results of the task, or nothing but unfinished work of an evaluation."""
        if (folder / RESULT).is_file():
            return read_json_object(folder / RESULT).get("task") == self.task
        return _is_unfinished(folder) or all(child.is_dir() and _is_unfinished(child) for child in folder.iterdir())

    def check_weights(self, *towers: Tower) -> None:
        """Record the checksums of the evaluated towers; an error if the folder holds an evaluation of other weights."""
        from dualenc.search.embed import tower_checksum

        self.weights = sorted({tower_checksum(tower) for tower in towers})
        if not _evaluated_weights(self.folder) <= set(self.weights):
            remedy = "choose another --out, or remove the folder"
            raise DualencError(
                f"{self.folder}: holds an evaluation of other weights than {self.model} has now; {remedy}"
            )

    def conclude(
        self,
        title: str,
        facts: Mapping[str, object],
        results: Mapping[str, object],
        tables: Sequence[Table],
        *,
        printed: int | None = None,
        figures: Sequence[Figure] = (),
        galleries: Sequence[Gallery] = (),
        files: str = "metrics and report.html",
    ) -> None:
        """Write metrics.json (facts and results) and report.html; print the first tables and where the files are."""
        weights = {"weights": self.weights} if self.weights else {}
        write_json(self.folder / RESULT, {"task": self.task, **facts, **weights, **results})
        write_report(self.folder / PAGE, title, facts=facts, tables=tables, figures=figures, galleries=galleries)
        for table in tables[:printed]:
            print_table(table)
        print(printable(f"{files} are in {self.folder}"))


def _distinct_name(data: str) -> str:
    """The last part of a path or name, with a short hash that keeps data sets of the same name apart."""
    path = Path(data)
    whole = str(path.resolve()) if path.exists() else data
    return f"{path.stem}-{hashlib.sha256(whole.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


def _is_unfinished(folder: Path) -> bool:
    return all(name in UNFINISHED or name.startswith(".") for name in os.listdir(folder))


def _evaluated_weights(folder: Path) -> set[str]:
    """Checksums of the towers whose results or unfinished work a folder holds."""
    if (folder / RESULT).is_file():
        recorded = read_json_object(folder / RESULT).get("weights")
        if isinstance(recorded, list):  # earlier versions did not write them down
            return set(map(str, recorded))
    paths = [path for pattern in KEPT_EMBEDDINGS for path in folder.glob(pattern)]
    checksums = {str(read_json_object(path).get("model_checksum")) for path in paths}
    for part in folder.glob("finished/**/part-*.ndjson"):
        models = (read_signature(part) or {}).get("model", [])
        checksums |= {models} if isinstance(models, str) else set(map(str, models))
    return checksums


def start_processes(device: str | None = None) -> torch.device:
    """Join the other processes of `accelerate launch`, if there are any. Returns the device to work on.

    Without a name it is this process's GPU, or the CPU where there is none. A device that is not there is an error.
    """
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(usual if device is None else device)
        # Only use shows whether a device is there; "meta" has no values.
        torch.zeros(1, device=chosen).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DualencError(f"device {device!r}: {reason}; choose another, such as cpu or cuda:0") from None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
        return state.device if device is None else chosen
    return chosen


def check_range(minimum: float, maximum: float, **values: float | None) -> None:
    """Refuse numeric options, by name, outside a range; NaN is outside, None is an option that was not given."""
    for name, value in values.items():
        if value is not None and not minimum <= value <= maximum:
            allowed = f"lie between {minimum:,} and {maximum:,}"
            if maximum == math.inf:
                allowed = f"be at least {minimum:,}"
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
    """Embed into a folder below an evaluation's output; embeddings of another model or other data are replaced.

    Finished shards of an interrupted run are kept where the checksums of weights and items are the same.

    Args:
        folder: where to.
        tower: the model's side.
        corpus: what to embed.
        batch_size: items per forward pass.
        side: for models with two.
        model: what the user calls it, for the record.
        how: further arguments of `dualenc.search.embed.embed`.
    """
    from dualenc.data.identity import digest_of
    from dualenc.search.embed import embed, tower_checksum
    from dualenc.search.embeddings import is_embeddings

    # Changed items under the same ids are noticed by `embed` itself.
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
    """Make sure that files can be written to a folder, which need not exist; nothing is left behind."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise DualencError(f"{folder}: cannot be written, {existing} is a file; choose another --out")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:
        if isinstance(error, DualencError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DualencError(f"{folder}: cannot be written ({reason}); choose another --out") from None


def display_name(model: str) -> str:
    """Short name of a model in tables: its run if it is RUN/model, otherwise the last part of its path or name."""
    path = Path(model)
    if path.is_dir() and path.resolve().name == "model":
        path = path.resolve().parent
    return path.name or model


def random_rows(total: int, limit: int | None) -> np.ndarray:
    """All row numbers below `total`, or a sample of `limit` with a fixed seed: files are often sorted by class."""
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
    """Features to fit probes on or test them with; kept in `folder`, from which an interrupted run resumes."""
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
    """Augmentation, the same for all models, before a tower's evaluation preprocessing; picklable.

    `augment` takes an image and a seed to pixels (3, H, W) in [0, 1] or to an image.
    """

    def __init__(self, prepare: PrepareImages, augment: Callable[[Image.Image, int], Any]) -> None:
        self.prepare = prepare
        self.augment = augment

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
