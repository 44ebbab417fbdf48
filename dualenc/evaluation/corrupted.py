"""Corruption robustness: encoding of corrupted versions, retrieval of the other view, and the table."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import faiss
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.corruptions import CorruptedImages
from dualenc.evaluation.probe import unit_rows
from dualenc.reading import read_json_object
from dualenc.seeds import derive_seed
from dualenc.types import Inputs, Vectors

PrepareImages = Callable[..., Inputs]
EncodeInputs = Callable[[Inputs], npt.NDArray[np.floating]]
Condition = tuple[str, int]
"""A corruption and its severity."""

CLEAN: Condition = ("clean", 1)
_VERSIONS_PER_FORWARD = 256


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
        source: CorruptedImages,
        conditions: Sequence[Condition],
        prepare: PrepareImages,
        *,
        views: int = 0,
        seed: int = 0,
    ):
        self.source = source
        self.conditions = list(conditions)
        self.prepare = prepare
        self.views = views
        self.seed = seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Inputs | DualencError]:
        """The image's number, and inputs with first dimension V·C, or the error of a bad image."""
        try:
            images = [self.source.image(index, name, severity) for name, severity in self.conditions]
        except DualencError as error:
            # Returned: an error raised in a worker arrives with the worker's traceback.
            return index, error
        if not self.views:
            return index, self.prepare(images)
        seeds = [
            derive_seed(self.seed, index, name, severity, view, bits=32)
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


def encode_versions(
    versions: ImageVersions,
    encode: EncodeInputs,
    *,
    indices: Iterable[int] | None = None,
    num_workers: int = 0,
    batch_size: int | None = None,
) -> Iterator[Encoded]:
    """Encode all versions of each image, a few images at a time, in order; the same for any number of workers.

    Args:
        versions: What to encode.
        encode: Inputs with first dimension B to (B, D).
        indices: Numbers of the images to do; all by default.
        num_workers: Processes that corrupt and augment; 0 does it in this process.
        batch_size: n; by default about 256 versions are encoded together.

    Raises:
        DualencError: an image is too small to be corrupted.
    """
    num_views = max(versions.views, 1)
    num_conditions = len(versions.conditions)
    per_image = num_views * num_conditions
    loader = DataLoader(
        versions,
        batch_size=batch_size or max(1, _VERSIONS_PER_FORWARD // per_image),
        sampler=list(range(len(versions)) if indices is None else indices),
        num_workers=num_workers,
        collate_fn=_collate,
        worker_init_fn=_one_thread,
    )
    for numbers, inputs, bad, mistake in loader:
        if mistake is not None:
            raise mistake
        features = np.asarray(encode(inputs)) if numbers else np.zeros((0, 0))
        yield Encoded(numbers, features.reshape(len(numbers), num_views, num_conditions, features.shape[1]), bad)


def _collate(
    rows: list[tuple[int, Inputs | DualencError]],
) -> tuple[list[int], Inputs, list[tuple[int, str]], DualencError | None]:
    """Batch of a worker: numbers and inputs of the good images, reasons for the bad ones, and a user's mistake."""
    indices: list[int] = []
    parts: list[Inputs] = []
    bad: list[tuple[int, str]] = []
    mistake = None
    for index, row in rows:
        if not isinstance(row, DualencError):
            indices.append(index)
            parts.append(row)
            continue
        bad.append((index, str(row)))
        # A bad image is skipped; any other error is a wrong argument, and ends the evaluation.
        if mistake is None and not isinstance(row, BadSample):
            mistake = row
    inputs = {name: torch.cat([part[name] for part in parts]) for name in (parts or [{}])[0]}
    return indices, inputs, bad, mistake


def _one_thread(worker: int) -> None:
    """OpenCV's threads do not survive a fork and would compete with the other workers."""
    if importlib.util.find_spec("cv2") is not None:
        importlib.import_module("cv2").setNumThreads(0)


Found = npt.NDArray[np.int64]
TIE = -1


def nearest_versions(features: Vectors) -> Found:
    """Which version each view finds among the views of the other kind of its image, by cosine.

    Args:
        features: (n, 2, K, D) first and second views of K versions of n images; scaled to unit norm here.

    Returns:
        (n, 2, K) numbers of versions: [:, 0] found by first views among the second ones, [:, 1] by second among first.
        −1 where the nearest two are equally near: an encoder that maps everything to one point finds nothing.

    Raises:
        DualencError: an embedding is not finite.
    """
    rows = unit_rows(features.reshape(-1, features.shape[-1]), "embeddings").reshape(features.shape)
    # K candidates per query: a product of small matrices; an index for each image would only add to it.
    similarities = rows[:, 0] @ rows[:, 1].swapaxes(1, 2)
    found = []
    for scores in (similarities, similarities.swapaxes(1, 2)):
        # An encoder that maps everything to one point must not win by argmax's choice of the first.
        tied = (scores == scores.max(axis=2, keepdims=True)).sum(axis=2) > 1
        found.append(np.where(tied, TIE, scores.argmax(axis=2)))
    return np.stack(found, axis=1)


def nearest_images(features: Vectors) -> Found:
    """Which image each view finds among the views of the other kind of all images, by cosine; exact search by FAISS.

    Args:
        features: (N, 2, D) first and second view of N images; scaled to unit norm here.

    Returns:
        (N, 2) numbers of images, −1 for a tie: as `nearest_versions`.

    Raises:
        DualencError: one image only, or an embedding that is not finite.
    """
    if len(features) < 2:
        raise DualencError("one image cannot be found among others; give two or more")
    first, second = (unit_rows(features[:, view], "embeddings") for view in (0, 1))
    found = []
    for queries, items in ((first, second), (second, first)):
        scores, nearest = faiss.knn(queries, items, 2, faiss.METRIC_INNER_PRODUCT)
        found.append(np.where(scores[:, 0] > scores[:, 1], nearest[:, 0], TIE))
    return np.stack(found, axis=1)


def summarise(found: Found, versions: Sequence[str] = ()) -> dict[str, float]:
    """Top-1 accuracies: "top1", "top1_first_to_second", "top1_second_to_first", and "top1/NAME" of each version.

    Args:
        found: (N, 2) of `nearest_images`, or (N, 2, K) of `nearest_versions`.
        versions: K names, for the latter.
    """
    hits = is_right(found)
    means = {
        "top1": float(hits.mean()),
        "top1_first_to_second": float(hits[:, 0].mean()),
        "top1_second_to_first": float(hits[:, 1].mean()),
    }
    return means | {f"top1/{name}": float(hits[:, :, k].mean()) for k, name in enumerate(versions)}


def is_right(found: Found) -> npt.NDArray[np.bool_]:
    """Whether each view found its own pair, in the shape of `found`: (N, 2) or (N, 2, K)."""
    if found.ndim == 3:
        return found == np.arange(found.shape[2])
    return found == np.arange(len(found))[:, None]


def confusions(found: Found) -> npt.NDArray[np.float64]:
    """(K, K) how often a view of version k (row) finds version j (column), by (N, 2, K) of `nearest_versions`; rows sum
    to 1 less the ties."""
    num_versions = found.shape[2]
    counts = (found[..., None] == np.arange(num_versions)).sum(axis=(0, 1))
    return counts / (2 * len(found))


Errors = npt.NDArray[np.floating]


def mean_corruption_error(errors: Errors, baseline: Errors | None = None) -> float:
    """Mean corruption error, unnormalised or relative to a baseline (Hendrycks & Dietterich 2019, §4.1).

    Args:
        errors: (K, S) error rates of K corruptions at S severities.
        baseline: (K, S) of the classifier to compare with. Given, the errors of a corruption are summed over
            severities and divided by the baseline's sum, and the K quotients averaged. Without, the plain mean of
            all errors, as papers on CIFAR-C report it.
    """
    if baseline is None:
        return float(errors.mean())
    return float(np.mean(errors.sum(axis=1) / baseline.sum(axis=1)))


def robustness_rows(
    errors: Errors, corruptions: Sequence[str], severities: Sequence[int]
) -> list[dict[str, str | float]]:
    """Table rows from (K, S) error rates: accuracies of each corruption and their mean, and a last row of means."""
    rows: list[dict[str, str | float]] = []
    for name, row in zip([*corruptions, "mean"], [*(1 - errors), (1 - errors).mean(axis=0)]):
        cells = {f"severity {severity}": float(value) for severity, value in zip(severities, row)}
        rows.append({"corruption": name, **cells, "mean": float(row.mean())})
    return rows


def read_baseline(path: str | os.PathLike[str], corruptions: Sequence[str], severities: Sequence[int]) -> Errors:
    """Errors (K, S) of another model under K corruptions at S severities, from the metrics.json of its evaluation.

    Raises:
        DualencError: the file lacks such an error, or all under a corruption are 0: they cannot be divided by.
    """
    robustness = read_json_object(path).get("robustness")
    errors = robustness.get("errors") if isinstance(robustness, dict) else None
    if not isinstance(errors, dict) or not all(isinstance(row, dict) for row in errors.values()):
        raise DualencError(f"{path}: holds no corruption errors; give the metrics.json of an evaluation with --train")
    baseline = np.zeros((len(corruptions), len(severities)))
    for row, name in enumerate(corruptions):
        for column, severity in enumerate(severities):
            value = errors.get(name, {}).get(str(severity))
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                problem = f"the baseline has no error of {name} at severity {severity}, a rate from 0 to 1"
                raise DualencError(f"{path}: {problem}; evaluate it on the same")
            baseline[row, column] = value
        if not baseline[row].sum() > 0:
            raise DualencError(f"{path}: the baseline makes no error under {name}, which cannot be divided by")
    return baseline
