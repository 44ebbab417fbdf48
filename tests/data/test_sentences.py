"""Sentences and sections against expectations written by hand."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data.sentences import first_sentence, sections, sentences

SENTENCES = {
    "Add it. Dr. No adds it.": ["Add it.", "Dr. No adds it."],
    "A title\nOne, e.g. this! Two?  Three": ["A title", "One, e.g. this!", "Two?", "Three"],
    "1. Install. 2. Run": ["1. Install.", "2. Run"],
    "Version 3.5 is out… Get it": ["Version 3.5 is out…", "Get it"],
    '"Stop it." She left (at last.) Then': ['"Stop it."', "She left (at last.)", "Then"],
    "你好。世界真大！是吗？「好。」完": ["你好。", "世界真大！", "是吗？", "「好。」", "完"],
    "¿Qué es? Ésta es así. Él vino": ["¿Qué es?", "Ésta es así.", "Él vino"],
    "هل هذا؟ نعم.": ["هل هذا؟", "نعم."],
    "यह क्या है। वह है।": ["यह क्या है।", "वह है।"],
    "one\r\n\r\n two \n": ["one", "two"],
    "": [],
    " \n\t ": [],
    "...": ["..."],
    "No end": ["No end"],
}


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_end_where_a_reader_ends_them(text: str) -> None:
    assert [span.of(text) for span in sentences(text)] == SENTENCES[text]


@given(st.text("aB .!?。\n\"'1", max_size=40))
def test_sentences_hold_every_character_but_space_once(text: str) -> None:
    spans = list(sentences(text))
    assert "".join(span.of(text) for span in spans).split() or not text.split()
    joined = "".join("".join(span.of(text).split()) for span in spans)
    assert joined == "".join(text.split())
    assert all(span.of(text).strip() == span.of(text) != "" for span in spans)
    assert all(before.end <= after.start for before, after in itertools.pairwise(spans))


def test_the_first_sentence_is_one_line_of_at_most_300_characters() -> None:
    assert first_sentence(" How  to\tresume. Add it.") == "How to resume."
    assert first_sentence("word " * 100) == ("word " * 60).strip()
    assert first_sentence(" \n ") == ""


def test_sections_lie_between_headings() -> None:
    text = (
        "Before.\n# A guide #\nintro\n\n## C#\n```sh\n# no heading\n```\nafter code\n"
        "## Empty\n### Deep\r\nlast\n#nor this\n    # nor this\n"
    )
    assert [(heading.of(text), section.of(text)) for heading, section in sections(text)] == [
        ("A guide", "intro"),
        ("C#", "```sh\n# no heading\n```\nafter code"),
        ("Empty", ""),
        ("Deep", "last\n#nor this\n    # nor this"),
    ]
    assert not list(sections("no heading\n"))
    unclosed = "# A\n~~~\n```\n# b\n"
    assert [heading.of(unclosed) for heading, _ in sections(unclosed)] == ["A"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["a. ", ". ", "." * 9, '."', "a.", " ", "# ", "。", "a\n"])
def test_time_grows_with_the_length_of_a_text(part: str) -> None:
    """A pattern that backtracks takes hours for a megabyte."""
    text = part * (1 << 18) + "x"
    start = time.process_time()
    assert sum(1 for _ in sentences(text)) <= len(text)
    assert sum(1 for _ in sections("# " + text)) <= len(text)
    assert time.process_time() - start < 20
