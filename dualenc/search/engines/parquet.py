"""Parquet files of ids, vectors and columns, as Spark reads them and Milvus loads them in bulk."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dualenc.data.embeddings import Embeddings
from dualenc.errors import DualencError
from dualenc.files import atomic_path, check_folder_target, recover_inside, write_json
from dualenc.reading import read_json_object
from dualenc.search.engines.connection import with_short_strings
from dualenc.search.engines.index import fingerprint_of

ABOUT = "_dualenc.json"
"""Spark, Arrow and others pass over files whose names begin with an underscore."""
ROWS_PER_FILE = 16384


def export_parquet(embeddings: Embeddings, folder: str | os.PathLike[str], *, replace: bool = False) -> tuple[int, int]:
    """Write files with columns id, vector (lists of float32), text and those kept by `embed`.

    Existing files are left as they are: an interrupted run resumes, and a second one does nothing.

    Args:
        embeddings: N vectors.
        folder: a new or empty one, or one with an export of the same embeddings.
        replace: first remove an export of other embeddings.

    Returns:
        How many files were written, and how many exist.

    Raises:
        DualencError: the folder holds something else.
    """
    folder = Path(folder)
    path = folder / ABOUT
    about = {"fingerprint": fingerprint_of(embeddings), "count": len(embeddings), "rows_per_file": ROWS_PER_FILE}
    check_folder_target(folder, lambda _: path.is_file(), "export of embeddings")
    if path.exists() and (found := read_json_object(path)) != about:
        if not replace:
            what = f"{found.get('count')} vectors of other embeddings"
            raise DualencError(f"{folder}: holds {what}; push with --replace to remove them, or to another folder")
        for old in (*folder.glob("part-*.parquet"), path):
            old.unlink()
    recover_inside(folder)
    if not path.exists():
        write_json(path, about)

    written = 0
    total = 0
    for number, batch in enumerate(embeddings.record_batches(ROWS_PER_FILE)):
        total = number + 1
        path = folder / f"part-{number:05d}.parquet"
        if path.exists():
            continue
        place = batch.schema.get_field_index("vector")
        # Spark and Milvus read lists of float32, not those of a fixed size or of float16.
        schema = with_short_strings(batch.schema).set(place, pa.field("vector", pa.list_(pa.float32())))
        with atomic_path(path) as part:
            pq.write_table(pa.table(batch).cast(schema), part)
        written += 1
    return written, total
