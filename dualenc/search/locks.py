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
    """File lock, held until the end of the context or the death of this process; the empty file stays.

    Yields whether this worker holds the lock; with `wait` it waits until it does.

    Raises:
        FileNotFoundError: the folder is gone.
        DualencError: the file system has no locks.
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
            raise DualencError(f"{path.parent}: its file system has no locks; choose another disk") from None
    try:
        yield True
    finally:
        lock.release()
