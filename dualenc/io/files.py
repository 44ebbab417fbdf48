"""Atomic writes: a file or folder is complete or absent, whatever kills its writer.

A writer works in a folder beside the target and holds the lock in it, which the system frees when
the process ends:

    .NAME.part/
        lock        one writer at a time
        new-NAME    being written; renamed to NAME once it is complete
        old-NAME    the folder that it replaces

A file is replaced in one rename. A folder cannot be renamed over another: the old one moves to
`old-NAME` first, which says that `new-NAME` is complete. `recover` restores the folder if a writer
was killed between the two renames.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from dualenc.errors import DualencError
from dualenc.io.reading import read_json_object
from dualenc.types import StrPath

if TYPE_CHECKING:
    import numpy as np

Result = TypeVar("Result")

DESCRIPTIONS = ("meta.json", "settings.json", "plan.json")
"""Files by which folders that are replaced, or resumed, are recognised."""
_MAX_ATTEMPTS = 100
"""How often a process tries again because another one replaced or removed a folder meanwhile."""
_FULL_DISK = ("No space left on device", "Disk quota exceeded")
_NEARLY_FULL = 2**16
"""Free bytes below which a failed write is taken for one on a full disk."""
_MAX_SWAP_SECONDS = 5.0
"""How long a reader waits for a living writer that is between the two renames of a folder."""


class _Work:
    """A writer's folder beside its target."""

    def __init__(self, target: StrPath) -> None:
        path = Path(os.path.abspath(target))
        # Of symbolic links, files replace the link, folders what it points to.
        self.target = path if path.is_file() else Path(os.path.realpath(path))
        self.folder = self.target.with_name(f".{self.target.name}.part")
        # The target's own name comes last: some libraries go by the suffix.
        self.new = self.folder / f"new-{self.target.name}"
        self.old = self.folder / f"old-{self.target.name}"
        # One object per path and process: the same thread may lock a target again.
        self.lock = FileLock(self.folder / "lock", is_singleton=True)

    @contextmanager
    def locked(self, timeout: float = -1) -> Iterator[None]:
        """Hold the lock in this context; what a killed writer left is put in place or removed
        first."""
        with removed_if_refused(self.target.parent):
            self._acquire(timeout)
            is_outermost = self.lock.lock_counter == 1
            try:
                if is_outermost:
                    self._settle()
                yield
            finally:
                if is_outermost:
                    self._clean_up()
                self.lock.release()

    def is_swapping(self) -> bool:
        """Whether the target is missing, between the two renames."""
        return os.path.lexists(self.old) and not os.path.lexists(self.target)

    def _acquire(self, timeout: float) -> None:
        for _ in range(_MAX_ATTEMPTS):
            # Another process may remove the folder between these two lines.
            with suppress(FileNotFoundError, FileExistsError):
                self.folder.mkdir(parents=True, exist_ok=True)
                if others := self.others():
                    problem = f"holds {others[0]!r}, which dualenc did not write"
                    raise DualencError(f"{self.folder}: {problem}; move it away")
                self.lock.acquire(timeout)
                return
        raise DualencError(f"{self.folder}: cannot be locked; move it away")

    def others(self) -> list[str]:
        """What somebody else has put into a folder of this name."""
        own = (self.new.name, self.old.name, "lock", ".nfs")
        return [name for name in sorted(os.listdir(self.folder)) if not name.startswith(own)]

    def _settle(self) -> None:
        if self.is_swapping():
            os.replace(self.new if self.new.exists() else self.old, self.target)
        remove(self.new)
        remove(self.old)

    def _clean_up(self) -> None:
        # What cannot be settled now is left to `recover`.
        with suppress(OSError):
            self._settle()
        # Removed while it is held: whoever waits for a removed lock file notices, and tries again.
        Path(self.lock.lock_file).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


@contextmanager
def atomic_path(target: StrPath) -> Iterator[Path]:
    """Yield a path to write a file to; on success it replaces the target, after an error the old
    target stays."""
    check_file_target(target)
    work = _Work(target)
    # Twice: the lock may not fit on the disk, and what was written fills it until the lock is
    # released.
    with explain_full_disk(target), work.locked(), explain_full_disk(target):
        yield work.new
        _sync(work.new)
        os.replace(work.new, work.target)


@contextmanager
def atomic_folder(target: StrPath, is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """Yield a path to write a folder to; on success it replaces the target, after an error the old
    target stays.

    Args:
        target: the folder, missing, empty or of the kind that is written.
        is_ours: whether a folder is of that kind.
        what: that kind, in the error: "holds no …".
    """
    work = _Work(target)
    with explain_full_disk(target), work.locked(), explain_full_disk(target):
        check_folder_target(target, is_ours, what, is_replaced=True)
        yield work.new
        for file in work.new.rglob("*"):
            if file.is_file():
                _sync(file)
        if work.target.is_dir():
            os.replace(work.target, work.old)
        os.replace(work.new, work.target)


@contextmanager
def explain_full_disk(target: StrPath) -> Iterator[None]:
    """Report in one line which disk is full, whatever the library that writes a target says."""
    try:
        yield
    except Exception as error:
        path = Path(os.path.abspath(target))
        folder = next(each for each in path.parents if each.is_dir())
        usage = shutil.disk_usage(folder)
        if not _is_full_disk(error, usage.free):
            raise
        problem = f"the disk is full ({usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB are free in {folder})"
        raise DualencError(
            f"{target}: {problem}; free some space, or name a folder on another disk"
        ) from error


def _is_full_disk(error: Exception, free: int) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        is_reported = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        # FAISS, safetensors and tokenizers raise errors of their own with the system's words.
        if is_reported or any(words in str(cause) for words in _FULL_DISK):
            return True
        cause = cause.__cause__ or cause.__context__
    # numpy and torch only count the bytes that were not written.
    has_no_reason = isinstance(error, RuntimeError) or (
        isinstance(error, OSError) and error.errno is None
    )
    return has_no_reason and free < _NEARLY_FULL


def _sync(file: Path) -> None:
    """Flush contents to the disk before a rename, so that a power cut cannot leave an empty
    target."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def locked(target: StrPath, wait: bool = True, option: str = "--out") -> Iterator[None]:
    """Lock an output in this context, so that processes that write it take turns; the same thread
    may lock it again.

    Args:
        target: the file or folder, which need not exist.
        wait: for another process that writes it; otherwise raise.
        option: that names the output, for the error.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_Work(target).locked(-1 if wait else 0))
        except Timeout:
            problem = f"another dualenc process is writing {target}"
            raise DualencError(f"{problem}; wait for it or choose another {option}") from None
        yield


def is_locked(target: StrPath) -> bool:
    """Whether another process writes an output."""
    work = _Work(target)
    try:
        if work.folder.is_dir():
            # Others may look at the same time, for a moment.
            with work.locked(0.5):
                pass
    except Timeout:
        return True
    return False


def was_replaced_by_killed(target: StrPath) -> bool:
    """Whether a writer that replaced a folder was killed before it removed the old one."""
    work = _Work(target)
    return work.old.exists() and work.target.exists()


def recover(target: StrPath, *, unfinished: bool = False) -> None:
    """Restore a folder whose writer was killed between the two renames; call it before a folder is
    opened.

    Args:
        target: the file or folder.
        unfinished: remove what dead writers did not finish, too; only for whoever is about to write
            the target.
    """
    work = _Work(target)
    is_missing = work.is_swapping()
    if not is_missing and not (unfinished and work.folder.is_dir() and not work.others()):
        return
    try:
        # A missing target may be that of a living writer, for a moment.
        with work.locked(_MAX_SWAP_SECONDS if is_missing else 0):
            pass
    except Timeout:
        pass
    except OSError as error:
        problem = f"a killed process has left it in {work.folder} ({error})"
        raise DualencError(f"{target}: {problem}; move it back") from None


def recover_inside(folder: StrPath) -> None:
    """`recover` all targets in a folder, for whoever writes there."""
    for work in sorted(Path(folder).glob(".*.part")):
        recover(work.with_name(work.name[1:].removesuffix(".part")), unfinished=True)


def check_file_target(path: StrPath) -> None:
    """Refuse a folder where a file is to be written."""
    if os.path.isdir(path):
        raise DualencError(f"{path}: is a folder, and a file is written here; name a file in it")


def check_folder_target(
    folder: StrPath, is_ours: Callable[[Path], bool], what: str, is_replaced: bool = False
) -> None:
    """Refuse a file, a folder of another kind, and a mount point that is replaced; arguments as of
    `atomic_folder`."""
    folder = Path(folder)
    if is_replaced and os.path.ismount(os.path.realpath(folder)):
        raise DualencError(
            f"{folder}: is a mount point, which cannot be replaced; name a folder in it"
        )
    recover(folder)
    is_free = not folder.exists() or (folder.is_dir() and not os.listdir(folder))
    if not is_free and not (folder.is_dir() and is_ours(folder)):
        raise DualencError(f"{folder}: exists and holds no {what}; choose a new or empty folder")


def check_writable(folder: Path) -> None:
    """Refuse a folder, which need not exist, that files cannot be written to."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fault = f"cannot be written ({error.strerror})"
        raise DualencError(f"{folder}: {fault}; choose another --out") from None


def consistent_read(folder: StrPath, read: Callable[[], Result]) -> Result:
    """Repeat `read`, which opens all that is needed of a folder, until all is of one generation of
    the folder."""
    meta = Path(folder) / "meta.json"
    for _ in range(_MAX_ATTEMPTS):
        generation = version_of(meta)
        try:
            result = read()
        except (OSError, DualencError):
            if version_of(meta) == generation:
                raise
            continue
        if version_of(meta) == generation:
            return result
    raise DualencError(f"{folder}: other processes keep replacing it; try again later")


def version_of(path: Path) -> tuple[int, int] | None:
    """Identify a version of a file that is replaced atomically; None if it is missing."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def is_folder_of(folder: StrPath, expected: str) -> bool:
    """Whether a folder that is replaced whole holds a format, by its meta.json."""
    path = Path(folder) / "meta.json"

    def read() -> bool:
        recover(folder)
        return path.is_file() and read_json_object(path).get("format") == expected

    return consistent_read(folder, read)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists; the files that identify a folder last, so that its
    rest is recognised."""
    if path.is_dir() and not path.is_symlink():
        for child in list(path.iterdir()):
            if child.name not in DESCRIPTIONS:
                remove(child)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_if_refused(folder: StrPath, finished: str | None = None) -> Iterator[None]:
    """Remove empty folders that were made in this context, so that a refusal leaves nothing.

    Args:
        folder: where the work goes, with those above it.
        finished: glob pattern of finished work; after an error without any, a new folder is removed
            with its files.
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.absolute().parents) if not os.path.lexists(path)]
    try:
        yield
    except Exception:
        if finished and made and not any(folder.glob(finished)):
            remove(folder)
        raise
    finally:
        # Inner folders first, up to one that holds something.
        for path in made:
            with suppress(OSError):
                path.rmdir()


def save_array(path: StrPath, array: np.ndarray) -> None:
    """`np.save` through Python's stream: through C's, numpy misses a disk that is full when the
    file is closed."""
    import numpy as np

    with open(path, "wb") as stream:
        np.save(SimpleNamespace(write=stream.write), array)  # type: ignore[arg-type]


def save_tensors(path: StrPath, value: Any) -> None:
    """`torch.save` to a stream: given a path, torch misses a disk that is full when the file is
    closed."""
    import torch

    with open(path, "wb") as stream:
        torch.save(value, stream)


def write_json(target: StrPath, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_path(target) as part:
        # Names of files need not be UTF-8; JSON escapes read back.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
