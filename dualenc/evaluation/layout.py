"""Lay out tables for a terminal: column widths, wrapped and shortened cells, blocks of columns.

Widths are in terminal cells: a CJK character takes two.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

GAP = 2
"""Terminal cells between two columns."""
EDGES = 2
"""Terminal cells left and right of a table."""
MIN_TEXT = 12
"""Minimum width of a readable text column; narrower tables are divided into blocks."""
MIN_PATH = 24
MAX_LINES = 3
"""Number of lines of a cell in a column of beginnings of texts."""
_WORD_END = re.compile(r"(?<=[-_@,;:=&|])(?=.)")
_PATH = re.compile(r"[/\\]")


class Block(NamedTuple):
    """Columns of a table that fit side by side. `lay_out` returns one or several.

        blocks = lay_out(["name", "score"], [["first", "0.5"]], width=80)

    Attributes:
        columns: numbers of the columns.
        widths: their widths in terminal cells.
        headers: their wrapped headers.
        rows: their wrapped cells.
    """

    columns: list[int]
    widths: list[int]
    headers: list[str]
    rows: list[list[str]]


def lay_out(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    beginnings: str | None = None,
) -> list[Block]:
    """Divide a table into blocks that are at most `width` wide.

    Numbers are never broken. Long paths are shortened in the middle, other text is wrapped. Columns
    that do not fit follow in further blocks, which repeat the columns that name a row.

    Args:
        names: headers of the C columns.
        rows: R rows of C cells, each a text in one line.
        width: width of the terminal in cells; None for no limit.
        beginnings: name of a column whose cells are cut after three lines.
    """
    columns = [_Column(name, [row[number] for row in rows]) for number, name in enumerate(names)]
    for column in columns:
        column.is_cut = column.name == beginnings
    everything = list(range(len(columns)))
    if width is None:
        return [_block(columns, everything, [column.natural for column in columns])]
    room = width - EDGES
    if widths := _fit(columns, everything, room):
        return [_block(columns, everything, widths)]
    keys = _keys(columns, room)
    blocks = []
    rest = everything[len(keys) :]
    while rest:
        # A column that does not fit beside the name of its row stands alone.
        first = rest.pop(0)
        chosen = [*keys, first]
        if not _fit(columns, chosen, room):
            chosen = [first]
        while rest and _fit(columns, [*chosen, rest[0]], room):
            chosen = [*chosen, rest.pop(0)]
        # One column that is too wide alone is wrapped to the whole width.
        widths = _fit(columns, chosen, room) or [room]
        blocks.append(_block(columns, chosen, widths))
    shows_names = any(block.columns[0] == 0 for block in blocks)
    if not shows_names:
        width_of_names = min(columns[0].natural, room)
        blocks.insert(0, _block(columns, keys, [width_of_names]))
    return blocks


class _Column:
    """A column with the widths that it can have: natural, wanted and least."""

    def __init__(self, name: str, cells: Sequence[str]) -> None:
        self.name = name
        self.cells = cells
        self.is_cut = False
        # Cells without letters (numbers, dates, intervals) are never wrapped.
        has_letters = any(character.isalpha() for character in "".join(cells))
        self.is_rigid = not has_letters
        self.is_path = all(_PATH.search(cell) and " " not in cell for cell in cells)
        content = max(map(cell_len, cells), default=0)
        self.natural = max(content, cell_len(name))
        self.wanted = self.natural
        least = content if self.is_rigid else min(content, MIN_TEXT)
        # The words of a header are not broken either.
        longest_word = max(map(cell_len, _words(name)), default=0)
        self.least = max(least, longest_word)


def _keys(columns: Sequence[_Column], room: int) -> list[int]:
    """Return the columns that name a row: leading text columns, in at most half of the room."""
    keys = [0]
    for number in range(1, len(columns) - 1):
        # The width of each name if this column is one, too.
        share = (room // 2 - GAP * number) // (number + 1)
        has_number = columns[number - 1].is_rigid or columns[number].is_rigid
        if has_number or share < MIN_TEXT:
            break
        keys.append(number)
    share = (room // 2 - GAP * (len(keys) - 1)) // len(keys)
    for number in keys:
        column = columns[number]
        # Fixed, so that the names are equally wide in every block.
        column.wanted = min(column.natural, share)
        column.least = column.wanted
    return keys


def _fit(columns: Sequence[_Column], chosen: Sequence[int], room: int) -> list[int]:
    """Return widths with which the chosen columns fit into the room; empty if they cannot."""
    room -= GAP * (len(chosen) - 1)
    own = [columns[number] for number in chosen]
    wanted = [column.wanted for column in own]
    least = [column.least for column in own]
    if sum(wanted) <= room:
        return wanted
    if sum(least) > room:
        return []
    # Headers over numbers are wrapped only if text would become too narrow otherwise.
    readable = [
        column.natural if column.is_rigid else max(column.least, min(column.wanted, 2 * MIN_TEXT))
        for column in own
    ]
    widths = least
    if sum(readable) <= room:
        widths = [column.natural if column.is_rigid else column.least for column in own]
    # Paths, which can be shortened, grow last.
    short = [min(column.wanted, MIN_PATH) if column.is_path else column.wanted for column in own]
    _grow(widths, short, room)
    _grow(widths, wanted, room)
    return widths


def _grow(widths: list[int], targets: Sequence[int], room: int) -> None:
    """Widen the narrowest columns in turn, up to their targets, while there is room."""
    while sum(widths) < room:
        growing = [number for number, width in enumerate(widths) if width < targets[number]]
        if not growing:
            return
        narrowest = min(growing, key=widths.__getitem__)
        widths[narrowest] += 1


def _block(columns: Sequence[_Column], chosen: Sequence[int], widths: list[int]) -> Block:
    """Wrap the chosen columns to their widths."""
    headers = []
    wrapped = []
    for number, width in zip(chosen, widths):
        column = columns[number]
        headers.append(_wrap(column.name, width))
        cells = [_wrap(cell, width) for cell in column.cells]
        wrapped.append([_cut(cell, width) for cell in cells] if column.is_cut else cells)
    rows = [list(row) for row in zip(*wrapped)]
    return Block(list(chosen), widths, headers, rows)


def _words(text: str) -> list[str]:
    """Return the parts of a text between which a line may end."""
    return [part for word in text.split() for part in _WORD_END.split(word)]


def _wrap(text: str, width: int) -> str:
    """Break a text into lines of at most this width; paths are shortened in the middle."""
    if cell_len(text) <= width:
        return text
    lines = [""]
    for word in text.split():
        gap = " " if lines[-1] else ""
        if cell_len(lines[-1] + gap + word) <= width:
            lines[-1] += gap + word
            continue
        parts = []
        if _PATH.search(word):
            parts = [shorten(word, width)]
        else:
            for part in _WORD_END.split(word):
                parts += chop_cells(part, width)
        for part in parts:
            if cell_len(lines[-1] + gap + part) > width:
                lines.append("")
                gap = ""
            lines[-1] += gap + part
            gap = ""
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    """Return the first lines of a wrapped text; "…" stands for the others."""
    lines = text.split("\n")
    if len(lines) <= MAX_LINES:
        return text
    last = chop_cells(lines[MAX_LINES - 1], width - 1)[0]
    return "\n".join([*lines[: MAX_LINES - 1], f"{last}…"])


def shorten(text: str, width: int) -> str:
    """Shorten a text to at most `width` terminal cells; "…" replaces the middle.

    The end gets two thirds of the width, because the last parts of a path matter most.

    Args:
        text: text in one line.
        width: width in terminal cells.
    """
    if cell_len(text) <= width:
        return text
    room = width - 1
    start = chop_cells(text, max(room // 3, 2))[0]
    stop = len(start)
    while cell_len(text[stop:]) > room - cell_len(start):
        stop += 1
    # A combining mark must not lose its letter.
    while stop < len(text) and unicodedata.combining(text[stop]):
        stop += 1
    return f"{start}…{text[stop:]}"
