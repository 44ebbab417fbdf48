"""Results of single items, written as they come, so that an interrupted evaluation goes on where it stopped."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import faiss
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from dualenc import distributed
from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.corruptions import CorruptedImages, Images, stable_seed
from dualenc.evaluation.probe import Features, unit_rows
from dualenc.files import full_disk_told, open_regular, remove, removed_if_refused
from dualenc.types import Inputs

Signature = dict[str, Any]
Key = TypeVar("Key", int, str)


class Ledger(Generic[Key]):
    """Values by number or name of an item in a folder, one JSON line each; every process appends to a file of its own.

    Lines of all processes are read back, whatever their number was. A line cut short by a kill, or otherwise damaged,
    is left out, and files that another model, other data or other settings wrote are removed.

    Args:
        folder: Where the files are; made with the first value.
        signature: Everything that the values depend on, as plain values: settings, and checksums of the weights and
            of the data (`Corpus.identity`), whose names may stay while their contents change.
    """

    def __init__(self, folder: str | os.PathLike[str], signature: Signature):
        self.folder = Path(folder)
        self.signature = json.loads(json.dumps(signature))
        self.path = self.folder / f"part-{distributed.rank():05d}.ndjson"
        if distributed.is_main():
            for part in self._parts():
                if _read(part)[0] != self.signature:
                    remove(part)
        distributed.barrier()
        self.values: dict[Key, Any] = {}
        for part in self._parts():
            self.values.update(_read(part)[1])
        distributed.barrier()

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the items without a value that this process should do."""
        left = [key for key in keys if key not in self.values]
        return left[distributed.rank_slice(len(left))]

    def add(self, values: dict[Key, Any]) -> None:
        """Append values by item."""
        lines = [] if self.path.exists() else [json.dumps({"signature": self.signature})]
        lines += [
            json.dumps({"item": key, "value": value, "check": _check(key, value)}) for key, value in values.items()
        ]
        size = self.path.stat().st_size if self.path.exists() else 0
        with removed_if_refused(self.folder), full_disk_told(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(self.path, "a", encoding="utf-8") as stream:
                    # A first newline ends a line that a kill cut short.
                    stream.write("\n" + "\n".join(lines) + "\n")
            except OSError:
                if size:
                    os.truncate(self.path, size)
                else:
                    remove(self.path)
                raise
        self.values.update(values)

    def all_values(self) -> dict[Key, Any]:
        """The values of all processes by item, in order; all processes call it together."""
        merged = {key: value for values in distributed.gather_objects(self.values) for key, value in values.items()}
        return dict(sorted(merged.items()))

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.ndjson"))


def _read(part: Path) -> tuple[Signature | None, dict[Any, Any]]:
    """The signature and the values of one file; whatever is not a line that `Ledger.add` wrote is left out."""
    signature: Signature | None = None
    values: dict[Any, Any] = {}
    try:
        with open_regular(part) as stream:
            lines = stream.read().splitlines()
    except (DualencError, OSError):
        return None, {}
    for line in lines:
        try:
            entry = json.loads(line)
            if "signature" in entry:
                signature = entry["signature"]
            elif entry["check"] == _check(entry["item"], entry["value"]):
                values[entry["item"]] = entry["value"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return signature, values


def _check(key: int | str, value: Any) -> int:
    return zlib.crc32(json.dumps([key, value]).encode())


Prepare = Callable[..., Inputs]
EncodeInputs = Callable[["Inputs"], npt.NDArray[np.floating]]
Condition = tuple[str, int]
"""A corruption and its severity."""

CLEAN: Condition = ("clean", 1)
_VERSIONS_PER_FORWARD = 256


class CleanImages:
    """Images as they are, in the shape of a corrupted set: its one "corruption" is called "clean".

    Args:
        images: The N images, RGB.
        labels: (N,) class numbers, where there are any.
        class_names: Name of each class number.
    """

    corruptions = (CLEAN[0],)
    severities = (CLEAN[1],)

    def __init__(
        self, images: Images, labels: npt.NDArray[np.int64] | None = None, class_names: list[str] | None = None
    ):
        self.images, self.labels, self.class_names = images, labels, class_names

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, corruption: str = CLEAN[0], severity: int = CLEAN[1]) -> Image.Image:
        """Image `index`, RGB."""
        return self.images[index].convert("RGB")


class ImageVersions(Dataset[Any]):
    """Row i is image i under every condition, prepared for a tower; in `views` augmentations each.

    Args:
        source: The images.
        conditions: C pairs of corruption and severity.
        prepare: The tower's; called with seeds (training augmentation) if `views` is above 0.
        views: Number V of augmented views of each version; 0 for the preprocessing of evaluation.
        seed: Of the augmentation, which is a function of seed, image, condition and view.
    """

    def __init__(
        self,
        source: CorruptedImages | CleanImages,
        conditions: Sequence[Condition],
        prepare: Prepare,
        *,
        views: int = 0,
        seed: int = 0,
    ):
        self.source, self.conditions, self.prepare = source, list(conditions), prepare
        self.views, self.seed = views, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Inputs | DualencError]:
        """The image's number, and inputs with first dimension V·C, or what is wrong with the image."""
        try:
            images = [self.source.image(index, name, severity) for name, severity in self.conditions]
        except DualencError as error:
            return index, error  # raised by a worker it would come out with the worker's traceback
        if not self.views:
            return index, self.prepare(images)
        seeds = [
            stable_seed(self.seed, index, name, severity, view)
            for view in range(self.views)
            for name, severity in self.conditions
        ]
        return index, self.prepare(images * self.views, seeds)


class Encoded(NamedTuple):
    """A block of images, encoded.

    Attributes:
        indices: (n,) numbers of the images.
        features: (n, V, C, D); V is 1 without augmentation.
        bad: (number, reason) of images that cannot be read; they are not among `indices`.
    """

    indices: list[int]
    features: npt.NDArray[np.floating]
    bad: list[tuple[int, str]]


class _Collated(NamedTuple):
    """What a worker sends: numbers and inputs of the good images, reasons of the bad, and a user's mistake."""

    numbers: list[int]
    inputs: Inputs
    bad: list[tuple[int, str]]
    mistake: DualencError | None


def encode_versions(
    versions: ImageVersions,
    encode: EncodeInputs,
    *,
    indices: Iterable[int] | None = None,
    num_workers: int = 0,
    images_at_once: int | None = None,
) -> Iterator[Encoded]:
    """EncodeInputs all versions of each image, a few images at a time, in order; the same for any number of workers.

    Args:
        versions: What to encode.
        encode: Inputs with first dimension B to (B, D).
        indices: Numbers of the images to do; all by default.
        num_workers: Processes that corrupt and augment; 0 does it in this process.
        images_at_once: n; by default so many that about 256 versions are encoded together.

    Raises:
        DualencError: an image is too small to be corrupted, or `encode` gives another shape.
    """
    order = list(range(len(versions)) if indices is None else indices)
    shape = (max(versions.views, 1), len(versions.conditions))
    loader = DataLoader(
        versions,
        batch_size=images_at_once or max(1, _VERSIONS_PER_FORWARD // (shape[0] * shape[1])),
        sampler=order,
        num_workers=num_workers,
        collate_fn=_collate,
        worker_init_fn=_one_thread,
    )
    for numbers, inputs, bad, mistake in loader:
        if mistake is not None:
            raise mistake
        if numbers:
            features = np.asarray(encode(inputs))
            if features.ndim != 2 or len(features) != len(numbers) * shape[0] * shape[1]:
                raise DualencError(
                    f"encode gave shape {features.shape} for {len(numbers) * shape[0] * shape[1]} images"
                )
            yield Encoded(numbers, features.reshape(len(numbers), *shape, -1), bad)
        elif bad:
            yield Encoded([], np.zeros((0, *shape, 0)), bad)


def _collate(rows: list[tuple[int, Inputs | DualencError]]) -> _Collated:
    good = [(index, row) for index, row in rows if not isinstance(row, DualencError)]
    wrong = [(index, row) for index, row in rows if isinstance(row, DualencError)]
    mistake = next((error for _, error in wrong if not isinstance(error, BadSample)), None)
    inputs = {name: torch.cat([row[name] for _, row in good]) for name in (good[0][1] if good else {})}
    return _Collated([index for index, _ in good], inputs, [(index, str(error)) for index, error in wrong], mistake)


def _one_thread(worker: int) -> None:
    """OpenCV's threads do not survive a fork and would compete with the other workers."""
    try:
        import cv2
    except ImportError:
        return
    cv2.setNumThreads(0)


Found = npt.NDArray[np.int64]
TIE = -1


def nearest_versions(features: Features) -> Found:
    """Which version each view finds among the views of the other kind of its image, by cosine.

    Args:
        features: (n, 2, K, D) first and second views of K versions of n images; scaled to unit norm here.

    Returns:
        (n, 2, K) numbers of versions: [:, 0] found by first views among the second ones, [:, 1] by second among first.
        −1 where the nearest two are equally near: an encoder that maps everything to one point finds nothing.

    Raises:
        DualencError: another shape, or not finite.
    """
    if features.ndim != 4 or features.shape[1] != 2 or features.shape[2] < 2:
        raise DualencError(f"features have shape {features.shape}; (images, 2 views, 2+ versions, dimension) is needed")
    rows = unit_rows(features.reshape(-1, features.shape[-1]), "embeddings").reshape(features.shape)
    # K candidates per query: a product of small matrices; an index for each image would only add to it.
    similarities = rows[:, 0] @ rows[:, 1].swapaxes(1, 2)
    return np.stack([_best_columns(similarities), _best_columns(similarities.swapaxes(1, 2))], axis=1)


def nearest_images(features: Features) -> Found:
    """Which image each view finds among the views of the other kind of all images, by cosine; exact search by FAISS.

    Args:
        features: (N, 2, D) first and second view of N images; scaled to unit norm here.

    Returns:
        (N, 2) numbers of images, −1 for a tie: as `nearest_versions`.

    Raises:
        DualencError: another shape, one image only, or not finite.
    """
    if features.ndim != 3 or features.shape[1] != 2 or len(features) < 2:
        raise DualencError(
            f"features have shape {features.shape}; (images, 2 views, dimension) of two images is needed"
        )
    first, second = (unit_rows(features[:, view], "embeddings") for view in (0, 1))
    return np.stack([_search(first, second), _search(second, first)], axis=1)


def summarise(found: Found, versions: Sequence[str] = ()) -> dict[str, float]:
    """Top-1 accuracies: of both directions together, of each, and of each version.

    Args:
        found: (N, 2) of `nearest_images`, or (N, 2, K) of `nearest_versions`.
        versions: K names, for the latter.

    Returns:
        "top1", "top1_first_to_second", "top1_second_to_first", and "top1/NAME" for each version.

    Raises:
        DualencError: there is no image.
    """
    if len(found) == 0:
        raise DualencError("no image was compared; the data is empty or every image is bad")
    hits = is_right(found)
    means = {
        "top1": float(hits.mean()),
        "top1_first_to_second": float(hits[:, 0].mean()),
        "top1_second_to_first": float(hits[:, 1].mean()),
    }
    return means | {f"top1/{name}": float(hits[:, :, k].mean()) for k, name in enumerate(versions)}


def is_right(found: Found) -> npt.NDArray[np.bool_]:
    """Whether each view found its own pair, in the shape of `found`: (N, 2) or (N, 2, K)."""
    return found == (np.arange(found.shape[2]) if found.ndim == 3 else np.arange(len(found))[:, None])


def confusions(found: Found) -> npt.NDArray[np.float64]:
    """(K, K) how often a view of version k (row) finds version j (column) first; rows sum to 1 less the ties.

    Args:
        found: (N, 2, K) of `nearest_versions`.
    """
    num_versions = found.shape[2]
    counts = (found[..., None] == np.arange(num_versions)).sum(axis=(0, 1))
    return counts / (2 * len(found))


def _best_columns(similarities: npt.NDArray[np.float32]) -> Found:
    """(n, K) number of the highest entry of each row of (n, K, K), −1 if another is as high."""
    best = similarities.max(axis=2, keepdims=True)
    tied = (similarities == best).sum(axis=2) > 1
    return np.where(tied, TIE, similarities.argmax(axis=2))


def _search(queries: npt.NDArray[np.float32], items: npt.NDArray[np.float32]) -> Found:
    scores, nearest = faiss.knn(queries, items, 2, faiss.METRIC_INNER_PRODUCT)
    return np.where(scores[:, 0] > scores[:, 1], nearest[:, 0], TIE)


Errors = npt.NDArray[np.floating]


def error_rates(right: npt.NDArray[np.bool_]) -> Errors:
    """Share of images classified wrongly, of each condition.

    Args:
        right: (N, ...) whether image i is classified rightly under each condition.
    """
    if len(right) == 0:
        raise DualencError("no image was classified; the data is empty or every image is bad")
    return 1 - right.mean(axis=0)


def mean_corruption_error(errors: Errors, baseline: Errors | None = None) -> float:
    """Mean corruption error, unnormalised or relative to a baseline (Hendrycks & Dietterich 2019, §4.1).

    Args:
        errors: (K, S) error rates of K corruptions at S severities.
        baseline: (K, S) of the classifier to compare with. Given, the errors of a corruption are summed over
            severities and divided by the baseline's sum, and the K quotients averaged. Without, the plain mean of
            all errors, as papers on CIFAR-C report it.

    Raises:
        DualencError: the shapes differ, or the baseline makes no error under a corruption.
    """
    if errors.ndim != 2 or errors.size == 0:
        raise DualencError(f"errors have shape {errors.shape}; (corruptions, severities) is needed")
    if baseline is None:
        return float(errors.mean())
    if baseline.shape != errors.shape:
        raise DualencError(f"the baseline's errors have shape {baseline.shape}, these {errors.shape}")
    if (baseline.sum(axis=1) <= 0).any():
        row = int(np.argmin(baseline.sum(axis=1)))
        raise DualencError(f"the baseline makes no error under corruption {row}; its error cannot be divided by")
    return float(np.mean(errors.sum(axis=1) / baseline.sum(axis=1)))


def robustness_rows(
    errors: Errors, corruptions: Sequence[str], severities: Sequence[int]
) -> list[dict[str, str | float]]:
    """Rows of a table: accuracy of each corruption at each severity and their mean, and a last row of means.

    Args:
        errors: (K, S) error rates.
        corruptions: K names.
        severities: S numbers.
    """
    if errors.shape != (len(corruptions), len(severities)):
        raise DualencError(f"errors of shape {errors.shape} for {len(corruptions)} corruptions x {len(severities)}")
    accuracies = 1 - errors
    rows = [_row(name, row, severities) for name, row in zip(corruptions, accuracies)]
    return [*rows, _row("mean", accuracies.mean(axis=0), severities)]


def as_mapping(errors: Errors, corruptions: Sequence[str], severities: Sequence[int]) -> dict[str, dict[str, float]]:
    """(K, S) numbers by corruption and severity, as `metrics.json` keeps them."""
    return {
        name: {str(severity): float(value) for severity, value in zip(severities, row)}
        for name, row in zip(corruptions, errors)
    }


def from_mapping(
    found: Mapping[str, Mapping[str, float]], corruptions: Sequence[str], severities: Sequence[int]
) -> Errors:
    """The (K, S) numbers back from `as_mapping`, in this order.

    Raises:
        DualencError: a corruption or a severity is not there, or its number is no rate.
    """
    for name in corruptions:
        for severity in severities:
            value = found.get(name, {}).get(str(severity))
            if value is None:
                raise DualencError(
                    f"the baseline has no error of {name} at severity {severity}; evaluate it on the same"
                )
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise DualencError(f"the baseline's error of {name} at severity {severity} is no rate from 0 to 1")
    return np.array([[found[name][str(severity)] for severity in severities] for name in corruptions], float)


def _row(name: str, accuracies: Errors, severities: Sequence[int]) -> dict[str, str | float]:
    cells: dict[str, str | float] = {"corruption": name}
    cells.update({f"severity {severity}": float(value) for severity, value in zip(severities, accuracies)})
    cells["mean"] = float(accuracies.mean())
    return cells
