"""Tables: files, saved data sets and hub names, all as a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from dualenc.data.bad_rows import BadRows, report_once
from dualenc.data.readers import parquet_files
from dualenc.data.readers.column_kinds import (
    CONVERTERS,
    TYPES,
    ColumnKind,
    is_plain,
    kind_of_type,
    kind_of_value,
    kind_of_written,
    written_list,
)
from dualenc.data.readers.column_names import first_of
from dualenc.data.readers.detect import Kind, detect_locally
from dualenc.data.readers.hub_data import load_from_hub, load_saved
from dualenc.data.readers.lines import Numbered, Record, file_format, read_records
from dualenc.data.readers.plain_types import check_types
from dualenc.data.readers.read_options import ReadOptions
from dualenc.data.readers.table_files import Partition, find_files, read_partitions, without_empty
from dualenc.data.readers.written_lists import parse_list
from dualenc.data.store.cache import cached_dataset, record_batches
from dualenc.errors import DualencError, nearest
from dualenc.io.reading import with_home
from dualenc.types import Modality, StrPath

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("dualenc.data")

# Columns that hold the position of each row, so that errors name file and line.
FILE = "__file__"
LINE = "__line__"

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|nan", re.IGNORECASE)
_RECORDS_EXAMINED = 1000  # records of each file that decide the kinds of columns
_FILES_EXAMINED = 8  # files whose values are examined


@dataclass(frozen=True)
class DataTable:
    """Rows of named columns as memory-mapped Arrow, and the local files they come from.

    Relative image paths start at the `folder` of their row and must stay in it unless the table has
    `allow_outside`.

        DataTable("toy", Dataset.from_dict({"text": ["a"]}), BadRows("toy"), Path())

    Args:
        source: path or name, for errors and logs.
        dataset: the rows.
        bad_rows: counts rows that cannot be used.
        root: folder at which relative image paths start.
        files: local files that hold the rows; empty for a hub data set.
        allow_outside: whether image paths may lead out of the folder of their row.
    """

    source: str
    dataset: Dataset
    bad_rows: BadRows
    root: Path
    files: list[Path] = field(default_factory=list)
    allow_outside: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return the values of a column."""
        return self.dataset.data.column(name)

    def has(self, name: str | None) -> bool:
        """Return True if the table has this column."""
        return name in self.dataset.column_names

    @cached_property
    def is_in_one_folder(self) -> bool:
        """True if all files are directly in `root`; also without files."""
        return {file.parent for file in self.files} <= {self.root}

    def folder(self, row: int) -> Path:
        """Return the folder of a row's file if the file is known, otherwise `root`."""
        if self.is_in_one_folder or not self.has(FILE):
            return self.root
        return self.files[self.column(FILE)[row].as_py()].parent

    def position(self, row: int) -> str:
        """Return where a row comes from: file:line if it was read from lines."""
        if not self.has(LINE):
            return f"{self.source} row {row}"
        file = self.files[self.column(FILE)[row].as_py()]
        return f"{file}:{self.column(LINE)[row].as_py()}"


class _Head(NamedTuple):
    """What the first records of files of lines show.

    Attributes:
        kinds: kind of each column, None if no value decides it.
        with_single_values: columns with at least one value that is not a list.
        records: the records of the first files.
    """

    kinds: dict[str, ColumnKind | None]
    with_single_values: set[str]
    records: list[Record]


@dataclass
class TableSource:
    """A table at any supported location; `open` loads selected columns.

    Opening the source finds its files and column kinds but reads no more rows than it must examine.

        TableSource("x.csv", BadRows("x.csv")).open({"text": "value"})

    Args:
        path: file, glob, folder, saved data set or hub name, see `dualenc.data.TablePairs`.
        bad_rows: counts malformed lines.
        dataset: rows already loaded; `path` is then only their name.
        kind: kind of the source, if it is known; by default detected.
        options: split, quotes and trust, see `ReadOptions`.
        subset: configuration of a hub data set.
        reshape: function applied to each record before its columns are read. It must be a named
            function: the name is part of the cache key.
        as_records: read rows of parquet files like records of lines, so that `reshape` sees nested
            columns.
    """

    path: StrPath
    bad_rows: BadRows
    _: KW_ONLY
    dataset: Dataset | None = None
    kind: Kind | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    subset: str | None = None
    reshape: Callable[[Record], Record] = dict
    as_records: bool = False

    def __post_init__(self) -> None:
        self.path = with_home(self.path)
        self.files: list[Path] = []
        self._partitions: list[Partition] = []
        if self.kind is None and self.dataset is None:
            self.kind = detect_locally(self.path)
        split = self.options.split
        if self.kind == "hub":
            self.dataset = load_from_hub(str(self.path), self.subset, split)
        elif self.kind in ("saved", "saved_splits"):
            self.dataset = load_saved(self.path, split)
        elif self.kind is not None:
            self.files = find_files(self.path, split)
        # `find_files` has made sure that all files are of one format.
        is_parquet = bool(self.files) and file_format(self.files[0]) == ".parquet"
        self._is_lines = bool(self.files) and (self.as_records or not is_parquet)
        if self._is_lines and len(self.files) > 1:
            self.files = without_empty(self.path, self.files)
        if self.kind == "folder":
            self._partitions = read_partitions(Path(self.path), self.files)

    @cached_property
    def kinds(self) -> dict[str, ColumnKind]:
        """Kind of each column in any of the files; lists of floating-point numbers are vectors.

        Lines carry no types: their columns are those of the first thousand records of each file,
        and the first value that is not null decides the kind.
        """
        if self._is_lines:
            names = [*self._head.kinds, *sorted(self._partition_names.difference(self._head.kinds))]
            kinds = {name: self._head.kinds.get(name) or "value" for name in names}
        else:
            kinds = {column.name: kind_of_type(column.type) for column in self._schema}
        return kinds | self.written_lists

    @cached_property
    def _head(self) -> _Head:
        """The first thousand records of each file of lines, which are read once."""
        head = _Head({}, set(), [])
        # A separate count, since these records are read again when columns are opened.
        bad_rows = BadRows(self.path)
        headers: dict[Path, list[str]] = {}
        for number, file in enumerate(self.files):
            names = headers.setdefault(file, [])
            for _, record in islice(self._records(file, bad_rows, names), _RECORDS_EXAMINED):
                values = self.reshape(record)
                if number < _FILES_EXAMINED:
                    head.records.append(values)
                for name, value in values.items():
                    kind = kind_of_value(value)
                    head.kinds[name] = head.kinds.get(name) or kind
                    if kind == "value":
                        head.with_single_values.add(name)
        bad_rows.require(len(head.kinds), "record")
        _check_headers(headers)
        return head

    def item_kind(self, name: str, modality: Modality | None = None) -> ColumnKind:
        """Return how to read a column of single items."""
        if (modality or self.kinds.get(name)) == "vector":
            return "vector"
        # Opened as lists only to be refused by a clear message: the items are single.
        return "list" if self.written_lists.get(name) == "list" else "value"

    def list_kind(self, name: str, modality: Modality | None = None) -> ColumnKind:
        """Return how to read a column of items, or lists of them."""
        return "vector" if self.item_kind(name, modality) == "vector" else "list"

    def label_kind(self, name: str) -> ColumnKind:
        """Return how to read a column of labels: lists of labels as lists, even of numbers."""
        has_lists = any(isinstance(value, list) for value in self.examined(name))
        return "list" if has_lists or self.kinds[name] != "value" else "value"

    @cached_property
    def _examined(self) -> list[Record]:
        """First thousand records of a few files.

        For typed data, without vectors, nested values and binary values.
        """
        if self._is_lines:
            return self._head.records
        names = [column.name for column in self._schema if is_plain(column.type)]
        if self.dataset is not None:
            return self.dataset.data.table.select(names).slice(0, _RECORDS_EXAMINED).to_pylist()
        records: list[Record] = []
        for file in self.files[:_FILES_EXAMINED]:
            records += parquet_files.first_rows(file, names, _RECORDS_EXAMINED)
        return records

    def examined(self, name: str) -> list[Any]:
        """Return a column's values in the first thousand records of a few files."""
        return [record.get(name) for record in self._examined]

    @cached_property
    def written_lists(self) -> dict[str, ColumnKind]:
        """Kind of each text column whose examined values are all lists, as pandas writes to csv."""
        names = dict.fromkeys(name for record in self._examined for name in record)
        kinds = {name: kind_of_written(self.examined(name)) for name in names}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def holds_numbers(self, name: str) -> bool:
        """Return True if all examined values of a column, at least one, are numbers."""
        texts = [str(value).strip() for value in self.examined(name) if value is not None]
        return any(texts) and all(_NUMBER.fullmatch(text) for text in texts if text)

    def _records(
        self, file: Path, bad_rows: BadRows, names: list[str] | None = None
    ) -> Iterator[Numbered]:
        """Yield the numbered records of a file of lines, or rows of a parquet file."""
        if file_format(file) == ".parquet":
            return parquet_files.read_rows(file)
        return read_records(file, bad_rows, self.options.quotes, names)

    def _parts(self) -> Iterator[tuple[int, Path, Partition]]:
        """Yield number and path of each file, and the keys of its partition."""
        yield from zip(count(), self.files, self._partitions or [{}] * len(self.files))

    @cached_property
    def _partition_names(self) -> set[str]:
        return {name for keys in self._partitions for name in keys}

    @property
    def has_header(self) -> bool:
        """True for formats whose first line names the columns."""
        return bool(self.files) and file_format(self.files[0]) in (".csv", ".tsv")

    def default_column(
        self,
        names: Iterable[str],
        argument: str,
        but: str | None = None,
        fix: str = "name it",
    ) -> str:
        """Return the first column with a common name, for an argument that the user left out.

        Args:
            names: common names, most common first.
            argument: the argument, or what the column holds.
            but: column to pass over.
            fix: how to make the column known; the columns are appended.

        Raises:
            DualencError: no column has one of the names.
        """
        name = first_of(self.kinds, names, but)
        if name is None:
            raise DualencError(
                f"it is unclear which column is {argument}",
                fix=f"{fix} (columns: {', '.join(self.kinds)})",
                where=self.path,
            )
        return name

    def open(
        self, columns: Mapping[str, ColumnKind], *, optional: Collection[str] = ()
    ) -> DataTable:
        """Open some columns, each read as its kind; those in `optional` may be missing."""
        check_columns(self.path, self.kinds, [name for name in columns if name not in optional])
        written = [name for name in self.written_lists if columns.get(name, "value") != "value"]
        for name in written:
            logger.warning("%s: column %r is parsed as lists written as texts", self.path, name)
        for name, kind in columns.items():
            # Fail here: later every row would be a bad row, blamed on its line.
            has_only_lists = self._is_lines and name not in self._head.with_single_values
            if kind == "value" and has_only_lists and self.kinds.get(name, "value") != "value":
                raise DualencError(
                    f"column {name!r} holds lists", fix="name one of single values", where=self.path
                )
        dataset = self.dataset
        if dataset is not None and written:
            raise DualencError(
                f"column {written[0]!r} holds lists written as texts",
                fix="save them as lists, or save the data set as csv",
                where=self.path,
            )
        # The name of a hub data set is not a local folder, so that paths in its rows cannot lead
        # to local images.
        root = Path(self.path)
        if dataset is None:
            dataset = self._read_lines(columns) if self._is_lines else self._read_parquet(columns)
            root = self.files[0].parent
        return DataTable(
            str(self.path), dataset, self.bad_rows, root, self.files, self.options.allow_outside
        )

    def _read_lines(self, columns: Mapping[str, ColumnKind]) -> Dataset:
        """Read the columns, null where a record lacks them, with file number and line."""
        fields = [(name, TYPES[kind]) for name, kind in columns.items()]
        schema = pa.schema([*fields, (FILE, pa.int32()), (LINE, pa.int64())])

        def batches(bad_rows: BadRows) -> Iterator[pa.RecordBatch]:
            return record_batches(self._rows_of_lines(columns, bad_rows), schema)

        # Everything that changes the result. Written lists are left out if there are none, so that
        # caches of other tables stay valid.
        key: tuple[Any, ...] = (
            columns,
            self.options.quotes,
            self.bad_rows.on_error,
            self.reshape.__qualname__,
            self._partitions,
        )
        if self.written_lists:
            key = (*key, self.written_lists)
        return cached_dataset(batches, schema, self.files, key, self.bad_rows)

    def _rows_of_lines(
        self, columns: Mapping[str, ColumnKind], bad_rows: BadRows
    ) -> Iterator[Record]:
        for number, file, keys in self._parts():
            for line, record in self._records(file, bad_rows):
                # A column in the file takes precedence over the name of its folder.
                values = self.reshape({**keys, **record})
                row = {FILE: number, LINE: line}
                name = ""
                try:
                    for name, kind in columns.items():
                        value = values.get(name)
                        if name in self.written_lists and kind != "value":
                            value = written_list(value)
                        row[name] = CONVERTERS[kind](value)
                except (TypeError, UnicodeEncodeError) as error:
                    fix = f"column {name!r} holds {error}; fix the line"
                    bad_rows.add("value of a wrong type", f"{file}:{line}", fix)
                else:
                    yield row

    @cached_property
    def _stored_schema(self) -> pa.Schema:
        """Union of the schemas of all parquet files."""
        return parquet_files.stored_schema(self.files)

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns of typed data with the types they are read as, including partition keys."""
        if self.dataset is not None:
            return self.dataset.data.schema
        schema = parquet_files.plain_schema(self._stored_schema)
        for name in sorted(self._partition_names.difference(schema.names)):
            are_texts = any(isinstance(keys.get(name), str) for keys in self._partitions)
            schema = schema.append(pa.field(name, pa.string() if are_texts else pa.int64()))
        return schema

    def _read_parquet(self, columns: Mapping[str, ColumnKind]) -> Dataset:
        """Read the columns, null in the rows of a file that lacks them."""
        schema = _with_columns(self._schema, columns)
        stored = _with_columns(self._stored_schema, columns)
        check_types(self.path, schema)
        parsed = schema
        for name in self.written_lists:
            if columns.get(name, "value") != "value":
                field_ = pa.field(name, TYPES[columns[name]])
                parsed = parsed.set(schema.get_field_index(name), field_)

        def batches(_: BadRows) -> Iterator[pa.RecordBatch]:
            for batch in parquet_files.read_batches(self._parts(), stored, schema):
                yield _with_lists(batch, parsed)

        key = (str(parsed), self._partitions)
        return cached_dataset(batches, parsed, self.files, key, self.bad_rows)


def _with_columns(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """Return a schema with only the columns among these names."""
    return pa.schema([column for column in schema if column.name in names], schema.metadata)


def _check_headers(headers: Mapping[Path, list[str]]) -> None:
    """Raise if two headers are disjoint: a file without a header loses its first row to it."""
    (first, names), *others = headers.items()
    for file, other in others:
        if len(other) != len(names) or set(other) == set(names):
            continue
        # Some shared names suggest a dropped column, none that the file lacks a header.
        problem = f"its first line ({_shown(other)}) is not that of {first.name} ({_shown(names)})"
        if set(other).isdisjoint(names):
            raise DualencError(
                problem,
                fix="write the same column names into the first line of each file",
                where=file,
            )
        report_once(f"{file}: {problem}; values of columns that a file lacks are missing")


def _shown(names: list[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _with_lists(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Parse the texts of a batch that stand for lists, with the types of the schema."""
    arrays = []
    for column, field_ in zip(batch.columns, schema, strict=True):
        if column.type != field_.type:
            lists = [parse_list(value) for value in column.to_pylist()]
            # Lists of texts may hold numbers, too, which become texts.
            lists = [values and CONVERTERS[kind_of_type(field_.type)](values) for values in lists]
            column = pa.array(lists, field_.type)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def check_columns(source: StrPath, columns: Iterable[str], required: Iterable[str]) -> None:
    """Raise a `DualencError` for a column that does not exist, suggesting the nearest name."""
    names = list(columns)
    for name in required:
        if name not in names:
            known = ", ".join(names) or "none"
            raise DualencError(
                f"no column {name!r}{nearest(name, names)}",
                fix=f"there are: {known}",
                where=source,
            )
