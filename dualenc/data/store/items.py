"""Item tables: ids, texts and columns of N items in memory-mapped Arrow files, found by id.

    *.arrow      Arrow IPC files with the columns id, text (the beginnings of texts, optional),
                 text:hash (a hash of each whole text) and the user's columns
    order.npy    (N,) uint32: the rows in the order of their ids, for binary search

An id takes 8 bytes on disk beyond its characters, and no memory. Files may be damaged or come from
somewhere else: structure and string offsets are checked when they are opened.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from dualenc.errors import DualencError, explain
from dualenc.io.files import atomic_path, save_array
from dualenc.io.reading import is_utf8
from dualenc.types import check_several

ITEMS = "items.arrow"
ORDER = "order.npy"
HASH = "text:hash"
"""Column of `text_hash`; a colon is not allowed in names of the user's columns."""
BATCH_ROWS = 2**14
MANY_IDS = 1000
"""For more ids than this, one pass over all of them is faster than a binary search for each."""
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


class Texts(Sequence[str]):
    """N strings of a column, mapped from files and decoded on access.

    Errors name `path` and `fix`.
    """

    def __init__(self, strings: pa.ChunkedArray, path: Path, fix: str) -> None:
        self.strings = strings
        self.path = path
        self.fix = fix
        # Check the offsets now, so that other memory is never read. UTF-8 is only checked when a
        # string is decoded: a full check would read the whole file.
        with explain(f"{path}: corrupt", fix):
            if strings.type not in _BYTES:
                raise ValueError(f"{strings.type} instead of strings")
            self.as_bytes = pa.chunked_array(
                [chunk.view(_BYTES[strings.type]) for chunk in strings.chunks]
            )
            self.as_bytes.validate(full=True)
            if strings.null_count:
                raise ValueError("a string is missing")

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, row: Any) -> Any:
        try:
            value = self.strings[row]
            return value.to_pylist() if isinstance(row, slice) else value.as_py()
        except UnicodeDecodeError as error:
            raise DualencError(
                f"corrupt ({error})",
                fix=self.fix,
                where=self.path,
            ) from None

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from self[start : start + BATCH_ROWS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Ids(Texts):
    """N distinct ids: `Texts`, and a file that lists the rows in the order of the ids."""

    def __init__(self, strings: pa.ChunkedArray, path: Path, fix: str, order_path: Path) -> None:
        super().__init__(strings, path, fix)
        self._order_path = order_path
        # Mapped now, since the folder may be replaced while it is in use.
        with explain(f"{order_path}: corrupt", fix):
            order = np.load(order_path, mmap_mode="r", allow_pickle=False)
            if order.dtype != np.uint32 or order.shape != (len(self),):
                raise ValueError(f"not the row numbers of {len(self)} ids")
        self._order = np.asarray(order)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._row(name) >= 0

    def rows(self, names: Iterable[str]) -> np.ndarray:
        """Return the row of each id, int64; -1 for an unknown id."""
        names = list(names)
        if len(names) <= MANY_IDS:
            return np.array([self._row(name) for name in names], dtype=np.int64)
        # A name may hold half of a surrogate pair, which Arrow cannot store as a string.
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        requested = pa.array(encoded, self.as_bytes.type).dictionary_encode()
        positions = pc.index_in(self.as_bytes, value_set=requested.dictionary)
        positions = pc.fill_null(positions, -1).to_numpy()
        # `positions` holds, for each stored id, its place among the distinct requested ones: one
        # pass over the file, and memory for the request only. Invert it to find rows.
        present = np.flatnonzero(positions >= 0)
        row_of = np.full(len(requested.dictionary), -1, dtype=np.int64)
        row_of[positions[present]] = present
        return row_of[requested.indices.to_numpy()]

    def _row(self, name: str) -> int:
        try:
            # Python compares code points, which sort like the UTF-8 bytes by which Arrow sorted.
            position = bisect.bisect_left(self._order, name, key=self.__getitem__)
            if position == len(self):
                return -1
            row = int(self._order[position])
            return row if self[row] == name else -1
        except IndexError:
            raise DualencError(
                f"corrupt (row > {len(self)})",
                fix=self.fix,
                where=self._order_path,
            ) from None


def rows_of(ids: Sequence[str], names: Iterable[str]) -> np.ndarray:
    """Return the row of each name among mapped ids or a list, (n,) int64; -1 if unknown."""
    check_several("ids", names)
    if isinstance(ids, Ids):
        return ids.rows(names)
    row_of = {name: row for row, name in enumerate(ids)}
    return np.array([row_of.get(name, -1) for name in names], dtype=np.int64)


class ItemTable:
    """N = `count` items in Arrow files.

    Attributes that were not stored are None. Errors name `fix`, which repairs the files.

        ItemTable([folder / "items.arrow"], 1000, "rebuild the index").ids[0]

    Attributes:
        batches: record batches of all files.
        ids: N distinct ids.
        texts: N texts, or their beginnings.
        hashes: (N,) uint64, `text_hash` of the whole texts.
        columns: the user's columns.
    """

    def __init__(self, paths: Sequence[Path], count: int, fix: str) -> None:
        location = paths[0] if len(paths) == 1 else paths[0].parent
        self.batches = [batch for path in paths for batch in read_batches(path, fix)]
        with explain(f"{location}: corrupt", fix):
            # Arrow raises if the files have different columns.
            table = pa.Table.from_batches(self.batches, self.batches[0].schema.remove_metadata())
            names = table.schema.names
            if len(set(names)) < len(names) or "id" not in names:
                raise ValueError("it lacks a column of ids, or has two columns of one name")
            if len(table) != count:
                raise ValueError(f"it has {len(table)} rows instead of {count}")
            own = [name for name in ("id", "vector", "text", HASH) if name in names]
            columns = table.drop_columns(own)
            columns.validate(full=True)
        order_path = paths[0].with_name(ORDER)
        self.ids = Ids(table.column("id"), location, fix, order_path)
        self.columns = columns if columns.column_names else None
        self.texts = None
        if "text" in names:
            self.texts = Texts(table.column("text"), location, fix)
        self.hashes = None
        if HASH in names:
            with explain(f"{location}: corrupt", fix):
                self.hashes = table.column(HASH).cast(pa.uint64()).to_numpy()


def read_batches(path: Path, fix: str) -> list[pa.RecordBatch]:
    """Map the record batches of an Arrow file without reading their values."""
    if not path.is_file():
        raise DualencError(
            "missing",
            fix=fix,
            where=path,
        )
    with explain(f"{path}: truncated or corrupt", fix):
        reader = ipc.open_file(pa.memory_map(os.fsencode(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()
        _ = reader.schema.names  # decoding raises if they are corrupt
        if not batches:
            raise ValueError("no rows")
    return batches


def item_batch(
    ids: Sequence[str],
    texts: Sequence[str] | None = None,
    columns: pa.Table | None = None,
    vectors: np.ndarray | None = None,
    hashes: np.ndarray | None = None,
) -> pa.RecordBatch:
    """Return a record batch of n items.

    Args:
        ids: (n,) ids.
        texts: (n,) texts, or their beginnings.
        columns: n rows of the user's columns.
        vectors: (n, D) float16 or float32.
        hashes: (n,) `text_hash` of the whole texts.
    """
    arrays: dict[str, pa.Array] = {"id": pa.array(ids, pa.string())}
    if vectors is not None:
        values = pa.array(np.ascontiguousarray(vectors).reshape(-1))
        arrays["vector"] = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    if texts is not None:
        arrays["text"] = pa.array([in_utf8(text) for text in texts], pa.large_string())
    if hashes is not None:
        arrays[HASH] = pa.array(hashes, pa.uint64())
    if columns is not None:
        for name in columns.column_names:
            arrays[name] = columns.column(name).combine_chunks()
    return pa.record_batch(arrays)


def in_utf8(text: str) -> str:
    """Return a text with lone surrogates replaced by "?"."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def text_hash(text: str) -> int:
    """Return a 64-bit hash of a whole text, to detect edits; never 0, which means unknown."""
    digest = hashlib.blake2b(in_utf8(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def write_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write record batches of one schema to an Arrow file, atomically."""
    remaining = iter(batches)
    first = next(remaining)
    # A Python stream: closing it reports a full disk, which Arrow's own stream may not.
    with (
        atomic_path(path) as part,
        open(part, "wb") as stream,
        ipc.new_file(stream, first.schema) as writer,
    ):
        for batch in itertools.chain([first], remaining):
            writer.write_batch(batch)


def write_items(
    folder: Path,
    ids: Iterable[str],
    texts: Iterable[str] | None = None,
    columns: pa.Table | None = None,
    hashes: np.ndarray | None = None,
) -> None:
    """Write items.arrow and order.npy.

    Args:
        folder: folder of both files.
        ids: (N,) ids, at least one, that have passed `check_ids`.
        texts: (N,) texts, or their beginnings.
        columns: (N,) rows of the user's columns.
        hashes: (N,) `text_hash` of the whole texts.
    """
    own_texts = None if texts is None else iter(texts)
    write_batches(folder / ITEMS, _item_batches(iter(ids), own_texts, columns, hashes))
    write_order([folder / ITEMS])


def _item_batches(
    ids: Iterator[str],
    texts: Iterator[str] | None,
    columns: pa.Table | None,
    hashes: np.ndarray | None,
) -> Iterator[pa.RecordBatch]:
    start = 0
    while block := list(itertools.islice(ids, BATCH_ROWS)):
        own_texts = None if texts is None else list(itertools.islice(texts, len(block)))
        own_columns = None if columns is None else columns.slice(start, len(block))
        own_hashes = None if hashes is None else hashes[start : start + len(block)]
        yield item_batch(block, own_texts, own_columns, hashes=own_hashes)
        start += len(block)


def write_order(paths: Sequence[Path]) -> None:
    """Write order.npy next to Arrow files: their rows in the order of the ids."""
    fix = "write the folder again"
    batches = [batch for path in paths for batch in read_batches(path, fix)]
    ids = pa.chunked_array([batch.column("id") for batch in batches])
    order = pc.sort_indices(ids).to_numpy()
    with atomic_path(paths[0].with_name(ORDER)) as part:
        save_array(part, order.astype(np.uint32))


def check_ids(ids: Sequence[str]) -> None:
    """Raise a `DualencError` for duplicate ids, and ids with line breaks or lone surrogates."""
    check_several("ids", ids)
    if isinstance(ids, Ids):  # checked when they were written
        return
    for row, name in enumerate(ids):
        if not isinstance(name, str):
            raise DualencError(
                f"id {name!r} at row {row} is {type(name).__name__}, not a text",
                fix="give str(id)",
            )
        if "\n" in name:
            raise DualencError(
                f"id {name!r} at row {row} contains a line break",
                fix="give it another id",
            )
        if not is_utf8(name):
            raise DualencError(
                f"id {name!r} at row {row} is not valid Unicode",
                fix="rename it",
            )
    if len(set(ids)) == len(ids):
        return
    # Look for the rows only when there is a duplicate to report.
    first_row: dict[str, int] = {}
    for row, name in enumerate(ids):
        first = first_row.setdefault(name, row)
        if first != row:
            raise DualencError(
                f"id {name!r} is a duplicate, at rows {first} and {row}",
                fix="give each item a unique id",
            )
