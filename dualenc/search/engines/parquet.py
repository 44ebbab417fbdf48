"""Parquet files of ids, vectors and columns, as Spark reads them and Milvus loads them in bulk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dualenc.errors import DualencError
from dualenc.files import atomic_path, recover_inside, remove, write_json
from dualenc.reading import read_json_object
from dualenc.search.embeddings import Embeddings
from dualenc.search.engines.collection import with_short_strings
from dualenc.search.engines.push import fingerprint_of

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
        DiskFull: what was written so far stays.
    """
    folder = Path(folder)
    _prepare(embeddings, folder, replace)
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


def _prepare(embeddings: Embeddings, folder: Path, replace: bool) -> None:
    """Refuse a folder with anything else, and describe the embeddings in it."""
    about: dict[str, Any] = {
        "fingerprint": fingerprint_of(embeddings),
        "count": len(embeddings),
        "dim": embeddings.dim,
        "rows_per_file": ROWS_PER_FILE,
    }
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / ABOUT).is_file():
            raise DualencError(f"{folder}: exists and holds no export of embeddings; choose a new or empty folder")
        found = read_json_object(folder / ABOUT)
        if found != about:
            if not replace:
                what = f"{found.get('count')} vectors of other embeddings"
                raise DualencError(f"{folder}: holds {what}; push with --replace to remove them, or to another folder")
            for path in folder.glob("part-*.parquet"):
                remove(path)
            remove(folder / ABOUT)
    recover_inside(folder)
    if not (folder / ABOUT).exists():
        write_json(folder / ABOUT, about)
