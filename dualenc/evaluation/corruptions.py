"""Image corruptions (Hendrycks & Dietterich 2019), each a pure function of image, name, severity
and seed.

The strengths are those of ImageNet-C, made for 224 px. CIFAR-C and Tiny-ImageNet-C were made with
weaker ones for their smaller images: compare with published numbers on those files
(`read_corrupted`), not on images corrupted here.
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
from dualenc.io.decoding import open_image
from dualenc.io.reading import open_regular
from dualenc.seeds import derive_seed
from dualenc.types import Integers, Items, one_or_several

Pixels = npt.NDArray[np.uint8]

ALL: tuple[str, ...] = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The 15 corruptions of the benchmark, and four for validation."""
BENCHMARK = ALL[:15]
"""Those that a mean corruption error is over."""

SEVERITIES: tuple[int, ...] = (1, 2, 3, 4, 5)
MIN_SIDE = 32
CIFAR = ".npy"
TINY_IMAGENET = "/1"
"""What follows a corruption's name in the folder. A folder alone proves nothing: "snow" may be a
class of images."""

# These two take a seed, and draw one from the operating system by default.
_OWN_GENERATOR = ("impulse_noise", "glass_blur")
# All threads share numpy's global generator.
_LOCK = threading.Lock()


class CorruptedImages:
    """Corrupted versions of the same N images; (N,) labels and class names where known."""

    corruptions: tuple[str, ...]
    labels: Integers | None = None
    class_names: list[str] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        """Version of image `index` (0…N−1) under a corruption at a severity (1…5), RGB."""
        raise NotImplementedError


class CleanImages(CorruptedImages):
    """Uncorrupted images as a `CorruptedImages`, the same under every corruption."""

    def __init__(
        self, images: Items, labels: Integers | None = None, class_names: list[str] | None = None
    ):
        self.images = images
        self.labels = labels
        self.class_names = class_names

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        return self.images[index].convert("RGB")


class GeneratedCorruptions(CorruptedImages):
    """Corruptions generated on the fly from images of at least 32 × 32; picklable if `clean` is."""

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
        # Decoded once for all its corruptions.
        if self._last is None or self._last[0] != index:
            self._last = (index, np.asarray(self.clean.image(index, "clean", 1)))
        return Image.fromarray(
            corrupt(self._last[1], corruption, severity, image_id=index, seed=self.seed)
        )


def corrupt(
    image: Pixels, corruption: str, severity: int = 1, *, image_id: int | str = 0, seed: int = 0
) -> Pixels:
    """One corrupted version of an image, (H, W, 3) uint8, both sides at least 32: a pure function
    of the arguments.

    The package `imagecorruptions-imaug` (extra `corruptions`) draws from numpy's global generator,
    from fresh ones of scikit-image and numpy, and from numba's own. All are seeded here, and the
    global one restored afterwards.

    Args:
        image, corruption: RGB pixels, and a name from `ALL`.
        severity: 1 (weak) to 5.
        image_id: stable id of the image; different images get different noise.
        seed: of the whole evaluation.
    """
    function = _function(corruption)
    if min(image.shape[:2]) < MIN_SIDE:
        height, width = image.shape[:2]
        raise DualencError(
            f"image {image_id} is {width}x{height}; corruptions need 32x32, resize the images first"
        )
    own_seed = derive_seed(seed, image_id, corruption, severity, bits=32)
    keywords = {"seed": own_seed} if corruption in _OWN_GENERATOR else {}
    # Spatter without a drop, on small images, is 0/0.
    with _LOCK, np.errstate(divide="ignore", invalid="ignore"):
        before = np.random.get_state()  # noqa: NPY002
        np.random.seed(own_seed)  # noqa: NPY002
        try:
            values = np.asarray(function(Image.fromarray(image), severity, **keywords))
        finally:
            np.random.set_state(before)  # noqa: NPY002
    return np.where(np.isfinite(values), values, image).astype(np.uint8)


def _function(corruption: str) -> Callable[..., Any]:
    """The corruption of `imagecorruptions`."""
    if corruption not in ALL:
        raise DualencError(
            f"unknown corruption {corruption}{nearest(corruption, ALL)}; choose from {', '.join(ALL)}"
        )
    # An optional package, which imports numba.
    try:
        import imagecorruptions
    except ImportError:
        needed = "making corrupted images needs the package imagecorruptions-imaug"
        raise DualencError(f"{needed}: pip install 'dualenc[corruptions]'") from None
    return imagecorruptions.corruption_dict[corruption]


def is_corrupted_folder(path: str | Path) -> bool:
    """Whether a folder looks like CIFAR-C or Tiny-ImageNet-C: a file or folder is named after a
    corruption."""
    return bool(_available(Path(path), CIFAR) or _available(Path(path), TINY_IMAGENET))


def read_corrupted(path: str | Path, corruptions: Sequence[str] = ()) -> CorruptedImages:
    """Open a CIFAR-C or Tiny-ImageNet-C folder; `corruptions` are names to read, by default all in
    the folder."""
    return (CifarC if _available(Path(path), CIFAR) else TinyImageNetC)(path, corruptions)


class CifarC(CorruptedImages):
    """CIFAR-10-C or CIFAR-100-C: `labels.npy`, and `<corruption>.npy` of (5N, 32, 32, 3) uint8, N
    per severity.

    Pixels are memory-mapped; the object pickles to its paths.
    """

    labels: Integers

    def __init__(self, path: str | Path, corruptions: Sequence[str] = ()):
        self.path = Path(path)
        self.corruptions = _choose(self.path, CIFAR, corruptions)
        labels = _read_npy(self.path / "labels.npy").reshape(-1)
        num_images = len(labels) // len(SEVERITIES)
        if num_images == 0 or not np.array_equal(
            labels, np.tile(labels[:num_images], len(SEVERITIES))
        ):
            problem = f"{len(labels)} labels are no five equal blocks, one per severity"
            raise DualencError(f"{self.path}/labels.npy: {problem}; download the folder again")
        for name in self.corruptions:
            pixels = _read_npy(self.path / f"{name}.npy")
            if (
                pixels.ndim != 4
                or pixels.shape[::3] != (len(labels), 3)
                or pixels.dtype != np.uint8
            ):
                problem = f"{pixels.dtype} of shape {pixels.shape}"
                raise DualencError(
                    f"{self.path}/{name}.npy: {problem}; uint8 ({len(labels)}, H, W, 3) belongs"
                )
        self.labels = labels[:num_images].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        row = (severity - 1) * len(self) + range(len(self))[index]
        return Image.fromarray(np.array(_read_npy(self.path / f"{corruption}.npy")[row]))


class TinyImageNetC(CorruptedImages):
    """Tiny-ImageNet-C (and ImageNet-C): `<corruption>/<severity>/<class>/<name>.JPEG`, the same
    names in each."""

    def __init__(self, path: str | Path, corruptions: Sequence[str] = ()):
        self.path = Path(path)
        self.corruptions = _choose(self.path, TINY_IMAGENET, corruptions)
        folder = self.path / self.corruptions[0] / str(SEVERITIES[0])
        files = [file for file in folder.glob("*/*") if is_image(file)]
        self.names = sorted(f"{file.parent.name}/{file.name}" for file in files)
        if not self.names:
            raise DualencError(f"{folder}: no <class>/<name>.JPEG files; download the folder again")
        classes, self.labels = np.unique(
            [name.split("/")[0] for name in self.names], return_inverse=True
        )
        self.class_names = classes.tolist()

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        return open_image(self.path / corruption / str(severity) / self.names[index])


def _available(folder: Path, suffix: str) -> list[str]:
    """Corruptions of the folder in the benchmark's order."""
    return [name for name in ALL if (folder / f"{name}{suffix}").exists()]


def _choose(folder: Path, suffix: str, requested: Sequence[str]) -> tuple[str, ...]:
    """The requested corruptions, by default all of the folder; one that it lacks is an error."""
    available = _available(folder, suffix)
    chosen = tuple(one_or_several(requested)) or available or ALL[:1]
    for name in chosen:
        if name not in available:
            listed = ", ".join(available) or "none; is it CIFAR-C or Tiny-ImageNet-C?"
            raise DualencError(
                f"{folder}/{name}{suffix}: no such file or folder; there are {listed}"
            )
    return tuple(chosen)


def _read_npy(file: Path) -> npt.NDArray[Any]:
    try:
        open_regular(file).close()
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DualencError(f"{file}: no such file; is the folder complete?") from None
    except DualencError:
        raise
    except Exception as error:
        # Of any type: a damaged header is evaluated as Python literals. numpy's own message names
        # parser objects.
        raise DualencError(
            f"{file}: not a whole .npy file ({type(error).__name__}); download it again"
        ) from None
