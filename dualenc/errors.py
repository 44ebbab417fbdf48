"""User-facing exceptions, wrappers for third-party errors, and suggestions of valid names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DualencError(ValueError):
    """A mistake in data, files or arguments, reported in one line.

    The command line prints the line and exits with code 2. Python callers may catch it as a
    `ValueError`.

        raise DualencError("gamma must be in (0, 1], got 0", fix="leave it out", where="SogCLR")
        # SogCLR: gamma must be in (0, 1], got 0; leave it out

    Args:
        problem: what is wrong.
        fix: how to correct it.
        where: file, folder, class or key that the error is about.
    """

    def __init__(self, problem: str, *, fix: str = "", where: object = "") -> None:
        place = f"{where}: " if str(where) else ""
        remedy = f"; {fix}" if fix else ""
        super().__init__(f"{place}{problem}{remedy}")


class BadSample(DualencError):
    """A sample that cannot be used (undecodable image, empty text).

    Readers skip and count it, or raise it.

        raise BadSample("text is empty", where="row 17")
    """


class BelowTarget(DualencError):
    """A measurement that missed its target. The command line exits with code 1.

    raise BelowTarget("recall@10 is 0.91, below 0.95")
    """


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the valid word most like a wrong one, or ""."""
    lowered = word.casefold()
    # Reversed, so that the first of the names that differ by case only wins.
    names = {name.casefold(): name for name in reversed(list(valid))}
    alike = difflib.get_close_matches(lowered, names, n=1, cutoff=0.74)
    abbreviated = [name for name in reversed(names) if _abbreviates(lowered, name)]
    candidates = alike + abbreviated
    return f" (did you mean {names[candidates[0]]}?)" if candidates else ""


def _abbreviates(word: str, name: str) -> bool:
    """Return True if one word begins with the other, has all its parts, or its initials."""
    name_parts = re.findall(r"[^\W_]+", name)
    word_parts = re.findall(r"[^\W_]+", word)
    initials = "".join(part[0] for part in name_parts)
    if len(name_parts) > 1 and word == initials:
        return True
    # Two letters begin or occur in too many words.
    if min(len(word), len(name)) < 3:
        return False
    shorter, longer = sorted((word_parts, name_parts), key=len)
    is_part = bool(shorter) and set(shorter) <= set(longer)
    return is_part or word.startswith(name) or name.startswith(word)


def first_line(error: BaseException) -> str:
    """Return the beginning of another library's error message as one line.

    The C++ function and file in messages of FAISS are removed.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # A heading such as "Error(s) in loading state_dict:" needs the line after it.
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    reason = re.sub(r"^(Error in .* at \S+:\d+: )?(Error: '.*' failed: )?", "", text)
    return reason[:300].rstrip(".:")


@contextmanager
def explain(what: str, advice: str) -> Iterator[None]:
    """Report another library's error in one line.

    Args:
        what: what failed; followed by the first line of the library's message.
        advice: how to fix it.
    """
    try:
        yield
    except DualencError:
        raise  # explains itself
    except Exception as error:
        raise DualencError(f"{what} ({first_line(error)})", fix=advice) from error
