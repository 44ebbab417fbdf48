"""Text that nobody chose reaches a terminal without commanding it."""

from __future__ import annotations

import os

import pytest

from dualenc.io.terminal import printable, without_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cm0gLXJm\x07", r"\x1b]52;c;cm0gLXJm\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("two\r\nlines\tand a tab", r"two\r\nlines\tand a tab"),
        (os.fsdecode(b"caf\xe9.jpg"), r"caf\udce9.jpg"),
        ("naïve café – 東京 👩‍🔬 שלום", "naïve café – 東京 👩‍🔬 שלום"),
        (ValueError("a\x00b"), r"a\x00b"),
    ],
)
def test_control_characters_are_escaped_and_others_are_not(text: object, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:secret@[::1/x.jsonl?key=secret: no", "http://[::1/x.jsonl: no"),
        ("https://h/x.tar?key=secret#part", "https://h/x.tar"),
        ("postgresql://me:sec/ret@h/db: no", "postgresql://h/db: no"),
        ("postgresql:/me:se@cr/e?t@h/db", "postgresql:/h/db"),
        ("mail me@example.org about a/b?c", "mail me@example.org about a/b?c"),
    ],
)
def test_urls_lose_what_may_be_a_key(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
