"""Layout of tables for a terminal: column widths, wrapped and shortened cells, blocks of columns.

Widths are in terminal cells: a CJK character takes two.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

GAP = 2
"""Cells between two columns."""
EDGES = 2
"""Cells left and right of a table."""
MIN_TEXT = 12
"""Below this width a column of text is not readable: the columns are divided into blocks."""
MIN_PATH = 24
_WORD_END = re.compile(r"(?<=[-_@,;:=&|])(?=.)")
_PATH = re.compile(r"[/\\]")


class Block(NamedTuple):
    """Columns of a table that fit side by side: numbers, widths, headers and wrapped cells."""

    columns: list[int]
    widths: list[int]
    headers: list[str]
    rows: list[list[str]]


def lay_out(names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[Block]:
    """Divide a table into blocks that are at most `width` wide.

    Numbers are never broken. Long paths are shortened in the middle, other text is wrapped. Where
    the columns do not fit, the rest follows in further blocks, which repeat the columns that name a
    row.

    Args:
        names: headers of the C columns.
        rows: R rows of C cells, each a text in one line.
        width: of the terminal; None for no limit.
    """
    columns = [_Column(name, [row[number] for row in rows]) for number, name in enumerate(names)]
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
        # What does not fit beside the name of its row stands alone.
        starts = [start for start in (keys + rest[:1], rest[:1]) if _fit(columns, start, room)]
        chosen = starts[0] if starts else rest[:1]
        del rest[0]
        while rest and _fit(columns, [*chosen, rest[0]], room):
            chosen = [*chosen, rest.pop(0)]
        blocks.append(_block(columns, chosen, _fit(columns, chosen, room) or [room]))
    if not any(block.columns[0] == 0 for block in blocks):
        blocks.insert(0, _block(columns, keys, [min(columns[0].natural, room)]))
    return blocks


class _Column:
    """Widths that a column can have."""

    def __init__(self, name: str, cells: Sequence[str]) -> None:
        self.name = name
        self.cells = cells
        # Numbers, dates and intervals.
        self.is_rigid = not any(character.isalpha() for cell in cells for character in cell)
        self.is_path = all(_PATH.search(cell) and " " not in cell for cell in cells)
        content = max(map(cell_len, cells), default=0)
        self.natural = self.wanted = max(content, cell_len(name))
        least = content if self.is_rigid else min(content, MIN_TEXT)
        self.least = max([least, *map(cell_len, _words(name))])


def _keys(columns: Sequence[_Column], room: int) -> list[int]:
    """Return the columns that name a row: leading text or the first; half of the room at most."""
    keys = [0]
    for number in range(1, len(columns) - 1):
        share = (room // 2 - GAP * number) // (number + 1)
        if columns[number - 1].is_rigid or columns[number].is_rigid or share < MIN_TEXT:
            break
        keys.append(number)
    share = (room // 2 - GAP * (len(keys) - 1)) // len(keys)
    for number in keys:
        columns[number].least = columns[number].wanted = min(columns[number].natural, share)
    return keys


def _fit(columns: Sequence[_Column], chosen: Sequence[int], room: int) -> list[int]:
    """Return widths with which the chosen columns fit into the room; empty if they do not."""
    room -= GAP * (len(chosen) - 1)
    own = [columns[number] for number in chosen]
    wanted = [column.wanted for column in own]
    if sum(wanted) <= room:
        return wanted
    if sum(column.least for column in own) > room:
        return []
    # Headers over numbers are wrapped only where text would become too narrow.
    rigid = [column.natural if column.is_rigid else 0 for column in own]
    text = [max(each.least, min(each.wanted, 2 * MIN_TEXT)) for each in own if not each.is_rigid]
    widths = [column.least for column in own]
    if sum(rigid) + sum(text) <= room:
        widths = [max(pair) for pair in zip(widths, rigid)]
    short = [min(want, MIN_PATH) if column.is_path else want for column, want in zip(own, wanted)]
    for targets in (short, wanted):
        _grow(widths, targets, room)
    return widths


def _grow(widths: list[int], targets: Sequence[int], room: int) -> None:
    """Widen the narrowest columns in turn, up to their targets, while there is room."""
    while sum(widths) < room:
        open_ones = [number for number, width in enumerate(widths) if width < targets[number]]
        if not open_ones:
            return
        narrowest = min(open_ones, key=widths.__getitem__)
        widths[narrowest] += 1


def _block(columns: Sequence[_Column], chosen: Sequence[int], widths: list[int]) -> Block:
    own = [columns[number] for number in chosen]
    headers = [_wrap(column.name, width) for column, width in zip(own, widths)]
    wrapped = [[_wrap(cell, width) for cell in column.cells] for column, width in zip(own, widths)]
    return Block(list(chosen), widths, headers, [list(row) for row in zip(*wrapped)])


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
        if _PATH.search(word):
            parts = [shorten(word, width)]
        else:
            parts = [piece for part in _WORD_END.split(word) for piece in chop_cells(part, width)]
        for part in parts:
            if cell_len(lines[-1] + gap + part) > width:
                lines.append("")
                gap = ""
            lines[-1] += gap + part
            gap = ""
    return "\n".join(lines)


def shorten(text: str, width: int) -> str:
    """Return a text of at most `width` terminal cells; "…" replaces the middle of a longer one.

    The end gets two thirds of the width: the last parts of a path tell most.
    """
    if cell_len(text) <= width:
        return text
    room = width - 1
    start = chop_cells(text, max(room // 3, 2))[0]
    stop = len(start)
    while cell_len(text[stop:]) > room - cell_len(start):
        stop += 1
    # A combining mark does not stand without its letter.
    while stop < len(text) and unicodedata.combining(text[stop]):
        stop += 1
    return f"{start}…{text[stop:]}"
