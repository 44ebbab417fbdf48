"""Checksums of a folder's files: stored in its meta.json, and verified when it is opened."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dualenc.errors import DualencError
from dualenc.io.reading import open_regular
from dualenc.types import StrPath

READ_AT_OPENING = 2**26
"""Maximum number of bytes that opening a folder reads to compare checksums (40 ms)."""
CLOCK_TICK = 2 * 10**9
"""Nanoseconds within which two writes may have the same time: the steps of FAT's clock."""
MAX_DIGESTS = 1024
_DIGESTS: dict[tuple[int, ...], str] = {}
"""SHA-256 of files that this process has read, by `_version`."""


def checksum(path: StrPath) -> str:
    """Return the SHA-256 of a regular file as a hexadecimal string."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path, names: Iterable[str], *, may_remember: bool = False) -> dict[str, str]:
    """Return the SHA-256 of files of a folder by name; computed in parallel.

    Args:
        folder: folder that contains the files.
        names: names of the files.
        may_remember: take the checksums of files that this process has read and that have not been
            written since; by default all files are read.
    """
    names = list(names)
    paths = [folder / name for name in names]
    read = _remembered if may_remember else _read
    # Threads suffice: hashlib releases the GIL.
    with ThreadPoolExecutor(max_workers=8) as threads:
        return dict(zip(names, threads.map(read, paths), strict=True))


def _remembered(path: Path) -> str:
    """Return the SHA-256 of a file, read only if it may have changed since."""
    return _DIGESTS.get(_version(path)) or _read(path)


def _read(path: Path) -> str:
    """Read a file and remember its SHA-256."""
    version = _version(path)
    # A write within the same tick of the file system's clock would leave the version unchanged.
    is_settled = time.time_ns() - version[-1] > CLOCK_TICK
    digest = checksum(path)
    if is_settled and version == _version(path):
        # A long-lived process must not remember every file it has ever opened.
        if len(_DIGESTS) >= MAX_DIGESTS:
            _DIGESTS.clear()
        _DIGESTS[version] = digest
    return digest


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that change with every write to a file: device, inode, size, times."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def recorded(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the entries of meta.json about a folder's files.

    `files` has their SHA-256 and `sizes` their bytes, by name.
    """
    names = list(names)
    return {
        "sizes": {name: (folder / name).stat().st_size for name in names},
        "files": checksums(folder, names),
    }


def verify_files(
    folder: Path,
    names: Iterable[str],
    sizes: Mapping[str, int],
    files: Mapping[str, str],
    remedy: str,
    whole: bool,
) -> None:
    """Verify that the files of a folder are unchanged since they were written.

    Args:
        folder: folder that contains the files.
        names: names of the files that belong to it.
        sizes: recorded bytes by name, see `recorded`.
        files: recorded SHA-256 by name.
        remedy: fix to suggest in errors.
        whole: True to read all files; otherwise at most `READ_AT_OPENING` bytes, smallest files
            first.

    Raises:
        DualencError: a file is missing, truncated or corrupt, or is not listed.
    """
    names = sorted(names)
    for key, by_name in (("files", files), ("sizes", sizes)):
        # A hostile list may leave out a file, which would then be read unverified.
        if sorted(by_name) != names:
            problem = f"its {key} are not those of the folder"
            raise DualencError(problem, fix=remedy, where=folder / "meta.json")
    # Sizes reveal truncated files of any length without reading them.
    for name in names:
        path = folder / name
        if not path.is_file():
            raise DualencError("missing", fix=remedy, where=path)
        size = path.stat().st_size
        if size != sizes[name]:
            problem = f"truncated or corrupt ({size} bytes instead of {sizes[name]})"
            raise DualencError(problem, fix=remedy, where=path)
    # Opening a folder again in the same command need not read it again; `--verify` must.
    names = names if whole else _smallest(sizes)
    for name, digest in checksums(folder, names, may_remember=not whole).items():
        if digest != files[name]:
            problem = "corrupt, its checksum is not that of meta.json"
            raise DualencError(problem, fix=remedy, where=folder / name)


def _smallest(sizes: Mapping[str, int]) -> list[str]:
    """Return the smallest files, together at most `READ_AT_OPENING` bytes."""
    ascending = sorted(sizes, key=sizes.__getitem__)
    totals = itertools.accumulate(sizes[name] for name in ascending)
    return [name for name, total in zip(ascending, totals) if total <= READ_AT_OPENING]
