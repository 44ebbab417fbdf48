"""Find image files in folders and read them as items."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from dualenc.data.bad_rows import report_once
from dualenc.data.readers.read_options import check_split
from dualenc.data.store.identity import file_identity
from dualenc.errors import DualencError
from dualenc.io.decoding import image_suffixes, open_image
from dualenc.io.reading import is_utf8, with_home
from dualenc.types import StrPath

IMAGE_SUFFIXES = image_suffixes()
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
"""Names of folders that hold splits and not classes, if all their siblings have such names."""


class ImageFiles:
    """Items stored as image files: `root / name` for each name."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str]) -> None:
        self.root = with_home(Path(root))
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Image.Image:
        return open_image(self.root / self.names[index])

    def item_identity(self, row: int, read: bool) -> bytes:
        """Return name and `file_identity`."""
        name = self.names[row]
        return name.encode(errors="surrogateescape") + b" " + file_identity(self.root / name, read)


def split_folder(folder: StrPath, split: str) -> Path:
    """Return the subfolder of a split, such as `val`, or the folder itself if it lacks splits.

    Subfolders are splits only if all of them have common split names; otherwise `train` may be a
    class.
    """
    root = with_home(Path(folder))
    if not root.is_dir():
        return root
    # Archives made on macOS contain a folder __MACOSX.
    entries = [entry for entry in root.iterdir() if not entry.name.startswith((".", "__MACOSX"))]
    subfolders = sorted(entry.name for entry in entries if entry.is_dir())
    if any(name.lower() in SPLITS for name in subfolders):
        # A folder without images, such as annotations, is neither split nor class.
        subfolders = [name for name in subfolders if any(map(is_image, (root / name).rglob("*")))]
    has_images = any(map(is_image, entries))
    only_splits = not has_images and all(name.lower() in SPLITS for name in subfolders)
    if split in subfolders and (only_splits or split not in SPLITS):
        return root / split
    if subfolders and only_splits:
        check_split(folder, split, subfolders)
    return root


def held_out_split(folder: StrPath) -> str:
    """Return test, or another split of a folder of images to evaluate on, such as val."""
    for split in ("test", "testing", "val", "valid", "validation", "dev"):
        with suppress(DualencError):
            split_folder(folder, split)
            if split != "test":
                report_once(f"{folder}: the images in {split} are evaluated")
            return split
    return "test"


def is_image(path: Path) -> bool:
    """Return True if the suffix is one of an image format."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def existing_file(root: Path, name: str) -> Path:
    """Return `root / name`; accents in the name may be composed (NFC) or decomposed (NFD)."""
    if not name.isascii():
        for form in ("NFC", "NFD"):
            other = root / unicodedata.normalize(form, name)
            if other.exists():
                return other
    return root / name


def find_images(folder: StrPath) -> list[str]:
    """Return the names of all images in a folder and its subfolders, sorted.

    Names are relative to the folder, with forward slashes. Links to folders are followed, but no
    folder is read twice, so cycles of links end.
    """
    root = with_home(Path(folder))
    if not root.is_dir():
        raise DualencError(
            "no such folder",
            fix="give a folder of images",
            where=folder,
        )
    names = []
    seen = set()
    # Real folders first, links later, so that an image gets the path of its real folder.
    waiting = deque([root])
    while waiting:
        for parent, subfolders, files in os.walk(waiting.popleft(), onerror=_unreadable_folder):
            real = os.path.realpath(parent)
            if real in seen:
                subfolders.clear()
                continue
            seen.add(real)
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            paths = [Path(parent, name) for name in subfolders]
            waiting.extend(path for path in paths if path.is_symlink())
            for file in files:
                name = (Path(parent).relative_to(root) / file).as_posix()
                if not file.startswith(".") and file.lower().endswith(IMAGE_SUFFIXES):
                    names.append(name)
    if not names:
        others = Counter(path.suffix.lower() for path in root.rglob("*") if path.is_file())
        found = ", ".join(suffix or "files without a suffix" for suffix, _ in others.most_common(3))
        contents = f"it has {found}" if found else "it is empty"
        raise DualencError(
            f"no image in this folder ({contents})",
            fix=f"supported formats are {', '.join(IMAGE_SUFFIXES)}",
            where=folder,
        )
    return sorted(names)


def printable_names(folder: Path, names: Sequence[str]) -> list[str]:
    r"""Return file names as ids; line breaks and bytes that are not UTF-8 become escapes.

    `caf\xe9.png` is such an id. Escaped names are reported in one line.
    """
    escaped = [name if is_utf8(name) and "\n" not in name else _escaped(name) for name in names]
    changed = [new for new, name in zip(escaped, names, strict=True) if new != name]
    if changed:
        report_once(
            f"{folder}: {len(changed)} file names are not UTF-8, or have line breaks; their ids "
            f"have escapes (first: {changed[0]})"
        )
    return escaped


def _escaped(name: str) -> str:
    data = name.encode("utf-8", "surrogateescape")
    return data.decode("utf-8", "backslashreplace").replace("\n", "\\n")


def _unreadable_folder(error: OSError) -> None:
    raise DualencError(
        f"folder cannot be read ({error.strerror})",
        fix="fix its permissions",
        where=error.filename,
    ) from None
