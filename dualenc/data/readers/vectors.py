"""Corpora and pairs of vectors, from embedding folders, .npy files, or columns of lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import matrix_faults, usable
from dualenc.data.corpus import Corpus, distinct_ids, table_corpus
from dualenc.data.item_lists import Picked, VectorItems, distinct_items
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.column_names import VECTORS
from dualenc.data.readers.detect import detect_locally
from dualenc.data.readers.id_columns import usual_id_column
from dualenc.data.readers.table_files import TABLE_FORMATS, file_format
from dualenc.data.readers.tables import TableSource, check_columns
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, explain
from dualenc.io.reading import with_home
from dualenc.types import OnError, StrPath


class VectorPairs(PairDataset):
    """Pairs of vectors with the same id, from two sources.

    Ids are those of a folder of embeddings, of a table's column `_id` or another common name, or
    else row numbers. Use `TablePairs` for two columns of one table, and `BeirPairs` for queries
    with several documents.

        VectorPairs("emb/questions", "emb/answers")

    Args:
        left: folder of embeddings, .npy file of shape (N, D), or table with a column `vector` or
            another common name.
        right: the same for the right side.
        deduplicate: equal vectors of one side are the same item and share an id.
        on_error: "skip" leaves out, counts and reports vectors that are missing, not finite or
            zero; "raise" stops at the first. A table with vectors of two sizes is refused.
    """

    has_distinct_items = True

    def __init__(
        self,
        left: str | Path,
        right: str | Path,
        *,
        deduplicate: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        bad_rows = BadRows(left, on_error)
        lefts = open_vectors(left, bad_rows=bad_rows)
        rights = open_vectors(right, bad_rows=bad_rows)
        rows = rows_of(rights.ids, lefts.ids)
        unpaired = sorted(set(lefts.ids) ^ set(rights.ids))
        if unpaired:
            # An id may be missing on either side.
            bad_rows.add(
                "vector without a partner of the same id",
                f"id {unpaired[0]!r}",
                "give it one or remove it",
                len(unpaired),
            )
        left_rows = np.flatnonzero(rows >= 0)
        bad_rows.require(len(left_rows), "pair")
        left_items, left_id = distinct_items(lefts.items, left_rows, deduplicate)
        right_items, right_id = distinct_items(rights.items, rows[left_rows], deduplicate)
        super().__init__(
            left_items,
            right_items,
            left_id,
            right_id,
            left_modality="vector",
            right_modality="vector",
        )
        self.skipped = bad_rows.report()


def open_vectors(
    source: StrPath,
    *,
    id_column: str | None = None,
    columns: Sequence[str] = (),
    bad_rows: BadRows,
) -> Corpus:
    """Open vectors to train on or to embed, without those that are zero or not finite.

    Args:
        source: folder of embeddings, .npy file of shape (N, D), or table.
        id_column: column of ids, see `open_corpus`.
        columns: further columns to keep for filters.
        bad_rows: counts vectors left out.
    """
    source = with_home(source)
    kind = detect_locally(source)
    if kind == "vectors":
        return matrix_corpus(source, columns, bad_rows)
    table = TableSource(source, bad_rows, kind=kind)
    return vector_corpus(table, id_column=id_column, columns=columns)


def vector_corpus(
    table: TableSource,
    column: str | None = None,
    *,
    id_column: str | None = None,
    columns: Sequence[str] = (),
) -> Corpus:
    """Return the usable vectors of a table's column, by default one with a common name."""
    if column is None:
        lists = [name for name, kind in table.kinds.items() if kind == "vector"]
        # A single column of vectors needs no common name.
        usual = [*VECTORS, *lists] if len(lists) == 1 else VECTORS
        column = table.default_column(usual, "the vectors")
    if id_column is None:
        id_column = usual_id_column(table, column)
    if id_column is None:
        id_column = usual_id_column(table, column, of_queries=True)
    return table_corpus(table, column, "vector", id_column=id_column, columns=columns)


def matrix_corpus(source: StrPath, columns: Sequence[str], bad_rows: BadRows) -> Corpus:
    """Return the usable vectors of a folder of embeddings or a .npy file."""
    if Path(source).suffix == ".npy":
        matrix = load_npy(Path(source))
        row_numbers = [str(row) for row in range(len(matrix))]
        opened = Embeddings(row_numbers, matrix)
    else:
        opened = Embeddings.open(source)
    stored = pa.table({}) if opened.columns is None else opened.columns
    check_columns(str(source), stored.column_names, columns)
    position_of = partial("{} row {}".format, source)
    faults = matrix_faults(opened.vectors)
    for reason, (bad, fix) in faults.items():
        if bad.any():
            bad_rows.add(reason, position_of(int(np.argmax(bad))), fix, int(bad.sum()))
    names = list(opened.ids)  # decodes in blocks, much faster than one by one
    rows = np.flatnonzero(usable(faults))
    ids, positions = distinct_ids(names, rows, bad_rows, position_of, "vector")
    items = Picked(VectorItems(opened.vectors), positions)
    selected = None
    if columns:
        selected = stored.select(columns).take(positions)
    return Corpus(ids, items, "vector", columns=selected)


def load_npy(path: Path) -> np.ndarray:
    """Map a .npy file of shape (N, D) into memory; a single vector (D,) becomes (1, D).

    Pickled objects are never loaded.
    """
    if not path.is_file():
        raise DualencError(
            "no such file",
            fix="give a .npy file of shape (N, D)",
            where=path,
        )
    with explain(f"{path}: not a readable .npy file", "write it with numpy.save"):
        matrix: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or not matrix.size or matrix.dtype.kind not in "fiu":
        raise DualencError(
            f"holds {matrix.dtype} of shape {matrix.shape}, not numbers of shape (N, D)",
            fix="save a matrix with a vector in each row",
            where=path,
        )
    return matrix


def refuse_vector_file(source: StrPath) -> None:
    """Raise a `DualencError` for a file in place of a folder: vectors have to be indexed first."""
    if with_home(Path(source)).is_file():
        # Of a table the texts are embedded first.
        before = "MODEL " if file_format(Path(source)) in TABLE_FORMATS else ""
        raise DualencError(
            "is a file, not an index",
            fix=f"index it with `dualenc index {before}{source} --out INDEX`",
            where=source,
        )
