"""Vectors as items: a folder of embeddings, a .npy file, or a column of lists of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.columns import Column, Picked, number_distinct
from dualenc.data.corpus import Corpus
from dualenc.data.embeddings import Array, Embeddings, ShardedVectors, is_embeddings
from dualenc.data.line_tables import ColumnKind, check_columns
from dualenc.data.metadata import metadata_columns
from dualenc.data.pairs import PairDataset
from dualenc.data.skips import Skips
from dualenc.data.table_files import check_whole
from dualenc.data.tables import DataTable, open_table, peek_columns
from dualenc.data.urls import display_name
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
        paired = np.array([name in row_of for name in lefts.ids], dtype=bool)
        for alone, side in ((~paired, "left"), (~np.isin(np.array(rights.ids), np.array(lefts.ids)), "right")):
            if alone.any():
                name = (lefts if side == "left" else rights).ids[int(np.argmax(alone))]
                reason = f"{side} vector without a partner of the same id"
                skips.bad(reason, f"id {name!r}", "give it one or remove it", int(alone.sum()))
        left_rows = np.flatnonzero(paired)
        right_rows = np.array([row_of[lefts.ids[row]] for row in left_rows], dtype=np.int64)
        skips.demand(len(left_rows), "pair")
        left_first, left_id = _number(lefts.items, left_rows, deduplicate)
        right_first, right_id = _number(rights.items, right_rows, deduplicate)
        super().__init__(
            Picked(lefts.items, left_first),
            Picked(rights.items, right_first),
            left_id,
            right_id,
            left_modality="vector",
            right_modality="vector",
        )
        self.skipped = skips.report()


class VectorKeys:
    """Vectors as strings that are equal for equal vectors."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        return str(self.items[index].tobytes().hex())


def _number(items: Items, rows: np.ndarray, deduplicate: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row of each distinct item, and the number of the item at each of `rows` (n,)."""
    return number_distinct(VectorKeys(items), rows) if deduplicate else (rows, np.arange(len(rows)))


def is_vectors(path: str | Path) -> bool:
    """Whether a path is a folder of embeddings or a .npy file."""
    # Another folder of data may have a meta.json of its own, of whatever kind.
    shards = (*Path(path).glob("data-*.arrow"), *Path(path).glob("shard-*.npy"))
    return Path(path).suffix == ".npy" or (bool(shards) and is_embeddings(path))


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
    """Open vectors to train on or to embed; those that are not finite or zero are told to `skips` and left out.

    Args:
        source: a folder of embeddings, a .npy file of shape (N, D), or a table.
        column: of a table, lists of numbers; by default `vector` or another usual name.
        id_column: ids of a table's rows; by default they are numbered.
        split: of a folder of tables, a saved data set or a hub name.
        subset: configuration of a hub data set.
        limit: read the first rows of a table only.
        columns: further columns of a table, or of a folder of embeddings that has kept them, to keep for filters.
        skips: is told of bad vectors.

    Raises:
        DualencError: no such file or column, something else than vectors, nothing usable.
        BadSample: a bad vector, under on_error="raise".
    """
    ids: list[str | None]
    where: Callable[[int], str] = f"{source} row {{}}".format
    table: DataTable | None = None
    known: pa.Table | None = None
    if Path(source).suffix == ".npy" or is_vectors(source):
        check_whole(source, split)
        opened = None if Path(source).suffix == ".npy" else Embeddings.open(source)
        matrix = load_npy(Path(source)) if opened is None else opened.vectors
        known = None if opened is None else opened.columns
        check_columns(str(source), [] if known is None else known.column_names, columns)
        ids = list(map(str, range(len(matrix)))) if opened is None else list(opened.ids)
        vectors: Items = VectorItems(matrix)
        faults = matrix_faults(matrix)
    else:
        column = column or _usual_column(str(source), split, subset)
        wanted: dict[str, ColumnKind] = {column: "vector", **({} if id_column is None else {id_column: "value"})}
        wanted = {**dict.fromkeys(columns, "value"), **wanted}
        table = open_table(source, wanted, skips, split=split, subset=subset, limit=limit)
        found = VectorColumn(table, column)
        if found.is_list:
            raise DualencError(f"{source}: column {column!r} holds lists of vectors; name one with one in each row")
        vectors, faults, where = found.items, found.faults, table.where
        ids = list(map(str, range(len(table))))
        if id_column is not None:
            names = Column(table, id_column, "text").values(np.arange(len(table))).tolist()
            ids = [None if name is None else str(name) for name in names]
    for reason, (bad, mend) in faults.items():
        if bad.any():
            skips.bad(reason, where(int(np.argmax(bad))), mend, int(bad.sum()))
    first: dict[str, int] = {}  # of each id
    for row in np.flatnonzero(usable(faults, len(ids))).tolist():
        name = ids[row]
        if name is None:
            skips.bad("vector without an id", where(row), "give it one")
        elif first.setdefault(name, row) != row:
            skips.bad("vector with an id used before", where(row), f"{name!r} stands twice")
    skips.demand(len(first), "vector")
    kept = np.array(list(first.values()))
    further = known.select(columns).take(kept) if columns and known is not None else None
    if columns and table is not None:
        further = metadata_columns(table, columns, kept)
    return Corpus(list(first), Picked(vectors, kept), "vector", columns=further)


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
        self.is_list = _is_list(array.type) and _is_list(array.type.value_type)
        if self.is_list:
            self.rows = np.repeat(self.rows, pc.fill_null(pc.list_value_length(array), 0).to_numpy())
            array = pc.list_flatten(array)
        kind = array.type.value_type if _is_list(array.type) else pa.null()
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            held = table.dataset.data.column(name).type
            raise DualencError(
                f"{table.source}: column {name!r} holds {held}, where vectors are needed; name a column of lists of "
                "numbers"
            )
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        if dim is None:
            dim = max(1, int(np.bincount(lengths[lengths > 0], minlength=2).argmax()))  # 1 if there is no vector at all
        fits = lengths == dim
        shards, start = [np.zeros((0, dim), np.float32)], 0
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


def holds_vectors(table: DataTable, name: str) -> bool:
    """Whether a column is one of lists of floating-point numbers, or of lists of such lists."""
    kind = inner = table.dataset.data.schema.field(name).type
    while _is_list(inner):
        inner = inner.value_type
    return kind != inner and pa.types.is_floating(inner)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


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


def _usual_column(source: str, split: str, subset: str | None) -> str:
    kinds = peek_columns(source, split, subset)
    lists = [name for name, kind in kinds.items() if kind == "vector"]
    found = next((name for name in VECTOR_NAMES if name in kinds), lists[0] if len(lists) == 1 else None)
    if found is None:
        told = f"no telling which column holds vectors; name it (columns: {', '.join(kinds)})"
        raise DualencError(f"{display_name(source)}: {told}")
    return found


def usual_ids(source: str | Path, split: str = "train", subset: str | None = None) -> str | None:
    """The column of a table that holds ids, if it has one of a usual name."""
    return next((name for name in ID_NAMES if name in peek_columns(source, split, subset)), None)


def load_npy(path: Path) -> np.ndarray:
    """Map a .npy file of shape (N, D) into memory, one vector (D,) as (1, D); pickled objects are never loaded.

    Raises:
        DualencError: no such file, or something else in it.
    """
    if not path.is_file():
        raise DualencError(f"{path}: no such file; give a .npy file of shape (N, D)")
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's own, and those of the tokenizer behind it
        raise DualencError(f"{path}: no readable .npy file ({' '.join(str(error).split())[:120]})") from None
    if isinstance(matrix, np.ndarray) and matrix.ndim == 1:
        matrix = matrix[None]
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not matrix.size or matrix.dtype.kind not in "fiu":
        found = f"{matrix.dtype} of shape {matrix.shape}" if isinstance(matrix, np.ndarray) else "an archive"
        raise DualencError(f"{path}: holds {found}, where numbers of shape (N, D) are needed")
    return matrix
