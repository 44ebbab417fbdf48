"""The data cache: Arrow files converted from tables, next to the caches of `datasets`.

`datasets` takes over a second to import, so modules of `dualenc.data` import it inside the functions that need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tqdm import tqdm

from dualenc.data.bad_rows import BadRows
from dualenc.data.identity import digest_of, file_identity
from dualenc.errors import explain
from dualenc.files import atomic_path, write_json
from dualenc.reading import read_json_object

if TYPE_CHECKING:
    from datasets import Dataset

IN_MEMORY_BYTES = 32 << 20
"""Files that are smaller than this together are kept in memory instead of the cache folder."""
BATCH_ROWS = 2000
VERSION = 6
"""Of what the cache holds; raise it when the reading changes."""
FIX_CACHE = "set HF_DATASETS_CACHE to another folder"


def cache_folder() -> Path:
    """Where converted and fetched files are kept: `dualenc` in the cache folder of `datasets` ($HF_DATASETS_CACHE)."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "dualenc"


def cache_option(source: str | Path) -> dict[str, str]:
    """The `cache_dir` to load a folder with: `datasets` notices no change of files in a folder with a README.md."""
    files = (
        sorted(file for file in Path(source).rglob("*") if file.is_file()) if Path(source).is_dir() else []
    )
    if not files:
        return {}
    digest = digest_of([f"{file} {file_identity(file, read=False).decode()}" for file in files])
    return {"cache_dir": str(cache_folder() / "folders" / digest)}


def dataset_of_batches(
    read: Callable[[BadRows], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
    files: Sequence[Path],
    key: Sequence[Any],
    bad_rows: BadRows,
) -> Dataset:
    """A data set of the record batches that `read` makes of files: in memory if these are small, else a mapped file.

    In the cache folder the batches are stored by the contents of the files and by `key`, with what was counted as bad.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable

    own = BadRows(bad_rows.source, bad_rows.on_error)
    bar = {"unit": " rows", "unit_scale": BATCH_ROWS, "delay": 2, "leave": False}
    batches = tqdm(read(own), files[0].name, **bar)
    if sum(file.stat().st_size for file in files) <= IN_MEMORY_BYTES:
        dataset = Dataset(InMemoryTable(pa.Table.from_batches(batches, schema=schema)))
        bad_rows.update(own.counts, own.first)
        return dataset
    # Paths too, which messages name. Contents under one key never change: two processes may write the same file.
    facts = [
        (str(file.resolve()), file.stat().st_mtime_ns, file_identity(file).decode()) for file in files
    ]
    digest = hashlib.sha256(json.dumps([VERSION, facts, key]).encode()).hexdigest()
    target = cache_folder() / f"{digest[:32]}.arrow"
    counts = target.with_suffix(".json")
    # The counts are written after the table: a process killed in between leaves a table that is written again.
    if not (target.is_file() and counts.is_file()):
        with explain(f"{target.parent}: cannot write the data cache", FIX_CACHE):
            with atomic_path(target) as part, pa.ipc.new_stream(str(part), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            write_json(counts, {"counts": own.counts, "first": own.first})
    with explain(f"{target}: damaged data cache", "remove this file"):
        stored = read_json_object(counts, {"counts": dict, "first": dict})
        bad_rows.update(stored["counts"], stored["first"])
        return Dataset.from_file(str(target))
