"""The one exception that a user's mistake raises."""

from __future__ import annotations


class DualencError(ValueError):
    """A mistake in data, files or arguments, told in one line: what is wrong, where, and how to mend it.

    The command line prints the line and exits with code 2; Python callers may catch it as a `ValueError`.
    """


class BadSample(DualencError):
    """One sample cannot be used (undecodable image, empty text). Readers skip and count it, or raise it."""


class UnknownId(DualencError):
    """An id that an index or engine does not hold."""


class Unsupported(DualencError):
    """A request that this kind of index cannot answer, whatever it holds."""


class DiskFull(DualencError):
    """No room to write a file: the disk is full, or a quota or limit reached; what stood there before still does."""
