"""Image corruptions (Hendrycks & Dietterich 2019), each a pure function of image, name, severity and seed.

The package `imagecorruptions-imaug` (extra `corruptions`) draws from the global generator of numpy, from
fresh generators of scikit-image and numpy, and from numba's own; `corrupt` seeds all of them from its
arguments and puts the global one of numpy back, so order, worker count and other users of randomness make no
difference. (Numba's, which nothing else here uses, stays seeded.)

The strengths are those of ImageNet-C, made for 224 px. The CIFAR-C and Tiny-ImageNet-C files were made with
weaker ones for their smaller images: compare with published numbers on those files
(`dualenc.evaluation.corruption_folders`), not on images corrupted here.
"""

from __future__ import annotations

import difflib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualenc.errors import DualencError

Pixels = npt.NDArray[np.uint8]

STANDARD: tuple[str, ...] = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The 15 corruptions of the benchmark."""

ALL: tuple[str, ...] = (*STANDARD, "speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The 19 of CIFAR-C: the standard ones and four for validation."""

SEVERITIES: tuple[int, ...] = (1, 2, 3, 4, 5)
SMALLEST_SIDE = 32

# These two take a seed; left without one they ask the operating system for it.
_OWN_GENERATOR = ("impulse_noise", "glass_blur")
# The global generator is one for all threads.
_LOCK = threading.Lock()


class Images(Protocol):
    """N RGB images by number; a list is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Image.Image: ...


class CorruptedImages(Protocol):
    """Corrupted versions of the same N images, made or read one at a time."""

    corruptions: tuple[str, ...]
    severities: tuple[int, ...]

    @property
    def class_names(self) -> list[str] | None:
        """Name of each class number, where they are known."""
        ...

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """(N,) class numbers, where they are known."""
        ...

    def __len__(self) -> int: ...

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        """Version of image `index` (0…N−1) under a corruption at a severity (1…5), RGB."""
        ...


class GeneratedCorruptions:
    """Corruptions made on the fly from clean images; picklable if `images` is.

    Args:
        images: The N clean images, RGB, each at least 32 × 32.
        corruptions: Names from `ALL`; all 19 by default.
        seed: Of the noise.
        labels: (N,) class numbers, where there are any.
        class_names: Name of each class number.

    Raises:
        DualencError: unknown corruption, labels of another length, or the library is not installed.
    """

    severities = SEVERITIES

    def __init__(
        self,
        images: Images,
        corruptions: Sequence[str] = ALL,
        *,
        seed: int = 0,
        labels: npt.NDArray[np.integer] | None = None,
        class_names: list[str] | None = None,
    ):
        if labels is not None and len(labels) != len(images):
            raise DualencError(f"{len(images)} images but {len(labels)} labels; give one label per image")
        for name in corruptions:
            _function(name)
        self.images, self.corruptions, self.seed = images, tuple(corruptions), seed
        self.labels: npt.NDArray[np.int64] | None = None if labels is None else np.asarray(labels, np.int64)
        self.class_names = class_names
        self._last: tuple[int, Pixels] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        """Version of image `index` under a corruption at a severity, RGB."""
        pixels = self._pixels(index)
        return Image.fromarray(corrupt(pixels, corruption, severity, image_id=index, seed=self.seed))

    def _pixels(self, index: int) -> Pixels:
        """The clean image, decoded once for all its corruptions."""
        if self._last is None or self._last[0] != index:
            self._last = (index, np.asarray(self.images[index].convert("RGB")))
        return self._last[1]


def corrupt(image: Pixels, corruption: str, severity: int = 1, *, image_id: int | str = 0, seed: int = 0) -> Pixels:
    """One corrupted version of an image, always the same for the same arguments.

    Args:
        image: (H, W, 3) uint8 RGB pixels; both sides at least 32.
        corruption: A name from `ALL`.
        severity: 1 (weak) to 5.
        image_id: Stable id of the image: different images get different noise.
        seed: Of the whole evaluation.

    Returns:
        (H, W, 3) uint8.

    Raises:
        DualencError: unknown corruption or severity, wrong shape or type, an image too small, or
            `imagecorruptions-imaug` is not installed.
    """
    function = _function(corruption)
    if severity not in SEVERITIES:
        raise DualencError(f"severity={severity}: choose one of 1, 2, 3, 4, 5")
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise DualencError(f"image {image_id}: shape {image.shape} of {image.dtype}; give RGB as uint8 (H, W, 3)")
    if min(image.shape[:2]) < SMALLEST_SIDE:
        height, width = image.shape[:2]
        raise DualencError(f"image {image_id} is {width}x{height}; corruptions need 32x32, resize the images first")
    own_seed = stable_seed(seed, image_id, corruption, severity)
    keywords = {"seed": own_seed} if corruption in _OWN_GENERATOR else {}
    # Spatter divides by the largest drop; with no drop at all (small images) that is 0/0.
    with _global_generator(own_seed), np.errstate(divide="ignore", invalid="ignore"):
        values = np.asarray(function(Image.fromarray(image), severity, **keywords))
    return np.where(np.isfinite(values), values, image).astype(np.uint8)


def stable_seed(*parts: int | str) -> int:
    """A number in [0, 2³²) from any numbers and words; the same in every process and Python version."""
    plain = tuple(part if isinstance(part, str) else int(part) for part in parts)  # repr(np.int64(1)) differs
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=4).digest(), "little")


def check_corruptions(corruptions: Sequence[str], known: Sequence[str] = ALL) -> tuple[str, ...]:
    """The names as a tuple; an unknown one raises a `DualencError` that tells the nearest known one."""
    for name in corruptions:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise DualencError(f"unknown corruption {name}; {hint}")
    return tuple(corruptions)


def _function(corruption: str) -> Callable[..., Any]:
    check_corruptions([corruption])
    try:
        import imagecorruptions
    except ImportError:
        raise DualencError(
            "making corrupted images needs the package imagecorruptions-imaug: pip install 'dualenc[corruptions]'"
        ) from None
    return imagecorruptions.corruption_dict[corruption]


@contextmanager
def _global_generator(seed: int) -> Iterator[None]:
    """numpy's global generator seeded, and put back as it was afterwards."""
    with _LOCK:
        before = np.random.get_state()  # noqa: NPY002
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002
