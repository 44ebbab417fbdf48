"""Rows and columns of parquet files, which may differ in their columns and types."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from dualenc.data.readers.lines import COMPRESSIONS, Numbered, Record
from dualenc.data.readers.plain_types import is_type, plain_batch, plain_type
from dualenc.data.readers.table_files import Partition
from dualenc.data.store.cache import BATCH_ROWS
from dualenc.errors import DualencError, explain


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    with explain(
        f"{file}: cannot be read", "write all files with the same types, or fetch it again"
    ):
        yield


def stored_schema(files: Sequence[Path]) -> pa.Schema:
    """Return the union of the schemas of files, with types wide enough for every file."""
    schemas: list[pa.Schema] = []
    for file in files:
        if file.suffix.lower() in COMPRESSIONS:
            raise DualencError("compressed parquet file", fix="decompress it first", where=file)
        with _explained(file):
            schema = pq.read_schema(file)
            for index, column in enumerate(schema):
                # Row groups may have different dictionaries, which do not unify.
                if is_type(column.type, "dictionary"):
                    schema = schema.set(index, column.with_type(column.type.value_type))
            # Writers infer types file by file: a column without values is null in one file, int32
            # in the next, int64 in a third. "permissive" takes the widest.
            schemas = [pa.unify_schemas([*schemas, schema], promote_options="permissive")]
    return schemas[0]


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the plain types as which columns are read."""
    columns = [column.with_type(plain_type(column.type)) for column in schema]
    return pa.schema(columns, schema.metadata)


def read_rows(file: Path) -> Iterator[Numbered]:
    """Yield (row number from 0, record) for each row of a file."""
    with _explained(file), pq.ParquetFile(file) as opened:
        # A record of a view or dictionary column would not be a plain Python value.
        schema = plain_schema(opened.schema_arrow)
        start = 0
        for batch in opened.iter_batches(batch_size=BATCH_ROWS):
            yield from enumerate(plain_batch(batch, schema, {}).to_pylist(), start)
            start += len(batch)


def first_rows(file: Path, columns: Collection[str], most: int) -> list[Record]:
    """Return up to `most` rows with those of the columns that the file has."""
    with _explained(file), pq.ParquetFile(file) as opened:
        own = [name for name in columns if name in opened.schema_arrow.names]
        batches = opened.iter_batches(batch_size=most, columns=own)
        # Damaged text only matters if its column is read; the reader then reports it.
        with suppress(UnicodeDecodeError):
            return next(iter(batches), pa.RecordBatch.from_pylist([])).to_pylist()
    return []


def read_batches(
    parts: Iterator[tuple[int, Path, Partition]], stored: pa.Schema, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files with the columns and types of a schema.

    Args:
        parts: number and path of each file, and the keys of its partition.
        stored: the columns of the schema with their types in the files.
        schema: the columns to return; null where a file lacks one.
    """
    # Do not read ahead more than one batch: otherwise a file is in memory twice.
    scan = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
    for _, file, keys in parts:
        with _explained(file):
            # The union schema fills columns that this file lacks with nulls.
            data = pyarrow.dataset.dataset(file, schema=stored, format="parquet")
            for batch in data.to_batches(
                batch_size=BATCH_ROWS,
                batch_readahead=1,
                fragment_readahead=1,
                fragment_scan_options=scan,
            ):
                yield plain_batch(batch, schema, keys)
