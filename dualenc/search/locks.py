"""Work claims: a lock file per piece of work, in a folder that all workers share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dualenc.errors import DualencError

WAIT_SECONDS = 0.05


@contextmanager
def work_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Yield whether this worker got a file lock, held until the end of the context or the death of this process.

    With `wait` it waits until it does. A folder that is gone is a FileNotFoundError. The empty file stays.
    """
    lock = FileLock(path)
    while True:
        # FileLock would create the folder again, which another worker may have removed after finishing.
        if not path.parent.is_dir():
            raise FileNotFoundError(path)
        try:
            lock.acquire(timeout=WAIT_SECONDS if wait else 0)
            break
        except Timeout:
            if not wait:
                yield False
                return
        except NotImplementedError:
            raise DualencError(
                f"{path.parent}: its file system has no locks; choose another disk"
            ) from None
    try:
        yield True
    finally:
        lock.release()
