"""Columns of a table as items, read on demand from memory-mapped Arrow and cheap to pickle."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from dualenc.data.bad_rows import report_once
from dualenc.data.item_lists import Picked, VectorItems, VectorsById
from dualenc.data.readers.column_kinds import kind_of_type
from dualenc.data.readers.images import IMAGE_SUFFIXES, existing_file
from dualenc.data.readers.plain_types import is_list, is_type
from dualenc.data.readers.tables import FILE, DataTable
from dualenc.data.store.identity import file_identity
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Array, ShardedVectors
from dualenc.errors import BadSample, DualencError, explain
from dualenc.io.decoding import decode_image, has_image_format, open_image
from dualenc.types import Integers, Items, Modality

logger = logging.getLogger("dualenc.data")

Faults = dict[str, tuple[np.ndarray, str]]
"""Why values cannot be used: by reason, which of them (n,) bool, and how to fix it."""

_BLOCK = 1 << 14  # vectors checked at a time, as float64
_VALUES_EXAMINED = 1000  # strings of a column that may name image files
_CONTENTS_EXAMINED = 100  # byte values of a column that may be images or texts
_STRINGS = ("string", "large_string")
_BYTES = ("binary", "large_binary")
_TEXT_LIKE = (*_STRINGS, "null", "boolean", "integer", "floating", "decimal", "temporal")
# Control and format characters such as zero-width spaces (Cc, Cf) are blank, too: a tokenizer may
# produce no tokens for them.
_NOT_BLANK = r"^[\s\p{Z}\p{Cc}\p{Cf}]*[^\s\p{Z}\p{Cc}\p{Cf}]"
# Cached arrays that are not pickled: a worker process maps the table and computes them again.
_DERIVED = ("array", "rows", "lengths")
_RECORD_PARTS = {"bytes": _BYTES, "path": _STRINGS}  # records of images written by `datasets`


class Column:
    """The texts or images of one column; with `lists` a row may hold several, which are flattened.

    Texts, ids and labels may be stored as strings, numbers or UTF-8 bytes; images as file contents,
    records of contents and path, or paths. By default records, file contents and names of image
    files are images, and everything else is text.

        Column(table, "caption", "text")[0]

    Args:
        table: table in which the column is open.
        name: name of the column.
        modality: "text" or "image"; by default inferred from type and values.
        lists: whether rows may hold lists.
    """

    def __init__(
        self, table: DataTable, name: str, modality: Modality | None = None, *, lists: bool = False
    ) -> None:
        self.source = table.source
        self.dataset = table.dataset
        self.name = name
        kind = table.dataset.data.schema.field(name).type
        self.is_list = is_list(kind)
        if self.is_list and not lists:
            raise DualencError(
                f"column {name!r} holds lists",
                fix="name one of single values",
                where=table.source,
            )
        with explain(
            f"{table.source}: column {name!r} is damaged", "write it again, texts as UTF-8"
        ):
            stored = self._stored()
            # Checks every offset and character, so that a corrupt file cannot crash a worker.
            stored.validate(full=True)
        self.modality: Modality = modality or self._guess_modality(stored)
        self.holds_strings = is_type(self.array.type, *_STRINGS)
        if not self._fits():
            raise DualencError(
                f"column {name!r} holds {kind}, which cannot be read as {self.modality}",
                fix="name another column",
                where=table.source,
            )

    def _fits(self) -> bool:
        """Return True if values of this Arrow type can have this modality."""
        kind = self.array.type
        if self.modality == "text":
            return is_type(kind, *_TEXT_LIKE)
        if not is_type(kind, "struct"):
            return is_type(kind, *_STRINGS, *_BYTES, "null")
        parts = self._parts()
        for name, part in parts.items():
            if not is_type(part.type, *_RECORD_PARTS[name], "null"):
                return False
        return bool(parts)

    def _guess_modality(self, stored: pa.ChunkedArray) -> Modality:
        if is_type(stored.type, *_BYTES):
            return self._guess_modality_of_bytes(stored)
        if not is_type(stored.type, *_STRINGS):
            return "image" if is_type(stored.type, "struct") else "text"
        texts = [str(value or "").strip() for value in _spread(stored, _VALUES_EXAMINED)]
        values = [text for text in texts if text]
        names = sum(value.lower().endswith(IMAGE_SUFFIXES) for value in values)
        modality: Modality = "image" if 0 < len(values) <= 2 * names else "text"
        if 0 < names < len(values):
            logger.warning(
                "%s: column %r is read as %s: %d of %d values examined look like names of image "
                "files; set left_modality or right_modality to text or image to change this",
                self.source,
                self.name,
                modality,
                names,
                len(values),
            )
        return modality

    def _guess_modality_of_bytes(self, stored: pa.ChunkedArray) -> Modality:
        """Return "text" if most values are UTF-8 without an image signature, else "image".

        Some writers store texts as bytes.
        """
        values = [value for value in _spread(stored, _CONTENTS_EXAMINED) if value]
        num_texts = sum(_is_utf8(value) and not has_image_format(value) for value in values)
        if 2 * num_texts <= len(values):
            return "image"
        report_once(
            f"{self.source}: column {self.name!r} is read as text: {num_texts} of {len(values)} "
            "values examined are UTF-8 and not images"
        )
        return "text"

    def _stored(self) -> pa.ChunkedArray:
        """Return the values as stored in the table, with lists flattened."""
        array = self.dataset.data.column(self.name)
        return pc.list_flatten(array) if self.is_list else array

    @cached_property
    def array(self) -> pa.ChunkedArray:
        """Values as Arrow, with lists flattened; NaN, as pandas writes missing values, is null.

        Bytes that are read as text become strings, null if they are not UTF-8.
        """
        array = self._stored()
        if self.modality == "text" and is_type(array.type, *_BYTES):
            return pa.chunked_array([_decode(chunk) for chunk in array.chunks], pa.large_string())
        if is_type(array.type, "floating"):
            return pc.if_else(pc.is_nan(array), None, array)
        return array

    @cached_property
    def rows(self) -> Integers:
        """Row of each value, (len(self),)."""
        array = self.dataset.data.column(self.name)
        rows = np.arange(len(array))
        return np.repeat(rows, _list_lengths(array)) if self.is_list else rows

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Any:
        return self.array[int(index)].as_py()

    def values(self) -> list[Any]:
        """Return all values."""
        return self.array.to_pylist()

    @cached_property
    def lengths(self) -> Integers:
        """Bytes of each text or file content, (len(self),); 0 for other kinds of values."""
        contents = self._parts().get("bytes", self.array)
        if is_type(contents.type, *_STRINGS, *_BYTES):
            return pc.fill_null(pc.binary_length(contents), 0).to_numpy()
        return np.zeros(len(self), dtype=np.int64)

    def filled(self) -> np.ndarray:
        """Return a mask (len(self),) of values that are not null, empty or blank.

        Records need contents or a path.
        """
        result = np.zeros(len(self), dtype=bool)
        for array in self._parts().values():
            filled = pc.is_valid(array)
            if is_type(array.type, *_STRINGS, *_BYTES):
                filled = pc.and_(filled, pc.greater(pc.binary_length(array), 0))
            if is_type(array.type, *_STRINGS):
                filled = pc.and_(filled, pc.match_substring_regex(array, _NOT_BLANK))
            result |= pc.fill_null(filled, False).to_numpy()
        return result

    def _parts(self) -> dict[str, pa.ChunkedArray]:
        """Return contents and paths of records by these names, other values by column name."""
        kind = self.array.type
        if not is_type(kind, "struct"):
            return {self.name: self.array}
        names = [name for name in _RECORD_PARTS if kind.get_field_index(name) >= 0]
        return {name: pc.struct_field(self.array, name) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _DERIVED}


def _spread(array: pa.ChunkedArray, most: int) -> list[Any]:
    """Return at most `most` values of an array, evenly spaced."""
    last = max(0, len(array) - 1)
    count = min(len(array), most)
    rows = np.linspace(0, last, count, dtype=np.int64)
    return [array[int(row)].as_py() for row in np.unique(rows)]


def _is_utf8(data: bytes) -> bool:
    """Return True for bytes of UTF-8 text; zero bytes only occur in binary data."""
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _decode(array: pa.Array) -> pa.Array:
    """Convert bytes to strings, null if they are not UTF-8."""
    # The cast takes the whole array or none of it, so look at single values if it fails.
    try:
        return array.cast(pa.large_string())
    except pa.ArrowInvalid:
        texts = [
            value if value is not None and _is_utf8(value) else None for value in array.to_pylist()
        ]
        return pa.array(texts, pa.large_binary()).cast(pa.large_string())


def _list_lengths(lists: pa.ChunkedArray) -> Integers:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)


class TextColumn:
    """Values of a column as text, numbers spelled out; titles, if given, are prepended."""

    def __init__(self, column: Column, titles: Column | None = None) -> None:
        self.column = column
        self.titles = titles

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        if self.titles is None:
            value = self.column[index]
            return "" if value is None else str(value)
        return f"{self.titles[index] or ''} {self.column[index] or ''}".strip()

    def item_identity(self, row: int, read: bool) -> bytes:
        """Return the text, or its length."""
        if read:
            return self[row].encode()
        length = self.column.lengths[row]
        if self.titles is not None:
            length += self.titles.lengths[row]
        return str(length).encode()


class ColumnImages:
    """Values of a column as images: file contents, `{"bytes", "path"}` records, or paths.

    Unless the table has `allow_outside`, paths must stay in the folder of the row after links are
    resolved: a downloaded table must not make this machine read files of its choice.
    """

    def __init__(self, table: DataTable, column: Column) -> None:
        is_unclear = column.holds_strings and not (table.is_in_one_folder or table.has(FILE))
        if is_unclear and not all(os.path.isabs(path) for path in column.values() if path):
            raise DualencError(
                f"relative paths in column {column.name!r} of parquet files in several folders",
                fix=(
                    "open the folders one by one, or write absolute paths and pass "
                    "allow_outside=True"
                ),
                where=table.source,
            )
        self.table = table
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Image.Image:
        data, path = _contents_and_path(self.column[index])
        row = int(self.column.rows[index])
        position = f"{self.table.position(row)}, column {self.column.name!r}"
        if data is not None:
            return decode_image(data, position)
        if path is None:
            raise BadSample(
                "no image",
                fix="fill it in or remove the row",
                where=position,
            )
        try:
            return open_image(self._file(row, path))
        except BadSample as error:
            # The error names the image file; add the row of the table that refers to it.
            raise BadSample(f"{error} (named in {position})") from None

    def _file(self, row: int, path: str) -> Path:
        """Return the file that a path of a row refers to.

        Raise a `BadSample` if it is outside of the row's folder.
        """
        root = self.table.folder(row)
        file = existing_file(root, path)
        if self.table.allow_outside:
            return file
        # Resolve links before comparing and opening, so that a link cannot lead out of the folder.
        resolved = Path(os.path.realpath(file))
        if not resolved.is_relative_to(os.path.realpath(root)):
            raise BadSample(
                f"image outside of the folder {root}",
                fix=(
                    "move it there, or pass allow_outside=True (--allow-outside) if you trust the "
                    "table"
                ),
                where=repr(path),
            )
        return resolved

    def key(self, index: int) -> bytes | str:
        """Return file contents, or the normalized path."""
        data, path = _contents_and_path(self.column[index])
        if data is not None:
            return data
        return os.path.normpath(self.table.folder(int(self.column.rows[index])) / (path or ""))

    @property
    def key_sizes(self) -> np.ndarray:
        """Bytes of each file's contents (N,), 0 for paths."""
        return np.zeros(len(self)) if self.column.holds_strings else self.column.lengths

    def item_identity(self, index: int, read: bool) -> bytes:
        """Return file contents or their length; for a path, the `file_identity`."""
        length = int(self.column.lengths[index])
        # Without reading, contents are identified by their length; for a path that says nothing.
        if length and not read and not self.column.holds_strings:
            return str(length).encode()
        data, path = _contents_and_path(self.column[index])
        if data is not None:
            return data
        if not path:
            return str(length).encode()
        try:
            identity = file_identity(self._file(int(self.column.rows[index]), path), read)
        except BadSample:
            identity = b"outside"
        return path.encode(errors="surrogatepass") + b" " + identity


def _contents_and_path(value: Any) -> tuple[bytes | None, str | None]:
    """Return the file contents and the path in an image cell, None for what it lacks."""
    if isinstance(value, dict):
        return value.get("bytes"), value.get("path")
    if isinstance(value, bytes):
        return value, None
    return None, value


@dataclass(frozen=True)
class ItemColumn:
    """One column as n items, with lists flattened, and the row of each item.

    A row without items counts as the first fault.

        read_column(table, "caption").items[0]

    Args:
        table: table that holds the column.
        modality: "text", "image" or "vector".
        is_list: whether rows hold lists.
        rows: row of each item, (n,).
        items: the raw items.
        faults: reasons not to use items, each with a mask (n,) and a fix.
    """

    table: DataTable
    modality: Modality
    is_list: bool
    rows: Integers
    items: Items
    faults: Faults

    def usable(self) -> np.ndarray:
        """Return a mask (n,) of values without a fault."""
        return usable(self.faults)

    @property
    def is_empty(self) -> np.ndarray:
        """Mask (n,) of missing or blank values."""
        return next(iter(self.faults.values()))[0]

    def with_fault(self, reason: str, bad: np.ndarray, fix: str) -> ItemColumn:
        """Return the column with one more fault; each value counts for its first fault only."""
        return replace(self, faults={**self.faults, reason: (bad & self.usable(), fix)})

    def skip(
        self, among: np.ndarray | bool = True, empty_rows: Sequence[int] | Integers = ()
    ) -> None:
        """Count faulty values in the mask `among` (n,), and `empty_rows`, as bad samples."""
        for reason, (mask, fix) in self.faults.items():
            rows = [*self.rows[mask & among], *empty_rows]
            empty_rows = ()
            if rows:
                self.table.bad_rows.add(reason, self.table.position(min(rows)), fix, len(rows))


def read_column(
    table: DataTable, name: str, modality: Modality | None = None, title_column: str | None = None
) -> ItemColumn:
    """Return the items of a column.

    Args:
        table: table in which the column is open.
        name: name of the column.
        modality: "text", "image" or "vector"; by default inferred from type and values.
        title_column: column of titles to prepend to texts.
    """
    kind = kind_of_type(table.dataset.data.schema.field(name).type)
    if modality == "vector" or (modality is None and kind == "vector"):
        return _read_vectors(table, name)
    column = Column(table, name, modality, lists=True)
    filled = column.filled()
    titles = None
    if title_column is not None and not column.is_list:
        titles = Column(table, title_column, "text")
        # A title alone is a text too.
        filled = filled | titles.filled()
    items: Items = TextColumn(column, titles)
    if column.modality == "image":
        items = ColumnImages(table, column)
    faults = {f"no {column.modality} in column {name!r}": (~filled, "fill it in or remove the row")}
    return ItemColumn(table, column.modality, column.is_list, column.rows, items, faults)


def read_ids(table: DataTable, name: str, ids: Sequence[str], vectors: Items) -> ItemColumn:
    """Return the vectors (N, D) whose ids a column holds, given all ids (N,)."""
    column = Column(table, name, "text", lists=True)
    filled = column.filled()
    names = ["" if value is None else str(value) for value in column.values()]
    positions = positions_of(ids, names)
    faults = {
        f"no id in column {name!r}": (~filled, "fill it in or remove the row"),
        "id without a vector": (
            filled & (positions < 0),
            f"column {name!r} names an item without a vector",
        ),
    }
    # Position -1 is never read, because those values have a fault.
    items = VectorsById(vectors, positions)
    return ItemColumn(table, "vector", column.is_list, column.rows, items, faults)


def positions_of(ids: Sequence[str], names: Sequence[str]) -> Integers:
    """Return the position of each name (n,) among ids, -1 if unknown."""
    positions = rows_of(ids, names)
    missing = np.flatnonzero(positions < 0)
    # pandas writes id 7 as 7.0 beside missing ids.
    positions[missing] = rows_of(ids, [names[row].removesuffix(".0") for row in missing.tolist()])
    return positions


def _read_vectors(table: DataTable, name: str) -> ItemColumn:
    array = table.column(name)
    kind = array.type.value_type if is_list(array.type) else pa.null()
    if not is_type(kind, "floating", "integer"):
        raise DualencError(
            f"column {name!r} holds {array.type}, not vectors",
            fix="name a column of lists of numbers",
            where=table.source,
        )
    lengths = _list_lengths(array)
    # A missing list and an empty one both have length 0.
    is_empty = lengths == 0
    sizes = np.unique(lengths[~is_empty]).tolist()
    if len(sizes) > 1:
        raise DualencError(
            f"column {name!r} holds vectors of sizes {sizes[0]} and {sizes[1]}",
            fix="embed all with one model",
            where=table.source,
        )
    dim = max(sizes, default=1)
    shards = []
    for chunk in array.chunks:
        # NumPy lacks null: a missing number becomes NaN, which is a fault below.
        numbers = pc.list_flatten(chunk).to_numpy(zero_copy_only=False)
        if len(numbers):
            shards.append(numbers.reshape(-1, dim))
    matrix = ShardedVectors(shards or [np.zeros((0, dim), np.float32)])
    faults: Faults = {f"no vector in column {name!r}": (is_empty, "fill it in or remove the row")}
    for reason, (bad, fix) in matrix_faults(matrix).items():
        # The matrix holds only the rows with a vector.
        mask = np.zeros(len(lengths), dtype=bool)
        mask[~is_empty] = bad
        faults[reason] = mask, fix
    items = Picked(VectorItems(matrix), np.cumsum(~is_empty) - 1)
    return ItemColumn(table, "vector", False, np.arange(len(array)), items, faults)


def matrix_faults(matrix: Array) -> Faults:
    """Return the rows of a matrix (n, D) that are zero or not finite."""
    # One pass finds both faults: the sum of squares is 0 for a vector of zeros, and not finite if
    # one of the numbers is not. float64, since large float32 numbers would overflow when squared.
    squares = np.zeros(len(matrix))
    for start in range(0, len(matrix), _BLOCK):
        block = np.asarray(matrix[start : start + _BLOCK], dtype=np.float64)
        squares[start : start + _BLOCK] = np.einsum("nd,nd->n", block, block)
    return {
        "vector that is not finite": (~np.isfinite(squares), "embed it again or remove it"),
        "vector of zeros": (squares == 0, "remove it, since it lacks a direction"),
    }


def usable(faults: Faults) -> np.ndarray:
    """Return a mask (n,) of values without a fault."""
    return ~np.any([bad for bad, _ in faults.values()], axis=0)
