"""Atomic writes: a file or folder is complete or absent, even if its writer is killed.

A writer works in a folder beside the target and holds the lock in it, which the system releases
when the process ends:

    .NAME.part/
        lock        one writer at a time
        new-NAME    being written; renamed to NAME when complete
        old-NAME    the folder that it replaces

A file is replaced in one rename. A folder cannot be renamed over another: the old one moves to
`old-NAME` first, which shows that `new-NAME` is complete. `recover` restores the folder if a writer
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
"""Files that identify folders which are replaced or resumed."""
_MAX_ATTEMPTS = 100
"""Maximum number of attempts if another process keeps replacing or removing a folder."""
_FULL_DISK = ("No space left on device", "Disk quota exceeded")
_NEARLY_FULL = 2**16
"""Free bytes below which a failed write counts as one on a full disk."""
_MAX_SWAP_SECONDS = 5.0
"""Time a reader waits for a living writer that is between the two renames of a folder."""


class _Work:
    """The work folder of a writer, beside its target."""

    def __init__(self, target: StrPath) -> None:
        path = Path(os.path.abspath(target))
        # A file replaces a symbolic link; a folder replaces the link's destination.
        self.target = path if path.is_file() else Path(os.path.realpath(path))
        self.folder = self.target.with_name(f".{self.target.name}.part")
        # The name ends with that of the target, because some libraries depend on the suffix.
        self.new = self.folder / f"new-{self.target.name}"
        self.old = self.folder / f"old-{self.target.name}"
        # A single object per path and process, so that the same thread may lock a target again.
        self.lock = FileLock(self.folder / "lock", is_singleton=True)

    @contextmanager
    def locked(self, timeout: float = -1) -> Iterator[None]:
        """Hold the lock in this context.

        The remains of a killed writer are put in place or removed first.
        """
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
        """Return True if the target is missing because a writer is between the two renames."""
        return os.path.lexists(self.old) and not os.path.lexists(self.target)

    def _acquire(self, timeout: float) -> None:
        for _ in range(_MAX_ATTEMPTS):
            # Another process may remove the folder between mkdir and acquire.
            with suppress(FileNotFoundError, FileExistsError):
                self.folder.mkdir(parents=True, exist_ok=True)
                if others := self.others():
                    raise DualencError(
                        f"holds {others[0]!r}, which dualenc did not write",
                        fix="move it away",
                        where=self.folder,
                    )
                self.lock.acquire(timeout)
                return
        raise DualencError("cannot be locked", fix="move it away", where=self.folder)

    def others(self) -> list[str]:
        """Return the names of foreign files in the work folder."""
        own = (self.new.name, self.old.name, "lock", ".nfs")
        return [name for name in sorted(os.listdir(self.folder)) if not name.startswith(own)]

    def _settle(self) -> None:
        if self.is_swapping():
            os.replace(self.new if self.new.exists() else self.old, self.target)
        remove(self.new)
        remove(self.old)

    def _clean_up(self) -> None:
        # `recover` handles what cannot be settled now.
        with suppress(OSError):
            self._settle()
        # Removed while held: a process that waits for a removed lock file notices, and tries again.
        Path(self.lock.lock_file).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


@contextmanager
def atomic_path(target: StrPath) -> Iterator[Path]:
    """Yield a path to write a file to; on success it replaces the target.

    After an error the old target stays.

    Args:
        target: path of the file.
    """
    check_file_target(target)
    work = _Work(target)
    # Explained twice: taking the lock may fail on a full disk, and while it is held the partial
    # output keeps the disk full.
    with explain_full_disk(target), work.locked(), explain_full_disk(target):
        yield work.new
        _sync(work.new)
        os.replace(work.new, work.target)


@contextmanager
def atomic_folder(target: StrPath, is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """Yield a path to write a folder to; on success it replaces the target.

    After an error the old target stays.

    Args:
        target: path of the folder, which is missing, empty or of the kind that is written.
        is_ours: function that returns True if a folder is of that kind.
        what: name of that kind, for the error: "already exists and holds no …".
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
    """Report a full disk in one line that names it, whichever library writes the target."""
    try:
        yield
    except Exception as error:
        path = Path(os.path.abspath(target))
        folder = next(each for each in path.parents if each.is_dir())
        usage = shutil.disk_usage(folder)
        if not _is_full_disk(error, usage.free):
            raise
        free = f"{usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB"
        raise DualencError(
            f"the disk is full ({free} are free in {folder})",
            fix="free some space, or name a folder on another disk",
            where=target,
        ) from error


def _is_full_disk(error: Exception, free: int) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        is_reported = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        # FAISS, safetensors and tokenizers raise their own errors with the system's message.
        if is_reported or any(words in str(cause) for words in _FULL_DISK):
            return True
        cause = cause.__cause__ or cause.__context__
    # numpy and torch report only the number of unwritten bytes.
    has_no_reason = isinstance(error, RuntimeError) or (
        isinstance(error, OSError) and error.errno is None
    )
    return has_no_reason and free < _NEARLY_FULL


def _sync(file: Path) -> None:
    """Flush a file to disk before a rename: a power cut must not leave an empty target."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def locked(target: StrPath, wait: bool = True, option: str = "--out") -> Iterator[None]:
    """Lock an output in this context, so that processes that write it take turns.

    The same thread may lock it again.

    Args:
        target: path of the file or folder, which need not exist.
        wait: True to wait for another process that writes it, False to raise.
        option: name of the option that sets the output, for the error.

    Raises:
        DualencError: another process writes the output, and `wait` is False.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_Work(target).locked(-1 if wait else 0))
        except Timeout:
            raise DualencError(
                f"another dualenc process is writing {target}",
                fix=f"wait for it or choose another {option}",
            ) from None
        yield


def is_locked(target: StrPath) -> bool:
    """Return True if another process writes an output."""
    work = _Work(target)
    try:
        if work.folder.is_dir():
            # Other processes may check at the same time, and hold the lock for a moment.
            with work.locked(0.5):
                pass
    except Timeout:
        return True
    return False


def was_replaced_by_killed(target: StrPath) -> bool:
    """Return True if a writer replaced a folder and was killed before it removed the old one."""
    work = _Work(target)
    return work.old.exists() and work.target.exists()


def is_written_now(target: StrPath) -> bool:
    """Return True if another process holds the lock of an output; unlike `is_locked`, change
    nothing."""
    work = _Work(target)
    if not os.path.lexists(work.lock.lock_file):
        return False
    try:
        # A single attempt, and the lock alone: what a killed writer has left stays.
        with FileLock(work.lock.lock_file, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that cannot be written to, so by nobody who is like us
        return False


def left_by_killed(target: StrPath) -> list[str]:
    """Return what a killed writer has left beside an output, as paths.

    Args:
        target: path of the file or folder, which nobody writes (`is_written_now`).
    """
    work = _Work(target)
    return [str(path) for path in (work.new, work.old) if os.path.lexists(path)]


def recover(target: StrPath, *, unfinished: bool = False) -> None:
    """Restore a folder whose writer was killed between the two renames; call before opening it.

    Args:
        target: path of the file or folder.
        unfinished: also remove what dead writers did not finish; only for a process that is about
            to write the target.
    """
    work = _Work(target)
    is_missing = work.is_swapping()
    if not is_missing and not (unfinished and work.folder.is_dir() and not work.others()):
        return
    try:
        # The target of a living writer may be missing for a moment.
        with work.locked(_MAX_SWAP_SECONDS if is_missing else 0):
            pass
    except Timeout:
        pass
    except OSError as error:
        raise DualencError(
            f"a killed process has left it in {work.folder} ({error})",
            fix="move it back",
            where=target,
        ) from None


def recover_inside(folder: StrPath) -> None:
    """Recover all targets in a folder, for a process that writes there."""
    for work in sorted(Path(folder).glob(".*.part")):
        recover(work.with_name(work.name[1:].removesuffix(".part")), unfinished=True)


def check_file_target(path: StrPath) -> None:
    """Raise if a file is to be written where a folder is."""
    if os.path.isdir(path):
        raise DualencError(
            "is a folder, but the output is a file", fix="name a file in it", where=path
        )


def check_folder_target(
    folder: StrPath, is_ours: Callable[[Path], bool], what: str, is_replaced: bool = False
) -> None:
    """Raise on a file, a folder of another kind, or a mount point that would be replaced.

    Args:
        folder: path of the folder, which need not exist.
        is_ours: function that returns True if a folder is of the kind that is written.
        what: name of that kind, for the error.
        is_replaced: True if the folder is replaced as a whole.
    """
    folder = Path(folder)
    if is_replaced and os.path.ismount(os.path.realpath(folder)):
        raise DualencError(
            "is a mount point, which cannot be replaced", fix="name a folder in it", where=folder
        )
    recover(folder)
    is_free = not folder.exists() or (folder.is_dir() and not os.listdir(folder))
    if not is_free and not (folder.is_dir() and is_ours(folder)):
        raise DualencError(
            f"already exists and holds no {what}", fix="choose a new or empty folder", where=folder
        )


def check_writable(folder: Path) -> None:
    """Raise if files cannot be written to a folder, which need not exist."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise DualencError(
            f"cannot be written ({error.strerror})", fix="choose another --out", where=folder
        ) from None


def consistent_read(folder: StrPath, read: Callable[[], Result]) -> Result:
    """Call `read` until everything it opens belongs to one generation of a folder.

    Args:
        folder: path of a folder that is replaced as a whole.
        read: function that opens all that is needed of the folder.
    """
    # meta.json is renamed with its folder, so its inode identifies the generation.
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
    raise DualencError("other processes keep replacing it", fix="try again later", where=folder)


def version_of(path: Path) -> tuple[int, int] | None:
    """Return an identifier of a version of an atomically replaced file; None if it is missing."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def is_folder_of(folder: StrPath, expected: str) -> bool:
    """Return True if a folder has a format, by its meta.json.

    Args:
        folder: path of a folder that is replaced as a whole.
        expected: name of the format.
    """
    path = Path(folder) / "meta.json"

    def read() -> bool:
        recover(folder)
        return path.is_file() and read_json_object(path).get("format") == expected

    return consistent_read(folder, read)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists.

    The files that identify a folder go last, so that the rest is recognized if this is interrupted.
    """
    if path.is_dir() and not path.is_symlink():
        for child in list(path.iterdir()):
            if child.name not in DESCRIPTIONS:
                remove(child)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_if_refused(folder: StrPath, finished: str | None = None) -> Iterator[None]:
    """Remove empty folders that were created in this context, so that a refusal leaves nothing.

    Args:
        folder: path that the work goes to; its parents may be created, too.
        finished: glob pattern of finished work. After an error without any, a new folder is removed
            together with its files.
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
        # Inner folders first, up to the first one that is not empty.
        for path in made:
            with suppress(OSError):
                path.rmdir()


def save_array(path: StrPath, array: np.ndarray) -> None:
    """Save an array by `np.save` through a Python stream.

    With a C stream, numpy misses a disk that is full when the file is closed.
    """
    import numpy as np

    with open(path, "wb") as stream:
        np.save(SimpleNamespace(write=stream.write), array)  # type: ignore[arg-type]


def save_tensors(path: StrPath, value: Any) -> None:
    """Save a value by `torch.save` through a Python stream.

    Given a path, torch misses a disk that is full when the file is closed.
    """
    import torch

    with open(path, "wb") as stream:
        torch.save(value, stream)


def write_json(target: StrPath, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_path(target) as part:
        # File names need not be valid UTF-8; JSON escapes can be read back.
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
