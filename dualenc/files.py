"""Atomic writes: a file or folder is complete or absent, whatever kills its writer.

Each writer works in a folder of its own beside the target, and holds a lock in it. The system frees the lock when the
process ends, however it ends: whoever gets the lock of another writer knows that this one is dead.

    .NAME.part-XXXXXXXX/
        lock        held by the writer
        new-NAME    what is written; renamed to NAME once it is complete
        old-NAME    the folder that it replaces

A file takes its target's place in one rename. A folder cannot be renamed over another: the old one moves to `old-NAME`
first, so `old-NAME` says that `new-NAME` is complete. Whatever a kill leaves between the two renames, `recover` puts
the complete folder in its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from dualenc.errors import DualencError
from dualenc.reading import is_utf8, read_json_object

if TYPE_CHECKING:
    import numpy as np

Result = TypeVar("Result")

_WORK_FOLDER = re.compile(r"\.(?P<target>.+)\.part-[0-9a-f]{8}$")
_LOCK = "lock"
_GONE = (FileNotFoundError, FileExistsError)
"""What filelock raises when a lock's folder is removed: it first makes the folder, and then looks whether it exists."""
_MAX_READS = 100
"""How often a reader tries anew because its folder was replaced meanwhile."""
_MAX_SWAP_SECONDS = 5.0
"""How long a reader waits for a living writer that is between the two renames of a folder."""


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `target` to write a file to; on success it takes the target's place.

    On an error whatever was written is removed and the old target stays. Several writers do not wait for one another:
    the last one that succeeds wins.

    Raises:
        DualencError: the target is a folder, which a file never replaces.
    """
    target = Path(target)
    check_file_target(target)
    with _work_folder(target) as work:
        new = _new(work, target)
        yield new
        _sync(new)
        os.replace(new, target)


@contextmanager
def atomic_folder(target: str | os.PathLike[str], is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """Yield a path beside `target` to write a folder to; on success it takes the target's place.

    On an error whatever was written is removed and the old target stays. Behind a symbolic link the folder that it
    points to is replaced. Of several writers the last one that succeeds wins.

    Args:
        target: the folder.
        is_ours: whether a folder is of the kind that is written, and may be replaced.
        what: that kind, in the error: "holds no …".

    Raises:
        DualencError: the target is a file, or a folder of another kind that is not empty.
    """
    with locked(target):
        check_folder_target(target, is_ours, what)
    target = _behind_link(target)
    with _work_folder(target) as work:
        new = _new(work, target)
        old = _old(work, target)
        yield new
        for file in new.rglob("*"):
            if file.is_file():
                _sync(file)
        with locked(target):
            try:
                if target.is_dir():
                    os.replace(target, old)
                os.replace(new, target)
            finally:
                if not os.path.lexists(target) and old.is_dir():
                    os.replace(old, target)


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """Yield a writer's folder beside a target, locked; it is removed at the end."""
    with removed_if_refused(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target, unfinished=True)
        work, lock = _locked_folder(target)
        try:
            yield work
        finally:
            lock.release()
            # Unless the target could not be put back: `recover` tries again.
            if os.path.lexists(target) or not os.path.lexists(_old(work, target)):
                shutil.rmtree(work, ignore_errors=True)


def _locked_folder(target: Path) -> tuple[Path, FileLock]:
    while True:
        work = target.with_name(f".{target.name}.part-{uuid.uuid4().hex[:8]}")
        work.mkdir()
        lock = FileLock(work / _LOCK)
        # Between these two lines another writer may take the folder for that of a dead one, and remove it.
        with suppress(Timeout, *_GONE):
            lock.acquire(timeout=0)
            return work, lock


def _new(work: Path, target: Path) -> Path:
    # The target's own name comes last, as some libraries go by the suffix.
    return work / f"new-{target.name}"


def _old(work: Path, target: Path) -> Path:
    return work / f"old-{target.name}"


def _sync(file: Path) -> None:
    """Flush contents to the disk before a rename, so that a power cut cannot leave an empty target."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def _behind_link(target: str | os.PathLike[str]) -> Path:
    """The path of a target; of a symbolic link that is no file's, what it points to."""
    target = Path(target)
    # The current folder and its parent have a name only in full.
    has_name = target.name not in ("", "..")
    if has_name and (target.is_file() or not target.is_symlink()):
        return target
    return Path(os.path.realpath(target))


def recover(target: str | os.PathLike[str], *, unfinished: bool = False) -> None:
    """Recover from killed writers; call it before a folder is opened or judged missing.

    A folder that is missing because its replacement was killed between the two renames comes back. What belongs to a
    living writer is not touched.

    Args:
        target: the file or folder.
        unfinished: remove what dead writers did not finish, too. Only for whoever is about to write the target.

    Raises:
        DualencError: a complete folder is there but cannot be renamed.
    """
    target = _behind_link(target)
    for work, owner in _work_folders(target.parent):
        if owner != target:
            continue
        is_swap = os.path.lexists(_old(work, target))
        if not (is_swap or unfinished):
            continue
        # A missing target may be that of a living writer between two renames, which take a moment.
        is_missing = is_swap and not os.path.lexists(target)
        lock = FileLock(work / _LOCK, timeout=_MAX_SWAP_SECONDS if is_missing else 0)
        try:
            with lock:
                _settle(work, target)
        except (Timeout, *_GONE):
            # Its writer lives, or has just finished.
            continue
        except OSError as error:
            if is_missing and not os.path.lexists(target):
                complete = _complete(work, target)
                remedy = f"rename it to {target.name}"
                raise DualencError(f"{target}: a killed process left it as {complete} ({error}); {remedy}") from None


def _settle(work: Path, target: Path) -> None:
    """Put the complete folder of a dead writer in place if the target is missing, and remove the rest."""
    if os.path.lexists(_old(work, target)) and not os.path.lexists(target):
        os.replace(_complete(work, target), target)
    shutil.rmtree(work, ignore_errors=True)


def _complete(work: Path, target: Path) -> Path:
    """The folder that takes the place of a target which was moved to `old-NAME`."""
    new = _new(work, target)
    return new if new.exists() else _old(work, target)


def recover_inside(folder: str | os.PathLike[str]) -> None:
    """`recover` all targets in a folder, for whoever writes there."""
    targets = {target for _, target in _work_folders(Path(folder))}
    for target in sorted(targets):
        recover(target, unfinished=True)


def _work_folders(folder: Path) -> list[tuple[Path, Path]]:
    """The work folders in a folder, each with its target: by their name, and by holding nothing that is not ours."""
    found = []
    with suppress(OSError):
        for named in filter(None, map(_WORK_FOLDER.match, sorted(os.listdir(folder)))):
            path = folder / named[0]
            target = folder / named["target"]
            # A folder of another user, which cannot be read, is nothing to recover.
            with suppress(OSError):
                if set(path.iterdir()) <= {path / _LOCK, _new(path, target), _old(path, target)}:
                    found.append((path, target))
    return found


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no system takes, before any work."""
    if "\0" in os.fspath(path):
        raise DualencError(f"{os.fspath(path)!r}: holds a NUL character, which no path may; name another")


def check_file_target(path: str | os.PathLike[str]) -> None:
    """Refuse a folder where a file is to be written: a file never replaces one."""
    check_path(path)
    if os.path.isdir(path):
        raise DualencError(f"{os.fspath(path)}: is a folder, and a file is written here; name a file in it, or another")


def check_folder_target(folder: str | os.PathLike[str], is_ours: Callable[[Path], bool], what: str) -> None:
    """Refuse to write a folder over anything but nothing, an empty folder, or one of the same kind.

    Args:
        folder: to be written.
        is_ours: whether a folder that is not empty is of that kind, judged by a file that dualenc wrote.
        what: the kind, in the error: "holds no …".

    Raises:
        DualencError: it is a file, or a folder of another kind: that is neither deleted nor mixed into.
    """
    check_path(folder)
    folder = Path(folder)
    if not is_utf8(str(folder)):
        raise DualencError(f"{folder}: the name is not UTF-8, which FAISS and safetensors need; choose another")
    recover(folder)
    is_free = not folder.exists() or (folder.is_dir() and not os.listdir(folder))
    if not is_free and not (folder.is_dir() and is_ours(folder)):
        raise DualencError(f"{folder}: exists and holds no {what}; choose a new or empty folder")


@contextmanager
def locked(target: str | os.PathLike[str], wait: bool = True, option: str = "--out") -> Iterator[None]:
    """Lock an output in this context, so that processes that write it take turns; the same thread may lock it again.

    Args:
        target: the file or folder, which need not exist; the lock file is beside it, and removed at the end.
        wait: for another process that writes it; otherwise refuse.
        option: that names the output, for the error.

    Raises:
        DualencError: without `wait`, another process holds the lock.
    """
    check_path(target)
    path = _behind_link(target).absolute()
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), is_singleton=True)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        problem = f"another dualenc process is writing {target}"
        raise DualencError(f"{problem}; wait for it or choose another {option}") from None
    try:
        recover(path)
        yield
    finally:
        if lock.lock_counter == 1:
            # Removed while it is held: whoever waits for a removed lock file notices, and tries again.
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        # Inner folders first, up to one that holds something.
        with suppress(OSError):
            for folder in made:
                folder.rmdir()


def consistent_read(folder: str | os.PathLike[str], read: Callable[[], Result]) -> Result:
    """Read a folder that writers replace whole: `read` is repeated until all that it opened is of one generation.

    Open files and memory maps survive a replaced folder, so whatever is needed later is opened by `read`.
    """
    for _ in range(_MAX_READS):
        generation = version_of(Path(folder) / "meta.json")
        try:
            result = read()
        except (OSError, DualencError):
            if version_of(Path(folder) / "meta.json") == generation:
                raise
            continue
        if version_of(Path(folder) / "meta.json") == generation:
            return result
    raise DualencError(f"{folder}: other processes keep replacing it; try again later")


def version_of(path: Path) -> tuple[int, int] | None:
    """Identify a version of a file that is replaced atomically; None if it is missing."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def remove_at_once(folder: Path) -> None:
    """Remove a folder of work in one rename; what a kill leaves of its files the next writer of the folder removes."""
    with _work_folder(folder) as work:
        os.replace(folder, _new(work, folder))


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_if_refused(folder: str | os.PathLike[str], finished: str | None = None) -> Iterator[None]:
    """On an error remove the folders that were made in this context, as far as they hold nothing.

    A kill or Ctrl-C leaves finished work to resume from; a refusal before any of it leaves nothing.

    Args:
        folder: where the work goes, with those above it.
        finished: glob pattern of finished work; without any, whatever else is in the new folder goes with it.
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.absolute().parents) if not os.path.lexists(path)]
    try:
        yield
    except Exception:
        # An .npy file without rows is its header, 128 bytes.
        if finished and made and not any(path.stat().st_size > 128 for path in folder.glob(finished)):
            remove(folder)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


def save_array(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """`np.save`, except that a disk that is full at the end of the file is an error.

    Given a real file, numpy writes through C's stdio and does not look at what closing it returns.
    """
    import numpy as np

    with open(path, "wb") as stream:
        np.save(SimpleNamespace(write=stream.write), array)  # type: ignore[arg-type]


def save_tensors(path: str | os.PathLike[str], value: Any) -> None:
    """`torch.save`, except that a disk that is full at the end of the file is an error.

    Given a path, torch does not look at what closing the file returns.
    """
    import torch

    with open(path, "wb") as stream:
        torch.save(value, stream)


def write_json(target: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_path(target) as part:
        # Names of files need not be UTF-8: what cannot be encoded becomes an escape of JSON, which reads back.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def is_folder_of(folder: str | os.PathLike[str], expected: str) -> bool:
    """Whether a folder that is replaced whole holds a format, by its meta.json."""
    path = Path(folder) / "meta.json"

    def read() -> bool:
        recover(folder)
        return path.is_file() and read_json_object(path).get("format") == expected

    return consistent_read(folder, read)


def check_writable(folder: Path) -> None:
    """Make sure that files can be written to a folder, which need not exist; nothing is left behind."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise DualencError(f"{folder}: cannot be written, {existing} is a file; choose another --out")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except (OSError, ValueError) as error:
        if isinstance(error, DualencError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DualencError(f"{folder}: cannot be written ({reason}); choose another --out") from None
