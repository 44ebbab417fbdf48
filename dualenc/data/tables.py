"""Tables: local and remote files, saved data sets and hub names, all as a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dualenc.data.cache import cache_folder, dataset_of_batches, first_line
from dualenc.data.identity import file_identity
from dualenc.data.line_tables import (
    FILE,
    LINE,
    ColumnKind,
    Reshape,
    check_columns,
    kind_of_type,
    kinds_of_records,
    table_of_lines,
)
from dualenc.data.lines import check_distinct
from dualenc.data.remote import RemoteFile
from dualenc.data.skips import Skips
from dualenc.data.table_files import (
    ONLY_SPLIT,
    TableFile,
    find_files,
    is_parquet,
    is_saved,
    is_whole,
    local_copies,
    select_split,
    split_name,
)
from dualenc.data.urls import display_name, is_url
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH_ROWS = 2000


@dataclass
class DataTable:
    """Rows of named columns.

    Attributes:
        source: as the user named it.
        dataset: the rows, memory-mapped Arrow.
        skips: counts the bad samples of these rows.
        root: where relative image paths start.
        files: the local files behind it, empty for a hub name.
        allow_outside: whether image paths may lead out of `root`.
    """

    source: str
    dataset: Dataset
    skips: Skips
    root: Path
    files: list[Path] = field(default_factory=list)
    allow_outside: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def has(self, name: str) -> bool:
        """Whether there is such a column with at least one value in it."""
        return name in self.dataset.column_names and self.dataset.data.column(name).null_count < len(self)

    def skip_rows(self, reason: str, rows: np.ndarray, mend: str) -> None:
        """Count rows (n,) as bad samples; the first one's place is reported."""
        if len(rows):
            self.skips.bad(reason, self.where(int(rows[0])), mend, len(rows))

    def where(self, row: int) -> str:
        """The place of a row: file:line if it was read from lines."""
        if LINE not in self.dataset.column_names:
            return f"{self.source} row {row}"
        place = self.dataset.data.slice(row, 1)
        file = self.files[place.column(FILE)[0].as_py()]
        return f"{file}:{place.column(LINE)[0].as_py()}"


def open_table(
    source: str | Path,
    columns: Mapping[str, ColumnKind],
    skips: Skips,
    *,
    optional: Collection[str] = (),
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    quotes: bool = True,
    reshape: Reshape | None = None,
    allow_outside: bool = False,
) -> DataTable:
    """Open a table wherever it is.

    Args:
        source: as for `dualenc.data.TablePairs`, or a URL of files (`dualenc.data.remote`), which go into the cache
            folder; of parquet only the named columns.
        columns: the columns to read, and whether each may hold a list; others are not read.
        skips: counts malformed lines.
        optional: columns of these that may be missing.
        split: as for `TablePairs`, like `subset`, `quotes` and `allow_outside`; of a file the only one is train.
        limit: read the first rows of that only.
        reshape: applied to each record of a line-based file before its columns are taken.

    Raises:
        DualencError: no such file, column or split; a broken file.
    """
    source = str(source)
    if limit is not None and not 1 <= limit <= sys.maxsize:
        raise DualencError(f"{display_name(source)}: limit is {limit}; give the number of rows to read, from 1 on")
    files = find_files(source, split)
    local: list[Path] = []
    required = [name for name in columns if name not in optional]
    if not files:
        dataset = _from_datasets(source, subset, split)
    elif is_parquet(files[0]):
        dataset = _from_parquet(source, files, columns, required)
        local = [file for file in files if isinstance(file, Path)]
    else:
        local = local_copies(files)
        # A slice may need rows behind the limit.
        first_rows = limit if is_whole(split) else None
        dataset = table_of_lines(local, columns, optional, skips, quotes, first_rows, reshape)
    check_columns(source, dataset.column_names, required)
    if files:
        dataset = select_split({split_name(split): dataset}, split, display_name(source))
    # A limit applies behind the split: the first rows of a slice.
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    # Columns are read as stored, without the indices of a selection.
    if dataset._indices is not None:
        dataset = dataset.flatten_indices()
    root = _root(source, local or files)
    return DataTable(display_name(source), dataset, skips, root, local, allow_outside and not is_url(source))


def _root(source: str, files: Sequence[TableFile]) -> Path:
    """Where relative paths of a table start; for a remote one a folder of the cache without any images in it."""
    from datasets import config

    if not files:
        return Path(source if is_saved(source) else config.HF_CACHE_HOME)
    return cache_folder() / "remote" / files[0].key if isinstance(files[0], RemoteFile) else files[0].parent


def peek_columns(source: str | Path, split: str = "train", subset: str | None = None) -> dict[str, ColumnKind]:
    """The columns of a table and their kinds, without reading it whole: of records, those of the first hundred.

    Lists of floating-point numbers are vectors ("vector"), lists of those several vectors ("vectors"); all other lists
    are lists.

    Raises:
        DualencError: no such file or split; a broken file.
    """
    files = find_files(str(source), split)
    if files and not is_parquet(files[0]):
        skips = Skips(source)
        kinds = kinds_of_records(local_copies(files[:1])[0], skips)
        skips.demand(len(kinds), "record")
        return kinds
    if files:
        schema = _footer(files[0]).schema.to_arrow_schema()
    else:
        schema = _from_datasets(str(source), subset, split).data.schema
    return {column.name: kind_of_type(column.type) for column in schema}


def peek_lines(source: str | Path, split: str = "train", quotes: bool = True) -> dict[str, ColumnKind]:
    """The kinds of the columns of a line-based file, by its first records; nothing for sources with types.

    Raises:
        DualencError: no such file or split.
    """
    files = find_files(str(source), split)
    if not files or is_parquet(files[0]):
        return {}
    return kinds_of_records(local_copies(files[:1])[0], Skips(source), quotes)


def _from_datasets(source: str, subset: str | None, split: str) -> Dataset:
    """A saved data set, or one of the hub; both raise errors of many kinds."""
    import datasets

    # A saved data set is never looked up on the hub, whatever its name.
    if is_saved(source):
        try:
            loaded = datasets.load_from_disk(source)
        except Exception as error:
            reason = f"saved data set cannot be read ({first_line(error)})"
            raise DualencError(f"{source}: {reason}; save it again") from None
        return select_split(loaded if isinstance(loaded, dict) else {ONLY_SPLIT: loaded}, split, source)
    try:
        return datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        raise DualencError(
            f"{source}: no such file here, and as a dataset of the hub it does not load ({first_line(error)}); "
            "check the name, subset and split, and the network"
        ) from error


def _from_parquet(
    source: str, files: Sequence[TableFile], columns: Mapping[str, ColumnKind], required: Sequence[str]
) -> Dataset:
    """The named columns of parquet files, as far as they have them."""
    footers = [_footer(file) for file in files]
    schema = footers[0].schema.to_arrow_schema()
    check_columns(source, schema.names, required)
    names = [name for name in schema.names if name in columns] or schema.names
    for file, footer in zip(files, footers):
        check_columns(str(file), footer.schema.to_arrow_schema().names, names)
    fields = [schema.field(name) for name in names]
    # Dictionaries differ from row group to row group; their values are what counts.
    plain = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in fields]
    schema = pa.schema(plain, metadata=schema.metadata)
    size = sum(file.size if isinstance(file, RemoteFile) else file.stat().st_size for file in files)

    def key() -> str:
        facts = [file.key if isinstance(file, RemoteFile) else file_identity(file).decode() for file in files]
        return json.dumps(["parquet", facts, names])

    return dataset_of_batches(_parquet_batches(files, footers, schema), schema, size, key)


def _parquet_batches(
    files: Sequence[TableFile], footers: Sequence[pq.FileMetaData], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    with tqdm(desc=files[0].name, unit=" rows", delay=2, leave=False) as bar:
        for file, footer in zip(files, footers):
            with broken_parquet(file), open_parquet(file, footer) as parquet:
                # One row group at a time: pyarrow keeps what it has buffered of all that it is asked for.
                for group in range(parquet.num_row_groups):
                    for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=schema.names):
                        bar.update(len(batch))
                        yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).to_batches()


@contextmanager
def broken_parquet(file: TableFile) -> Iterator[None]:
    """Report what pyarrow raises of broken files and pages, and of files that differ, in one line."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = f"not a readable parquet file ({first_line(error)[:200]})"
        raise DualencError(f"{file}: {reason}; fetch it again") from None


def open_parquet(file: TableFile, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a parquet file; a remote one costs a request for its footer, unless that is given."""
    with broken_parquet(file):
        return pq.ParquetFile(file.open() if isinstance(file, RemoteFile) else file, metadata=footer)


def _footer(file: TableFile) -> pq.FileMetaData:
    """The schema and row groups of a parquet file."""
    with broken_parquet(file), open_parquet(file) as parquet:
        footer = parquet.metadata
        names = footer.schema.to_arrow_schema().names
    check_distinct(str(file), names)
    return footer
