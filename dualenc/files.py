"""Writing so that nothing is ever half-written: beside the target first, then renamed; and reading what may be damaged.

A file takes its target's place in one rename. A folder that replaces a folder needs three:

    .NAME.part-WRITER → .NAME.new-WRITER    the new folder is complete, and its name says so
    NAME              → .NAME.old-WRITER
    .NAME.new-WRITER  → NAME                and the old one is removed

Whatever a kill leaves between them, `recover` puts a complete folder in place again. WRITER is PLACE-PID-THREAD;
PLACE tells machines and containers apart that share a disk and whose processes may have equal numbers.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from filelock import FileLock

from dualenc.errors import DiskFull, DualencError

if TYPE_CHECKING:
    import numpy as np

_FULL = {errno.ENOSPC: "no space left on the disk", errno.EFBIG: "the file would be larger than is allowed"}
_FULL |= {errno.EDQUOT: "the disk quota is used up"} if hasattr(errno, "EDQUOT") else {}
_SHORT_WRITE = re.compile(
    r"unexpected pos \d+ vs \d+|basic_ios::clear: iostream error|PytorchStreamWriter failed writing"
    r"|\d+ requested and \d+ written|database or disk is full"
)
"""What torch.save, numpy and SQLite say, without an errno, of a write that the disk cut short."""

READ_AT_OPENING = 2**26
"""Bytes of a folder that opening it reads to compare checksums (40 ms)."""

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<stage>part|new|old)-((?P<place>[0-9a-f]{8})-)?(?P<pid>\d+)(-\d+)?$")
_SWAP_SECONDS = 0.5
"""Longer than any living process takes between the renames of a swap."""
_FOREIGN_SECONDS = 86400.0
"""Unfinished files of another machine, whose processes cannot be looked up, stay that long."""
_CLOCK_SECONDS = 5.0
"""By how much the clocks of files and of processes may differ."""

_CLOCK_TICKS = Path("/proc/stat")
"""Where Linux tells when it was booted; elsewhere psutil says when a process began."""

_writing: set[Path] = set()
"""Targets that this process is writing now."""


@contextmanager
def atomic_path(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `target` to write a file to; on success it takes the target's place.

    On an error whatever was written is removed and the old target stays.

    Raises:
        DualencError: the target is a folder, which a file never replaces.
        DiskFull: the disk, the quota or the permitted file size was used up, whichever library noticed it.
    """
    target = Path(target)
    check_file_target(target)
    with _written_beside(target) as part:
        yield part
        _sync(part)
        os.replace(part, target)


@contextmanager
def atomic_folder(target: str | os.PathLike[str], is_ours: Callable[[Path], bool], what: str) -> Iterator[Path]:
    """Yield a path beside `target` to write a folder to; on success it takes the target's place.

    On an error whatever was written is removed and the old target stays.

    Args:
        target: the folder.
        is_ours: whether a folder is of the kind that is written, and may be replaced.
        what: that kind, in the error: "holds no …".

    Raises:
        DualencError: the target is a file, or a folder of another kind that is not empty.
        DiskFull: the disk, the quota or the permitted file size was used up, whichever library noticed it.
    """
    target = Path(target)
    check_folder_target(target, is_ours, what)
    with _written_beside(target) as part:
        yield part
        for file in part.rglob("*"):
            if file.is_file():
                _sync(file)
        if not target.is_dir() or target.is_symlink():
            os.replace(part, target)
            return
        # A folder cannot be renamed over a folder that holds files: step aside, swap, remove.
        new, old = _beside(target, "new"), _beside(target, "old")
        os.replace(part, new)
        try:
            os.replace(target, old)
            os.replace(new, target)
        finally:
            if not os.path.lexists(target):
                os.replace(old, target)
            remove(new)
        remove(old)


@contextmanager
def _written_beside(target: Path) -> Iterator[Path]:
    """Yield where to write what will be a target; removed at the end unless it was renamed."""
    part = _beside(target, "part")
    with explain_full_disk(target), removed_if_refused(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        recover(target, unfinished=True)
        _writing.add(Path(os.path.abspath(target)))
        try:
            yield part
        finally:
            _writing.discard(Path(os.path.abspath(target)))
            remove(part)


def _sync(file: Path) -> None:
    """Contents before names, so that a power cut cannot leave an empty target."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no system takes, before any work."""
    if "\0" in os.fspath(path):
        raise DualencError(f"{os.fspath(path)!r}: holds a NUL character, which no path may; name another")


def check_file_target(path: str | os.PathLike[str]) -> None:
    """Insist that a file may be written: what is there is no folder, which a file never replaces."""
    check_path(path)
    if os.path.isdir(path):
        raise DualencError(f"{os.fspath(path)}: is a folder, and a file is written here; name a file in it, or another")


def check_folder_target(folder: str | os.PathLike[str], is_ours: Callable[[Path], bool], what: str) -> None:
    """Insist that a folder may be written: it is new, empty, or of the same kind.

    Args:
        folder: to be written.
        is_ours: whether a folder that holds something is of that kind, told by a file that dualenc wrote.
        what: the kind, in the error: "holds no …".

    Raises:
        DualencError: it is a file, or a folder of another kind: that is neither deleted nor mixed into.
    """
    check_path(folder)
    folder = Path(folder)
    recover(folder)
    is_empty = not folder.exists() or (folder.is_dir() and not os.listdir(folder))
    if not is_empty and not (folder.is_dir() and is_ours(folder)):
        raise DualencError(f"{folder}: exists and holds no {what}; choose a new or empty folder")


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a folder that is read, changed and written anew, so that no change of another process is lost.

    The lock lies beside the folder, which is replaced itself, and stays there. A folder that is missing has none.
    """
    target = Path(os.path.realpath(folder))
    recover(target)
    with FileLock(target.with_name(f".{target.name}.lock")) if target.is_dir() else nullcontext():
        yield


def _beside(target: Path, stage: str) -> Path:
    """Where this thread has a target that is not in its place yet, or not any more."""
    return target.with_name(f".{target.name}.{stage}-{_place()}-{os.getpid()}-{threading.get_native_id()}")


@cache
def _place() -> str:
    """Eight characters for this machine and, in a container, for that."""
    return hashlib.sha256(f"{socket.gethostname()} {_container()}".encode()).hexdigest()[:8]


def _container() -> str:
    """In what numbers of processes mean what they do here."""
    container = Path("/proc/self/ns/pid")
    return os.readlink(container) if container.is_symlink() else ""


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def removed_if_refused(folder: str | os.PathLike[str], finished: str | None = None) -> Iterator[None]:
    """On an error take away the folders that were made in this context, as far as they hold nothing.

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


@contextmanager
def explain_full_disk(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the libraries raise on a full disk into one line that names the folder and what to do.

    Args:
        target: the file or folder that is being written.

    Raises:
        DiskFull: instead of an OSError, or of what torch, numpy, safetensors, tokenizers, faiss and pyarrow raise.
    """
    try:
        yield
    except Exception as error:
        interruption = _interruption(error)
        if interruption is not None:
            raise interruption from None
        reason = _full_reason(error)
        if reason is None:
            raise
        target = Path(target)
        folder = next(path for path in target.absolute().parents if path.exists())
        free = f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB free in {folder}"
        remedy = "make room there or choose another folder, then run the same command again"
        raise DiskFull(f"{target}: could not be written, {reason} ({free}); {remedy}") from error


def _interruption(error: BaseException | None) -> BaseException | None:
    """The KeyboardInterrupt or SystemExit of a signal, if that and not the disk cut a write short."""
    if not _SHORT_WRITE.search(str(error)):
        return None
    while isinstance(error, Exception):
        error = error.__cause__ or error.__context__
    return error


def _full_reason(error: BaseException | None) -> str | None:
    """Why there was no room, if that is what an error or its cause is about."""
    if error is None or (isinstance(error, DualencError) and not isinstance(error, DiskFull)):
        return None
    text = str(error)
    for number, reason in _FULL.items():
        told = os.strerror(number) in text or f"(os error {number})" in text
        if told or getattr(error, "errno", None) == number:
            return reason
    return _FULL[errno.ENOSPC] if _SHORT_WRITE.search(text) else _full_reason(error.__cause__)


def recover(target: str | os.PathLike[str], *, unfinished: bool = False) -> None:
    """Settle what killed processes left beside a target; call it before a folder is opened or judged missing.

    A target that is missing because its replacement was killed half-way comes back: the new folder if it was
    complete, or else the old one. What belongs to a living process is not touched.

    Args:
        target: the file or folder.
        unfinished: remove what dead processes did not finish, too, and what other machines did not within a day. Only
            for whoever is about to write the target.

    Raises:
        DualencError: a complete folder is there but cannot be renamed.
    """
    target = Path(os.path.abspath(target))

    def leftovers() -> list[tuple[Path, str, str]]:
        """Path, stage and writer of each; without a place it is of this machine."""
        found = [match for match in _leftovers(target.parent) if match["name"] == target.name]
        writers = [f"{match['place'] or _place()}-{match['pid']}" for match in found]
        return [(target.parent / match[0], match["stage"], writer) for match, writer in zip(found, writers)]

    deadline = time.monotonic() + _SWAP_SECONDS
    while not os.path.lexists(target) and time.monotonic() < deadline:
        if not any(stage == "old" for _, stage, _ in leftovers()):
            break
        time.sleep(0.02)  # a swap on another machine may be under way
    dead = []
    for path, stage, writer in leftovers():
        place, _, pid = writer.partition("-")
        if place != _place():  # a swap would be over by now
            alive = stage == "part" and time.time() < _changed(path) + _FOREIGN_SECONDS
        else:
            alive = target in _writing if int(pid) == os.getpid() else is_running(int(pid), _changed(path))
        if not alive:
            dead.append((path, stage, writer))
    swaps = {writer for _, stage, writer in dead if stage == "old"}
    complete = [(stage == "new", _changed(path), path) for path, stage, by in dead if by in swaps and stage != "part"]
    if complete and not os.path.lexists(target):
        latest = max(complete)[2]
        try:
            os.replace(latest, target)
        except OSError as error:
            if not os.path.lexists(target):  # otherwise another process was faster
                remedy = f"rename it to {target.name}"
                raise DualencError(f"{target}: a killed process left it as {latest} ({error}); {remedy}") from None
    for path, stage, _ in dead:
        if os.path.lexists(target) if stage == "old" else unfinished:
            with suppress(OSError):
                remove(path)


def recover_inside(folder: str | os.PathLike[str]) -> None:
    """`recover` all that is in a folder, for whoever writes there."""
    for name in sorted({match["name"] for match in _leftovers(Path(folder))}):
        recover(Path(folder) / name, unfinished=True)


def _leftovers(folder: Path) -> list[re.Match[str]]:
    try:
        return [match for match in map(_LEFTOVER.match, os.listdir(folder)) if match]
    except OSError:
        return []


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_ctime
    except OSError:
        return 0.0


def started(pid: int) -> str:
    """When a process of this machine began, in whatever clock its system keeps.

    "" for one that has ended, even if its parent has not noticed yet; "?" for one that does not tell.
    """
    if not _CLOCK_TICKS.exists():
        import psutil

        try:
            return f"{psutil.Process(pid).create_time():.0f}"
        except psutil.NoSuchProcess:
            return ""
        except psutil.Error:
            return "?"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        pass  # alive, and another user's
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return "?"


def is_running(pid: int, since: float | None = None) -> bool:
    """Whether a process of this machine is alive.

    Args:
        pid: its number.
        since: seconds since the epoch; a process that began later only reuses the number and does not count.
    """
    began = started(pid)
    if began in ("", "?") or since is None:
        return bool(began)
    seconds = float(began)
    if _CLOCK_TICKS.exists():  # in ticks since the boot
        booted = re.search(r"^btime (\d+)", _CLOCK_TICKS.read_text(), re.MULTILINE)
        if booted is None:
            return True
        seconds = int(booted[1]) + seconds / os.sysconf("SC_CLK_TCK")
    return seconds < since + _CLOCK_SECONDS


def this_process() -> dict[str, Any]:
    """What names this process to others who see the same disk; they ask `process_state`."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "container": _container(),
    }


def process_state(named: Mapping[str, Any]) -> Literal["running", "gone", "unknown"]:
    """Whether the process that `this_process` once named is alive; "unknown" when it is out of sight.

    A number alone does not name a process: numbers are used again, so the time of its start counts too; they mean
    nothing after another boot; and in another container they mean other processes.
    """
    here = this_process()
    if named.get("host") != here["host"] or not isinstance(named.get("pid"), int):
        return "unknown"
    if named.get("boot") != here["boot"]:
        return "gone"
    began = started(named["pid"])
    if named.get("container") != here["container"] or began == "?":
        return "unknown"
    return "running" if began and named.get("started") == began else "gone"


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
    with atomic_path(target) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def create_json(target: str | os.PathLike[str], value: Any) -> bool:
    """Write `value` as JSON unless there is such a file already: of several processes one does.

    Returns:
        Whether this one did.
    """
    target = Path(target)
    part, text = _beside(target, "part"), json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with explain_full_disk(target):
        try:
            with open(part, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.link(part, target)  # unlike a rename, never over another file
        except FileExistsError:
            return False
        except OSError:
            if not part.is_file() or part.stat().st_size < len(text):
                raise
            with suppress(FileExistsError), open(target, "x", encoding="utf-8") as stream:  # no links here
                stream.write(text)
                return True
            return False
        finally:
            remove(part)
    return True


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


def read_json(source: str | os.PathLike[str]) -> Any:
    """Read a JSON file; a missing or malformed one is a one-line `DualencError`."""
    try:
        with open_regular(source) as stream:
            return json.loads(stream.read().decode("utf-8"))
    except FileNotFoundError:
        raise DualencError(f"{source}: no such file; is the folder complete?") from None
    except RecursionError:
        raise DualencError(f"{source}: not valid JSON (nested too deeply); write it again") from None
    except DualencError:
        raise
    except ValueError as error:
        raise DualencError(f"{source}: not valid JSON ({error}); write it again") from None


_KINDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
_KINDS |= {bool: "true or false", type(None): "null"}


def read_json_object(source: str | os.PathLike[str], kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        source: the file.
        kinds: names that must be there, each with the type or tuple of types of its value; `True` is no `int`.

    Raises:
        DualencError: it is missing, malformed, not an object, or a value is missing or of another type.
    """
    value = read_json(source)
    if not isinstance(value, dict):
        raise DualencError(f"{source}: holds {_KINDS[type(value)]} instead of an object; write it again")
    for name, kind in (kinds or {}).items():
        if name not in value:
            raise DualencError(f"{source}: lacks {name!r}; write it again")
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(value[name]) not in allowed:
            wanted = " or ".join(_KINDS[one] for one in allowed)
            raise DualencError(f"{source}: {name!r} is {_KINDS[type(value[name])]}, not {wanted}; write it again")
    return value


def is_folder_of(folder: str | os.PathLike[str], wanted: str) -> bool:
    """Whether a folder that is replaced whole holds a format, told by its meta.json."""
    recover(folder)
    path = Path(folder) / "meta.json"
    return path.is_file() and read_json_object(path).get("format") == wanted


def checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a regular file, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of some files of a folder by name, several at a time: one core takes about 1.5 GB a second."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: checksum(folder / name), names)))


def sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Bytes of some files of a folder, by name."""
    return {name: (folder / name).stat().st_size for name in names}


def verify_files(folder: Path, names: Iterable[str], meta: Mapping[str, Any], mend: str, whole: bool) -> None:
    """Insist that a folder's files are those that were written: all by their size, and by SHA-256 as many as asked for.

    Args:
        folder: where they are.
        names: the files that belong to it.
        meta: its meta.json: under `files` the SHA-256 of each of them, and of no others; under `sizes` their bytes.
        mend: what to do if they are not.
        whole: read all files. Otherwise at most `READ_AT_OPENING` bytes, the smallest files first.

    Raises:
        DualencError: a file is missing, is no regular file, has changed, or has no checksum.
    """
    names, recorded, written = list(names), meta["files"], meta.get("sizes")
    if not isinstance(recorded, dict) or sorted(recorded) != sorted(names):
        listed = ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
        raise DualencError(f"{folder / 'meta.json'}: its checksums are not those of {listed}; {mend}")
    for name in names:
        if not (folder / name).is_file():
            raise DualencError(f"{folder / name}: missing; {mend}")
    found = sizes(folder, names)
    if written is not None and written != found:  # older versions did not write them down
        wrong = next((name for name in names if not isinstance(written, dict) or written.get(name) != found[name]), "")
        told = written.get(wrong) if isinstance(written, dict) else written
        remark = f"{found.get(wrong, 0)} bytes instead of {str(told)[:20]}"
        raise DualencError(f"{folder / wrong}: truncated or corrupt ({remark}); {mend}")
    if not whole:
        names.sort(key=lambda name: found[name])
        read = itertools.accumulate(found[name] for name in names)
        names = [name for name, total in zip(names, read) if total <= READ_AT_OPENING]
    for name, digest in checksums(folder, names).items():
        if digest != recorded[name]:
            raise DualencError(f"{folder / name}: corrupt, its checksum is not that of meta.json; {mend}")
