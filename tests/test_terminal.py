"""Text that nobody chose reaches a terminal without commanding it."""

from __future__ import annotations

import json
import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.terminal import printable, printable_json


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]52;c;cm0gLXJm\x07", r"\x1b]52;c;cm0gLXJm\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("two\r\nlines\tand a tab", r"two\r\nlines\tand a tab"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        (os.fsdecode(b"caf\xe9.jpg"), r"caf\udce9.jpg"),
        ("naïve café – 東京 👩‍🔬 שלום", "naïve café – 東京 👩‍🔬 שלום"),
        (ValueError("a\x00b"), r"a\x00b"),
    ],
)
def test_control_characters_are_escaped_and_others_are_not(text: object, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_that_unicode_calls_a_control_is_left(text: str) -> None:
    for character in printable(text):
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    printable(text).encode("utf-8")


@pytest.mark.slow
@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_is_printable_ascii_and_the_same_value(value: object) -> None:
    text = printable_json(value)
    assert json.loads(text) == value
    assert all(" " <= character <= "~" or character == "\n" for character in text)
