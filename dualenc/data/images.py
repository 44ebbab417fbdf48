"""Image files: found in folders, and read as items."""

from __future__ import annotations

import os
import unicodedata
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dualenc.data.identity import file_identity
from dualenc.data.skips import Skips
from dualenc.decoding import image_suffixes, open_image
from dualenc.errors import DualencError
from dualenc.reading import is_utf8

IMAGE_SUFFIXES = image_suffixes()
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
"""Names of folders that hold splits and not classes, if all folders beside them are named like that."""


class ImageFiles:
    """Items that are image files: `root / name` for each name."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.root = Path(root)
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Image.Image:
        return open_image(self.root / self.names[index])

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """Identities for `dualenc.data.identity`: name and `file_identity`."""
        names = (self.names[row] for row in rows.tolist())
        return [name.encode(errors="surrogateescape") + b" " + file_identity(self.root / name, read) for name in names]


def split_folder(folder: str | os.PathLike[str], split: str) -> Path:
    """The subfolder of a split, such as `val`; the folder itself if it is not divided into splits.

    Subfolders are splits if all of them have usual names of splits: `train` may also be a class among others.

    Raises:
        DualencError: the folder is divided into splits, and this one is missing.
    """
    root = Path(folder)
    if not root.is_dir():
        return root
    entries = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
    subfolders = sorted(entry.name for entry in entries if entry.is_dir())
    only_splits = all(name.lower() in SPLITS for name in subfolders)
    only_splits = only_splits and not any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in entries)
    if split in subfolders and (only_splits or split not in SPLITS):
        return root / split
    if subfolders and only_splits:
        raise DualencError(f"{folder}: no split {split!r}; there are: {', '.join(subfolders)}")
    return root


def existing_file(root: Path, name: str) -> Path:
    """The file `root / name`, or the one whose name differs only in composed (NFC) and decomposed (NFD) accents."""
    if not name.isascii() and not (root / name).exists():
        for form in ("NFC", "NFD"):
            if (root / unicodedata.normalize(form, name)).exists():
                return root / unicodedata.normalize(form, name)
    return root / name


def find_images(folder: str | os.PathLike[str], skips: Skips) -> list[str]:
    """Names of all images in a folder and its subfolders, relative to it with forward slashes, sorted.

    Links to folders are followed, but no folder is read twice, so links in a circle end. `skips` counts images whose
    names are not UTF-8.

    Raises:
        DualencError: no such folder, one that cannot be read, or no image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DualencError(f"{folder}: no such folder; give a folder of images")
    names = []
    seen = set()
    # Links to folders wait until all real folders are read, and each folder is read once.
    waiting = deque([root])
    while waiting:
        for parent, subfolders, files in os.walk(waiting.popleft(), onerror=_unreadable_folder):
            # By device and inode, which links cannot disguise.
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            waiting.extend(Path(parent, name) for name in subfolders if os.path.islink(Path(parent, name)))
            inside = Path(parent).relative_to(root)
            images = [name for name in files if name.lower().endswith(IMAGE_SUFFIXES) and name[0] != "."]
            for name in ((inside / image).as_posix() for image in images):
                if is_utf8(name):
                    names.append(name)
                else:
                    skips.bad("file name that is not UTF-8", repr(str(root / name)), "rename it")
    if not names:
        raise DualencError(f"{folder}: no image in this folder; known are {', '.join(IMAGE_SUFFIXES)}")
    return sorted(names)


def _unreadable_folder(error: OSError) -> None:
    raise DualencError(f"{error.filename}: folder cannot be read ({error.strerror}); mend its permissions") from None
