"""Tables: files, saved data sets and hub names, all as a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from dualenc.data.bad_rows import BadRows, report_once
from dualenc.data.readers.column_names import first_of
from dualenc.data.readers.detect import check_split, detect_locally
from dualenc.data.readers.lines import COMPRESSIONS, Numbered, Record, file_format, read_records
from dualenc.data.readers.plain_types import check_types, plain_batch, plain_type
from dualenc.data.readers.read_options import ONLY_SPLIT, ReadOptions
from dualenc.data.readers.table_files import (
    TABLE_FORMATS,
    Partition,
    has_splits,
    read_partitions,
    split_tables,
    without_empty,
)
from dualenc.data.readers.written_lists import kind_of_written, parse_list
from dualenc.data.store.cache import BATCH_ROWS, cache_option, cached_dataset, record_batches
from dualenc.errors import DualencError, explain, nearest
from dualenc.io.reading import glob_files, with_home

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("dualenc.data")

ColumnKind = Literal["value", "list", "vector"]
# Columns that hold the position of each row, so that errors name file and line.
FILE = "__file__"
LINE = "__line__"

_TYPES: dict[ColumnKind, pa.DataType] = {
    "value": pa.large_string(),
    "list": pa.list_(pa.large_string()),
    "vector": pa.large_list(pa.float32()),
}
_CONVERSIONS = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), "save the sheet as csv"),
    **dict.fromkeys(
        (".arrow", ".feather", ".orc", ".avro", ".pkl", ".h5", ".db"), "write its rows as parquet"
    ),
    **dict.fromkeys(
        (".lz4", ".snappy", ".deflate", ".br", ".7z", ".rar", ".z", ".tgz", ".tar"),
        "decompress it first",
    ),
    ".zip": "unpack it, or name it by what the one file in it is, such as x.csv.zip",
}
"""Advice for files of other formats, by suffix."""
_PARQUET_ADVICE = "write all files with the same types, or fetch it again"
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|nan", re.IGNORECASE)
_NAMES = {
    list: "a list",
    dict: "a record",
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
}
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


@dataclass
class TableSource:
    """A table at any supported location; `open` loads selected columns.

    Opening the source finds its files and column kinds but reads no more rows than it must examine.

        TableSource("x.csv", BadRows("x.csv")).open({"text": "value"})

    Args:
        path: file, glob, folder, saved data set or hub name, see `dualenc.data.TablePairs`.
        bad_rows: counts malformed lines.
        dataset: rows already loaded; `path` is then only their name.
        options: split, quotes and trust, see `ReadOptions`.
        subset: configuration of a hub data set.
        reshape: function applied to each record before its columns are read. It must be a named
            function: the name is part of the cache key.
        as_records: read rows of parquet files like records of lines, so that `reshape` sees nested
            columns.
    """

    path: str | Path
    bad_rows: BadRows
    _: KW_ONLY
    dataset: Dataset | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    subset: str | None = None
    reshape: Callable[[Record], Record] = dict
    as_records: bool = False

    def __post_init__(self) -> None:
        self.path = with_home(self.path)
        self.files: list[Path] = []
        self._partitions: list[Partition] = []
        kind = detect_locally(self.path) if self.dataset is None else None
        split = self.options.split
        if kind == "hub":
            self.dataset = load_from_hub(str(self.path), self.subset, split)
        elif kind in ("saved", "saved_splits"):
            self.dataset = _load_saved(self.path, split)
        elif kind is not None:
            self.files = _find_files(self.path, split)
        # `_find_files` has made sure that all files are of one format.
        is_parquet = bool(self.files) and file_format(self.files[0]) == ".parquet"
        self._is_lines = bool(self.files) and (self.as_records or not is_parquet)
        if self._is_lines and len(self.files) > 1:
            self.files = without_empty(self.path, self.files)
        if kind == "folder":
            self._partitions = read_partitions(Path(self.path), self.files)

    @cached_property
    def kinds(self) -> dict[str, ColumnKind]:
        """Kind of each column in any of the files; lists of floating-point numbers are vectors.

        Lines carry no types: their columns are those of the first thousand records of each file,
        and the first value that is not null decides the kind.
        """
        if not self._is_lines:
            kinds = {column.name: kind_of_type(column.type) for column in self._schema}
            return kinds | self.written_lists
        found: dict[str, ColumnKind | None] = {}
        # A separate count, since these records are read again when columns are opened.
        bad_rows = BadRows(self.path)
        headers: dict[Path, list[str]] = {}
        for file in self.files:
            names = headers.setdefault(file, [])
            for _, record in islice(self._records(file, bad_rows, names), _RECORDS_EXAMINED):
                for name, value in self.reshape(record).items():
                    kind = _kind_of_value(value)
                    found[name] = found.get(name) or kind
                    if kind == "value":
                        self._with_single_values.add(name)
        bad_rows.require(len(found), "record")
        _check_headers(headers)
        found |= dict.fromkeys(self._partition_names.difference(found), "value")
        return {name: kind or "value" for name, kind in found.items()} | self.written_lists

    @cached_property
    def examined(self) -> list[Record]:
        """First thousand records of a few files.

        For typed data, without vectors, nested values and binary values.
        """
        records: list[Record] = []
        if self._is_lines:
            for file in self.files[:_FILES_EXAMINED]:
                first = islice(self._records(file, BadRows(self.path)), _RECORDS_EXAMINED)
                records += [self.reshape(record) for _, record in first]
            return records
        names = [column.name for column in self._schema if _is_plain(column.type)]
        if self.dataset is not None:
            return self.dataset.data.table.select(names).slice(0, _RECORDS_EXAMINED).to_pylist()
        for file in self.files[:_FILES_EXAMINED]:
            with (
                explain(f"{file}: cannot be read", _PARQUET_ADVICE),
                pq.ParquetFile(file) as opened,
            ):
                own = [name for name in names if name in opened.schema_arrow.names]
                batches = opened.iter_batches(batch_size=_RECORDS_EXAMINED, columns=own)
                # Damaged text only matters if its column is read; the reader then reports it.
                with suppress(UnicodeDecodeError):
                    records += next(iter(batches), pa.RecordBatch.from_pylist([])).to_pylist()
        return records

    @cached_property
    def written_lists(self) -> dict[str, ColumnKind]:
        """Kind of each text column whose examined values are all lists, as pandas writes to csv."""
        kinds: dict[str, ColumnKind] = {}
        for name in dict.fromkeys(name for record in self.examined for name in record):
            values = [record.get(name) for record in self.examined]
            first = next(
                (value for value in values if isinstance(value, str) and value.strip()), ""
            )
            if first.lstrip().startswith("[") and (kind := kind_of_written(values)):
                kinds[name] = cast(ColumnKind, kind)
        return kinds

    def label_kind(self, name: str) -> ColumnKind:
        """Return how to read a column of labels: lists of labels as lists, even of numbers."""
        has_lists = any(isinstance(record.get(name), list) for record in self.examined)
        return "list" if has_lists or self.kinds[name] != "value" else "value"

    def holds_numbers(self, name: str) -> bool:
        """Return True if all examined values of a column, at least one, are numbers."""
        values = [record.get(name) for record in self.examined]
        texts = [str(value).strip() for value in values if value is not None]
        return any(texts) and all(_NUMBER.fullmatch(text) for text in texts if text)

    def _records(
        self, file: Path, bad_rows: BadRows, names: list[str] | None = None
    ) -> Iterator[Numbered]:
        """Yield the numbered records of a file of lines, or rows of a parquet file."""
        if file_format(file) != ".parquet":
            yield from read_records(file, bad_rows, self.options.quotes, names)
            return
        with explain(f"{file}: cannot be read", _PARQUET_ADVICE), pq.ParquetFile(file) as opened:
            columns = opened.schema_arrow
            # A record of a view or dictionary column would not be a plain Python value.
            schema = pa.schema([each.with_type(plain_type(each.type)) for each in columns])
            start = 0
            for batch in opened.iter_batches(batch_size=BATCH_ROWS):
                yield from enumerate(plain_batch(batch, schema, {}).to_pylist(), start)
                start += len(batch)

    @cached_property
    def _partition_names(self) -> set[str]:
        return {name for keys in self._partitions for name in keys}

    @cached_property
    def _with_single_values(self) -> set[str]:
        """Columns of lines with at least one value that is not a list; filled by `kinds`."""
        return set()

    @property
    def has_header(self) -> bool:
        """True for formats whose first line names the columns."""
        return bool(self.files) and file_format(self.files[0]) in (".csv", ".tsv")

    def default_column(self, names: Iterable[str], argument: str, but: str | None = None) -> str:
        """Return the first column with a common name, for an argument that the user left out.

        Raises:
            DualencError: no column has one of the names.
        """
        name = first_of(self.kinds, names, but)
        if name is None:
            raise DualencError(
                f"it is unclear which column is {argument}",
                fix=f"name it (columns: {', '.join(self.kinds)})",
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
            is_list_only = (
                self._is_lines and name in self.kinds and name not in self._with_single_values
            )
            if kind == "value" and is_list_only and self.kinds[name] != "value":
                raise DualencError(
                    f"column {name!r} holds lists",
                    fix="name one of single values",
                    where=self.path,
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
        fields = [(name, _TYPES[kind]) for name, kind in columns.items()]
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
        for number, file in enumerate(self.files):
            partition = self._partitions[number] if self._partitions else {}
            for line, record in self._records(file, bad_rows):
                # A column in the file takes precedence over the name of its folder.
                values = self.reshape({**partition, **record})
                row = {FILE: number, LINE: line}
                name = ""
                try:
                    for name, kind in columns.items():
                        value = values.get(name)
                        if name in self.written_lists and kind != "value":
                            value = _written(value)
                        row[name] = _CONVERTERS[kind](value)
                except (TypeError, UnicodeEncodeError) as error:
                    fix = f"column {name!r} holds {error}; fix the line"
                    bad_rows.add("value of a wrong type", f"{file}:{line}", fix)
                else:
                    yield row

    @cached_property
    def _stored_schema(self) -> pa.Schema:
        """Union of the schemas of all parquet files, with types wide enough for every file."""
        schemas: list[pa.Schema] = []
        for file in self.files:
            if file.suffix.lower() in COMPRESSIONS:
                raise DualencError(
                    "compressed parquet file",
                    fix="decompress it first",
                    where=file,
                )
            with explain(f"{file}: cannot be read", _PARQUET_ADVICE):
                schema = pq.read_schema(file)
                for index, column in enumerate(schema):
                    # Row groups may have different dictionaries, which do not unify.
                    if pa.types.is_dictionary(column.type):
                        schema = schema.set(index, column.with_type(column.type.value_type))
                schemas = [pa.unify_schemas([*schemas, schema], promote_options="permissive")]
        return schemas[0]

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns of typed data with the types they are read as, including partition keys."""
        if self.dataset is not None:
            return self.dataset.data.schema
        schema = self._stored_schema
        for index, column in enumerate(schema):
            schema = schema.set(index, column.with_type(plain_type(column.type)))
        for name in sorted(self._partition_names.difference(schema.names)):
            values = [keys.get(name) for keys in self._partitions]
            are_texts = any(isinstance(value, str) for value in values)
            schema = schema.append(pa.field(name, pa.string() if are_texts else pa.int64()))
        return schema

    def _read_parquet(self, columns: Mapping[str, ColumnKind]) -> Dataset:
        """Read the columns, null in the rows of a file that lacks them."""
        names = [name for name in self._schema.names if name in columns]
        schema = pa.schema([self._schema.field(name) for name in names], self._schema.metadata)
        check_types(self.path, schema)
        stored = self._stored_schema
        stored = pa.schema(
            [stored.field(name) for name in names if name in stored.names], stored.metadata
        )
        written = [
            name for name in names if name in self.written_lists and columns[name] != "value"
        ]
        parsed = schema
        for name in written:
            parsed = parsed.set(names.index(name), pa.field(name, _TYPES[columns[name]]))

        # Do not read ahead more than one batch: otherwise a file is in memory twice.
        scan = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
        options: dict[str, Any] = {
            "batch_size": BATCH_ROWS,
            "batch_readahead": 1,
            "fragment_readahead": 1,
            "fragment_scan_options": scan,
        }

        def batches(_: BadRows) -> Iterator[pa.RecordBatch]:
            for number, file in enumerate(self.files):
                keys = self._partitions[number] if self._partitions else {}
                with explain(f"{file}: cannot be read", _PARQUET_ADVICE):
                    # The union schema fills columns that this file lacks with nulls.
                    data = pyarrow.dataset.dataset(file, schema=stored, format="parquet")
                    for batch in data.to_batches(**options):
                        plain = plain_batch(batch, schema, keys)
                        yield _with_lists(plain, parsed) if written else plain

        key = (str(parsed), self._partitions)
        return cached_dataset(batches, parsed, self.files, key, self.bad_rows)


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
            lists = [
                values and _CONVERTERS[_kind_of_lists(field_.type)](values) for values in lists
            ]
            column = pa.array(lists, field_.type)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _kind_of_lists(kind: pa.DataType) -> ColumnKind:
    return "vector" if pa.types.is_floating(kind.value_type) else "list"


def _written(value: Any) -> Any:
    """Return the list that a text stands for, None for a blank text."""
    if not isinstance(value, str) or not value.strip():
        return None
    values = parse_list(value)
    if values is None:
        raise TypeError("a text where a list written as a text is expected")
    return values


def _is_plain(kind: pa.DataType) -> bool:
    """Return True for texts, numbers and truth values, and lists of texts or integers."""
    if is_list(kind):
        return _is_plain(kind.value_type) and not pa.types.is_floating(kind.value_type)
    return not (
        pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    )


def check_columns(source: str | Path, columns: Iterable[str], required: Iterable[str]) -> None:
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


def is_list(kind: pa.DataType) -> bool:
    """Return True if values of an Arrow type are lists."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def kind_of_type(kind: pa.DataType) -> ColumnKind:
    """Return how to read a column of an Arrow type: floating-point lists are vectors."""
    if not is_list(kind):
        return "value"
    return "vector" if pa.types.is_floating(kind.value_type) else "list"


def _kind_of_value(value: Any) -> ColumnKind | None:
    """Return the kind of column that a value suggests.

    None for null, and for lists that hold neither texts nor fractions.
    """
    if not isinstance(value, list):
        return None if value is None else "value"
    # Integers occur in lists of ids and in vectors, so they decide nothing.
    types = {*map(type, value)} - {int, NoneType}
    if not types:
        return None
    return "vector" if types == {float} else "list"


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        # JSON can escape half of a surrogate pair; encoding it raises UnicodeEncodeError.
        value.encode()
        return value
    if isinstance(value, (dict, list)):
        raise TypeError(f"{_NAMES[type(value)]} where one text is expected")
    # Numbers and truth values as in JSON: `true`, and not Python's `True`.
    return None if value is None else json.dumps(value)


def _texts(value: Any) -> list[str | None]:
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, list):
        value = [value]
    return [_text(entry) for entry in value]


def _vector(value: Any) -> list[float] | None:
    """Return a list of numbers; null becomes NaN, which the check of vectors finds later."""
    if value is None:
        return None
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float, NoneType}:
        raise TypeError(
            f"{_NAMES.get(type(value), type(value).__name__)} where a list of numbers is expected"
        )
    # Python integers and JSON numbers may exceed what a float holds.
    return [math.nan if entry is None or abs(entry) > 1e300 else float(entry) for entry in value]


_CONVERTERS: dict[ColumnKind, Callable[[Any], Any]] = {
    "value": _text,
    "list": _texts,
    "vector": _vector,
}


def load_from_hub(name: str, subset: str | None, split: str | None = None) -> Any:
    """Load a split of a hub data set, in the syntax of `datasets`, or all splits by name."""
    import datasets

    # Nothing distinguishes a mistyped path from a hub name, so mention both.
    failure = f"{name}: not a local file, and loading it as a hub data set fails"
    with explain(failure, "check the name, subset and split, and the network"):
        return datasets.load_dataset(name, subset, split=split, **cache_option(name))


def _load_saved(folder: str | Path, split: str) -> Dataset:
    """Load a data set saved by `datasets`, or one split of several."""
    import datasets

    with explain(f"{folder}: saved data set cannot be read", "save it again"):
        loaded = datasets.load_from_disk(str(folder))
    splits = loaded if isinstance(loaded, dict) else {ONLY_SPLIT: loaded}
    check_split(folder, split, splits)
    return splits[split]


def _find_files(source: str | Path, split: str) -> list[Path]:
    """Return the table files of a path, glob or folder, sorted; of a folder, those of a split."""
    is_folder = Path(source).is_dir()
    files = _files_of_split(Path(source), split) if is_folder else _files_of_glob(str(source))
    formats = {file_format(file) for file in files}
    if len(formats) == 1 and formats <= set(TABLE_FORMATS):
        if not is_folder:
            check_split(source, split)
        return files
    fix = f"give a file, folder or glob of one of {', '.join(TABLE_FORMATS)}, or .tar files"
    if not files:
        problem = (
            "no table in this folder (use ImageFolderViews for images)"
            if is_folder
            else "no such file"
        )
    elif len(formats) > 1:
        problem = f"files of several formats ({', '.join(sorted(formats))})"
        fix = "name those of one format, by a glob"
    else:
        suffix = files[0].suffix.lower()
        problem = f"a file of another format ({file_format(files[0]) or suffix or 'no suffix'})"
        fix = _CONVERSIONS.get(file_format(files[0])) or _CONVERSIONS.get(suffix, fix)
    raise DualencError(
        problem,
        fix=fix,
        where=source,
    )


def _files_of_glob(pattern: str) -> list[Path]:
    """Return the files that match a glob, without those that Spark and Arrow add to tables."""
    files = glob_files(pattern)
    # `*` also matches _SUCCESS and _metadata, which the user does not mean.
    added = [
        file
        for file in files
        if file.name.startswith("_") and file_format(file) not in TABLE_FORMATS
    ]
    return files if len(added) == len(files) else [file for file in files if file not in added]


def _files_of_split(folder: Path, split: str) -> list[Path]:
    splits = split_tables(folder)
    if not splits or split in splits:
        return splits.get(split, [])
    if has_splits(splits):
        check_split(folder, split, sorted(filter(None, splits)))
    check_split(folder, split)
    ((name, files),) = splits.items()
    # Numbered parts belong together; a common first word may mean something else, so report it.
    if name:
        report_once(
            f"{folder}: no file is named like a split; all {name}* are read as {split} "
            f"({len(files)} files)"
        )
    return files
