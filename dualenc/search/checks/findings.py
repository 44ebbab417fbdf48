"""Findings of checks: what was looked at, and whether it is an alarm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

State = Literal["ok", "alarm", "skipped"]


class Finding(NamedTuple):
    """What one check found.

        alarm("zero", "3 of 1,000 vectors are zero", zero=3, vectors=1000)

    Attributes:
        name: name of the check.
        state: "ok", "alarm", or "skipped" if it could not be made.
        line: what was found, or why the check was skipped.
        numbers: what was counted and measured.
    """

    name: str
    state: State
    line: str
    numbers: Mapping[str, Any]


def ok(name: str, line: str, **numbers: Any) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(name, "ok", line, numbers)


def alarm(name: str, line: str, **numbers: Any) -> Finding:
    """Return the finding of a check that found a fault."""
    return Finding(name, "alarm", line, numbers)


def skipped(name: str, reason: str) -> Finding:
    """Return the finding of a check that could not be made."""
    return Finding(name, "skipped", reason, {})


def judged(name: str, is_alarm: bool, line: str, **numbers: Any) -> Finding:
    """Return an alarm or a finding without one."""
    return Finding(name, "alarm" if is_alarm else "ok", line, numbers)
