"""Process registry of `search/claims.py`, its only user; goes with it."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from dualenc.full_disk import explain_full_disk

_CLOCK_TICKS = Path("/proc/stat")


def _container() -> str:
    container = Path("/proc/self/ns/pid")
    return os.readlink(container) if container.is_symlink() else ""


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


def create_json(target: str | os.PathLike[str], value: Any) -> bool:
    """Write `value` as JSON unless there is such a file already: of several processes one does.

    Returns:
        Whether this one did.
    """
    target = Path(target)
    part = target.with_name(f".{target.name}.part-{uuid.uuid4().hex[:8]}")
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
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
            part.unlink(missing_ok=True)
    return True
