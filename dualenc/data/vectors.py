"""Vectors as items: a folder of embeddings, a .npy file, or a column of lists of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.columns import Picked, list_lengths, number_distinct
from dualenc.data.corpus import Corpus, distinct_ids, row_ids
from dualenc.data.detect import detect
from dualenc.data.embeddings import Array, Embeddings, ShardedVectors
from dualenc.data.line_tables import ColumnKind, check_columns, is_list
from dualenc.data.metadata import metadata_columns
from dualenc.data.pairs import PairDataset
from dualenc.data.skips import Skips
from dualenc.data.tables import DataTable, check_whole, default_column, first_of, open_table, peek_columns
from dualenc.errors import DualencError
from dualenc.types import Items, OnError

VECTOR_NAMES = ("vector", "embedding", "embeddings", "vectors", "emb")
ID_NAMES = ("_id", "id", "docid", "doc_id", "document_id")

_BLOCK = 1 << 14  # rows that are looked at together

Faults = dict[str, tuple[np.ndarray, str]]
"""Why values cannot be used: of which of them each reason is true, (n,) bool, and how to mend it."""


class VectorItems:
    """The rows of a matrix (N, D) as items (D,) float32, read from the file when they are asked for."""

    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array(self.matrix[int(index)], dtype=np.float32)

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """The numbers as float32, always read: nothing is known of a vector without them."""
        return [row.tobytes() for row in np.asarray(self.matrix[rows], dtype=np.float32)]


class VectorPairs(PairDataset):
    """Pairs of vectors with the same id, from one table with two columns or from two sources.

        VectorPairs("pairs.parquet", left_column="query_vector", right_column="document_vector")
        VectorPairs("emb/questions", "emb/answers")

    Ids are those of a folder of embeddings, of `id_column`, or else the numbers of rows. Queries with several documents
    and corpora with more documents than pairs are a matter for `BeirPairs`.

    Args:
        left: folder of embeddings, .npy file of shape (N, D), or table with a column of lists of numbers.
        right: the same; by default the source of the left vectors.
        left_column: of a table; by default `vector` or another usual name.
        right_column: likewise.
        id_column: of tables; by default rows are numbered.
        split: of a folder of tables, a saved data set or a hub name.
        subset: configuration of a hub data set.
        limit: read the first rows of tables only.
        deduplicate: equal vectors of one side are the same item and share an id.
        on_error: "skip" leaves out, counts and reports vectors that are missing, not finite, zero, or of another
            size than most; "raise" stops at the first.

    Raises:
        DualencError: no such file or column, something else than vectors, nothing usable.
        BadSample: such a vector, or one without a partner, under on_error="raise".
    """

    def __init__(
        self,
        left: str | Path,
        right: str | Path | None = None,
        *,
        left_column: str | None = None,
        right_column: str | None = None,
        id_column: str | None = None,
        split: str = "train",
        subset: str | None = None,
        limit: int | None = None,
        deduplicate: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        skips = Skips(left, on_error)
        how: dict[str, Any] = {"id_column": id_column, "split": split, "subset": subset, "limit": limit, "skips": skips}
        if right is None and left_column == right_column:
            raise DualencError(f"{left}: both sides are the same vectors; name right, or left_column and right_column")
        lefts = open_vectors(left, left_column, **how)
        rights = open_vectors(left if right is None else right, right_column, **how)
        row_of = {name: row for row, name in enumerate(rights.ids)}
        for side, ids, partners in (("left", lefts.ids, row_of), ("right", rights.ids, set(lefts.ids))):
            without_partner = [name for name in ids if name not in partners]
            if without_partner:
                reason = f"{side} vector without a partner of the same id"
                skips.bad(reason, f"id {without_partner[0]!r}", "give it one or remove it", len(without_partner))
        left_rows = np.array([row for row, name in enumerate(lefts.ids) if name in row_of], dtype=np.int64)
        right_rows = np.array([row_of[lefts.ids[row]] for row in left_rows], dtype=np.int64)
        skips.demand(len(left_rows), "pair")
        left_first, left_id = number_distinct(lefts.items.__getitem__ if deduplicate else None, left_rows)
        right_first, right_id = number_distinct(rights.items.__getitem__ if deduplicate else None, right_rows)
        super().__init__(
            Picked(lefts.items, left_first),
            Picked(rights.items, right_first),
            left_id,
            right_id,
            left_modality="vector",
            right_modality="vector",
        )
        self.skipped = skips.report()


def open_vectors(
    source: str | Path,
    column: str | None = None,
    *,
    id_column: str | None = None,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    columns: Sequence[str] = (),
    skips: Skips,
) -> Corpus:
    """Open vectors to train on or to embed, without those that are not finite or zero; `skips` counts them.

    The arguments are those of `VectorPairs`; `columns` of a table, or of a folder of embeddings that has kept them, are
    kept for filters.

    Raises:
        DualencError: no such file or column, something else than vectors, nothing usable.
        BadSample: a bad vector, under on_error="raise".
    """
    where: Callable[[int], str]
    if detect(source) == "vectors":
        check_whole(source, split)
        opened = _open_npy(Path(source)) if Path(source).suffix == ".npy" else Embeddings.open(source)
        kept_columns = pa.table({}) if opened.columns is None else opened.columns
        check_columns(str(source), kept_columns.column_names, columns)
        ids: Sequence[str | None] = list(opened.ids)  # much faster than one by one
        vectors: Items = VectorItems(opened.vectors)
        faults = matrix_faults(opened.vectors)
        where = partial("{} row {}".format, source)
        columns_of = kept_columns.select(columns).take
    else:
        column = column or _default_column(str(source), split, subset)
        named = [*columns, *([] if id_column is None else [id_column])]
        kinds: dict[str, ColumnKind] = {**dict.fromkeys(named, "value"), column: "vector"}
        table = open_table(source, kinds, skips, split=split, subset=subset, limit=limit)
        found = VectorColumn(table, column)
        if found.is_list:
            raise DualencError(f"{source}: column {column!r} holds lists of vectors; name one with one in each row")
        ids = row_ids(table, id_column)
        vectors = found.items
        faults = found.faults
        where = table.where
        columns_of = partial(metadata_columns, table, columns)
    for reason, (bad, mend) in faults.items():
        if bad.any():
            skips.bad(reason, where(int(np.argmax(bad))), mend, int(bad.sum()))
    rows = np.flatnonzero(usable(faults, len(ids))).tolist()
    names, kept = distinct_ids(((row, ids[row]) for row in rows), skips, where, "vector")
    return Corpus(names, Picked(vectors, kept), "vector", columns=columns_of(kept) if columns else None)


def _open_npy(path: Path) -> Embeddings:
    matrix = load_npy(path)
    return Embeddings(list(map(str, range(len(matrix)))), matrix)


class VectorColumn:
    """A table's column of lists of numbers, or of lists of such lists, which are laid flat: n values.

    Args:
        table: the rows.
        name: one of its columns.
        dim: D, the size that vectors must have; by default the most frequent one.

    Attributes:
        is_list: whether a row may hold several vectors.
        rows: (n,) the row that each value stands in.
        items: (n,) the vectors, mapped from the file where they can be; those with faults are none.
        faults: which values are missing, of another size, not finite, or zero.

    Raises:
        DualencError: the column holds something else.
    """

    def __init__(self, table: DataTable, name: str, dim: int | None = None) -> None:
        array = table.dataset.data.column(name)
        self.rows = np.arange(len(array))
        self.is_list = is_list(array.type) and is_list(array.type.value_type)
        if self.is_list:
            self.rows = np.repeat(self.rows, list_lengths(array))
            array = pc.list_flatten(array)
        kind = array.type.value_type if is_list(array.type) else pa.null()
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            held = f"column {name!r} holds {table.dataset.data.column(name).type}"
            raise DualencError(f"{table.source}: {held}, where vectors are needed; name a column of lists of numbers")
        lengths = list_lengths(array)
        if dim is None:
            dim = max(1, int(np.bincount(lengths[lengths > 0], minlength=2).argmax()))  # 1 if there is no vector at all
        fits = lengths == dim
        shards = [np.zeros((0, dim), np.float32)]
        start = 0
        for chunk in array.chunks:
            good = fits[start : start + len(chunk)]
            start += len(chunk)
            chunk = chunk if good.all() else chunk.filter(pa.array(good))
            # A missing number becomes NaN, which is told with the others.
            shards.append(pc.list_flatten(chunk).to_numpy(zero_copy_only=False).reshape(-1, dim))
        matrix = ShardedVectors([shard for shard in shards if len(shard)] or shards[:1])
        self.dim = dim
        self.items = Picked(VectorItems(matrix), np.cumsum(fits) - 1)
        self.faults: Faults = {
            f"no vector in column {name!r}": (lengths == 0, "fill it in or remove the row"),
            f"vector of another size than {dim}": (~fits & (lengths > 0), "embed it as the others, or remove it"),
        }
        for reason, (bad, mend) in matrix_faults(matrix).items():
            mask = np.zeros(len(lengths), dtype=bool)
            mask[fits] = bad
            self.faults[reason] = mask, mend


def matrix_faults(matrix: Array) -> Faults:
    """Which rows of a matrix (n, D) are not finite or zero."""
    blocks = (np.asarray(matrix[at : at + _BLOCK], dtype=np.float64) for at in range(0, len(matrix), _BLOCK))
    squares = np.concatenate([np.zeros(0), *(np.einsum("nd,nd->n", block, block) for block in blocks)])
    return {
        "vector that is not finite": (~np.isfinite(squares), "embed it again or remove it"),
        "vector of zeros": (squares == 0, "it has no direction; remove it"),
    }


def usable(faults: Faults, count: int) -> np.ndarray:
    """Which of so many values have no fault, (count,) bool."""
    return ~np.any([np.zeros(count, dtype=bool), *(bad for bad, _ in faults.values())], axis=0)


def _default_column(source: str, split: str, subset: str | None) -> str:
    kinds = peek_columns(source, split, subset)
    lists = [name for name, kind in kinds.items() if kind == "vector"]
    return default_column(source, kinds, [*VECTOR_NAMES, *(lists if len(lists) == 1 else ())], "the vectors")


def default_ids(source: str | Path, split: str = "train", subset: str | None = None) -> str | None:
    """The column of a table that holds ids, if it has one of a usual name."""
    return first_of(peek_columns(source, split, subset), ID_NAMES)


def load_npy(path: Path) -> np.ndarray:
    """Map a .npy file of shape (N, D) into memory, one vector (D,) as (1, D); pickled objects are never loaded.

    Raises:
        DualencError: no such file, or something else in it.
    """
    if not path.is_file():
        raise DualencError(f"{path}: no such file; give a .npy file of shape (N, D)")
    try:
        matrix: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy's own, and those of the tokenizer behind it
        raise DualencError(f"{path}: no readable .npy file ({' '.join(str(error).split())[:120]})") from None
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or not matrix.size or matrix.dtype.kind not in "fiu":
        found = f"{matrix.dtype} of shape {matrix.shape}"
        raise DualencError(f"{path}: holds {found}, where numbers of shape (N, D) are needed")
    return matrix
