"""Image files: found in folders, and read as items."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dualenc.data.identity import file_identity
from dualenc.decoding import open_image
from dualenc.errors import DualencError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


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


def find_images(folder: str | os.PathLike[str]) -> list[str]:
    """Names of all images in a folder and its subfolders, relative to it with forward slashes, sorted.

    Links to folders are followed, but no folder is read twice, so links in a circle end.

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
            names += [(inside / name).as_posix() for name in images]
    if not names:
        raise DualencError(f"{folder}: no image in this folder; known are {', '.join(IMAGE_SUFFIXES)}")
    return sorted(names)


def _unreadable_folder(error: OSError) -> None:
    raise DualencError(f"{error.filename}: folder cannot be read ({error.strerror}); mend its permissions") from None
