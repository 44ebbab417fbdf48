"""Many versions of each image (corruptions × severities × augmented views), prepared in workers, encoded in a stream.

At most a few images' versions are in memory at a time, whatever the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.corruption import CorruptedImages, Images, stable_seed

Inputs = dict[str, Tensor]
Prepare = Callable[..., Inputs]
Encode = Callable[[Inputs], npt.NDArray[np.floating]]
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


class ImageVersions(Dataset[tuple[int, Inputs | DualencError]]):
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
    encode: Encode,
    *,
    indices: Iterable[int] | None = None,
    num_workers: int = 0,
    images_at_once: int | None = None,
) -> Iterator[Encoded]:
    """Encode all versions of each image, a few images at a time, in order; the same for any number of workers.

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
