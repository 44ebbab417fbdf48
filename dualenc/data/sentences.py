"""Sentences and markdown sections as spans of a text, by punctuation and lines alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_CHARACTERS = 300
"""Length to which a sentence is cut where it is a query."""
# Chinese and Japanese put no space behind a full stop. Elsewhere one ends a sentence if a space
# follows, but not before a lower-case letter, as in "e.g. this".
_END = re.compile(
    r"[。！？｡]+[」』）”’]*"
    r"|(?<![.!?…؟।])[.!?…؟।]++[\"'”’»)\]]*+(?=\s++(?![a-zà-öø-ÿα-ωа-я])|$)"
    r"|(?=\n)|$"
)
_ABBREVIATION = re.compile(r"\W{0,2}\w{1,3}\.(?:\w\.)*")  # Dr., 1., (i.e.
_SPACE = re.compile(r"\s*")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class Span(NamedTuple):
    """The characters [start, end) of a text.

        Span(0, 5).of("Hello there")  # "Hello"

    Attributes:
        start: position of the first character.
        end: position after the last one.
    """

    start: int
    end: int

    def of(self, text: str) -> str:
        """Return these characters of a text."""
        return text[self.start : self.end]


def sentences(text: str) -> Iterator[Span]:
    """Yield the sentences of a text, without the space between them.

    A line break ends a sentence, as do 。！？ and, before a space, `.`, `!`, `?` and `…`. At its
    beginning, up to three letters and a dot, such as "Dr." or "1.", end nothing.

        [span.of("Add it. Dr. No adds it.") for span in sentences("Add it. Dr. No adds it.")]
    """
    start = position = _SPACE.match(text).end()  # type: ignore[union-attr]
    while start < len(text):
        end = _END.search(text, position).end()  # type: ignore[union-attr]
        following = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        is_line_end = end == len(text) or "\n" in text[end:following]
        position = following
        if is_line_end or not _ABBREVIATION.fullmatch(text, start, end):
            yield Span(start, len(text[start:end].rstrip()) + start)
            start = following


def first_sentence(text: str) -> str:
    """Return the first sentence of a text in one line, often its title; "" if it has none.

    first_sentence("How to resume. Add --resume.")  # "How to resume."
    """
    span = next(sentences(text), Span(0, 0))
    return " ".join(span.of(text)[:MAX_CHARACTERS].split())


def sections(text: str) -> Iterator[tuple[Span, Span]]:
    """Yield each heading of a markdown text (`## Heading`), with the text up to the next heading.

    Lines of fenced code are not headings.
    """
    heading: Span | None = None
    body = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        start, position = position, position + len(line)
        mark = _FENCE.match(line)
        if mark is not None and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        found = None if fence else _HEADING.match(line)
        if found is not None:
            if heading is not None:
                yield heading, _stripped(text, Span(body, start))
            words = line[found.end() :].rstrip()
            # A heading may be closed by further marks: ## Heading ##
            if words.rstrip("#") == "" or words.rstrip("#")[-1].isspace():
                words = words.rstrip("#").rstrip()
            heading = Span(start + found.end(), start + found.end() + len(words))
            body = position
    if heading is not None:
        yield heading, _stripped(text, Span(body, len(text)))


def _stripped(text: str, span: Span) -> Span:
    """Return a span without the space around it."""
    part = span.of(text)
    start = span.start + len(part) - len(part.lstrip())
    return Span(start, start + len(part.strip()))
