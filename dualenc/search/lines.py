"""Lines of a text file that are never all in memory: the ids of a corpus, and what to show for each.

    ids.txt           a line of UTF-8 per row
    ids.starts.npy    (N + 1,) int64: where each line begins, and where the last one ends
    ids.order.npy     (N,) uint32: the rows in the order of the hashes of their lines, to find the row of an id

All three are mapped. Besides its characters an id takes 13 bytes: 8 and 4 for the two arrays, and a line break. Without
the arrays, as in folders of older versions, they are computed when first needed.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import atomic_path, save_array

BLOCK_LINES = 2**16
DECODED_LINES = 2**12
"""Lines that are decoded together: what that takes stays in the processor's cache."""
SHORT_LINE = 64
"""Lines of so many bytes are collected byte by byte in numpy; of longer ones slices cost less."""
SORTED_AT_ONCE = 2**24
"""Hashes that are sorted in memory together (400 MiB); of more, one range of hashes after the other."""
_MIX = [np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)]
_STEP = np.uint64(0x9E3779B97F4A7C15)


class MappedLines:
    """N lines of a file, each without its line break.

    Args:
        path: the file; `starts.npy` and `order.npy` stand beside it, or not.
        count: N, if it is known.

    Raises:
        DualencError: no such file, or one with another number of lines or another size than is said.
    """

    def __init__(self, path: Path, count: int | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise DualencError(f"{path}: missing; write the folder again")
        size = path.stat().st_size
        # A plain view of the map: slicing a memmap itself takes ten times as long.
        self._bytes = memoryview(np.asarray(np.memmap(path, np.uint8, mode="r")).data) if size else memoryview(b"")
        self._starts = self._mapped("starts", np.dtype(np.int64))
        if self._starts is not None and (self._starts[0] != 0 or self._starts[-1] != size):
            raise DualencError(f"{path}: has {size:,} bytes instead of {self._starts[-1]:,}; write the folder again")
        if count is not None and len(self) != count:
            raise DualencError(f"{path}: holds {len(self)} {path.stem} for {count} vectors; write the folder again")

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """(N + 1,) where each line begins, and where the last one ends."""
        if self._starts is not None:
            return self._starts
        ends = [np.zeros(1, np.int64)]
        for start in range(0, len(self._bytes), 1 << 24):
            block = np.frombuffer(self._bytes[start : start + (1 << 24)], np.uint8)
            ends.append(np.flatnonzero(block == ord("\n")) + start + 1)
        return np.concatenate(ends)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def line(self, row: int) -> bytes:
        """The bytes of a line."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return bytes(self._bytes[int(self.starts[row]) : int(self.starts[row + 1]) - 1])

    def lines(self, start: int, stop: int) -> list[bytes]:
        """Consecutive lines, at once."""
        return self._bytes[int(self.starts[start]) : int(self.starts[stop])].tobytes().split(b"\n")[:-1]

    def _mapped(self, kind: str, dtype: np.dtype) -> np.ndarray | None:
        """One of the two arrays, if it is there."""
        path = beside(self.path, kind)
        if not path.is_file():
            return None
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy's own, and those of the tokenizer and the zip reader behind it
            raise DualencError(
                f"{path}: corrupt ({' '.join(str(error).split())[:80]}); write the folder again"
            ) from None
        if not isinstance(found, np.ndarray) or found.dtype != dtype or found.ndim != 1 or not len(found):
            raise DualencError(f"{path}: corrupt (no row of {dtype}); write the folder again")
        return np.asarray(found)


class MappedIds(MappedLines, Sequence[str]):
    """N distinct ids, as a sequence of texts that stays on disk.

    Args:
        path: of ids.txt.
        count: N, if it is known.

    Raises:
        DualencError: as `MappedLines`.
    """

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return [self._text(line, start) for line in self.lines(start, max(start, stop))]
        row = int(row)
        return self._text(self.line(row + len(self) if row < 0 else row), row)

    def texts(self, rows: np.ndarray) -> np.ndarray:
        """The ids of rows of any shape, as objects; "" for a row of -1."""
        flat = rows.ravel()
        there = flat >= 0
        if not there.all():
            found = np.full(len(flat), "", dtype=object)
            found[there] = self.texts(flat[there])
            return found.reshape(rows.shape)
        found = np.empty(len(flat), dtype=object)
        for start in range(0, len(flat), DECODED_LINES):
            found[start : start + DECODED_LINES] = self._decoded(flat[start : start + DECODED_LINES])
        return found.reshape(rows.shape)

    def _decoded(self, rows: np.ndarray) -> list[str]:
        """The ids of a few thousand rows, decoded together: one by one they take longer than many a search."""
        begins, ends = self.starts.take(rows), self.starts.take(rows + 1)
        lengths = ends - begins
        filled = np.cumsum(lengths)
        try:
            if filled[-1] <= SHORT_LINE * len(rows):
                places = np.repeat(begins - (filled - lengths), lengths)
                places += np.arange(len(places))
                together = np.frombuffer(self._bytes, np.uint8).take(places).tobytes()
            else:
                together = b"".join([self._bytes[a:b] for a, b in zip(begins.tolist(), ends.tolist())])
            texts = together.decode("utf-8").split("\n")[:-1]
        except (ValueError, IndexError):
            texts = []
        # Otherwise the file is corrupt, and one by one they show where.
        return texts if len(texts) == len(rows) else [self._text(self.line(row), row) for row in rows.tolist()]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), BLOCK_LINES):
            yield from self[start : start + BLOCK_LINES]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.rows([name])[0] >= 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def rows(self, names: Iterable[str]) -> np.ndarray:
        """The row of each id, int64; -1 for one that is not there. All take one binary search of mapped pages."""
        lines = [name.encode("utf-8", "surrogatepass") for name in names]
        wanted = hash_lines(lines)
        low, high = np.zeros(len(lines), np.int64), np.full(len(lines), len(self))
        while len(open_ := np.flatnonzero(low < high)):
            middle = (low[open_] + high[open_]) // 2
            below = hash_lines([self.line(row) for row in self.order[middle].tolist()]) < wanted[open_]
            low[open_] = np.where(below, middle + 1, low[open_])
            high[open_] = np.where(below, high[open_], middle)
        return np.array([self._from(place, line) for place, line in zip(low.tolist(), lines)], dtype=np.int64)

    def _from(self, place: int, line: bytes) -> int:
        """The row of a line, which is among those of equal hash that begin at a place of the order; or -1."""
        wanted = None
        for row in map(int, self.order[place:]):
            if (found := self.line(row)) == line:
                return row
            wanted = hash_lines([line]) if wanted is None else wanted
            if hash_lines([found]) != wanted:
                break
        return -1

    @functools.cached_property
    def order(self) -> np.ndarray:
        """(N,) rows in the order of their hashes."""
        order = self._mapped("order", np.dtype(np.uint32)) if len(self) else np.empty(0, np.uint32)
        if order is None:
            order = np.argsort(_hashes(self), kind="stable").astype(np.uint32)
        if len(order) != len(self) or (len(order) and int(order.max()) >= len(self)):
            raise DualencError(f"{beside(self.path, 'order')}: is of {len(order)} ids, not {len(self)}; write it again")
        return order

    def _text(self, line: bytes, row: int) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DualencError(f"{self.path}: corrupt at row {row} ({error}); write the folder again") from None


class Snippets(MappedLines):
    """Lines of a `snippets.jsonl`: what to show for each row."""

    def __getitem__(self, row: int) -> str:
        try:
            return str(json.loads(self.line(int(row))))
        except ValueError as error:
            raise DualencError(f"{self.path}: corrupt at row {row} ({error}); write the folder again") from None


def beside(path: Path, kind: str) -> Path:
    """Where the array "starts" or "order" of a file of lines is."""
    return path.with_name(f"{path.stem}.{kind}.npy")


def lines_files(folder: Path, name: str) -> list[str]:
    """The file and what stands beside it, as far as it is there."""
    paths = [folder / name, beside(folder / name, "starts"), beside(folder / name, "order")]
    return [path.name for path in paths if path == folder / name or path.exists()]


def write_ids(path: Path, ids: Iterable[str]) -> None:
    """Write ids.txt and what finds a row by its id; the caller has checked them with `check_ids`."""
    _write_lines(path, (name.encode() for name in ids))
    mapped = MappedIds(path)
    number, hashes = len(mapped), _hashes(mapped)
    # Range by range of hashes, each sorted in memory.
    bits = (max(0, number - 1) // SORTED_AT_ONCE).bit_length()
    order = np.empty(number, np.uint32)
    filled = 0
    for top in range(2**bits):
        rows = np.flatnonzero(hashes >> np.uint64(64 - bits) == top) if bits else np.arange(number)
        order[filled : filled + len(rows)] = rows[np.argsort(hashes[rows], kind="stable")]
        filled += len(rows)
    with atomic_path(beside(path, "order")) as part:
        save_array(part, order)


def write_snippets(path: Path, snippets: Iterable[str]) -> None:
    """Write one JSON string per line, and where each begins."""
    # Half a surrogate pair has no UTF-8; as \\ud800 it is JSON.
    _write_lines(path, (json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace") for text in snippets))


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    lengths = []
    with atomic_path(path) as part, open(part, "wb") as stream:
        remaining = iter(lines)
        while block := list(itertools.islice(remaining, BLOCK_LINES)):
            stream.write(b"\n".join(block) + b"\n")
            lengths.append(np.fromiter(map(len, block), np.int64, len(block)) + 1)
    with atomic_path(beside(path, "starts")) as part:
        save_array(part, np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths])))


def check_ids(ids: Sequence[str]) -> None:
    """Insist that ids can be told apart and written as lines of UTF-8; those that are mapped were checked before."""
    if isinstance(ids, MappedIds):
        return
    hashes = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), BLOCK_LINES):
        block = ids[start : start + BLOCK_LINES]
        for row, name in enumerate(block, start):
            if not isinstance(name, str):
                raise DualencError(f"id {name!r} at row {row} is {type(name).__name__}, not a text; give str(id)")
            if "\n" in name:
                raise DualencError(f"id {name!r} at row {row} contains a line break; give it another id")
            if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
                raise DualencError(f"id {name!r} at row {row} is not valid Unicode; rename it")
        hashes[start : start + len(block)] = hash_lines([name.encode() for name in block])
    order = np.argsort(hashes, kind="stable")
    twice = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    suspects = sorted({int(row) for place in twice for row in order[place : place + 2]})
    first: dict[str, int] = {}
    for row in suspects:
        if first.setdefault(ids[row], row) != row:
            raise DualencError(f"id {ids[row]!r} stands twice, at rows {first[ids[row]]} and {row}; ids must differ")


def hash_lines(lines: Sequence[bytes]) -> np.ndarray:
    """(n,) uint64 hashes, the same on every machine.

    Multilinear modulo 2⁶⁴ with a fixed weight for each place (universal: Lemire and Kaser 2014, arXiv:1202.4961), mixed
    by the end of SplitMix64 so that every bit counts. Equal hashes are no proof: whoever finds some compares the lines.
    """
    if not lines:
        return np.empty(0, np.uint64)
    lengths = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
    # The line break, as a last character, tells "a" from "a\0", and leaves no line empty.
    characters = np.frombuffer(b"\n".join([*lines, b""]), np.uint8).astype(np.uint64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]])
    places = np.arange(len(characters)) - np.repeat(starts, lengths)
    weights = _mixed(np.arange(1, int(lengths.max()) + 1, dtype=np.uint64) * _STEP)
    return _mixed(np.add.reduceat(characters * weights[places], starts))


def _hashes(mapped: MappedLines) -> np.ndarray:
    hashes = np.empty(len(mapped), np.uint64)
    for start in range(0, len(mapped), BLOCK_LINES):
        stop = min(start + BLOCK_LINES, len(mapped))
        hashes[start:stop] = hash_lines(mapped.lines(start, stop))
    return hashes


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
