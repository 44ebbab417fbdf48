"""The CPUs that this process may use."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, such as those that `taskset` left it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_workers(num_workers: int) -> int:
    """Return at most one worker process per usable CPU: more would slow one another down."""
    return min(num_workers, usable_cpus())
