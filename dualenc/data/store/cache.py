"""The data cache: Arrow files converted from tables, and indexes of tars.

It is next to the caches of `datasets`. `datasets` takes over a second to import, so modules of
`dualenc.data` import it inside the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tqdm import tqdm

from dualenc.data.bad_rows import BadRows
from dualenc.data.store.identity import digest_of, file_identity
from dualenc.errors import explain
from dualenc.io.files import atomic_path, write_json
from dualenc.io.reading import read_json_object

if TYPE_CHECKING:
    from datasets import Dataset

IN_MEMORY_BYTES = 32 << 20
"""Files of at most this total size are kept in memory instead of the cache folder."""
BATCH_ROWS = 2000
VERSION = 9
"""Version of the cached data; increase it when readers change what they return."""


def cache_folder() -> Path:
    """Return the folder of converted and fetched files: `dualenc` in $HF_DATASETS_CACHE."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "dualenc"


def cache_option(source: str | Path) -> dict[str, str]:
    """Return the `cache_dir` to load a folder with.

    `datasets` does not notice changed files in a folder with a README.md, so their sizes and times
    are part of the name.
    """
    files = sorted(file for file in Path(source).rglob("*") if file.is_file())
    if not files:
        return {}
    digest = digest_of([f"{file} {file_identity(file, read=False).decode()}" for file in files])
    return {"cache_dir": str(cache_folder() / "folders" / digest)}


def record_batches(rows: Iterable[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches of `BATCH_ROWS`."""
    remaining = iter(rows)
    while block := list(islice(remaining, BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(block, schema=schema)


def cached_dataset(
    read: Callable[[BadRows], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
    files: Sequence[Path],
    key: object,
    bad_rows: BadRows,
) -> Dataset:
    """Return a data set of the record batches that `read` makes of files.

    It is in memory if the files are small. Otherwise it is a mapped file in the cache folder,
    stored with its counts of bad rows by `key` and the paths, times and contents of the files.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # The counts of these files alone, to store beside them; `bad_rows` may hold others.
    own = BadRows(bad_rows.source, bad_rows.on_error)
    batches = tqdm(
        read(own), files[0].name, unit=" rows", unit_scale=BATCH_ROWS, delay=2, leave=False
    )
    if sum(file.stat().st_size for file in files) <= IN_MEMORY_BYTES:
        dataset = Dataset(InMemoryTable(pa.Table.from_batches(batches, schema)))
        bad_rows.update(own.counts, own.first)
        return dataset
    # The key determines the contents, so it does no harm if two processes write the same file.
    facts = [
        f"{file.resolve()} {file.stat().st_mtime_ns} {file_identity(file).decode()}"
        for file in files
    ]
    target = cache_folder() / f"{digest_of([f'{VERSION} {key}', *facts])}.arrow"
    counts = target.with_suffix(".json")
    if not target.is_file():
        failure = f"{target.parent}: cannot write the data cache"
        with (
            explain(failure, "set HF_DATASETS_CACHE to another folder"),
            atomic_path(target) as part,
        ):
            with pa.ipc.new_stream(str(part), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            # Written before the table gets its name, so that a table has counts even if the
            # process is killed in between.
            write_json(counts, {"counts": own.counts, "first": own.first})
    with explain(f"{target}: damaged data cache", "remove this file"):
        stored = read_json_object(counts, {"counts": dict, "first": dict})
        bad_rows.update(stored["counts"], stored["first"])
        return Dataset.from_file(str(target))
