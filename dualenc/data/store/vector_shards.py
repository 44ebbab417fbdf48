"""Embeddings: N vectors with their ids, texts and columns, in memory or in a folder of Arrow files.

    data-00000.arrow …   id (string), vector (fixed-size list of float16 or float32), for texts
                         text (its beginning) and text:hash (of the whole), and the user's
                         columns; the metadata of the schema records what the shard was made of
    order.npy            the rows in the order of their ids
    meta.json            model, side, dtype, dimension, rows per shard, skipped items, size and
                         SHA-256 of each file

`dualenc.search.embed.writer.EmbeddingWriter` writes the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dualenc.data.store.items import ORDER, Ids, ItemTable, item_batch, read_batches, rows_of
from dualenc.errors import DualencError
from dualenc.io.checksums import verify_files
from dualenc.io.provenance import META, Provenance, Recorded
from dualenc.io.reading import read_json_object, with_home
from dualenc.types import check_several

FORMAT = "dualenc embeddings"
FORMAT_VERSION = 4
DTYPES = {"float16": pa.float16(), "float32": pa.float32()}
AGAIN = "run the same `dualenc embed` again"

# np.ndarray or ShardedVectors. Any, since a union would need casts wherever rows are selected.
Array = Any


class Embeddings(Recorded):
    """N vectors with their ids, in memory or on disk.

    Vectors on disk are memory-mapped, so opening a folder reads next to nothing.

        Embeddings.open("emb").vectors[:10]

    Args:
        ids: (N,) distinct strings.
        vectors: (N, D) float16 or float32, an array or `ShardedVectors`.
        provenance: the model and data that the vectors came from, as far as known.
        snippets: (N,) texts to show with the ids.
        columns: (N,) rows of the user's columns.
        hashes: (N,) uint64 of the whole texts (`dualenc.data.store.items.text_hash`); 0 if unknown.
    """

    def __init__(
        self,
        ids: Sequence[str],
        vectors: Array,
        provenance: Provenance | None = None,
        snippets: Sequence[str] | None = None,
        columns: pa.Table | None = None,
        hashes: np.ndarray | None = None,
    ) -> None:
        if len(vectors.shape) != 2:
            raise DualencError(
                f"vectors have shape {tuple(vectors.shape)}",
                fix="give a matrix (N, D)",
            )
        if len(ids) != len(vectors):
            raise DualencError(
                f"{len(ids)} ids for {len(vectors)} vectors",
                fix="give one id per vector",
            )
        check_several("ids", ids)
        self.ids: Sequence[str] = ids if isinstance(ids, Ids) else list(ids)
        self.vectors = vectors
        self.provenance = provenance or Provenance()
        self.snippets = snippets
        self.columns = columns
        self.hashes = hashes

    @classmethod
    def open(cls, folder: str | os.PathLike[str], verify: bool = False) -> Embeddings:
        """Map a folder of embeddings written by `embed` or `dualenc embed` into memory.

        Args:
            folder: the folder.
            verify: read every file and compare its SHA-256 with meta.json; otherwise sizes and at
                most 64 MiB are compared.

        Raises:
            DualencError: the folder is unfinished, corrupt or not a folder of embeddings.
        """
        folder = with_home(Path(folder))
        provenance = read_provenance(folder)
        if not provenance.complete:
            raise DualencError(
                "this folder of embeddings is not finished",
                fix=f"{AGAIN} to resume it",
                where=folder,
            )
        # The sizes in meta.json show truncated files at once; --verify reads everything.
        rows, dim, dtype = provenance.shard_rows, provenance.dim, provenance.dtype
        paths = [shard_path(folder, number) for number in range(len(rows))]
        names = [*(path.name for path in paths), ORDER]
        verify_files(folder, names, provenance.sizes, provenance.files, AGAIN, verify)
        table = ItemTable(paths, sum(rows), AGAIN)
        vectors = ShardedVectors([vectors_of(part, dim, dtype, folder) for part in table.batches])
        return cls(table.ids, vectors, provenance, table.texts, table.columns, table.hashes)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return int(self.vectors.shape[1])

    def rows_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the row of each id, (n,); -1 for an id without a vector."""
        return rows_of(self.ids, ids)

    def first(self, dim: int) -> Embeddings:
        """Return the first `dim` components of each vector, normalized if the vectors were."""
        if not 1 <= dim <= self.dim:
            raise DualencError(
                f"dim must be from 1 to {self.dim}, the size of the vectors, got {dim}",
                fix="give a smaller one",
            )
        parts = []
        for block in self.blocks():
            short = block[:, :dim]
            if self.provenance.normalized:
                # A vector may be zero in its first components: keep it, without dividing by 0.
                lengths = np.linalg.norm(short, axis=1, keepdims=True)
                short = short / np.where(lengths == 0, 1, lengths)
            # Always a copy: a view would keep its whole block in memory.
            parts.append(short.astype(self.vectors.dtype))
        return Embeddings(
            self.ids,
            np.concatenate(parts),
            self.provenance.updated(dim=dim),
            self.snippets,
            self.columns,
            self.hashes,
        )

    def blocks(self, rows: int = 16384) -> Iterator[np.ndarray]:
        """Yield the vectors in order as float32 matrices of at most `rows` rows."""
        for start, stop in self._ranges(rows):
            yield np.ascontiguousarray(self.vectors[start:stop], dtype=np.float32)

    def _ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield start and stop of blocks of at most `rows` rows within shards, for views."""
        # Blocks also end where shards end. A block across two shards would be a copy.
        bounds = set(range(0, len(self), rows))
        bounds.add(len(self))
        if isinstance(self.vectors, ShardedVectors):
            bounds.update(self.vectors.offsets.tolist())
        yield from pairwise(sorted(bounds))

    def record_batches(self, rows: int = 16384) -> Iterator[pa.RecordBatch]:
        """Yield all items in order, at most `rows` per batch.

        A batch has id, vector as stored, text if stored, and the user's columns.
        """
        texts = None
        columns = None
        for start, stop in self._ranges(rows):
            if self.snippets is not None:
                texts = self.snippets[start:stop]
            if self.columns is not None:
                columns = self.columns.slice(start, stop - start)
            vectors = np.asarray(self.vectors[start:stop])
            yield item_batch(self.ids[start:stop], texts, columns, vectors)


class ShardedVectors:
    """Matrices of equal width as one (N, D) matrix.

    Rows are selected by integer, slice, mask or integer array; a slice within one shard is a view.

        ShardedVectors([np.zeros((2, 4)), np.ones((3, 4))])[3]

    Args:
        shards: matrices (n, D), at least one.
    """

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self.shards = list(shards)
        sizes = [len(shard) for shard in self.shards]
        self.offsets = np.cumsum([0, *sizes])
        self.dtype = self.shards[0].dtype
        self.shape = (int(self.offsets[-1]), self.shards[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray) -> np.ndarray:
        if isinstance(rows, (int, np.integer)):
            number = self._shard_of(rows)
            return self.shards[number][rows - self.offsets[number]]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            number = self._shard_of(start)
            # Reading in blocks is common, so a slice within one shard must not copy.
            if step == 1 and start < stop <= self.offsets[number + 1]:
                first = self.offsets[number]
                return self.shards[number][start - first : stop - first]  # a view of the file
            rows = np.arange(start, stop, step)
        rows = np.asarray(rows)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        rows = rows.astype(np.int64)
        # One gather per shard rather than per row, which keeps reads of a mapped file together.
        result = np.empty((len(rows), self.shape[1]), self.dtype)
        numbers = self._shard_of(rows)
        for number in np.unique(numbers):
            in_shard = numbers == number
            first = self.offsets[number]
            result[in_shard] = self.shards[number][rows[in_shard] - first]
        return result

    def _shard_of(self, rows: Any) -> Any:
        return np.searchsorted(self.offsets, rows, side="right") - 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.concatenate(self.shards), dtype=dtype)


def is_embeddings(folder: str | os.PathLike[str]) -> bool:
    """Return True if the meta.json of a folder is that of embeddings, finished or not."""
    path = with_home(Path(folder)) / "meta.json"
    return path.is_file() and read_json_object(path).get("format") == FORMAT


def are_embeddings(folder: Path) -> bool:
    """Return True if a folder holds only folders that are empty or hold embeddings."""
    return all(
        path.is_dir() and (is_embeddings(path) or not os.listdir(path)) for path in folder.iterdir()
    )


def read_provenance(folder: Path) -> Provenance:
    """Read and check the meta.json of a folder of embeddings, finished or not."""
    # Another kind of folder stays what it is.
    out = "EMBEDDINGS" if (folder / META).is_file() else folder
    other = f"not a folder of embeddings; make one with `dualenc embed MODEL DATA --out {out}`"
    required = ["complete", "dim", "dtype"]
    provenance = Provenance.from_folder(folder, FORMAT, FORMAT_VERSION, required, other, AGAIN)
    # While a folder is being written, the rows per shard are not known yet.
    if provenance.complete:
        provenance.check(folder / META, ["shard_rows", "files"], AGAIN)
    rows = provenance.shard_rows if provenance.complete else [0]
    is_valid = rows and min(rows) >= 0 and provenance.dim >= 1 and provenance.dtype in DTYPES
    if not is_valid:
        raise DualencError(
            f"dim {provenance.dim}, dtype {provenance.dtype} and shard_rows {str(rows)[:60]} "
            "do not describe embeddings",
            fix="embed into another folder",
            where=folder / META,
        )
    return provenance


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard."""
    return folder / f"data-{number:05d}.arrow"


def read_shard(path: Path, dim: int, dtype: str) -> tuple[pa.RecordBatch, np.ndarray]:
    """Map a shard into memory and return it with its vectors (n, D), not copied."""
    batches = read_batches(path, AGAIN)
    if len(batches) != 1:
        raise DualencError(
            f"corrupt (it has {len(batches)} record batches, not one)",
            fix=AGAIN,
            where=path,
        )
    return batches[0], vectors_of(batches[0], dim, dtype, path)


def vectors_of(batch: pa.RecordBatch, dim: int, dtype: str, path: Path) -> np.ndarray:
    """Return the vectors (n, D) of a record batch, a view of the file."""
    kind = pa.null()
    if "vector" in batch.schema.names:
        kind = batch.schema.field("vector").type
    # Types first: a view of other bytes as floats would give numbers, not an error.
    is_vectors = pa.types.is_fixed_size_list(kind) and kind.list_size == dim
    if not is_vectors or kind.value_type != DTYPES[dtype]:
        raise DualencError(
            f"corrupt (it holds {kind} instead of {dtype} vectors of dimension {dim})",
            fix=AGAIN,
            where=path,
        )
    try:
        return batch.column("vector").flatten().to_numpy().reshape(len(batch), dim)
    except ValueError:  # also the base class of Arrow's errors
        raise DualencError(
            "corrupt (a vector is missing)",
            fix=AGAIN,
            where=path,
        ) from None
