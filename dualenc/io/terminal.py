"""Terminal output: escape control characters and remove credentials from untrusted text."""

from __future__ import annotations

import re

# C0, DEL and C1 are commands to a terminal. Lone surrogates (undecodable bytes of file names) make
# print() raise.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# A password may contain a slash that was not percent-encoded.
_USER = re.compile(r"(?<=:/)(/?)(?:[^/?#\s:]*:\S{0,500}@|[^/?#\s]*@)")
_QUERY = re.compile(r"(\b[A-Za-z][\w+.-]+:/[^\s?#]*)[?#]\S*?(?=[:;,.)\]'\"]*(?:\s|$))")


def without_credentials(text: str) -> str:
    """Remove user names, passwords, queries and fragments from URLs: they may contain keys."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def printable(text: object) -> str:
    r"""Escape control characters the way Python does, `\x1b`, on a single line (CWE-150)."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))
