"""Tar files as webdataset reads them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tests.helpers.make import encoded, picture


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar of files, given as names and contents."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, shade: int, text: str) -> list[tuple[str, bytes]]:
    """The files of one sample: a picture and its text."""
    return [(f"{key}.png", encoded(picture(shade))), (f"{key}.txt", text.encode())]
