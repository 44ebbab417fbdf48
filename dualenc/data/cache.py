"""The data cache: Arrow files converted from tables, next to the caches of `datasets`.

`datasets` takes over a second to import, so modules of `dualenc.data` import it inside the functions that need it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dualenc.errors import DualencError, first_line
from dualenc.files import atomic_path, write_json
from dualenc.reading import read_json_object

if TYPE_CHECKING:
    from datasets import Dataset

    from dualenc.data.skips import Skips

IN_MEMORY_BYTES = 32 << 20
"""Files that are smaller than this together are kept in memory instead of the cache folder."""
VERSION = 3
"""Of what the cache holds; raise it when the reading changes."""


def cache_folder() -> Path:
    """Where converted and fetched files are kept: `dualenc` in the cache folder of `datasets` ($HF_DATASETS_CACHE)."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "dualenc"


def dataset_of_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, size: int, key: Callable[[], str], skips: Skips | None = None
) -> Dataset:
    """A data set of some batches: in memory if their files are small, else mapped from the cache folder.

    Not `Dataset.from_generator`: a million rows of jsonl take 5.6 s of CPU here and 23.5 s there (datasets 5.2), and it
    wraps our errors in its own. `Dataset.from_json` and `from_csv` are several times faster than reading line by line,
    but stop at the first bad row, name no line, and guess types. A parquet file of a million rows takes 1.4 s and 225
    MiB here, 1.6 s and 356 MiB with `Dataset.from_parquet`.

    Args:
        batches: the rows, one batch in memory at a time; not read when the cache has them.
        schema: of the batches.
        size: of the files that the rows come from, in bytes.
        key: identifies the contents; called if they go into the cache.
        skips: counts the bad rows; the counts are kept with the file and restored from it.

    Raises:
        DualencError: a cache that is damaged or cannot be written, or what reading the batches raises.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable

    if size <= IN_MEMORY_BYTES:
        return Dataset(InMemoryTable(pa.Table.from_batches(batches, schema=schema)))
    target = _cached_file(key(), ".arrow")
    counts = target.with_suffix(".json")
    # The counts are written after the table: a process killed in between leaves a table that is written again.
    cached = target.is_file() and (skips is None or counts.is_file())
    if not cached:
        try:
            with (
                atomic_path(target) as part,
                pa.OSFile(str(part), "wb") as sink,
                pa.ipc.new_stream(sink, schema) as out,
            ):
                for batch in batches:
                    out.write_batch(batch)
            if skips is not None:
                write_json(counts, {"counts": skips.counts, "first": skips.first})
        except OSError as error:
            raise unwritable_cache(target.parent, error) from None
    try:
        if cached and skips is not None:
            kept = read_json_object(counts, {"counts": dict, "first": dict})
            skips.counts.update(kept["counts"])
            skips.first.update(kept["first"])
        return Dataset.from_file(str(target))
    except (pa.ArrowException, OSError, DualencError) as error:
        raise DualencError(f"{target}: damaged data cache ({first_line(error)}); remove this file") from None


def cached_result(compute: Callable[[], dict[str, Any]], size: int, key: Callable[[], str]) -> dict[str, Any]:
    """A JSON object computed from files of `size` bytes, kept in the cache folder unless they are small."""
    if size <= IN_MEMORY_BYTES:
        return compute()
    target = _cached_file(key(), ".json")
    if target.is_file():
        return read_json_object(target)
    result = compute()
    try:
        write_json(target, result)
    except OSError as error:
        raise unwritable_cache(target.parent, error) from None
    return result


def _cached_file(key: str, suffix: str) -> Path:
    # Contents under one key never change, so two processes that write the same file do no harm.
    digest = hashlib.sha256(f"{VERSION} {key}".encode()).hexdigest()
    return cache_folder() / f"{digest[:32]}{suffix}"


def unwritable_cache(folder: Path, error: OSError) -> DualencError:
    """The error of a cache folder that cannot be written."""
    reason = error.strerror or first_line(error)
    return DualencError(f"{folder}: cannot write the data cache ({reason}); set HF_DATASETS_CACHE to another folder")
