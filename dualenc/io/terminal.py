"""Output for a terminal: text from data, file names and errors, without control characters and
credentials."""

from __future__ import annotations

import re

# C0, delete and C1 command a terminal; halves of characters and undecodable bytes of file names
# make print() raise.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# A password may hold a slash that its writer did not encode.
_USER = re.compile(r"(?<=:/)(/?)(?:[^/?#\s:]*:\S{0,500}@|[^/?#\s]*@)")
_QUERY = re.compile(r"(\b[A-Za-z][\w+.-]+:/[^\s?#]*)[?#]\S*?(?=[:;,.)\]'\"]*(?:\s|$))")


def without_credentials(text: str) -> str:
    """A text without user names, passwords, queries and fragments in its URLs: they may hold
    keys."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def printable(text: object) -> str:
    """A text in one line with control characters escaped as Python writes them, `\\x1b`
    (CWE-150)."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))
