"""Remote Parquet texts, read by row groups on demand: a corpus larger than the disk.

Not `pyarrow.dataset`: it opens files through a file system of its own, without the retries and the check for changed
files of `RemoteFile`, and has no cheap access to single rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualenc.data.columns import Picked
from dualenc.data.corpus import Corpus, distinct_ids, id_of
from dualenc.data.line_tables import check_columns
from dualenc.data.remote import RemoteFile
from dualenc.data.skips import Skips
from dualenc.data.tables import broken_parquet, open_parquet
from dualenc.errors import BadSample, DualencError

# Caches of the process rather than of `RemoteTexts`: connections survive no fork, and neither travels in a pickle.


@lru_cache(maxsize=1000)
def _parquet(file: RemoteFile, process: int) -> pq.ParquetFile:
    return open_parquet(file)


@lru_cache(maxsize=2)  # two, because the texts of a batch may lie on both sides of a border
def _row_group(file: RemoteFile, process: int, group: int, columns: tuple[str, ...]) -> pa.Table:
    with broken_parquet(file):
        return _parquet(file, process).read_row_group(group, list(columns))


class RemoteTexts:
    """Texts of a column of parquet files, in the order of the files; with a column of titles, joined in front.

    Empty texts are bad samples when they are read; they are not known before.

    Args:
        files: with the same columns.
        column: of the texts.
        title_column: of the titles.

    Raises:
        DualencError: no such column or one of no texts, or a file that is no parquet or cannot be read.
    """

    def __init__(self, files: Sequence[RemoteFile], column: str, title_column: str | None = None) -> None:
        self.files = list(files)
        self.columns = (column,) if title_column is None else (column, title_column)
        self._groups: list[tuple[int, int, int]] = []  # file, row group, and the first row of the file
        # Row groups of all files in one order, so that a row is found by binary search.
        starts = [0]
        for number, file in enumerate(self.files):
            parquet = _parquet(file, os.getpid())
            check_columns(str(file), parquet.schema_arrow.names, self.columns)
            for name in self.columns:
                kind = parquet.schema_arrow.field(name).type
                if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                    raise DualencError(f"{file}: column {name!r} holds {kind}, where texts are needed; name another")
            first_row = starts[-1]
            for group in range(parquet.num_row_groups):
                self._groups.append((number, group, first_row))
                starts.append(starts[-1] + parquet.metadata.row_group(group).num_rows)
        self._starts = np.array(starts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str:
        number = self._group_of(index)
        row = int(index - self._starts[number])
        file, group, _ = self._groups[number]
        table = _row_group(self.files[file], os.getpid(), group, self.columns)
        try:
            values = [table[name][row].as_py() for name in self.columns]
        except UnicodeDecodeError:
            raise BadSample(f"{self.where(index)}: not UTF-8 text; mend or remove it") from None
        # Missing titles and texts are empty; numbers are spelled out.
        text, *title = ("" if value is None or value != value else str(value) for value in values)
        if title:
            text = f"{title[0]} {text}".strip()
        if not text.strip():
            raise BadSample(f"{self.where(index)}: empty; fill it in or remove the row")
        return text

    def _group_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def where(self, index: int) -> str:
        """The file of a row and its number in it."""
        file, _, first_row = self._groups[self._group_of(index)]
        return f"{self.files[file]} row {index - first_row}, column {self.columns[0]!r}"

    def values(self, column: str) -> Iterator[Any]:
        """All values of a column such as ids, row group by row group."""
        for number, group, _ in self._groups:
            file = self.files[number]
            parquet = _parquet(file, os.getpid())
            check_columns(str(file), parquet.schema_arrow.names, [column])
            with broken_parquet(file):
                values = parquet.read_row_group(group, [column])[column]
            yield from values.to_pylist()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """Identities for `dualenc.data.identity`, without reading: each file's own, and the text's place in it."""
        title_column = self.columns[1] if len(self.columns) > 1 else None
        files = [f"{file.name} {file.identity().decode()}" for file in self.files]
        result = []
        for row in rows.tolist():
            number = self._group_of(row)
            file, group, _ = self._groups[number]
            # The position within its file is stable when other files are added behind it.
            place = f"{group} {row - self._starts[number]} {self.columns[0]} {title_column}"
            result.append(f"{files[file]} {place}".encode())
        return result


def remote_corpus(texts: RemoteTexts, id_column: str | None, skips: Skips, limit: int | None = None) -> Corpus:
    """Remote texts as items to embed; their ids are those of a column, read at once, or the rows' numbers."""
    rows = range(len(texts) if limit is None else min(limit, len(texts)))
    values = rows if id_column is None else texts.values(id_column)
    named = zip(rows, map(id_of, values))
    ids, positions = distinct_ids(named, skips, texts.where, "document")
    return Corpus(ids, Picked(texts, positions), "text")
