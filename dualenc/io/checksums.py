"""Checksums of a folder's files: written into its meta.json, and compared with it when the folder
is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dualenc.errors import DualencError
from dualenc.io.reading import open_regular
from dualenc.types import StrPath

READ_AT_OPENING = 2**26
"""Bytes of a folder that opening it reads to compare checksums (40 ms)."""


def checksum(path: StrPath) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files of a folder by name, several at a time."""
    names = list(names)
    paths = [folder / name for name in names]
    with ThreadPoolExecutor(max_workers=8) as threads:
        digests = threads.map(checksum, paths)
        return dict(zip(names, digests, strict=True))


def recorded(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What meta.json records of a folder's files: under `files` their SHA-256, under `sizes` their
    bytes, by name."""
    names = list(names)
    return {
        "sizes": {name: (folder / name).stat().st_size for name in names},
        "files": checksums(folder, names),
    }


def verify_files(
    folder: Path, names: Iterable[str], meta: Mapping[str, Any], remedy: str, whole: bool
) -> None:
    """Verify that a folder's files are those that were written.

    Args:
        folder: that holds them.
        names: the files that belong to it.
        meta: its meta.json, with the entries of `recorded`.
        remedy: what to do about it, for the error.
        whole: read all files. Otherwise at most `READ_AT_OPENING` bytes, the smallest files first.
    """
    names = sorted(names)
    for key in ("files", "sizes"):
        by_name = meta.get(key)
        if not isinstance(by_name, dict) or sorted(by_name) != names:
            raise DualencError(
                f"{folder / 'meta.json'}: its {key} are not those of the folder; {remedy}"
            )
    for name in names:
        path = folder / name
        if not path.is_file():
            raise DualencError(f"{path}: missing; {remedy}")
        size = path.stat().st_size
        expected = meta["sizes"][name]
        if size != expected:
            raise DualencError(
                f"{path}: truncated or corrupt ({size} bytes instead of {expected}); {remedy}"
            )
    if not whole:
        names = _smallest(meta["sizes"])
    for name, digest in checksums(folder, names).items():
        if digest != meta["files"][name]:
            raise DualencError(
                f"{folder / name}: corrupt, its checksum is not that of meta.json; {remedy}"
            )


def _smallest(present: Mapping[str, int]) -> list[str]:
    """The smallest files, together at most `READ_AT_OPENING` bytes."""
    names = []
    left = READ_AT_OPENING
    for name in sorted(present, key=present.__getitem__):
        left -= present[name]
        if left >= 0:
            names.append(name)
    return names
