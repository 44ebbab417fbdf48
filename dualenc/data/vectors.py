"""Vectors as items: a folder of embeddings, a .npy file, or a column of lists of numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc.data.columns import Column, Picked, number_distinct
from dualenc.data.corpus import Corpus
from dualenc.data.pairs import Items, PairDataset, Skips
from dualenc.data.tables import ColumnKind, DataTable, open_table, peek_columns
from dualenc.errors import DualencError
from dualenc.types import OnError

if TYPE_CHECKING:
    from dualenc.search.embeddings import Array

VECTOR_NAMES = ("vector", "embedding", "embeddings", "vectors", "emb")
ID_NAMES = ("_id", "id", "docid", "doc_id", "document_id")

_BLOCK = 1 << 14  # rows that are looked at together


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


class _Numbers:
    """Vectors as strings that are equal for equal vectors."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        return str(self.items[index].tobytes().hex())


def _number(items: Items, rows: np.ndarray, deduplicate: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row of each distinct item, and the number of the item at each of `rows` (n,)."""
    return number_distinct(_Numbers(items), rows) if deduplicate else (rows, np.arange(len(rows)))


def is_vectors(path: str | Path) -> bool:
    """Whether a path is a folder of embeddings or a .npy file."""
    if not (Path(path) / "meta.json").is_file() or not any(Path(path).glob("shard-*")):
        return Path(path).suffix == ".npy"
    # Embeddings on disk are the format of `search`; imported only where there are any, since that brings FAISS.
    from dualenc.search.embeddings import is_embeddings

    return is_embeddings(path)


def open_vectors(
    source: str | Path,
    column: str | None = None,
    *,
    id_column: str | None = None,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
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
        skips: is told of bad vectors.

    Raises:
        DualencError: no such file or column, something else than vectors, nothing usable.
        BadSample: a bad vector, under on_error="raise".
    """
    from dualenc.search.embeddings import Embeddings

    ids: list[str | None]
    where: Callable[[int], str] = f"{source} row {{}}".format
    if Path(source).suffix == ".npy":
        matrix = load_npy(Path(source))
        ids = [str(row) for row in range(len(matrix))]
    elif is_vectors(source):
        opened = Embeddings.open(source)
        matrix, ids = opened.vectors, list(opened.ids)
    else:
        column = column or _usual_column(str(source), split, subset)
        columns: dict[str, ColumnKind] = {column: "vector", **({} if id_column is None else {id_column: "value"})}
        table = open_table(source, columns, skips, split=split, subset=subset, limit=limit)
        matrix, rows = vector_column(table, column)
        ids = [str(row) for row in rows.tolist()]
        if id_column is not None:
            names = Column(table, id_column, "text").values(rows).tolist()
            ids = [None if name is None else str(name) for name in names]

        def where(row: int) -> str:
            return table.where(int(rows[row]))

    first: dict[str, int] = {}  # of each id
    good = _usable(matrix, where, skips)
    for row in good.tolist():
        name = ids[row]
        if name is None:
            skips.bad("vector without an id", where(row), "give it one")
        elif first.setdefault(name, row) != row:
            skips.bad("vector with an id used before", where(row), f"{name!r} stands twice")
    skips.demand(len(first), "vector")
    kept = np.array(list(first.values()), dtype=np.int64)
    return Corpus(list(first), Picked(VectorItems(matrix), kept), "vector")


def vector_column(table: DataTable, name: str) -> tuple[Array, np.ndarray]:
    """A column of lists of numbers as a matrix (n, D), mapped from the file where it can be, and its rows (n,).

    D is the most frequent length; lists of another one and missing ones are told to the table's `skips`.

    Raises:
        DualencError: the column holds something else, or nothing.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from dualenc.search.embeddings import ShardedVectors

    array = table.dataset.data.column(name)
    kinds = pa.types
    is_list = any(check(array.type) for check in (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list))
    inner = array.type.value_type if is_list else None
    if not is_list or not (kinds.is_floating(inner) or kinds.is_integer(inner)):
        raise DualencError(
            f"{table.source}: column {name!r} holds {array.type}, where vectors are needed; name a column of lists of "
            "numbers"
        )
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    missing = np.flatnonzero(lengths == 0)
    if len(missing):
        where = table.where(int(missing[0]))
        table.skips.bad(f"no vector in column {name!r}", where, "fill it in or remove the row", len(missing))
    table.skips.demand(len(lengths) - len(missing), "vector")
    dim = int(np.bincount(lengths[lengths > 0]).argmax())
    other = np.flatnonzero((lengths != dim) & (lengths > 0))
    if len(other):
        reason = f"vector of another size than {dim}"
        table.skips.bad(reason, table.where(int(other[0])), f"it has {lengths[other[0]]} numbers", len(other))
    shards, start = [np.zeros((0, dim), np.float32)], 0
    for chunk in array.chunks:
        good = lengths[start : start + len(chunk)] == dim
        start += len(chunk)
        chunk = chunk if good.all() else chunk.filter(pa.array(good))
        # A missing number becomes NaN, which is told with the others.
        shards.append(pc.list_flatten(chunk).to_numpy(zero_copy_only=False).reshape(-1, dim))
    shards = [shard for shard in shards if len(shard)]
    return ShardedVectors(shards), np.flatnonzero(lengths == dim)


def _usual_column(source: str, split: str, subset: str | None) -> str:
    kinds = peek_columns(source, split, subset)
    lists = [name for name, kind in kinds.items() if kind == "vector"]
    found = next((name for name in VECTOR_NAMES if name in kinds), lists[0] if len(lists) == 1 else None)
    if found is None:
        raise DualencError(f"{source}: no telling which column holds vectors; name it (columns: {', '.join(kinds)})")
    return found


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


def _usable(matrix: Array, where: Callable[[int], str], skips: Skips) -> np.ndarray:
    """Rows that are finite and not zero, (n,)."""
    squares = np.concatenate(
        [
            np.einsum("nd,nd->n", block, block)
            for start in range(0, len(matrix), _BLOCK)
            for block in [np.asarray(matrix[start : start + _BLOCK], dtype=np.float64)]
        ]
    )
    bad = np.flatnonzero(~np.isfinite(squares))
    if len(bad):
        skips.bad("vector that is not finite", where(int(bad[0])), "embed it again or remove it", len(bad))
    zero = np.flatnonzero(squares == 0)
    if len(zero):
        skips.bad("vector of zeros", where(int(zero[0])), "it has no direction; remove it", len(zero))
    return np.flatnonzero(np.isfinite(squares) & (squares > 0))
