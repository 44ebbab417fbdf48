"""Ranges of options, checked before any work and any heavy import."""

from __future__ import annotations

import math

from dualenc.errors import DualencError

MAX_WORKERS = 1024
MAX_ITEMS = 1 << 20  # in a batch
MAX_SEED = (1 << 32) - 1


def check_options(minimum: float, maximum: float, **values: float | None) -> None:
    """Refuse numeric options, by name, outside a range; NaN is outside, None is an option that was not given."""
    for name, value in values.items():
        if value is not None and not minimum <= value <= maximum:
            allowed = f"lie between {minimum:,} and {maximum:,}"
            if maximum == math.inf:
                allowed = f"be at least {minimum:,}"
            raise DualencError(f"--{name.replace('_', '-')} is {value}; it must {allowed}")
