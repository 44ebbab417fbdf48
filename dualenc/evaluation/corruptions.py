"""Image corruptions, each a pure function of image, name, severity and seed.

Source: Hendrycks & Dietterich 2019, arXiv 1903.12261. The strengths are those of ImageNet-C, for
224 px. CIFAR-C and Tiny-ImageNet-C use weaker ones for their smaller images: compare with published
numbers on those files (`read_corrupted`), not on images corrupted here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualenc.data.readers.images import is_image
from dualenc.errors import DualencError, nearest
from dualenc.io.decoding import open_image, rgb_item
from dualenc.io.reading import open_regular
from dualenc.seeds import derive_seed
from dualenc.types import Integers, Items, one_or_several

Pixels = npt.NDArray[np.uint8]

ALL: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
    # For validation.
    "speckle_noise",
    "gaussian_blur",
    "spatter",
    "saturate",
)
"""The 15 corruptions of the benchmark, and four for validation."""
BENCHMARK = ALL[:15]
"""Corruptions that the mean corruption error averages."""

SEVERITIES: tuple[int, ...] = (1, 2, 3, 4, 5)
MIN_SIDE = 32
CIFAR = ".npy"
TINY_IMAGENET = "/1"
"""Suffixes of a corruption's name in a folder. "snow/1" and not "snow", which may be a class."""

# These two take a seed; without one they draw it from the operating system.
_OWN_GENERATOR = ("impulse_noise", "glass_blur")
# All threads share numpy's global generator.
_LOCK = threading.Lock()


class CorruptedImages:
    """Corrupted versions of the same N images. Base class of all sources.

        source = read_corrupted("CIFAR-10-C")
        image = source.image(0, "fog", severity=3)

    Attributes:
        corruptions: names of the corruptions.
        labels: (N,) class numbers, if known.
        class_names: names of the classes, if known.
    """

    corruptions: tuple[str, ...]
    labels: Integers | None = None
    class_names: list[str] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        """Return the version of image `index` (0…N−1) at a severity (1…5), in RGB."""
        raise NotImplementedError


class CleanImages(CorruptedImages):
    """Images that are the same under every corruption. For accuracy on clean images.

        source = CleanImages(corpus.items, corpus.labels, corpus.class_names)

    Args:
        images: N images.
        labels: (N,) class numbers.
        class_names: names of the classes.
    """

    def __init__(
        self, images: Items, labels: Integers | None = None, class_names: list[str] | None = None
    ):
        self.images = images
        self.labels = labels
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        return rgb_item(self.images[index], f"image {index}")


class GeneratedCorruptions(CorruptedImages):
    """Corruptions generated on the fly from images of at least 32 × 32. Picklable if `clean` is.

        source = GeneratedCorruptions(clean, ["fog", "snow"], seed=0)

    Args:
        clean: N clean images.
        corruptions: names from `ALL`.
        seed: random seed.
    """

    def __init__(self, clean: CleanImages, corruptions: Sequence[str] = ALL, *, seed: int = 0):
        corruptions = tuple(one_or_several(corruptions))
        for name in corruptions:
            _function(name)
        self.clean = clean
        self.labels = clean.labels
        self.class_names = clean.class_names
        self.corruptions = tuple(corruptions)
        self.seed = seed
        self._last: tuple[int, Pixels] | None = None

    def __len__(self) -> int:
        return len(self.clean)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        # An image is decoded once for all its corruptions, which are requested in a row.
        if self._last is None or self._last[0] != index:
            self._last = (index, np.asarray(self.clean.image(index, "clean", 1)))
        pixels = corrupt(self._last[1], corruption, severity, image_id=index, seed=self.seed)
        return Image.fromarray(pixels)


def corrupt(
    image: Pixels,
    corruption: str,
    severity: int = 1,
    *,
    image_id: int | str = 0,
    seed: int = 0,
) -> Pixels:
    """Return a corrupted version of an image, as a pure function of the arguments.

    The package `imagecorruptions-imaug` (extra `corruptions`) draws from numpy's global generator,
    from new generators of scikit-image and numpy, and from numba's own. All are seeded here, and
    the global one is restored afterwards.

    Args:
        image: (H, W, 3) uint8 RGB pixels, both sides at least 32.
        corruption: name from `ALL`.
        severity: 1 (weak) to 5.
        image_id: stable id of the image; different images get different noise.
        seed: random seed of the whole evaluation.

    Raises:
        DualencError: if the name is unknown, the image too small, or the package missing.
    """
    function = _function(corruption)
    height, width = image.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise DualencError(
            f"image {image_id} is {width}x{height}; corruptions need 32x32",
            fix="resize the images first",
        )
    own_seed = derive_seed(seed, image_id, corruption, severity, bits=32)
    keywords = {"seed": own_seed} if corruption in _OWN_GENERATOR else {}
    # Spatter divides 0 by 0 if no drop falls on a small image.
    with _LOCK, np.errstate(divide="ignore", invalid="ignore"):
        before = np.random.get_state()  # noqa: NPY002
        np.random.seed(own_seed)  # noqa: NPY002
        try:
            values = np.asarray(function(Image.fromarray(image), severity, **keywords))
        finally:
            np.random.set_state(before)  # noqa: NPY002
    # Pixels that are NaN stay clean.
    return np.where(np.isfinite(values), values, image).astype(np.uint8)


def _function(corruption: str) -> Callable[..., Any]:
    """Return the function of `imagecorruptions`."""
    if corruption not in ALL:
        raise DualencError(
            f"unknown corruption {corruption}{nearest(corruption, ALL)}",
            fix=f"choose from {', '.join(ALL)}",
        )
    # An optional package, which imports numba.
    try:
        import imagecorruptions
    except ImportError:
        raise DualencError(
            "making corrupted images needs the package imagecorruptions-imaug: "
            "pip install 'dualenc[corruptions]'"
        ) from None
    return imagecorruptions.corruption_dict[corruption]


def is_corrupted_folder(path: str | Path) -> bool:
    """Return True if a folder looks like CIFAR-C or Tiny-ImageNet-C, by the names in it.

    Args:
        path: folder.
    """
    return bool(_available(Path(path), CIFAR) or _available(Path(path), TINY_IMAGENET))


def read_corrupted(path: str | Path, corruptions: Sequence[str] = ()) -> CorruptedImages:
    """Open a CIFAR-C or Tiny-ImageNet-C folder.

    Args:
        path: folder.
        corruptions: names to read; by default all in the folder.
    """
    if _available(Path(path), CIFAR):
        return CifarC(path, corruptions)
    return TinyImageNetC(path, corruptions)


class CifarC(CorruptedImages):
    """CIFAR-10-C or CIFAR-100-C. Pixels are memory-mapped; the object pickles to its paths.

        source = CifarC("CIFAR-10-C", ["fog"])

    Args:
        path: folder with labels.npy, and for each corruption `<corruption>.npy` of
            (5N, 32, 32, 3) uint8 pixels, N images per severity.
        corruptions: names to read; by default all in the folder.

    Raises:
        DualencError: if a file is missing or has another shape.
    """

    labels: Integers

    def __init__(self, path: str | Path, corruptions: Sequence[str] = ()):
        self.path = Path(path)
        self.corruptions = _choose(self.path, CIFAR, corruptions)
        labels = _read_npy(self.path / "labels.npy").reshape(-1)
        num_images = len(labels) // len(SEVERITIES)
        repeated = np.tile(labels[:num_images], len(SEVERITIES))
        if num_images == 0 or not np.array_equal(labels, repeated):
            raise DualencError(
                f"{len(labels)} labels are not five equal blocks, one per severity",
                fix="download the folder again",
                where=f"{self.path}/labels.npy",
            )
        for name in self.corruptions:
            pixels = _read_npy(self.path / f"{name}.npy")
            is_image = pixels.ndim == 4 and pixels.shape[::3] == (len(labels), 3)
            if not is_image or pixels.dtype != np.uint8:
                raise DualencError(
                    f"is {pixels.dtype} of shape {pixels.shape}, "
                    f"not uint8 ({len(labels)}, H, W, 3)",
                    fix="download the file again",
                    where=f"{self.path}/{name}.npy",
                )
        self.labels = labels[:num_images].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        # `range` checks the index, which would otherwise read another severity.
        row = (severity - 1) * len(self) + range(len(self))[index]
        pixels = _read_npy(self.path / f"{corruption}.npy")[row]
        return Image.fromarray(np.array(pixels))


class TinyImageNetC(CorruptedImages):
    """Tiny-ImageNet-C or ImageNet-C. Every corruption and severity has the same file names.

        source = TinyImageNetC("Tiny-ImageNet-C", ["fog"])

    Args:
        path: folder with `<corruption>/<severity>/<class>/<name>.JPEG` files.
        corruptions: names to read; by default all in the folder.

    Raises:
        DualencError: if the folder does not contain images.
    """

    def __init__(self, path: str | Path, corruptions: Sequence[str] = ()):
        self.path = Path(path)
        self.corruptions = _choose(self.path, TINY_IMAGENET, corruptions)
        folder = self.path / self.corruptions[0] / str(SEVERITIES[0])
        files = [file for file in folder.glob("*/*") if is_image(file)]
        self.names = sorted(f"{file.parent.name}/{file.name}" for file in files)
        if not self.names:
            raise DualencError(
                "no <class>/<name>.JPEG files", fix="download the folder again", where=folder
            )
        class_of_image = [name.split("/")[0] for name in self.names]
        classes, self.labels = np.unique(class_of_image, return_inverse=True)
        self.class_names = classes.tolist()

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        return open_image(self.path / corruption / str(severity) / self.names[index])


def _available(folder: Path, suffix: str) -> list[str]:
    """Return the corruptions in a folder, in the benchmark's order."""
    return [name for name in ALL if (folder / f"{name}{suffix}").exists()]


def _choose(folder: Path, suffix: str, requested: Sequence[str]) -> tuple[str, ...]:
    """Return the requested corruptions, by default all in the folder; raise if one is missing."""
    available = _available(folder, suffix)
    chosen = tuple(one_or_several(requested)) or available or ALL[:1]
    for name in chosen:
        if name not in available:
            listed = ", ".join(available) or "none; is it CIFAR-C or Tiny-ImageNet-C?"
            raise DualencError(
                f"no such file or folder{nearest(name, available)}",
                fix=f"there are {listed}",
                where=f"{folder}/{name}{suffix}",
            )
    return tuple(chosen)


def _read_npy(file: Path) -> npt.NDArray[Any]:
    """Map an array of a regular file into memory."""
    try:
        open_regular(file).close()
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DualencError("no such file", fix="is the folder complete?", where=file) from None
    except DualencError:
        raise
    except Exception as error:
        # Any type: numpy evaluates a damaged header as Python literals, and its message names
        # parser objects.
        raise DualencError(
            f"not a complete .npy file ({type(error).__name__})",
            fix="download it again",
            where=file,
        ) from None
