"""Output for a terminal: text from data, file names and errors, without control characters and credentials."""

from __future__ import annotations

import json
import re
from typing import Any

_CONTROL = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, delete and C1: colours, cursor, window title, clipboard, answers typed back
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls: text that reads as other text
    "\u2028\u2029\ufff9-\ufffb"  # line and paragraph separators, interlinear annotations
    "\ud800-\udfff"  # halves of characters and undecodable bytes of file names, which print() would raise on
    "]"
)


_USER = re.compile(r"(?<=:/)(/?)[^/?#\s]*@")
_QUERY = re.compile(r"(\b[A-Za-z][\w+.-]+:/[^\s?#]*)[?#]\S*?(?=[:;,.)\]'\"]*(?:\s|$))")


def without_credentials(text: str) -> str:
    """A text without user names, passwords, queries and fragments in its URLs: they may hold keys."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def printable(text: object) -> str:
    """A text in one line with every control character escaped as Python writes it, `\\x1b` or `\\u202e`.

    For all text from data, file names and errors that is printed to the terminal (CWE-150).
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def printable_json(value: Any) -> str:
    """Indented JSON in printable ASCII alone; parsed, it is `value` again."""
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f")
