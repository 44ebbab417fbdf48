"""The exceptions that a user's mistake raises, other libraries' errors in one line, and suggestions of valid names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DualencError(ValueError):
    """A mistake in data, files or arguments, reported in one line: what is wrong, where, and how to fix it.

    The command line prints the line and exits with code 2; Python callers may catch it as a `ValueError`.
    """


class BadSample(DualencError):
    """One sample cannot be used (undecodable image, empty text). Readers skip and count it, or raise it."""


class BelowTarget(DualencError):
    """A measurement that does not reach what was asked for or promised; the command line exits with code 1."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """` (did you mean …?)`: the valid word that a wrong one abbreviates or resembles most; empty without one."""
    words = list(valid)
    abbreviated = [name for name in words if word.lower() == "".join(part[0] for part in re.findall("[a-z]+", name))]
    close = abbreviated or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def first_line(error: BaseException) -> str:
    """The beginning of another library's message as one line, of FAISS's without the C++ function and file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return re.sub(r"^(Error in .* at \S+:\d+: )?(Error: '.*' failed: )?", "", text)[:300].rstrip(".:")


@contextmanager
def explain(what: str, advice: str) -> Iterator[None]:
    """Report another library's error in one line: what failed, the first line of its message, and advice."""
    try:
        yield
    except DualencError:
        raise
    except Exception as error:
        raise DualencError(f"{what} ({first_line(error)}); {advice}") from error
