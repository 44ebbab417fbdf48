"""Corruption robustness: encoding of corrupted versions, retrieval of the other view, and the
table."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.views import SimCLR
from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.corruptions import BENCHMARK, SEVERITIES, CorruptedImages
from dualenc.evaluation.probe import unit_rows
from dualenc.io.reading import read_json_object
from dualenc.io.terminal import printable
from dualenc.seeds import derive_seed
from dualenc.types import Inputs, Output, StrPath, Vectors

if TYPE_CHECKING:
    from dualenc.encoders import Tower

logger = logging.getLogger("dualenc.evaluation")

PrepareImages = Callable[..., Inputs]
EncodeInputs = Callable[[Inputs], Vectors]
Condition = tuple[str, int]
"""A corruption and its severity."""

CLEAN: Condition = ("clean", 1)
VERSIONS_PER_FORWARD = 256


class SimCLRPrepare:
    """SimCLR's augmentation at the size of a tower's input, before the tower's preprocessing;
    picklable."""

    def __init__(self, prepare: PrepareImages) -> None:
        self.prepare = prepare
        self.augment = SimCLR(size=prepare([Image.new("RGB", (64, 64))])["image"].shape[-1])

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int]) -> Inputs:
        views = []
        for item, seed in zip(items, seeds, strict=True):
            pixels = self.augment(item, seed).permute(1, 2, 0) * 255
            whole = pixels.round().clamp(0, 255).to(torch.uint8)
            views.append(Image.fromarray(whole.numpy()))
        return self.prepare(views)


def encoder_of(tower: Tower, output: Output) -> EncodeInputs:
    """A function from inputs of the tower to (B, D) float32 embeddings, or to the features that
    probes use."""
    device = next(tower.parameters()).device
    forward = tower.features if output == "features" else tower

    @torch.inference_mode()
    def encode(inputs: Inputs) -> np.ndarray:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        return forward(on_device).float().cpu().numpy()

    return encode


class ImageVersions(Dataset[Any]):
    """Row i is image i under C conditions, prepared for a tower.

    With V `views` above 0, each version is augmented V times, by seeds of seed, image, condition
    and view; with 0 it is prepared as in evaluation.
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
            images = [
                self.source.image(index, name, severity) for name, severity in self.conditions
            ]
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


def measure_versions(
    versions: ImageVersions,
    encode: EncodeInputs,
    value_of: Callable[[list[int], Vectors], Vectors],
    indices: Sequence[int],
    *,
    num_workers: int = 0,
    what: str = "images",
    progress: bool = True,
) -> Vectors:
    """(n, …) what `value_of` gives for the n readable images, from their numbers and the features
    of their versions.

    About 256 versions are encoded at a time, in order; the same for any number of workers.
    Processes share the images. Images that cannot be read are left out and named.

    Args:
        versions, encode: what to encode, and inputs with first dimension B to (B, D).
        value_of: from m numbers and features (m, V, C, D) to (m, …); V is 1 without augmentation.
        indices: numbers of the images.
        num_workers: processes that corrupt and augment; 0 does it in this process.
        what: name of the pass in the progress bar and in messages.
        progress: show a progress bar.
    """
    shape = (max(versions.views, 1), len(versions.conditions))
    own = indices[distributed.rank_slice(len(indices))]
    loader = DataLoader(
        versions,
        batch_size=max(1, VERSIONS_PER_FORWARD // math.prod(shape)),
        sampler=own,
        num_workers=num_workers,
        collate_fn=list,
        worker_init_fn=_one_thread,
    )
    values: list[Vectors] = []
    hidden = not (progress and distributed.is_main())
    with tqdm(total=len(own), desc=what, unit=" images", disable=hidden) as bar:
        for rows in loader:
            readable: dict[int, Inputs] = {}
            for index, row in rows:
                if isinstance(row, BadSample):
                    # File names and errors may hold control characters.
                    logger.warning("%s: left out %s", what, printable(row))
                elif isinstance(row, DualencError):
                    raise row
                else:
                    readable[index] = row
            if readable:
                parts = list(readable.values())
                encoded = encode(
                    {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                )
                values.append(value_of(list(readable), encoded.reshape(len(parts), *shape, -1)))
            bar.update(len(rows))
    blocks = [block for part in distributed.gather_objects(values) for block in part]
    if not blocks:
        raise DualencError(f"{what}: none of {len(indices)} images can be read; check the data")
    return np.concatenate(blocks)


def _one_thread(worker: int) -> None:
    """OpenCV's threads do not survive a fork and would compete with the other workers."""
    if importlib.util.find_spec("cv2") is not None:
        importlib.import_module("cv2").setNumThreads(0)


Nearest = npt.NDArray[np.int64]
TIE = -1


def nearest_versions(features: Vectors) -> Nearest:
    """Which version each view finds among the views of the other kind of its image, by cosine.

    Args:
        features: (n, 2, K, D) first and second views of K versions of n images; scaled to unit norm
            here.

    Returns:
        (n, 2, K) numbers of versions, found by first views among the second ones, and by second
        among first; −1 for a
        tie: an encoder that maps everything to one point finds nothing.
    """
    rows = unit_rows(features.reshape(-1, features.shape[-1]), "embeddings").reshape(features.shape)
    similarities = rows[:, 0] @ rows[:, 1].swapaxes(1, 2)
    nearest = []
    for scores in (similarities, similarities.swapaxes(1, 2)):
        # An encoder that maps everything to one point must not win by argmax's choice of the first.
        tied = (scores == scores.max(axis=2, keepdims=True)).sum(axis=2) > 1
        nearest.append(np.where(tied, TIE, scores.argmax(axis=2)))
    return np.stack(nearest, axis=1)


def nearest_images(features: Vectors) -> Nearest:
    """Which image each view finds among the views of the other kind of all images, by cosine; exact
    search by FAISS.

    `features` are (N, 2, D) first and second views, scaled to unit norm here. Returns (N, 2)
    numbers of images, −1 for a tie: as `nearest_versions`.
    """
    if len(features) < 2:
        raise DualencError("one image cannot be found among others; give two or more")
    first = unit_rows(features[:, 0], "embeddings")
    second = unit_rows(features[:, 1], "embeddings")
    nearest = []
    for queries, items in ((first, second), (second, first)):
        scores, rows = faiss.knn(queries, items, 2, faiss.METRIC_INNER_PRODUCT)
        nearest.append(np.where(scores[:, 0] > scores[:, 1], rows[:, 0], TIE))
    return np.stack(nearest, axis=1)


def summarize_nearest(nearest: Nearest, versions: Sequence[str] = ()) -> dict[str, float]:
    """Top-1 accuracies: "top1", and "top1/NAME" of each version.

    `nearest` is (N, 2) of `nearest_images`, or (N, 2, K) of `nearest_versions` with the names of K
    versions.
    """
    own = np.arange(len(nearest))[:, None]
    if nearest.ndim == 3:
        own = np.arange(nearest.shape[2])
    hits = nearest == own
    by_version = {f"top1/{name}": float(hits[:, :, k].mean()) for k, name in enumerate(versions)}
    return {"top1": float(hits.mean()), **by_version}


def corruption_errors(
    errors: Mapping[str, Sequence[float]],
    baseline: Mapping[str, float],
) -> dict[str, float]:
    """Return CE of each corruption (Hendrycks & Dietterich 2019, arXiv:1903.12261, section 4.3).

    CE_c = Σ_s E_{s,c} / Σ_s E^baseline_{s,c}; the mean over corruptions is the mean corruption
    error (mCE), with AlexNet as the baseline. The four corruptions for validation have none.

    Args:
        errors: error rates from 0 to 1 by corruption, one for each severity.
        baseline: mean error rate over the same severities by corruption, of `read_baseline`.

    Raises:
        DualencError: the baseline lacks a corruption, or makes no errors under one.
    """
    tested = [name for name in errors if name in BENCHMARK]
    if not tested:
        raise DualencError("the baseline is for corruptions of the benchmark, and none is tested")
    for name in tested:
        if not baseline.get(name):
            problem = "makes no errors" if name in baseline else "has no errors"
            raise DualencError(f"the baseline {problem} under {name}; name a baseline for it")
    return {name: float(np.mean(errors[name])) / baseline[name] for name in tested}


def read_baseline(path: StrPath) -> dict[str, float]:
    """Read a baseline's mean error rates, from 0 to 1, by corruption.

    Args:
        path: metrics.json of an evaluation, or {"fog": [e₁, …, e₅], …}, with the error rate of each
            of the five severities or their mean.
    """
    content = read_json_object(path)
    values = content.get("robustness", content)
    values = values.get("errors", values) if isinstance(values, dict) else {}
    values = values if isinstance(values, dict) else {}
    means = {}
    for name in BENCHMARK:
        if name in values:
            rates = values[name]
            if isinstance(rates, dict):
                rates = [rates.get(str(severity)) for severity in SEVERITIES]
            rates = rates if isinstance(rates, list) else [rates] * len(SEVERITIES)
            if len(rates) != len(SEVERITIES) or not all(map(_is_rate, rates)):
                form = "an error rate from 0 to 1 for each of the five severities, or their mean"
                raise DualencError(f"{path}: {name!r} is {values[name]!r}; give {form}")
            means[name] = float(np.mean(rates))
    if not means:
        raise DualencError(f'{path}: has no errors by corruption; give {{"fog": [0.3, …], …}}')
    return means


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def robustness_rows(
    errors: Vectors, corruptions: Sequence[str], severities: Sequence[int]
) -> list[dict[str, str | float]]:
    """Table rows from (K, S) error rates: accuracies of each corruption and their mean, and a last
    row of means."""
    rows: list[dict[str, str | float]] = []
    accuracies = np.concatenate([1 - errors, (1 - errors).mean(axis=0, keepdims=True)])
    for name, row in zip([*corruptions, "mean"], accuracies):
        cells = {f"severity {severity}": float(value) for severity, value in zip(severities, row)}
        rows.append({"corruption": name, **cells, "mean": float(row.mean())})
    return rows
