"""Checksums of a folder's files: written into its meta.json, and compared with it when the folder is opened."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dualenc.errors import DualencError
from dualenc.reading import open_regular

READ_AT_OPENING = 2**26
"""Bytes of a folder that opening it reads to compare checksums (40 ms)."""


def checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files of a folder by name, several at a time: one core takes about 1.5 GB a second."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: checksum(folder / name), names)))


def sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Bytes of files of a folder, by name."""
    return {name: (folder / name).stat().st_size for name in names}


def verify_files(folder: Path, names: Iterable[str], meta: Mapping[str, Any], mend: str, whole: bool) -> None:
    """Verify that a folder's files are those that were written: all by size, and by SHA-256 as many as asked for.

    Args:
        folder: that holds them.
        names: the files that belong to it.
        meta: its meta.json: under `files` the SHA-256 of each of them, and of no others; under `sizes` their bytes.
        mend: the remedy, for the error.
        whole: read all files. Otherwise at most `READ_AT_OPENING` bytes, the smallest files first.

    Raises:
        DualencError: a file is missing, is no regular file, has changed, or has no checksum.
    """
    names = list(names)
    recorded = meta["files"]
    if not isinstance(recorded, dict) or sorted(recorded) != sorted(names):
        listed = ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
        raise DualencError(f"{folder / 'meta.json'}: its checksums are not those of {listed}; {mend}")
    for name in names:
        if not (folder / name).is_file():
            raise DualencError(f"{folder / name}: missing; {mend}")
    found = sizes(folder, names)
    _verify_sizes(folder, found, meta.get("sizes"), mend)
    if not whole:
        names.sort(key=lambda name: found[name])
        totals = itertools.accumulate(found[name] for name in names)
        names = [name for name, total in zip(names, totals) if total <= READ_AT_OPENING]
    for name, digest in checksums(folder, names).items():
        if digest != recorded[name]:
            raise DualencError(f"{folder / name}: corrupt, its checksum is not that of meta.json; {mend}")


def _verify_sizes(folder: Path, found: Mapping[str, int], written: Any, mend: str) -> None:
    # Older versions did not write sizes down.
    if written is None or written == found:
        return
    if not isinstance(written, dict):
        written = dict.fromkeys(found, written)
    wrong = next((name for name in found if written.get(name) != found[name]), "")
    remark = f"{found.get(wrong, 0)} bytes instead of {str(written.get(wrong))[:20]}"
    raise DualencError(f"{folder / wrong}: truncated or corrupt ({remark}); {mend}")
