"""Columns of a table as items: read from memory-mapped Arrow when asked for, cheap to hand to worker processes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from dualenc.data.identity import file_identity, identities
from dualenc.data.images import IMAGE_SUFFIXES, decode_image, open_image
from dualenc.data.pairs import Items, Modality
from dualenc.errors import BadSample

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from dualenc.data.tables import Table


class Column:
    """The values of one column; a column of lists is laid flat.

    Only the data set travels when this is pickled, as the path of its Arrow file.
    """

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.dataset, self.name = dataset, name
        self._array: pa.ChunkedArray | None = None
        self._lengths: np.ndarray | None = None

    @property
    def array(self) -> pa.ChunkedArray:
        """The values as Arrow, lists laid flat."""
        if self._array is None:
            import pyarrow.compute as pc

            array = self.dataset.data.column(self.name)
            self._array = pc.list_flatten(array) if self.is_list else array
        return self._array

    @property
    def is_list(self) -> bool:
        """Whether each row holds a list."""
        import pyarrow.types as kinds

        kind = self.dataset.data.schema.field(self.name).type
        return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)

    @property
    def holds_strings(self) -> bool:
        """Whether the values are texts or paths, not numbers, bytes or records."""
        import pyarrow.types as kinds

        return kinds.is_string(self.array.type) or kinds.is_large_string(self.array.type)

    @property
    def holds_bytes(self) -> bool:
        """Whether the values are file contents."""
        import pyarrow.types as kinds

        return kinds.is_binary(self.array.type) or kinds.is_large_binary(self.array.type)

    def row_of_values(self) -> np.ndarray:
        """The row that each value stands in, (len(self),)."""
        rows = np.arange(len(self.dataset))
        if not self.is_list:
            return rows
        import pyarrow.compute as pc

        lengths = pc.fill_null(pc.list_value_length(self.dataset.data.column(self.name)), 0)
        return np.repeat(rows, lengths.to_numpy())

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Any:
        return self.array[int(index)].as_py()

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The values at some positions (n,), in bulk, as an array of objects."""
        starts = np.cumsum([0, *(len(chunk) for chunk in self.array.chunks)])
        chunk_of = np.searchsorted(starts, rows, side="right") - 1
        result = np.empty(len(rows), dtype=object)
        for number in np.unique(chunk_of).tolist():
            here = np.flatnonzero(chunk_of == number)
            values = self.array.chunk(number).take(rows[here] - starts[number]).to_pylist()
            for place, value in zip(here.tolist(), values, strict=True):
                result[place] = value
        return result

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the texts or file contents at some positions (n,); 0 for values of other kinds."""
        import pyarrow.compute as pc
        import pyarrow.types as kinds

        if self._lengths is None:
            array = self.array
            if kinds.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
                array = pc.struct_field(array, "bytes")
            self._lengths = np.zeros(len(self), dtype=np.int64)
            if any(
                of(array.type)
                for of in (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary)
            ):
                self._lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy()
        return self._lengths[rows]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None, "_lengths": None}


class Texts:
    """Values of a column as text; numbers are spelled out."""

    def __init__(self, column: Column) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        return str(self.column[index])

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for: the texts, or their lengths."""
        values = self.column.values(rows) if read else self.column.lengths(rows)
        return [str(value).encode(errors="surrogatepass") for value in values.tolist()]


class Titled:
    """Titles joined to texts by a space, as BEIR does; either may be empty."""

    def __init__(self, titles: Column, texts: Column) -> None:
        self.titles, self.texts = titles, texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return f"{self.titles[index] or ''} {self.texts[index] or ''}".strip()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for: titles and texts, or their lengths."""
        parts = [column.values(rows) if read else column.lengths(rows) for column in (self.titles, self.texts)]
        both = zip(*(part.tolist() for part in parts), strict=True)
        return [f"{title or ''} {text or ''}".strip().encode(errors="surrogatepass") for title, text in both]


class Images:
    """Values of a column as images: file contents, `{"bytes", "path"}` records, or paths.

    Args:
        column: the values.
        root: where relative paths start.
        source: names the table in errors.
    """

    def __init__(self, column: Column, root: Path, source: str) -> None:
        self.column, self.root, self.source = column, root, source

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Image.Image:
        data, path = _contents_and_path(self.column[index])
        if isinstance(data, bytes):
            return decode_image(data, f"{self.source} row {index}, column {self.column.name!r}")
        if path:
            return open_image(self.root / path)
        raise BadSample(
            f"{self.source} row {index}, column {self.column.name!r}: no image; fill it in or remove the row"
        )

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for: file contents, or lengths; of paths what `file_identity` tells."""
        result = [str(length).encode() for length in self.column.lengths(rows).tolist()]
        unknown = np.arange(len(rows))
        if not read and not self.column.holds_strings:  # only records without contents have a path to look at
            unknown = np.flatnonzero(self.column.lengths(rows) == 0)
        for place, value in zip(unknown.tolist(), self.column.values(rows[unknown]).tolist(), strict=True):
            data, path = _contents_and_path(value)
            if data is not None:
                result[place] = data
            elif path:
                name = path.encode(errors="surrogatepass")
                result[place] = name + b" " + file_identity(self.root / path, read)
        return result


class Picked:
    """Some items of another collection, in the order of `positions`."""

    def __init__(self, items: Items, positions: np.ndarray) -> None:
        self.items, self.positions = items, np.asarray(positions, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        return self.items[int(self.positions[index])]

    def identities(self, rows: np.ndarray, read: bool) -> Sequence[bytes]:
        """As `dualenc.data.identity` asks for."""
        return identities(self.items, self.positions[rows], read)


class Chained:
    """The items of one collection, then those of another."""

    def __init__(self, first: Items, second: Items) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, index: int) -> Any:
        split = len(self.first)
        return self.first[index] if index < split else self.second[index - split]

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for."""
        in_first = rows < len(self.first)
        first = iter(identities(self.first, rows[in_first], read))
        second = iter(identities(self.second, rows[~in_first] - len(self.first), read))
        return [next(first if from_first else second) for from_first in in_first.tolist()]


def _contents_and_path(value: Any) -> tuple[bytes | None, str | None]:
    """What an image cell holds: file contents, a path, a record of both, or neither."""
    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, value)
    return (data if isinstance(data, bytes) else None), (path if isinstance(path, str) else None)


def modality_of(column: Column) -> Modality:
    """What a column holds: records, file contents and names of image files are images, all else is text."""
    import pyarrow.types as kinds

    if column.holds_bytes or kinds.is_struct(column.array.type):
        return "image"
    if not column.holds_strings:
        return "text"
    first = next((v for v in (column[i] for i in range(min(len(column), 100))) if v and v.strip()), "")
    return "image" if first.lower().endswith(IMAGE_SUFFIXES) else "text"


def items_of(table: Table, column: Column, modality: Modality) -> Items:
    """A column's values as raw items."""
    return Texts(column) if modality == "text" else Images(column, table.root, table.source)


def filled(column: Column) -> np.ndarray:
    """Which values are there: not null, not blank, not empty. (len(column),) bool."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = column.array
    if not kinds.is_struct(array.type):
        return _filled(array)
    fields = [pc.struct_field(array, name) for name in ("bytes", "path") if array.type.get_field_index(name) >= 0]
    return np.any([_filled(field) for field in fields], axis=0)


def _filled(array: pa.ChunkedArray) -> np.ndarray:
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    kind = array.type
    there = pc.is_valid(array)
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        there = pc.and_(there, pc.fill_null(pc.invert(pc.utf8_is_space(array)), False))
    if not kinds.is_null(kind) and not kinds.is_primitive(kind):
        there = pc.and_(there, pc.fill_null(pc.greater(pc.binary_length(array), 0), False))
    return there.to_numpy()


def number_distinct(items: Items, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number equal values alike, by 128-bit digests, so that a million texts cost 16 MB.

    Args:
        items: strings.
        positions: (n,) which of them.

    Returns:
        (k,) the position of the first of each distinct value, in order of appearance; (n,) the number, in [0, k),
        of each.
    """
    digests = np.empty(len(positions), dtype="S16")
    for i, position in enumerate(tqdm(positions, desc="finding equal items", delay=2, leave=False)):
        digests[i] = hashlib.blake2b(items[position].encode(), digest_size=16).digest()
    return number_keys(digests, positions)


def number_keys(keys: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `number_distinct`, for values that are already small keys."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.asarray(positions)[first[order]], rank[inverse.reshape(-1)]
