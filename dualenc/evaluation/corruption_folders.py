"""Readers of the published corrupted data sets: CIFAR-10/100-C and Tiny-ImageNet-C (or ImageNet-C)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualenc.data.images import open_image
from dualenc.errors import DualencError
from dualenc.evaluation.corruption import ALL, SEVERITIES, CorruptedImages, check_corruptions
from dualenc.files import open_regular


def is_corrupted_folder(path: str | Path) -> bool:
    """Whether a folder looks like CIFAR-C or Tiny-ImageNet-C: a file or folder is named after a corruption."""
    return bool(_known(Path(path), ".npy") or _known(Path(path), ""))


def read_corrupted(path: str | Path, corruptions: Sequence[str] = ()) -> CorruptedImages:
    """Open a CIFAR-C or Tiny-ImageNet-C folder, whichever it is.

    Args:
        path: The folder that holds `<corruption>.npy` files, or `<corruption>/<severity>/<class>/` folders.
        corruptions: Names to read; all that are there by default.

    Raises:
        DualencError: neither layout, or what `CifarC` and `TinyImageNetC` raise.
    """
    if _known(Path(path), ".npy"):
        return CifarC(path, corruptions)
    if _known(Path(path), ""):
        return TinyImageNetC(path, corruptions)
    raise DualencError(
        f"{path}: no <corruption>.npy file and no <corruption>/ folder; is it CIFAR-C or Tiny-ImageNet-C?"
    )


class CifarC:
    """CIFAR-10-C or CIFAR-100-C: `<corruption>.npy` of (5N, 32, 32, 3) uint8, one block of N per severity.

    Pixels are memory-mapped; the object pickles to its paths.

    Args:
        path: The folder with `labels.npy` and the corruption files.
        corruptions: Names to read; all that are there by default.

    Attributes:
        files: Names of all files, relative to the folder.

    Raises:
        DualencError: a file is missing or damaged, or lengths differ.
    """

    severities = SEVERITIES
    class_names = None

    def __init__(self, path: str | Path, corruptions: Sequence[str] = ()):
        self.path = Path(path)
        self.corruptions = _choose(self.path, ".npy", corruptions)
        self.files = ["labels.npy", *(f"{name}.npy" for name in self.corruptions)]
        labels = _read_npy(self.path / "labels.npy")
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise DualencError(f"{self.path}/labels.npy: {labels.dtype} of shape {labels.shape}; whole numbers belong")
        if len(labels) == 0 or len(labels) % len(SEVERITIES):
            raise DualencError(
                f"{self.path}/labels.npy: {len(labels)} labels; five equal blocks, one per severity, belong"
            )
        for name in self.corruptions:
            self._check(name, len(labels))
        blocks = labels.reshape(len(SEVERITIES), -1)
        if (blocks != blocks[0]).any():
            raise DualencError(
                f"{self.path}/labels.npy: the blocks of the severities differ; the file is not CIFAR-C's"
            )
        self.labels: npt.NDArray[np.int64] = blocks[0].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        """Version of image `index` under a corruption at a severity, RGB."""
        row = (severity - 1) * len(self) + range(len(self))[index]
        return Image.fromarray(np.array(_read_npy(self.path / f"{corruption}.npy")[row]))

    def _check(self, name: str, length: int) -> None:
        pixels = _read_npy(self.path / f"{name}.npy")
        if pixels.ndim != 4 or pixels.shape[3] != 3 or pixels.dtype != np.uint8:
            raise DualencError(
                f"{self.path}/{name}.npy: {pixels.dtype} of shape {pixels.shape}; uint8 (5N, H, W, 3) belongs"
            )
        if len(pixels) != length:
            raise DualencError(
                f"{self.path}/{name}.npy: {len(pixels)} images but labels.npy has {length}; download again"
            )


class TinyImageNetC:
    """Tiny-ImageNet-C (and ImageNet-C): `<corruption>/<severity>/<class>/<name>.JPEG`.

    An image is known by `<class>/<name>` and must be in every corruption and severity; ids are positions in the
    sorted list of those.

    Args:
        path: The folder of the corruption folders.
        corruptions: Names to read; all that are there by default.

    Attributes:
        files: Names of all files, relative to the folder.

    Raises:
        DualencError: a folder is missing or empty, or two folders do not hold the same images.
    """

    severities = SEVERITIES

    def __init__(self, path: str | Path, corruptions: Sequence[str] = ()):
        self.path = Path(path)
        self.corruptions = _choose(self.path, "", corruptions)
        self.names = self._names(self.corruptions[0], SEVERITIES[0])
        for corruption in self.corruptions:
            for severity in SEVERITIES:
                self._compare(corruption, severity)
        self.files = [f"{c}/{s}/{name}" for c in self.corruptions for s in SEVERITIES for name in self.names]
        self.class_names: list[str] | None = sorted({name.split("/")[0] for name in self.names})
        number = {wnid: position for position, wnid in enumerate(self.class_names)}
        self.labels: npt.NDArray[np.int64] = np.array([number[name.split("/")[0]] for name in self.names])

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int, corruption: str, severity: int) -> Image.Image:
        """Version of image `index` under a corruption at a severity, RGB."""
        return open_image(self.path / corruption / str(severity) / self.names[index])

    def _names(self, corruption: str, severity: int) -> list[str]:
        folder = self.path / corruption / str(severity)
        names = sorted(f"{file.parent.name}/{file.name}" for file in folder.glob("*/*") if _is_image(file))
        if not names:
            raise DualencError(f"{folder}: no <class>/<name>.JPEG files; download the folder again")
        return names

    def _compare(self, corruption: str, severity: int) -> None:
        names = self._names(corruption, severity)
        if names != self.names:
            first = min(set(names) ^ set(self.names))
            raise DualencError(
                f"{self.path}/{corruption}/{severity}: {len(names)} images, {len(self.names)} in "
                f"{self.corruptions[0]}/1; {first} is in one only, download the folder again"
            )


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in (".jpeg", ".jpg", ".png")


def _known(folder: Path, suffix: str) -> list[str]:
    """Corruptions that the folder has, in the benchmark's order: files with the suffix, or folders with a severity 1.

    A folder alone proves nothing: "snow" may be a class of a folder of clean images.
    """
    return [
        name for name in ALL if ((folder / f"{name}{suffix}").is_file() if suffix else (folder / name / "1").is_dir())
    ]


def _choose(folder: Path, suffix: str, wanted: Sequence[str]) -> tuple[str, ...]:
    there = _known(folder, suffix)
    for name in check_corruptions(wanted):
        if name not in there:
            raise DualencError(
                f"{folder}/{name}{suffix}: no such file or folder; there are {', '.join(there) or 'none'}"
            )
    if not there:
        raise DualencError(f"{folder}: no corruption named {ALL[0]}{suffix}, …; give the folder that holds them")
    return tuple(wanted) or tuple(there)


def _read_npy(file: Path) -> npt.NDArray[Any]:
    try:
        open_regular(file).close()
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DualencError(f"{file}: no such file; is the folder complete?") from None
    except DualencError:
        raise
    except Exception as error:  # a damaged header is evaluated as Python literals: SyntaxError, TypeError, …
        # numpy's own words name objects of the parser.
        raise DualencError(f"{file}: not a whole .npy file ({type(error).__name__}); download it again") from None
