"""The exception that a user's mistake raises, and the suggestion of the valid name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class DualencError(ValueError):
    """A mistake in data, files or arguments, reported in one line: what is wrong, where, and how to mend it.

    The command line prints the line and exits with code 2; Python callers may catch it as a `ValueError`.
    """


class BadSample(DualencError):
    """One sample cannot be used (undecodable image, empty text). Readers skip and count it, or raise it."""


class UnknownId(DualencError):
    """An id that an index or engine does not hold."""


class Unsupported(DualencError):
    """A request that this kind of index cannot answer, whatever it holds."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """` (did you mean …?)`: the valid word that a wrong one abbreviates or resembles most; empty without one."""
    words = list(valid)
    abbreviated = [name for name in words if word.lower() == "".join(part[0] for part in re.findall("[a-z]+", name))]
    close = abbreviated or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
