"""Writing so that nothing is ever half-written: beside the target first, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dualenc.errors import DualencError


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `target` to write a file or a folder to; on success it takes the target's place.

    On an error whatever was written is removed and the old target stays.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.part-{os.getpid()}")
    remove(beside)
    try:
        yield beside
        _sync(beside)
        _replace(beside, target)
    finally:
        remove(beside)


def write_json(target: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_path(target) as beside:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(source: str | os.PathLike[str]) -> Any:
    """Read a JSON file; a missing or malformed one is a one-line `DualencError`."""
    try:
        return json.loads(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DualencError(f"{source}: no such file; is the folder complete?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DualencError(f"{source}: not valid JSON ({error}); write it again") from None


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading bytes; never waits for a named pipe, never touches a device.

    Raises:
        DualencError: a folder, device, pipe or socket.
        OSError: missing or not readable.
    """
    kind = os.stat(path).st_mode
    if stat.S_ISREG(kind):
        # The path may name something else by now: open without waiting, and look at what was opened.
        at_once = getattr(os, "O_NONBLOCK", 0)
        stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | at_once))  # noqa: SIM115
        kind = os.fstat(stream.fileno()).st_mode
        if stat.S_ISREG(kind):
            return stream
        stream.close()
    what = "a folder" if stat.S_ISDIR(kind) else "a device, pipe or socket"
    raise DualencError(f"{path}: {what}, not a file; give a regular file")


def checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Push contents to the disk before the rename, so that a power cut cannot leave an empty target."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    for file in files:
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())


def _replace(beside: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        # A folder cannot be renamed over a folder that holds files: step aside, swap, remove.
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        os.replace(target, old)
        os.replace(beside, target)
        remove(old)
    else:
        os.replace(beside, target)
