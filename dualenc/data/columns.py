"""Columns of a table as items: read from memory-mapped Arrow when asked for, cheap to hand to worker processes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from dualenc.data.identity import file_identity, identities
from dualenc.data.images import IMAGE_SUFFIXES, decode_image, open_image
from dualenc.data.pairs import Items
from dualenc.errors import BadSample, DualencError
from dualenc.types import Modality

if TYPE_CHECKING:
    import pyarrow as pa

    from dualenc.data.tables import DataTable


_STRINGS, _BYTES = ("string", "large_string"), ("binary", "large_binary")


class Column:
    """The values of one column, which are sure to be usable; a column of lists is laid flat.

    Only the data set travels when this is pickled, as the path of its Arrow file.

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
        self.dataset, self.name = table.dataset, name
        self._array: pa.ChunkedArray | None = None
        self._lengths: np.ndarray | None = None
        kind = self.dataset.data.schema.field(name).type
        self.is_list = _is(kind, "list", "large_list", "fixed_size_list")
        if self.is_list and not lists:
            raise DualencError(f"{table.source}: column {name!r} holds lists; name one with a single value in each row")
        values = self.array.type
        self.holds_strings = _is(values, *_STRINGS)
        if modality is None:
            head = (self[i] for i in range(min(len(self), 100) if self.holds_strings else 0))
            first = next((value for value in head if value and value.strip()), "")
            image = _is(values, *_BYTES, "struct") or first.lower().endswith(IMAGE_SUFFIXES)
            modality = "image" if image else "text"
        self.modality: Modality = modality
        if modality == "text":
            usable = _is(values, *_STRINGS, "null", "boolean", "integer", "floating", "decimal", "temporal")
            mend = "texts are needed; cast it to strings, or name another column"
        else:
            parts = {"bytes": _BYTES, "path": _STRINGS}
            if _is(values, "struct"):
                there = {part: values.field(part).type for part in parts if values.get_field_index(part) >= 0}
                usable = bool(there) and all(_is(found, *parts[part], "null") for part, found in there.items())
            else:
                usable = _is(values, *_STRINGS, *_BYTES, "null")
            mend = "images are needed: file contents, paths, or records with `bytes` and `path`; name another column"
        if not usable:
            raise DualencError(f"{table.source}: column {name!r} holds {kind}, where {mend}")

    @property
    def array(self) -> pa.ChunkedArray:
        """The values as Arrow, lists laid flat."""
        if self._array is None:
            import pyarrow.compute as pc

            array = self.dataset.data.column(self.name)
            self._array = pc.list_flatten(array) if self.is_list else array
        return self._array

    def row_of_values(self) -> np.ndarray:
        """The row that each value stands in, (len(self),)."""
        import pyarrow.compute as pc

        rows = np.arange(len(self.dataset))
        if not self.is_list:
            return rows
        lengths = pc.fill_null(pc.list_value_length(self.dataset.data.column(self.name)), 0)
        return np.repeat(rows, lengths.to_numpy())

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
        chunk_of = np.searchsorted(starts, rows, side="right") - 1
        result = np.empty(len(rows), dtype=object)
        for number in np.unique(chunk_of).tolist():
            here = np.flatnonzero(chunk_of == number)
            values = _as_python(self.array.chunk(number).take(rows[here] - starts[number]))
            for place, value in zip(here.tolist(), values, strict=True):
                result[place] = value
        return result

    def places_in(self, names: Sequence[str]) -> np.ndarray:
        """Where each value stands among some strings, (len(self),); -1 for one that is not there."""
        import pyarrow as pa
        import pyarrow.compute as pc

        known = pa.array(names, pa.large_string())
        places = pc.index_in(pc.cast(self.array, known.type), value_set=known)
        return np.asarray(pc.fill_null(places, -1).to_numpy(), dtype=np.int64)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of the texts or file contents at some positions (n,); 0 for values of other kinds."""
        import pyarrow.compute as pc

        if self._lengths is None:
            array = self.array
            if _is(array.type, "struct") and array.type.get_field_index("bytes") >= 0:
                array = pc.struct_field(array, "bytes")
            self._lengths = np.zeros(len(self), dtype=np.int64)
            if _is(array.type, *_STRINGS, *_BYTES):
                self._lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy()
        return self._lengths[rows]

    def filled(self) -> np.ndarray:
        """Which values are there: not null, not blank, not empty; of a record, one of its parts. (len(self),) bool."""
        import pyarrow as pa
        import pyarrow.compute as pc

        parts, kind = [self.array], self.array.type
        if _is(kind, "struct"):
            names = [name for name in ("bytes", "path") if kind.get_field_index(name) >= 0]
            parts = [pc.struct_field(self.array, name) for name in names]
        filled = np.zeros(len(self), dtype=bool)
        for part in parts:
            there = pc.is_valid(part)
            if _is(part.type, *_STRINGS, *_BYTES):
                there = pc.and_(there, pc.fill_null(pc.greater(pc.binary_length(part), 0), False))
            try:
                if _is(part.type, *_STRINGS):
                    there = pc.and_(there, pc.fill_null(pc.invert(pc.utf8_is_space(part)), False))
                filled |= there.to_numpy()
            except pa.ArrowInvalid:  # not UTF-8 somewhere; those that are not are told when they are read
                values = [value for chunk in part.chunks for value in _as_python(chunk)]
                filled |= np.array([bool(value and value.strip()) for value in values], dtype=bool)
        return filled

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None, "_lengths": None}


def _is(kind: pa.DataType, *names: str) -> bool:
    """Whether an Arrow type is one of those that `pyarrow.types.is_NAME` tells."""
    import pyarrow.types as kinds

    return any(getattr(kinds, f"is_{name}")(kind) for name in names)


def _as_python(array: pa.Array) -> list[Any]:
    import pyarrow as pa

    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        values = array.cast(pa.large_binary()).to_pylist()
        return [None if value is None else value.decode(errors="backslashreplace") for value in values]


# Collections of items. Each has `identities(rows, read)`, what `dualenc.data.identity` asks for.


class Texts:
    """Values of a column as text, numbers spelled out; with a column of titles, joined in front."""

    def __init__(self, column: Column, titles: Column | None = None) -> None:
        self.column, self.titles = column, titles

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        if self.titles is None:
            return str(self.column[index])
        return f"{self.titles[index] or ''} {self.column[index] or ''}".strip()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """The texts, or their lengths."""
        texts: Iterable[Any] = self.column.values(rows) if read else self.column.lengths(rows)
        if self.titles is not None:
            titles = self.titles.values(rows) if read else self.titles.lengths(rows)
            texts = [f"{title or ''} {text or ''}".strip() for title, text in zip(titles, texts, strict=True)]
        return [str(text).encode(errors="surrogatepass") for text in texts]


class ColumnImages:
    """Values of a column as images: file contents, `{"bytes", "path"}` records, or paths.

    Paths start in the table's folder and must stay in it, links resolved, unless the table says `allow_outside`: a
    table from somewhere else must not make this machine read files of its choice.
    """

    def __init__(self, table: DataTable, column: Column) -> None:
        self.table, self.column = table, column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Image.Image:
        data, path = _contents_and_path(self.column[index])
        row = self.column.row_of_values()[index] if self.column.is_list else index
        where = f"{self.table.where(int(row))}, column {self.column.name!r}"
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
        file = self.table.root / path
        if self.table.allow_outside or "\0" in path:
            return file
        resolved = os.path.realpath(file)
        if not Path(resolved).is_relative_to(os.path.realpath(self.table.root)):
            raise BadSample(
                f"{path!r}: image outside of the folder {self.table.root}; move it there, or pass allow_outside=True "
                "if you trust the table"
            )
        return Path(resolved)

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """File contents, or lengths; of paths what `file_identity` tells."""
        result = [str(length).encode() for length in self.column.lengths(rows).tolist()]
        unknown = np.arange(len(rows))
        if not read and not self.column.holds_strings:  # only records without contents have a path to look at
            unknown = np.flatnonzero(self.column.lengths(rows) == 0)
        for place, value in zip(unknown.tolist(), self.column.values(rows[unknown]).tolist(), strict=True):
            data, path = _contents_and_path(value)
            if data is not None:
                result[place] = data
            elif path:
                try:
                    told = file_identity(self._file(path), read)
                except BadSample:
                    told = b"outside"
                result[place] = path.encode(errors="surrogatepass") + b" " + told
        return result


def _contents_and_path(value: Any) -> tuple[bytes | None, str | None]:
    """What an image cell holds: file contents, a path, a record of both, or neither."""
    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, value)
    return (data if isinstance(data, bytes) else None), (path if isinstance(path, str) else None)


class Picked:
    """Some items of another collection, in the order of `positions`."""

    def __init__(self, items: Items, positions: np.ndarray) -> None:
        self.items, self.positions = items, np.asarray(positions, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        return self.items[int(self.positions[index])]

    def identities(self, rows: np.ndarray, read: bool) -> Sequence[bytes]:
        """Those of the items picked."""
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
        """Those of both, in the order of `rows`."""
        in_first = rows < len(self.first)
        first = iter(identities(self.first, rows[in_first], read))
        second = iter(identities(self.second, rows[~in_first] - len(self.first), read))
        return [next(first if from_first else second) for from_first in in_first.tolist()]


def number_distinct(items: Items, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number equal strings alike, by 128-bit digests, so that a million texts cost 16 MB.

    Of the strings at `positions` (n,): where the first of each distinct one stands (k,), in order of appearance, and
    the number in [0, k) of each (n,).
    """
    digests = np.empty(len(positions), dtype="S16")
    for i, position in enumerate(tqdm(positions, desc="finding equal items", delay=2, leave=False)):
        digests[i] = hashlib.blake2b(items[position].encode(), digest_size=16).digest()
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.asarray(positions)[first[order]], rank[inverse.reshape(-1)]


# Classes of images.

_CLASS_NUMBER = re.compile("-?[0-9]{1,6}")  # larger ones are keys of something: a list of their names would fill memory


class Labels(NamedTuple):
    """Class numbers (N,) int64, -1 where there is none, and the name of each class number."""

    numbers: np.ndarray
    names: list[str]

    def take(self, rows: np.ndarray) -> Labels:
        """The labels of some rows; the classes stay."""
        return Labels(self.numbers[rows], self.names)


def labels_of_names(names: Sequence[str]) -> Labels:
    """Number class names in sorted order; whole numbers below a million keep their value."""
    if all(_CLASS_NUMBER.fullmatch(name) for name in names):
        numbers = np.array([int(name) for name in names], dtype=np.int64)
        return Labels(numbers, [str(i) for i in range(int(numbers.max(initial=-1)) + 1)])
    classes, numbers = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    return Labels(numbers.astype(np.int64), classes.tolist())


def labels_of_column(table: DataTable, name: str) -> Labels:
    """The labels in a column of class numbers or names; `datasets.ClassLabel` brings names to numbers."""
    column = Column(table, name, "text")
    values = column.values(np.arange(len(column))).tolist()
    known = np.array([value is not None for value in values])
    labels = labels_of_names([str(value) for value in values if value is not None])
    numbers = np.full(len(values), -1, dtype=np.int64)
    numbers[known] = labels.numbers
    names = getattr(table.dataset.features[name], "names", None)
    return Labels(numbers, labels.names if names is None else list(names))


def labels_of_folders(names: Sequence[str]) -> Labels | None:
    """The first folder of each relative file name as its class; None unless every file lies in one."""
    if not all("/" in name for name in names):
        return None
    return labels_of_names([name.split("/", 1)[0] for name in names])
