"""Who works on which piece: claims are files in a folder that all workers share, without any other connection.

    NAME.claim    host, process and a random token of the one worker that has the piece

A claim is made by creating its file, which one of several workers can do. Its owner touches it while it lives. One
whose process is seen to be gone, or that was not touched for `take_over` seconds, is replaced by another worker's. Two
may do that in the same moment: the later one has it, and the earlier one finds that out when it asks `held` before it
writes. Should both write nevertheless, both write the same and rename it into place.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dualenc.errors import DualencError
from dualenc.files import create_json, process_state, this_process, write_json

_SETTLE_SECONDS = 0.2
"""Longer than another worker takes from looking at a claim to replacing it."""


class Claims:
    """The claims of one worker in a folder; use it in a `with`, which touches them and releases them at the end.

    Args:
        folder: that all workers see.
        take_over: seconds without a sign of life after which a claim of another worker counts no more.

    Raises:
        DualencError: `take_over` is not above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], take_over: float = 600.0) -> None:
        if not take_over > 0:
            raise DualencError(f"claims cannot be taken over after {take_over} seconds; give a time above 0")
        self.folder, self.take_over = Path(folder), take_over
        self.token = uuid.uuid4().hex
        self._held: set[str] = set()
        self._ended = threading.Event()

    def __enter__(self) -> Claims:
        self._ended.clear()
        threading.Thread(target=self._keep_fresh, daemon=True, name="claims").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        for name in list(self._held):
            self.release(name)

    def take(self, name: str) -> bool:
        """Claim a piece; whether this worker has it now.

        Raises:
            DualencError: the folder is gone.
        """
        path = self._path(name)
        told = {**this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S"), "token": self.token}
        try:
            if not create_json(path, told):
                if not self._abandoned(path):
                    return False
                write_json(path, told)
                time.sleep(_SETTLE_SECONDS)
        except FileNotFoundError:
            if self.folder.is_dir():  # released in this very moment
                return False
            raise DualencError(f"{self.folder}: gone while it was written to; run the same command again") from None
        self._held.add(name)
        return self.held(name)

    def exists(self, name: str) -> bool:
        """Whether anybody has claimed a piece, alive or not."""
        return self._path(name).exists()

    def held(self, name: str) -> bool:
        """Whether this worker still has a piece that it claimed."""
        if name in self._held and _read(self._path(name)).get("token") != self.token:
            self._held.discard(name)
        return name in self._held

    def release(self, name: str) -> None:
        """Give a piece back, done or not."""
        if self.held(name):
            self._held.discard(name)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.claim"

    def _abandoned(self, path: Path) -> bool:
        """Whether nobody works on a claimed piece any more.

        The age is told by the clock of the disk alone: those of the machines may differ by minutes. A time that lies
        as far in the future was made by a clock that was wrong, and a living worker would have corrected it.
        """
        holder = _read(path)
        if holder and process_state(holder) == "gone":
            return True
        touched = path.stat().st_mtime
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".clock-") as now:
            return abs(os.fstat(now.fileno()).st_mtime - touched) > self.take_over

    def _keep_fresh(self) -> None:
        while not self._ended.wait(self.take_over / 10):
            for name in list(self._held):
                if self.held(name):
                    with suppress(OSError):
                        os.utime(self._path(name))


def _read(path: Path) -> dict[str, Any]:
    """Who a claim names; nobody where it is gone or being written."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
