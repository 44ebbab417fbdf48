"""Corruption robustness: encode corrupted versions, retrieve the other view, and compute errors."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from dualenc.io.cpus import usable_workers
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
TIMED_IMAGES = 3
MIN_ESTIMATED = 10
"""With fewer images an estimate would take as long as the evaluation."""


class SimCLRPrepare:
    """SimCLR's augmentation, followed by the preprocessing of a tower. Picklable for workers.

        prepare = SimCLRPrepare(tower.prepare)
        inputs = prepare([image, image], seeds=[0, 1])

    Args:
        prepare: preprocessing of the tower, whose input size the crops get.
    """

    def __init__(self, prepare: PrepareImages) -> None:
        self.prepare = prepare
        self.augment = SimCLR(size=prepare([Image.new("RGB", (64, 64))])["image"].shape[-1])

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int]) -> Inputs:
        """Return the inputs of one augmented view of each image."""
        # The tower prepares images, not tensors.
        pairs = zip(items, seeds, strict=True)
        return self.prepare([self.augment.image(item, seed) for item, seed in pairs])


def encoder_of(tower: Tower, output: Output) -> EncodeInputs:
    """Return a function from inputs of the tower to (B, D) float32 vectors.

    Args:
        tower: image tower.
        output: "embedding", or "features" for the vectors that probes use.
    """
    device = next(tower.parameters()).device
    forward = tower.features if output == "features" else tower

    @torch.inference_mode()
    def encode(inputs: Inputs) -> np.ndarray:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        return forward(on_device).float().cpu().numpy()

    return encode


class ImageVersions(Dataset[Any]):
    """Corrupted versions of images, prepared for a tower. Row i is image i under C conditions.

        versions = ImageVersions(source, [("fog", 1), ("snow", 1)], tower.prepare)

    Args:
        source: N images.
        conditions: C corruptions with severities.
        prepare: preprocessing of the tower; with `views` one that takes seeds, such as
            `SimCLRPrepare`.
        views: number V of augmented views of each version; 0 prepares it as in evaluation.
        seed: random seed of the augmentation, together with image, condition and view.
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
        """Return the image's number and inputs of V·C versions, or the error of a bad image."""
        try:
            images = [
                self.source.image(index, name, severity) for name, severity in self.conditions
            ]
        except DualencError as error:
            # Returned, not raised: an error raised in a worker arrives with its traceback.
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
    """Encode versions of images, and compute a value of each image from them.

    About 256 versions are encoded at a time, in order; results do not depend on the number of
    workers. Processes share the images. Unreadable images are left out and logged.

    Args:
        versions: prepared versions of the images.
        encode: function of inputs of B versions to (B, D) vectors.
        value_of: function of m image numbers and features (m, V, C, D) to (m, …); V is 1 without
            augmentation.
        indices: numbers of the images.
        num_workers: number of processes that corrupt and augment; 0 does it in this process.
        what: name of the pass in the progress bar and in messages.
        progress: show a progress bar.

    Returns:
        (n, …) values of the n readable images.

    Raises:
        DualencError: if no image can be read.
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
    with tqdm(total=len(own), desc=what, unit="image", disable=hidden) as bar:
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
                # One forward pass of all versions: (m · V · C, D).
                inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                features = encode(inputs).reshape(len(parts), *shape, -1)
                values.append(value_of(list(readable), features))
            bar.update(len(rows))
    blocks = [block for part in distributed.gather_objects(values) for block in part]
    if not blocks:
        raise DualencError(
            f"none of {len(indices)} images can be read", fix="check the data", where=what
        )
    return np.concatenate(blocks)


def estimate_seconds(
    versions: ImageVersions, encode: EncodeInputs, indices: Sequence[int], *, num_workers: int = 0
) -> float | None:
    """Estimate how long `measure_versions` takes, from the first readable images in this process.

    Args:
        versions: prepared versions of the images.
        encode: function of inputs of B versions to (B, D) vectors.
        indices: numbers of the images.
        num_workers: number of processes that corrupt and augment.

    Returns:
        Seconds; None if fewer than two of the first images can be read, or there are only a few.
    """
    if len(indices) < MIN_ESTIMATED:
        return None
    timed = []
    with _opencv_on_one_thread():
        for index in indices[:TIMED_IMAGES]:
            start = time.perf_counter()
            _, row = versions[index]
            prepared = time.perf_counter()
            if not isinstance(row, DualencError):
                encode(row)
                timed.append((prepared - start, time.perf_counter() - prepared))
    # The first image also loads libraries and compiles functions; forked workers inherit both.
    if len(timed) < 2:
        return None
    preparing, encoding = np.mean(timed[1:], axis=0).tolist()
    # Workers prepare the next images while this process encodes.
    parallel = usable_workers(num_workers)
    per_image = max(preparing / parallel, encoding) if parallel else preparing + encoding
    num_images = len(indices[distributed.rank_slice(len(indices))])
    return float(per_image * num_images)


@contextmanager
def _opencv_on_one_thread() -> Iterator[None]:
    """Turn off OpenCV's threads in this context: workers are forked later, where they break."""
    if importlib.util.find_spec("cv2") is None:
        yield
        return
    cv2 = importlib.import_module("cv2")
    before = cv2.getNumThreads()
    cv2.setNumThreads(0)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def _one_thread(worker: int) -> None:
    """Turn off OpenCV's threads, which break in forked workers and compete with them."""
    if importlib.util.find_spec("cv2") is not None:
        importlib.import_module("cv2").setNumThreads(0)


Nearest = npt.NDArray[np.int64]
TIE = -1


def nearest_versions(features: Vectors) -> Nearest:
    """Find the nearest version of each view among the other views of its image, by cosine.

    Args:
        features: (n, 2, K, D) first and second views of K versions of n images; scaled to unit norm
            here.

    Returns:
        (n, 2, K) numbers of versions: those that first views find among second views, and second
        among first. −1 for a tie.
    """
    flat = features.reshape(-1, features.shape[-1])
    rows = unit_rows(flat, "embeddings").reshape(features.shape)
    # (n, K, K): first views against second views.
    similarities = rows[:, 0] @ rows[:, 1].swapaxes(1, 2)
    nearest = []
    for scores in (similarities, similarities.swapaxes(1, 2)):
        # A collapsed encoder must not win because argmax takes the first of equal scores.
        best = scores.max(axis=2, keepdims=True)
        is_tied = (scores == best).sum(axis=2) > 1
        nearest.append(np.where(is_tied, TIE, scores.argmax(axis=2)))
    return np.stack(nearest, axis=1)


def nearest_images(features: Vectors) -> Nearest:
    """Find the nearest image of each view among the other views of all images, by cosine.

    Args:
        features: (N, 2, D) first and second views; scaled to unit norm here.

    Returns:
        (N, 2) numbers of images, −1 for a tie, as in `nearest_versions`.

    Raises:
        DualencError: if there is only one image.
    """
    if len(features) < 2:
        raise DualencError("one image cannot be found among others", fix="give two or more")
    first = unit_rows(features[:, 0], "embeddings")
    second = unit_rows(features[:, 1], "embeddings")
    nearest = []
    for queries, items in ((first, second), (second, first)):
        # The two best: equal scores are a tie.
        scores, rows = faiss.knn(queries, items, 2, faiss.METRIC_INNER_PRODUCT)
        is_clear = scores[:, 0] > scores[:, 1]
        nearest.append(np.where(is_clear, rows[:, 0], TIE))
    return np.stack(nearest, axis=1)


def summarize_nearest(nearest: Nearest, versions: Sequence[str] = ()) -> dict[str, float]:
    """Return top-1 accuracies: "top1", and "top1/NAME" of each version.

    Args:
        nearest: (N, 2) of `nearest_images`, or (N, 2, K) of `nearest_versions`.
        versions: names of the K versions.
    """
    # The correct answer is the image's own number, or the version's.
    own = np.arange(len(nearest))[:, None]
    if nearest.ndim == 3:
        own = np.arange(nearest.shape[2])
    hits = nearest == own
    scores = {"top1": float(hits.mean())}
    for number, name in enumerate(versions):
        scores[f"top1/{name}"] = float(hits[:, :, number].mean())
    return scores


def corruption_errors(
    errors: Mapping[str, Sequence[float]],
    baseline: Mapping[str, float],
) -> dict[str, float]:
    """Return the corruption error CE of each corruption of the benchmark.

    CE_c = Σ_s E_{s,c} / Σ_s E^baseline_{s,c} (Hendrycks & Dietterich 2019, arXiv 1903.12261,
    section 4.3). The mean over corruptions is the mean corruption error (mCE), with AlexNet as the
    baseline in the literature.

    Args:
        errors: error rates from 0 to 1 by corruption, one for each severity.
        baseline: mean error rate over the same severities by corruption, as of `read_baseline`.

    Raises:
        DualencError: if the baseline lacks a corruption, or its error rate is 0.
    """
    # The four validation corruptions are not part of the mean corruption error.
    tested = [name for name in errors if name in BENCHMARK]
    if not tested:
        raise DualencError(
            "the baseline is for corruptions of the benchmark",
            fix="test at least one of them",
        )
    for name in tested:
        if not baseline.get(name):
            problem = "has an error rate of 0" if name in baseline else "lacks an error rate"
            raise DualencError(f"the baseline {problem} under {name}", fix="give another baseline")
    return {name: float(np.mean(errors[name])) / baseline[name] for name in tested}


def read_baseline(path: StrPath) -> dict[str, float]:
    """Read a baseline's mean error rates, from 0 to 1, by corruption.

    Args:
        path: metrics.json of an evaluation, or {"fog": [e₁, …, e₅], …}, with the error rate of each
            of the five severities or their mean.

    Raises:
        DualencError: if a rate is invalid, or there is none.
    """
    content = read_json_object(path)
    values = content.get("robustness", content)
    values = values.get("errors", values) if isinstance(values, dict) else {}
    values = values if isinstance(values, dict) else {}
    means = {}
    for name in BENCHMARK:
        if name in values:
            rates = _rates_by_severity(values[name])
            if len(rates) != len(SEVERITIES) or not all(map(_is_rate, rates)):
                raise DualencError(
                    f"{name!r} is {values[name]!r}",
                    fix="give an error rate from 0 to 1 for each of the five severities, "
                    "or their mean",
                    where=path,
                )
            means[name] = float(np.mean(rates))
    if not means:
        raise DualencError(
            "does not contain error rates by corruption",
            fix='give {"fog": [0.3, …], …}',
            where=path,
        )
    return means


def _rates_by_severity(rates: Any) -> list[Any]:
    """Return a list of rates from {"1": rate, …}, a list, or their mean."""
    if isinstance(rates, dict):
        return [rates.get(str(severity)) for severity in SEVERITIES]
    return rates if isinstance(rates, list) else [rates] * len(SEVERITIES)


def _is_rate(value: object) -> bool:
    """Return True for a number from 0 to 1, which a truth value of JSON is not."""
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def robustness_rows(
    errors: Vectors,
    corruptions: Sequence[str],
    severities: Sequence[int],
) -> list[dict[str, str | float]]:
    """Return table rows of accuracies by severity: one per corruption, and a last one of means.

    Args:
        errors: (K, S) error rates.
        corruptions: names of the K corruptions.
        severities: the S severities.
    """
    rows: list[dict[str, str | float]] = []
    accuracies = 1 - errors
    means = accuracies.mean(axis=0, keepdims=True)
    for name, values in zip([*corruptions, "mean"], np.concatenate([accuracies, means])):
        accuracy_at = {str(severity): float(value) for severity, value in zip(severities, values)}
        rows.append({"corruption": name, **accuracy_at, "mean": float(values.mean())})
    return rows
