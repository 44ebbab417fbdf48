"""The folder of a run: who may write there, and what stands in its log."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import atomic_path, remove
from dualenc.training.run_log import read_metrics

LOCK = ".lock"
RUN_FILES = ("metrics.jsonl", "checkpoints", "selection", "model", "recipe.yaml", "trackers")


@contextmanager
def claimed(output: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> Iterator[None]:
    """In this context a run has a folder for itself; all ranks enter it together, the main process holds the lock.

    The folder is made if it is not there. Otherwise nothing in it changes here, and a folder in which nothing was
    written is gone at the end: a mistake that comes to light before the first step leaves no trace.

    Args:
        output: the folder.
        resume: a run there is gone on with.
        overwrite: a run there may be replaced, see `clear`.

    Raises:
        DualencError: another run is going on there; there is a finished or broken one and neither is wanted; or the
            folder cannot be made.
    """
    folder = Path(output)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    problem = None
    if distributed.is_main():
        try:
            _claim(folder, resume or overwrite)
        except DualencError as error:
            problem = str(error)
            _remove_empty(made)
    problem = distributed.broadcast_object(problem)
    if problem:
        raise DualencError(problem)
    try:
        yield
    finally:
        if distributed.is_main():
            _unlock(folder / LOCK)
            _remove_empty(made)


def clear(output: str | os.PathLike[str]) -> None:
    """Remove what an earlier run has left, all but `selection`, in which the new one may be at work already."""
    if distributed.is_main():
        for name in RUN_FILES:
            if name != "selection":
                remove(Path(output) / name)


def save_recipe(output: str | os.PathLike[str], recipe: Mapping[str, Any] | None) -> None:
    """Write recipe.yaml, from which the run can be made again."""
    if recipe and distributed.is_main():
        with atomic_path(Path(output) / "recipe.yaml") as beside:
            beside.write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


def last_logged(output: str | os.PathLike[str], name: str) -> float:
    """The last value of a metric in metrics.jsonl; NaN if there is none."""
    values = [line[name] for line in read_metrics(Path(output) / "metrics.jsonl") if line.get(name) is not None]
    return float(values[-1]) if values else float("nan")


def _claim(folder: Path, wanted: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder / LOCK)
    except OSError as error:
        raise DualencError(
            f"{folder}: cannot be made or written to ({error.strerror}); choose another trainer.output"
        ) from None
    found = [name for name in RUN_FILES if (folder / name).exists()]
    if found and not wanted:
        _unlock(folder / LOCK)
        raise DualencError(
            f"{folder}: holds a run already ({found[0]}); resume it (--resume), allow trainer.overwrite=true, or "
            "choose another trainer.output"
        )


def _lock(lock: Path) -> None:
    """Write who works here, unless somebody does; the lock of a process that is gone is replaced."""
    with _alone(lock.parent):
        if lock.exists():
            holder = _holder(lock)
            who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
            state = _state(holder)
            if state == "unknown":
                raise DualencError(
                    f"{lock.parent}: locked by a run that cannot be looked up from here ({who}); if it has ended, "
                    f"remove {lock} and start again"
                )
            if state == "running":
                raise DualencError(
                    f"{lock.parent}: a run is going on in this folder ({who}); wait for it or stop it, or choose "
                    "another trainer.output"
                )
            lock.unlink(missing_ok=True)
        try:
            with open(lock, "x", encoding="utf-8") as stream:
                stream.write(json.dumps({**_myself(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
        except FileExistsError:
            raise DualencError(f"{lock.parent}: another run has just begun in this folder; wait for it") from None
        except OSError:
            lock.unlink(missing_ok=True)
            raise


def _unlock(lock: Path) -> None:
    holder = _holder(lock)
    if {name: holder.get(name) for name in _myself()} == _myself():
        lock.unlink(missing_ok=True)


def _holder(lock: Path) -> dict[str, Any]:
    """Who a lock names; nobody when it cannot be read: it may be being written on another machine."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _state(holder: dict[str, Any]) -> str:
    """Whether the process that a lock names is "running", "gone", or "unknown" as it is out of sight.

    A number alone does not name a process: numbers are used again, so the time of its start counts too; they mean
    nothing after another boot; and in another container they mean other processes.
    """
    myself = _myself()
    if holder.get("host") != myself["host"] or not isinstance(holder.get("pid"), int):
        return "unknown"
    if holder.get("boot") != myself["boot"]:
        return "gone"
    if holder.get("container") != myself["container"]:
        return "unknown"
    return "running" if holder.get("started") == _started(holder["pid"]) else "gone"


def _myself() -> dict[str, Any]:
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "container": os.readlink(container) if container.is_symlink() else "",
    }


def _started(pid: int) -> str:
    """When a process was started, in whatever clock its system keeps; "" for one that has ended."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]  # ended, but not yet noticed by its parent
    import psutil

    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.Error:
        return ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of several processes on one machine that find a stale lock, one replaces it and the others see that."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, inner ones first, up to one that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
