"""Texts of parquet files behind URLs, read by row groups when they are asked for: a corpus larger than the disk."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc.data.columns import Picked
from dualenc.data.corpus import Corpus
from dualenc.data.pairs import Skips
from dualenc.data.remote import RemoteFile
from dualenc.data.tables import check_columns
from dualenc.errors import BadSample, DualencError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_KEPT_BYTES = 256 << 20
"""Of row groups in memory; the latest stays, however large it is."""


class RemoteTexts:
    """Texts of a column of parquet files, in the order of the files; with a column of titles, joined in front.

    Which texts are empty is not known before they are read: those are bad samples.

    Args:
        files: with the same columns.
        column: of the texts.
        title_column: of the titles.

    Raises:
        DualencError: no such column or one of no texts, or a file that is no parquet or cannot be read.
    """

    def __init__(self, files: Sequence[RemoteFile], column: str, title_column: str | None = None) -> None:
        import pyarrow.types as kinds

        self.files, self.column, self.title_column = list(files), column, title_column
        names = [column] if title_column is None else [column, title_column]
        groups: list[tuple[int, int, int]] = []
        self._reset()
        for number, file in enumerate(self.files):
            opened = self._file(number)
            check_columns(str(file), opened.schema_arrow.names, names)
            for name in names:
                kind = opened.schema_arrow.field(name).type
                if kinds.is_nested(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind):
                    raise DualencError(f"{file}: column {name!r} holds {kind}, where texts are needed; name another")
            sizes = (opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups))
            groups += [(number, group, rows) for group, rows in enumerate(sizes)]
        self._group_of = [(number, group) for number, group, _ in groups]
        self._starts = np.cumsum([0, *(rows for _, _, rows in groups)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        table, row = self._group(number), int(index - self._starts[number])
        try:
            text, *title = (table[name][row].as_py() for name in table.column_names)
        except UnicodeDecodeError:
            raise BadSample(f"{self.where(index)}: not UTF-8 text; mend or remove it") from None
        text = "" if text is None else str(text)
        if title:
            text = f"{title[0] or ''} {text}".strip()
        if not text.strip():
            raise BadSample(f"{self.where(index)}: empty; fill it in or remove the row")
        return text

    def where(self, index: int) -> str:
        """The file of a row and its number in it."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, _ = self._group_of[number]
        first = next(place for place, (other, _) in enumerate(self._group_of) if other == file)
        return f"{self.files[file]} row {int(index - self._starts[first])}, column {self.column!r}"

    def values(self, column: str) -> Iterator[Any]:
        """All values of a column such as ids, row group after row group, without what else is in the files."""
        for number, group in self._group_of:
            check_columns(str(self.files[number]), self._file(number).schema_arrow.names, [column])
            read = partial(self._file(number).read_row_group, group, [column])
            yield from self._read(number, read)[column].to_pylist()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for, without reading: each file's own identity, and where in it a text is."""
        what = f"{self.column} {self.title_column}".encode()
        known = [b"%s %s" % (file.name.encode(), file.identity()) for file in self.files]
        groups = (np.searchsorted(self._starts, rows, side="right") - 1).tolist()
        places = (rows - self._starts[groups]).tolist() if len(rows) else []
        return [
            b"%s %d %d %s" % (known[self._group_of[number][0]], self._group_of[number][1], place, what)
            for number, place in zip(groups, places)
        ]

    def _group(self, number: int) -> pa.Table:
        """The texts and titles of a row group."""
        if self._process != os.getpid():
            self._reset()
        if number not in self._kept:
            file, group = self._group_of[number]
            names = [self.column] if self.title_column is None else [self.column, self.title_column]
            table = self._read(file, lambda: self._file(file).read_row_group(group, names))
            self._kept[number] = table.select(names)
        self._kept.move_to_end(number)
        while len(self._kept) > 1 and sum(table.nbytes for table in self._kept.values()) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)
        return self._kept[number]

    def _file(self, number: int) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        if number not in self._open:
            self._open[number] = self._read(number, lambda: pq.ParquetFile(self.files[number].stream(buffered=False)))
        return self._open[number]

    def _read(self, number: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except DualencError:
            raise
        except Exception as error:  # pyarrow has several kinds for broken files
            reason = " ".join(str(error).split())[:200]
            raise DualencError(f"{self.files[number]}: cannot be read as parquet ({reason}); mend the file") from None

    def _reset(self) -> None:
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()
        self._open: dict[int, pq.ParquetFile] = {}
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_open", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def remote_corpus(texts: RemoteTexts, id_column: str | None, skips: Skips, limit: int | None = None) -> Corpus:
    """Texts of remote files as items to embed, with the ids of a column, of which all are read, or the rows' numbers.

    Rows without an id and with one used before are told to `skips`.
    """
    rows = range(len(texts) if limit is None else min(limit, len(texts)))
    if id_column is None:
        names = [str(row) for row in rows]
        positions = np.arange(len(rows))
    else:
        ids: dict[str, int] = {}
        for row, value in zip(rows, texts.values(id_column)):
            if value is None:
                skips.bad("document without an id", texts.where(row), "give it one")
            elif ids.setdefault(str(value), row) != row:
                skips.bad("document with an id used before", texts.where(row), f"{str(value)!r} stands twice")
        names, positions = list(ids), np.fromiter(ids.values(), dtype=np.int64, count=len(ids))
    skips.demand(len(names), "document")
    return Corpus(names, Picked(texts, positions), "text")
