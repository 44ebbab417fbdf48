"""Tables: files, saved data sets and hub names, all as a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from dualenc.data.bad_rows import BadRows
from dualenc.data.cache import BATCH_ROWS, cache_option, dataset_of_batches
from dualenc.data.detect import ONLY_SPLIT, TABLE_FORMATS, detect
from dualenc.data.lines import Record, check_distinct, file_format, read_records
from dualenc.errors import DualencError, explain, first_line
from dualenc.reading import glob_files

if TYPE_CHECKING:
    from datasets import Dataset

ColumnKind = Literal["value", "list", "vector"]
Reshape = Callable[[Record], Record]
FILE = "__file__"
LINE = "__line__"
"""Columns that hold the position of each row."""

_RECORDS_EXAMINED = 100_000  # of each file, to see what its columns hold
_TYPES: dict[ColumnKind, pa.DataType] = {
    "value": pa.large_string(),
    "list": pa.list_(pa.large_string()),
    "vector": pa.large_list(pa.float32()),
}
_FORMATS = ", ".join(TABLE_FORMATS)


@dataclass(frozen=True)
class DataTable:
    """Rows of named columns as memory-mapped Arrow, and the local files behind them, none of a hub name.

    Relative image paths start at `root`, and stay in it unless the table has `allow_outside`.
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
        """The values of a column."""
        return self.dataset.data.column(name)

    def has(self, name: str | None) -> bool:
        """Whether there is such a column."""
        return name in self.dataset.column_names

    def position(self, row: int) -> str:
        """Where a row comes from: file:line if it was read from lines."""
        if not self.has(LINE):
            return f"{self.source} row {row}"
        file = self.files[self.column(FILE)[row].as_py()]
        return f"{file}:{self.column(LINE)[row].as_py()}"


class TableSource:
    """A table wherever it is, of which some columns are then opened.

        TableSource("x.csv", BadRows("x.csv")).open({"text": "value"})

    Args:
        path: this, `split`, `subset`, `quotes` and `allow_outside` are as for `dualenc.data.TablePairs`.
        bad_rows: counts malformed lines.
        dataset: rows that are loaded already; `path` is their name.
        kinds: of columns, where they are known; by default what most values look like, for which a file is read.
        root: where relative image paths start; by default the table's folder.
    """

    def __init__(
        self,
        path: str | Path,
        bad_rows: BadRows,
        *,
        dataset: Dataset | None = None,
        kinds: dict[str, ColumnKind] | None = None,
        split: str = ONLY_SPLIT,
        subset: str | None = None,
        quotes: bool | None = None,
        root: Path | None = None,
        allow_outside: bool = False,
    ) -> None:
        self.path = str(path)
        self.bad_rows = bad_rows
        self.split = split
        self.quotes = quotes
        self.files = [] if dataset is not None else find_files(self.path, split)
        if dataset is None and not self.files:
            dataset = _from_datasets(self.path, subset, split)
        self.dataset = dataset
        # The name of a data set of the hub is no folder here, so that no path of its rows leads to an image.
        self.root = root or (self.files[0].parent if self.files else Path(self.path))
        self.allow_outside = allow_outside
        if kinds is not None:
            self.kinds = kinds

    @cached_property
    def kinds(self) -> dict[str, ColumnKind]:
        """The columns, in any of its files, and their kinds; lists of floating-point numbers are vectors."""
        if self._is_lines():
            return kinds_of_records(self.files, BadRows(self.path), self.quotes)
        schema = _one_schema(self.files) if self.dataset is None else self.dataset.data.schema
        return {column.name: kind_of_type(column.type) for column in schema}

    def default_column(self, names: Iterable[str], argument: str, but: str | None = None) -> str:
        """The `first_of` some usual names, for an argument that the user left out; a `DualencError` without any."""
        name = first_of(self.kinds, names, but)
        if name is None:
            reason = f"cannot tell which column is {argument}; name it (columns: {', '.join(self.kinds)})"
            raise DualencError(f"{self.path}: {reason}")
        return name

    def open(
        self,
        columns: Mapping[str, ColumnKind],
        *,
        optional: Collection[str] = (),
        reshape: Reshape | None = None,
    ) -> DataTable:
        """Open some columns.

        Args:
            columns: how to read each of these columns.
            optional: columns of these that may be missing.
            reshape: applied to each record of a line-based file before its columns are taken.
        """
        required = [column for column in columns if column not in optional]
        if self.dataset is not None:
            dataset = self.dataset
        elif self._is_lines():
            dataset = table_of_lines(self.files, columns, optional, self.bad_rows, self.quotes, reshape)
        else:
            dataset = _from_parquet(self.path, self.files, columns, required, self.bad_rows)
        check_columns(self.path, dataset.column_names, required)
        if self.files:
            dataset = select_split({split_name(self.split): dataset}, self.split, self.path)
        # Columns are read as stored, without the indices of a selection.
        if dataset._indices is not None:
            dataset = dataset.flatten_indices()
        return DataTable(self.path, dataset, self.bad_rows, self.root, self.files, self.allow_outside)

    def _is_lines(self) -> bool:
        return bool(self.files) and file_format(self.files[0]) != ".parquet"


def first_of(columns: Iterable[str], names: Iterable[str], but: str | None = None) -> str | None:
    """The first of some usual names that a column has."""
    return next((name for name in names if name in columns and name != but), None)


def check_columns(source: str, available: Iterable[str], required: Iterable[str]) -> None:
    """Raise a `DualencError` for a column that does not exist, with the nearest name."""
    names = [name for name in available if name not in (FILE, LINE)]
    for name in required:
        if name not in names:
            hint = "it has no columns"
            for nearest in difflib.get_close_matches(name, names, n=1, cutoff=0.0):
                hint = f"did you mean {nearest!r}? (columns: {', '.join(names)})"
            raise DualencError(f"{source}: no column {name!r}; {hint}")


def kind_of_type(kind: pa.DataType) -> ColumnKind:
    """How a column of an Arrow type is read: lists of floating-point numbers are vectors, all other lists are lists."""
    if not is_list(kind):
        return "value"
    return "vector" if pa.types.is_floating(kind.value_type) else "list"


def is_list(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _from_datasets(source: str, subset: str | None, split: str) -> Dataset:
    """A saved data set, or one of the hub; both raise errors of many kinds."""
    import datasets

    # A saved data set is never looked up on the hub, whatever its name.
    if detect(source) in ("saved", "saved_splits"):
        with explain(f"{source}: saved data set cannot be read", "save it again"):
            loaded = datasets.load_from_disk(source)
        return select_split(loaded if isinstance(loaded, dict) else {ONLY_SPLIT: loaded}, split, source)
    failure = f"{source}: no such file here, and as a dataset of the hub it does not load"
    with explain(failure, "check the name, subset and split, and the network"):
        return datasets.load_dataset(source, subset, split=split, **cache_option(source))


def table_of_lines(
    files: Sequence[Path],
    columns: Mapping[str, ColumnKind],
    optional: Collection[str],
    bad_rows: BadRows,
    quotes: bool | None = None,
    reshape: Reshape | None = None,
) -> Dataset:
    """Columns of line-based files of one format, and the file number and line of each row; see `TableSource.open`."""
    fields = [(name, _TYPES[kind]) for name, kind in columns.items()]
    schema = pa.schema([*fields, (FILE, pa.int32()), (LINE, pa.int64())])
    required = {name for name in columns if name not in optional}

    def rows(own: BadRows) -> Iterator[Record]:
        """Each record's columns. A required column may be missing in some records, but not in all."""
        absent = set(required)
        seen: dict[str, None] = {}
        for number, file in enumerate(files):
            for line, record in read_records(file, own, quotes):
                try:
                    if reshape is not None:
                        record = reshape(record)
                    if absent:
                        seen.update(dict.fromkeys(record))
                        absent -= record.keys()
                    row = {name: _CONVERTERS[kind](record.get(name)) for name, kind in columns.items()}
                except (TypeError, UnicodeEncodeError) as error:
                    own.add("value of a wrong type", f"{file}:{line}", f"{error}; fix the line")
                    continue
                yield {**row, FILE: number, LINE: line}
        if seen:
            check_columns(str(files[0]), seen, absent)

    def batches(own: BadRows) -> Iterator[pa.RecordBatch]:
        remaining = rows(own)
        while block := list(islice(remaining, BATCH_ROWS)):
            yield pa.RecordBatch.from_pylist(block, schema=schema)

    reshaped = None if reshape is None else reshape.__qualname__
    key = [list(columns.items()), quotes, bad_rows.on_error, reshaped]
    return dataset_of_batches(batches, schema, files, key, bad_rows)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        # Half a surrogate pair, which JSON can escape, is no text: a UnicodeEncodeError.
        value.encode()
        return value
    if isinstance(value, (dict, list)):
        raise TypeError(f"a {type(value).__name__} where one text is expected")
    # Numbers and truth values.
    return None if value is None else json.dumps(value)


def _texts(value: Any) -> list[str | None]:
    if value is None:
        return []
    return [_text(entry) for entry in value] if isinstance(value, list) else [_text(value)]


def _vector(value: Any) -> list[float] | None:
    """Numbers; null becomes NaN, which is found when the vectors are checked."""
    if value is None:
        return None
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float, NoneType}:
        raise TypeError(f"a {type(value).__name__} where a list of numbers is expected")
    return [math.nan if entry is None or abs(entry) > 1e300 else float(entry) for entry in value]


_CONVERTERS: dict[ColumnKind, Callable[[Any], Any]] = {"value": _text, "list": _texts, "vector": _vector}


def kinds_of_records(
    files: Sequence[Path], bad_rows: BadRows, quotes: bool | None = None
) -> dict[str, ColumnKind]:
    """The columns that records of the files have, and what most records hold in each."""
    counts: dict[str, Counter[str]] = {}
    for file in files:
        # The records of other formats than JSON all have the columns of the first.
        examined = _RECORDS_EXAMINED if file_format(file) not in (".csv", ".tsv", ".txt") else 1
        for _, record in islice(read_records(file, bad_rows, quotes), examined):
            for name, value in record.items():
                counts.setdefault(name, Counter())[_kind_of_value(value)] += 1
    bad_rows.require(len(counts), "record")
    return {name: _most_frequent(kinds) for name, kinds in counts.items()}


def _most_frequent(counts: Counter[str]) -> ColumnKind:
    kind = max(get_args(ColumnKind), key=lambda kind: counts[kind])
    if counts[kind]:
        return kind
    return "list" if counts["numbers"] else "value"


def _kind_of_value(value: Any) -> ColumnKind | Literal["missing", "numbers"]:
    """The kind of column that a value suggests; whole numbers may be a vector or a list."""
    if not isinstance(value, list):
        return "missing" if value is None else "value"
    kinds = {type(entry) for entry in value}
    if not kinds <= {int, float, NoneType}:
        return "list"
    return "vector" if float in kinds else "numbers"


def _from_parquet(
    source: str,
    files: Sequence[Path],
    columns: Mapping[str, ColumnKind],
    required: Sequence[str],
    bad_rows: BadRows,
) -> Dataset:
    """The named columns of parquet files, as far as they have them; columns that a file lacks are null in its rows."""
    schema = _one_schema(files)
    check_columns(source, schema.names, required)
    names = [name for name in schema.names if name in columns] or schema.names
    schema = pa.schema([schema.field(name) for name in names], metadata=schema.metadata)

    def batches(_: BadRows) -> Iterator[pa.RecordBatch]:
        for file in files:
            advice = "write all files with the same types, or fetch it again"
            with explain(f"{file}: cannot be read", advice):
                data = pyarrow.dataset.dataset(file, schema=schema, format="parquet")
                yield from data.to_batches(batch_size=BATCH_ROWS)

    return dataset_of_batches(batches, schema, files, ["parquet", names], bad_rows)


def _one_schema(files: Sequence[Path]) -> pa.Schema:
    """The columns of all parquet files, each of a type that holds the values of every file."""
    types: dict[str, pa.DataType] = {}
    metadata = None
    for file in files:
        with explain(f"{file}: not a readable parquet file", "fetch it again"):
            schema = pq.read_schema(file)
        check_distinct(str(file), schema.names)
        metadata = metadata or schema.metadata
        for column in schema:
            # Dictionaries differ from row group to row group.
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            known = types.get(column.name, kind)
            try:
                types[column.name] = _common_type(known, kind)
            except pa.ArrowException:
                reason = f"{kind} in column {column.name!r} where files before it have {known}"
                raise DualencError(f"{file}: {reason}; write all files with one type") from None
    return pa.schema(types.items(), metadata=metadata)


def _common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """The type that the values of both can be cast to, at worst a text; an ArrowException for lists beside others."""
    # No integer holds the values of both kinds.
    if {pa.int64(), pa.uint64()} == {left, right}:
        return pa.large_string()
    try:
        schemas = [pa.schema([("value", kind)]) for kind in (left, right)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("value").type
    except pa.ArrowException:
        if pa.types.is_nested(left) or pa.types.is_nested(right):
            raise
        return pa.large_string()


def find_files(source: str, split: str) -> list[Path]:
    """The table files that a path, glob or folder stands for, sorted; none of a saved data set or a hub name.

    Of a folder, the files named SPLIT.*, SPLIT-* or SPLIT_* in it or in its `data` folder, as the hub lays them out;
    everything else is one split, train.
    """
    kind = detect(source)
    # Refused rather than ignored: another split of the same file would be the training data again.
    if kind in ("files", "saved") and split_name(split) != ONLY_SPLIT:
        raise DualencError(f"{source}: no split {split!r}; there are: {ONLY_SPLIT}")
    if kind in ("saved", "saved_splits", "hub"):
        return []
    files = _files_of_split(Path(source), split) if Path(source).is_dir() else glob_files(source)
    if not files:
        raise DualencError(f"{source}: no such file; give a file, folder or glob of {_FORMATS}")
    formats = {file_format(file) for file in files}
    if len(formats) > 1 or not formats <= set(TABLE_FORMATS):
        present = ", ".join(sorted(formats)) or "no suffix"
        fix = f"give files of one format among {_FORMATS}, or .tar files"
        raise DualencError(f"{source}: no table of one format ({present}); {fix}")
    return files


def _files_of_split(folder: Path, split: str) -> list[Path]:
    # The hub keeps the files of a data set in `data`.
    entries = [*folder.glob("*"), *(folder / "data").glob("*")]
    splits: dict[str, list[Path]] = {}
    for file in sorted(entries):
        if file.is_file() and file_format(file) in TABLE_FORMATS:
            name = re.split(r"[._-]", file.name)[0]
            splits.setdefault(name, []).append(file)
    if splits and split_name(split) not in splits:
        raise DualencError(f"{folder}: no split {split!r}; there are: {', '.join(sorted(splits))}")
    return splits.get(split_name(split), [])


def split_name(split: str) -> str:
    """The one name in a split such as train[:10%]+train[90%:]; several different names unchanged."""
    names = {part.partition("[")[0].strip() for part in split.split("+")}
    return names.pop() if len(names) == 1 else split


def check_whole(source: str | Path, split: str) -> None:
    """Refuse splits and slices of sources that have neither: tars and vectors."""
    if split != ONLY_SPLIT:
        reason = f"no split {split!r}, for it has neither splits nor slices; leave it out"
        raise DualencError(f"{source}: {reason}")


def select_split(splits: Mapping[str, Dataset], split: str, source: str) -> Dataset:
    """The rows of a split, or of slices of splits in the syntax of `datasets`."""
    from datasets import ReadInstruction, concatenate_datasets

    if split in splits:
        return splits[split]
    sizes = {name: len(rows) for name, rows in splits.items()}
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        available = f"{', '.join(splits)}, and slices such as train[:90%] ({first_line(error)})"
        raise DualencError(f"{source}: no split {split!r}; there are: {available}") from None
    ranges = [(splits[part.splitname], range(part.from_, part.to)) for part in parts]
    slices = [rows.select(selected) for rows, selected in ranges if selected]
    if not slices:
        known = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
        raise DualencError(f"{source}: split {split!r} has no rows (of {known}); widen the slice")
    return concatenate_datasets(slices)
