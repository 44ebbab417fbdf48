"""Columns of a table as items: read from memory-mapped Arrow on demand, cheap to hand to worker processes."""

from __future__ import annotations

import hashlib
import logging
import os
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types
from PIL import Image
from tqdm import tqdm

from dualenc.data.identity import contents, file_identity, identities
from dualenc.data.images import IMAGE_SUFFIXES, existing_file
from dualenc.data.line_tables import is_list
from dualenc.data.tables import DataTable
from dualenc.decoding import decode_image, open_image
from dualenc.errors import BadSample, DualencError
from dualenc.types import Items, Modality

logger = logging.getLogger("dualenc.data")

_VALUES_EXAMINED = 1000  # of a column of strings, which may name image files
_STRINGS = ("string", "large_string")
_BYTES = ("binary", "large_binary")
_TEXT_LIKE = (*_STRINGS, "null", "boolean", "integer", "floating", "decimal", "temporal")
_RECORD_PARTS = {"bytes": _BYTES, "path": _STRINGS}  # of an image, as `datasets` writes them


class Column:
    """The values of one column, checked to be usable; a column of lists is laid flat.

    Pickled, it carries the data set alone, as the path of its Arrow file.

    Args:
        table: the rows.
        name: one of its columns.
        modality: "text" for texts, ids and labels: strings and numbers; "image": file contents, records of contents
            and path, or paths. By default records, contents and names of image files are images, all else is text.
        lists: whether a row may hold a list of values.

    Raises:
        DualencError: the column holds something else.
    """

    def __init__(self, table: DataTable, name: str, modality: Modality | None = None, *, lists: bool = False) -> None:
        self.source = table.source
        self.dataset = table.dataset
        self.name = name
        kind = self.dataset.data.schema.field(name).type
        self.is_list = is_list(kind)
        if self.is_list and not lists:
            raise DualencError(f"{table.source}: column {name!r} holds lists; name one with a single value in each row")
        self.holds_strings = _is(self.array.type, *_STRINGS)
        self.modality: Modality = modality or self._guess_modality()
        if self.modality == "text":
            usable = _is(self.array.type, *_TEXT_LIKE)
            mend = "texts are needed; cast it to strings, or name another column"
        else:
            usable = _holds_images(self.array.type)
            mend = "images are needed: file contents, paths, or records with `bytes` and `path`; name another column"
        if not usable:
            raise DualencError(f"{table.source}: column {name!r} holds {kind}, where {mend}")

    def _guess_modality(self) -> Modality:
        if not self.holds_strings:
            return "image" if _is(self.array.type, *_BYTES, "struct") else "text"
        rows = np.unique(np.linspace(0, max(0, len(self) - 1), min(len(self), _VALUES_EXAMINED)).astype(np.int64))
        values = [value.strip() for value in self.values(rows) if value and value.strip()]
        names = sum(value.lower().endswith(IMAGE_SUFFIXES) for value in values)
        modality: Modality = "image" if 0 < len(values) <= 2 * names else "text"
        # What all values say needs no word.
        if 0 < names < len(values):
            logger.warning(
                "%s: column %r is read as %s: %d of %d values examined end as names of image files do; left_modality "
                "or right_modality, text or image, decides otherwise",
                *(self.source, self.name, modality, names, len(values)),
            )
        return modality

    @cached_property
    def array(self) -> pa.ChunkedArray:
        """The values as Arrow, lists laid flat; NaN, as pandas writes missing values, is null."""
        array = self.dataset.data.column(self.name)
        array = pc.list_flatten(array) if self.is_list else array
        return pc.if_else(pc.is_nan(array), None, array) if _is(array.type, "floating") else array

    def row_of_values(self) -> np.ndarray:
        """The row of each value, (len(self),)."""
        rows = np.arange(len(self.dataset))
        return np.repeat(rows, list_lengths(self.dataset.data.column(self.name))) if self.is_list else rows

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.array[int(index)].as_py()
        except UnicodeDecodeError:  # files may hold any bytes as strings
            raise BadSample(f"column {self.name!r}, value {index}: not UTF-8 text; mend or remove it") from None

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The values at some positions (n,), in bulk, as an array of objects; bytes that are not UTF-8 as escapes."""
        starts = np.cumsum([0, *(len(chunk) for chunk in self.array.chunks)])
        # Chunk by chunk, so that one value that is not UTF-8 costs its chunk the slow path and not the column.
        chunk_of = np.searchsorted(starts, rows, side="right") - 1
        result = np.empty(len(rows), dtype=object)
        for number in np.unique(chunk_of).tolist():
            places = np.flatnonzero(chunk_of == number)
            values = _as_python(self.array.chunk(number).take(rows[places] - starts[number]))
            for place, value in zip(places.tolist(), values, strict=True):
                result[place] = value
        return result

    def places_in(self, names: Sequence[str]) -> np.ndarray:
        """The position of each value among some strings, (len(self),); -1 for a value that is none of them."""
        # Both sides as large strings: numbers in one table are texts in another.
        value_set = pa.array(names, pa.large_string())
        places = pc.index_in(pc.cast(self.array, value_set.type), value_set=value_set)
        return np.asarray(pc.fill_null(places, -1).to_numpy(), dtype=np.int64)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the texts or file contents at some positions (n,); 0 for values of other kinds."""
        return self._lengths[rows]

    @cached_property
    def _lengths(self) -> np.ndarray:
        array = self.array
        if _is(array.type, "struct") and array.type.get_field_index("bytes") >= 0:
            array = pc.struct_field(array, "bytes")
        if _is(array.type, *_STRINGS, *_BYTES):
            return pc.fill_null(pc.binary_length(array), 0).to_numpy()
        return np.zeros(len(self), dtype=np.int64)

    def filled(self) -> np.ndarray:
        """Which values are usable: neither null, empty nor blank; of a record, one of its parts. (len(self),) bool."""
        if not _is(self.array.type, "struct"):
            return _filled(self.array)
        names = [name for name in _RECORD_PARTS if self.array.type.get_field_index(name) >= 0]
        # A record is usable with contents or with a path; `datasets` writes either.
        parts = [_filled(pc.struct_field(self.array, name)) for name in names]
        return np.any([np.zeros(len(self), dtype=bool), *parts], axis=0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("array", "_lengths")}


def _is(kind: pa.DataType, *names: str) -> bool:
    """Whether `pyarrow.types.is_NAME` holds of an Arrow type, for one of the names."""
    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def list_lengths(lists: pa.ChunkedArray) -> np.ndarray:
    """The number of values in each list (n,), int64; 0 for null."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)


def _holds_images(kind: pa.DataType) -> bool:
    if not _is(kind, "struct"):
        return _is(kind, *_STRINGS, *_BYTES, "null")
    parts = [name for name in _RECORD_PARTS if kind.get_field_index(name) >= 0]
    return bool(parts) and all(_is(kind.field(name).type, *_RECORD_PARTS[name], "null") for name in parts)


def _filled(array: pa.ChunkedArray) -> np.ndarray:
    filled = pc.is_valid(array)
    if _is(array.type, *_STRINGS, *_BYTES):
        filled = pc.and_(filled, pc.fill_null(pc.greater(pc.binary_length(array), 0), False))
    if not _is(array.type, *_STRINGS):
        return filled.to_numpy()
    try:
        return pc.and_(filled, pc.fill_null(pc.invert(pc.utf8_is_space(array)), False)).to_numpy()
    except pa.ArrowInvalid:  # not UTF-8 somewhere: a bad sample when it is read
        values = [value for chunk in array.chunks for value in _as_python(chunk)]
        return np.array([bool(value and value.strip()) for value in values], dtype=bool)


def _as_python(array: pa.Array) -> list[Any]:
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        values = array.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode(errors="backslashreplace") for value in values]


# Collections of items. Each has `identities(rows, read)` for `dualenc.data.identity`.


class Texts:
    """Values of a column as text, numbers spelled out; with a column of titles, joined in front."""

    def __init__(self, column: Column, titles: Column | None = None) -> None:
        self.column = column
        self.titles = titles

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        if self.titles is None:
            return str(self.column[index])
        return f"{self.titles[index] or ''} {self.column[index] or ''}".strip()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """The texts, or their lengths."""
        what = Column.values if read else Column.lengths
        texts: Iterable[Any] = what(self.column, rows)
        if self.titles is not None:
            titles = what(self.titles, rows)
            texts = [f"{title or ''} {text or ''}".strip() for title, text in zip(titles, texts, strict=True)]
        return [str(text).encode(errors="surrogatepass") for text in texts]


class ColumnImages:
    """Values of a column as images: file contents, `{"bytes", "path"}` records, or paths.

    Paths start in the table's folder and must stay in it, links resolved, unless the table has `allow_outside`: a
    table from somewhere else must not make this machine read files of its choice.
    """

    def __init__(self, table: DataTable, column: Column) -> None:
        self.table = table
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Image.Image:
        data, path = _contents_and_path(self.column[index])
        row = int(self.column.row_of_values()[index]) if self.column.is_list else index
        where = f"{self.table.where(row)}, column {self.column.name!r}"
        if data is not None:
            return decode_image(data, where)
        if path is None:
            raise BadSample(f"{where}: no image; fill it in or remove the row")
        try:
            return open_image(self._file(path))
        except BadSample as error:
            raise BadSample(f"{error} (named in {where})") from None

    def _file(self, path: str) -> Path:
        """The file that a path of the table means; a `BadSample` if it is outside of the table's folder."""
        if "\0" in path:
            return self.table.root / path
        file = existing_file(self.table.root, path)
        if self.table.allow_outside:
            return file
        # Resolved before it is compared and opened, so that no link leads out of the folder.
        resolved = os.path.realpath(file)
        if not Path(resolved).is_relative_to(os.path.realpath(self.table.root)):
            raise BadSample(
                f"{path!r}: image outside of the folder {self.table.root}; move it there, or pass allow_outside=True "
                "if you trust the table"
            )
        return Path(resolved)

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """File contents, or lengths; of paths the `file_identity`."""
        result = [str(length).encode() for length in self.column.lengths(rows).tolist()]
        # Contents are known by their lengths unless they are read; the lengths of paths say nothing.
        to_read = np.arange(len(rows))
        # Only records without contents have a path to look at.
        if not read and not self.column.holds_strings:
            to_read = np.flatnonzero(self.column.lengths(rows) == 0)
        for place, value in zip(to_read.tolist(), self.column.values(rows[to_read]).tolist(), strict=True):
            data, path = _contents_and_path(value)
            if data is not None:
                result[place] = data
            elif path:
                try:
                    identity = file_identity(self._file(path), read)
                except BadSample:
                    identity = b"outside"
                result[place] = path.encode(errors="surrogatepass") + b" " + identity
        return result


class ImageKeys:
    """Keys of a column's images, equal for equal images: the contents of the file, or its normalised path.

    Attributes:
        sizes: (n,) bytes of the contents, 0 for paths.
    """

    def __init__(self, images: ColumnImages) -> None:
        self.images = images
        column = images.column
        self.sizes = np.zeros(len(column)) if column.holds_strings else column.lengths(np.arange(len(column)))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> bytes | str:
        data, path = _contents_and_path(self.images.column[index])
        if data is not None:
            return data
        return unicodedata.normalize("NFC", os.path.normpath(self.images.table.root / (path or "")))


def _contents_and_path(value: Any) -> tuple[bytes | None, str | None]:
    """What an image cell holds: file contents, a path, a record of both, or neither."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    if isinstance(value, bytes):
        return value, None
    return None, value


class Picked:
    """Some items of another collection, in the order of `positions`."""

    def __init__(self, items: Items, positions: np.ndarray) -> None:
        self.items = items
        self.positions = np.asarray(positions, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        return self.items[int(self.positions[index])]

    def identities(self, rows: np.ndarray, read: bool) -> Sequence[bytes]:
        """Those of the items picked."""
        return identities(self.items, self.positions[rows], read)


class Joined:
    """The items of several collections, one after the other; texts with the prompt of their collection, if it has one.

    Attributes:
        starts: where each collection begins, and the end.
    """

    def __init__(self, parts: Sequence[Items], prompts: Sequence[str] | None = None) -> None:
        self.parts = list(parts)
        self.prompts = list(prompts or [""] * len(parts))
        self.starts = [0, *np.cumsum([len(part) for part in parts]).tolist()]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Any:
        number = bisect_right(self.starts, index) - 1
        item = self.parts[number][index - self.starts[number]]
        return self.prompts[number] + item if self.prompts[number] else item

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """Those of all, in the order of `rows`, with their prompts."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        found: list[bytes] = [b""] * len(rows)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            own = identities(self.parts[number], rows[places] - self.starts[number], read)
            prompt = self.prompts[number].encode()
            for place, identity in zip(places.tolist(), own, strict=True):
                found[place] = prompt + identity
        return found


def number_distinct(
    read: Callable[[int], Any] | None,
    positions: np.ndarray,
    *,
    sizes: np.ndarray | None = None,
    unreadable: Callable[[int], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Number equal strings, file contents or vectors alike, by 128-bit digests: a million cost 16 MB.

    Args:
        read: the item at a position; without it all are distinct.
        positions: (n,) of the items to number.
        sizes: (n,) of file contents; those of a unique size are distinct and not read.
        unreadable: called with the position of a bad sample, whose number is -1; by default the error is raised.

    Returns:
        The position of the first of each distinct item (k,), in order of appearance; the number in [0, k) of each (n,).
    """
    if read is None:
        return positions, np.arange(len(positions))
    digests = np.zeros(len(positions), dtype="S16")
    to_read = np.arange(len(positions))
    if sizes is not None:
        _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        is_unique = counts[inverse] == 1
        digests[is_unique] = sizes[is_unique].astype("S16")
        to_read = np.flatnonzero(~is_unique)
    for i in tqdm(to_read, desc="finding equal items", delay=2, leave=False):
        try:
            digests[i] = hashlib.blake2b(contents(read(positions[i])), digest_size=16).digest()
        except BadSample:
            if unreadable is None:
                raise
            unreadable(int(positions[i]))
    readable = np.flatnonzero(digests != b"")
    _, first, inverse = np.unique(digests[readable], return_index=True, return_inverse=True)
    # np.unique numbers by digest; numbers by first appearance do not depend on the hash.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    number = np.full(len(positions), -1)
    number[readable] = rank[inverse]
    return np.asarray(positions)[readable][first[order]], number
