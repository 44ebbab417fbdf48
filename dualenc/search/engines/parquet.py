"""Parquet files of ids, vectors and columns, as Spark reads them and Milvus loads them in bulk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json_object, recover_inside, remove, write_json
from dualenc.search.embeddings import Embeddings, ShardedVectors
from dualenc.search.engines.push import fingerprint_of

ABOUT = "_dualenc.json"
"""Spark, Arrow and others pass over files whose names begin with an underscore."""
ROWS_PER_FILE = 16384


def export_parquet(embeddings: Embeddings, folder: str | os.PathLike[str], *, replace: bool = False) -> tuple[int, int]:
    """Write a file for each shard, with columns id, vector (lists of float32), snippet and those kept by `embed`.

    Files that are there already are left as they are: an interrupted run goes on, and a second one does nothing.

    Args:
        embeddings: N vectors.
        folder: where; a new or empty one, or one with an export of the same embeddings.
        replace: remove an export of other embeddings first.

    Returns:
        How many files were written, and how many there are.

    Raises:
        DualencError: the folder holds something else.
        DiskFull: what was written so far stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(folder)
    about: dict[str, Any] = {"fingerprint": fingerprint_of(embeddings), "count": len(embeddings), "dim": embeddings.dim}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / ABOUT).is_file():
            raise DualencError(f"{folder}: exists and holds no export of embeddings; choose a new or empty folder")
        if (found := read_json_object(folder / ABOUT)) != about:
            if not replace:
                what = f"{found.get('count')} vectors of other embeddings"
                raise DualencError(f"{folder}: holds {what}; push with --replace to remove them, or to another folder")
            for path in folder.glob("part-*.parquet"):
                remove(path)
            remove(folder / ABOUT)
    recover_inside(folder)
    if not (folder / ABOUT).exists():
        write_json(folder / ABOUT, about)
    vectors = embeddings.vectors
    starts = np.arange(0, len(embeddings), ROWS_PER_FILE).tolist()
    if isinstance(vectors, ShardedVectors):
        starts = vectors.offsets[:-1].tolist()
    written = 0
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(embeddings)])):
        path = folder / f"part-{number:05d}.parquet"
        if path.exists():
            continue
        numbers = pa.array(np.asarray(vectors[start:stop], np.float32).ravel())
        offsets = pa.array(np.arange(0, len(numbers) + 1, embeddings.dim, dtype=np.int32))
        table = {"id": pa.array(embeddings.ids[start:stop], pa.string())}
        table["vector"] = pa.ListArray.from_arrays(offsets, numbers)
        if embeddings.snippets is not None:
            table["snippet"] = pa.array([embeddings.snippets[row] for row in range(start, stop)], pa.string())
        if embeddings.columns is not None:
            for name in embeddings.columns.column_names:
                column = embeddings.columns.column(name).slice(start, stop - start)
                table[name] = column.cast(pa.string()) if pa.types.is_large_string(column.type) else column
        with atomic_path(path) as part:
            pq.write_table(pa.table(table), part)
        written += 1
    return written, len(starts)
