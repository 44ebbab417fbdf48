"""Full disks: what the libraries raise when there is no room, explained in one line."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualenc.errors import DiskFull, DualencError

_REASONS = {errno.ENOSPC: "no space left on the disk", errno.EFBIG: "the file would be larger than is allowed"}
if hasattr(errno, "EDQUOT"):
    _REASONS[errno.EDQUOT] = "the disk quota is used up"
_SHORT_WRITE = re.compile(
    r"unexpected pos \d+ vs \d+|basic_ios::clear: iostream error|PytorchStreamWriter failed writing"
    r"|\d+ requested and \d+ written|database or disk is full"
)
"""What torch.save, numpy and SQLite say, without an errno, of a write that the disk cut short."""


@contextmanager
def explain_full_disk(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the libraries raise on a full disk into one line that names the folder and the remedy.

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
        reason = _reason(error)
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


def _reason(error: BaseException | None) -> str | None:
    """Why there was no room, if that is what an error or its cause is about."""
    if error is None:
        return None
    # Errors of our own already say what is wrong; only a nested write's is repeated, with the outer target's name.
    if isinstance(error, DualencError) and not isinstance(error, DiskFull):
        return None
    text = str(error)
    for number, reason in _REASONS.items():
        # Rust libraries give the number in the text alone, C++ ones the system's words.
        in_text = os.strerror(number) in text or f"(os error {number})" in text
        if in_text or getattr(error, "errno", None) == number:
            return reason
    if _SHORT_WRITE.search(text):
        return _REASONS[errno.ENOSPC]
    return _reason(error.__cause__)
