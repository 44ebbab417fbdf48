"""Ranges of options and writable folders, checked before any work and any heavy import."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from dualenc.errors import DualencError

MAX_WORKERS = 1024
MAX_ITEMS = 1 << 20
"""In a batch."""
MAX_SEED = (1 << 32) - 1


def check_range(minimum: float, maximum: float, **values: float | None) -> None:
    """Refuse numeric options, by name, outside a range; NaN is outside, None is an option that was not given."""
    for name, value in values.items():
        if value is not None and not minimum <= value <= maximum:
            allowed = f"lie between {minimum:,} and {maximum:,}"
            if maximum == math.inf:
                allowed = f"be at least {minimum:,}"
            raise DualencError(f"--{name.replace('_', '-')} is {value}; it must {allowed}")


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
