"""Embedding writer: any number of workers write the shards of a shared folder, and resume at any
moment.

data-00001.lock      while the folder is unfinished: the lock of the worker that writes this shard
finish.lock          and of the worker that writes the other files of
`dualenc.data.store.vector_shards`
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from dualenc import distributed
from dualenc.data.store.items import (
    ORDER,
    check_ids,
    item_batch,
    text_hash,
    write_batches,
    write_order,
)
from dualenc.data.store.vector_shards import (
    AGAIN,
    FORMAT,
    FORMAT_VERSION,
    Embeddings,
    read_meta,
    read_shard,
    shard_path,
)
from dualenc.errors import DualencError
from dualenc.io.checksums import recorded
from dualenc.io.files import recover_inside, remove, version_of, write_json
from dualenc.io.targets import check_outside

MAX_SHARD_ROWS = 16384
MIN_SHARD_ROWS = 1024
MIN_SHARDS = 8
"""Of a small corpus, unless its shards would get too small."""
CREATION = "create"
"""Name of the lock under which one worker writes the first meta.json."""
MIN_WAIT = 0.05
MAX_WAIT = 2.0
"""Seconds between polls for the shards of other workers, which grow."""
_NOTE = b"dualenc"
"""Key of the provenance of a shard in its schema's metadata."""

Skipped = list[tuple[int, str]]
"""Rows of the corpus without a vector, each with the reason."""


def skipped_entries(ids: Sequence[str], skipped: Skipped) -> dict[str, Any]:
    """Entries of meta.json on items without a vector: their number, and the first hundred."""
    first = [{"id": ids[row], "reason": reason} for row, reason in skipped[:100]]
    return {"skipped": len(skipped), "first_skipped": first}


def shard_ranges(num_items: int) -> list[range]:
    """Rows of each shard: at most 16384, and about 8 shards for small corpora so that processes can
    share them."""
    number = max(
        math.ceil(num_items / MAX_SHARD_ROWS),
        min(MIN_SHARDS, math.ceil(num_items / MIN_SHARD_ROWS)),
        1,
    )
    parts = [distributed.rank_slice(num_items, i, number) for i in range(number)]
    return [range(part.start, part.stop) for part in parts]


def check_embeddings_target(folder: Path) -> bool:
    """True if a folder holds embeddings, finished or not; refuse others, and places inside such."""
    check_outside(folder)
    exists = folder.exists() and not folder.is_dir()
    if folder.is_dir():
        # Another worker may be about to write meta.json.
        exists = any(
            not name.startswith((".meta.json.", f"{CREATION}.lock")) for name in os.listdir(folder)
        )
    if exists and not (folder / "meta.json").is_file():
        raise DualencError(
            f"{folder}: exists and holds no embeddings; choose a new or empty folder"
        )
    return exists and bool(read_meta(folder))


class EmbeddingWriter:
    """Writes embeddings of N items to a folder that any number of workers share, each with a
    writer.

    Args:
        folder: new or empty, or written or left unfinished by workers with the same identity.
        ids: (N,) ids of the items.
        dim: D, the size of the vectors.
        dtype: "float16" or "float32".
        identity: entries of meta.json that must be equal to join or resume (`model_checksum`,
            `side`, …).
        notes: further entries of meta.json that may differ (`model`, …).
        contents: fingerprint of the items of a range of rows; a shard whose items have changed is
            written again.
        snippet: the text to show for a row; None keeps no texts.
        whole_text: the text of a row, of which a hash is kept; None keeps none.
        columns: (N,) rows of the user's columns, to filter search results by.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        ids: Sequence[str],
        dim: int,
        dtype: str,
        identity: dict[str, Any],
        notes: dict[str, Any] | None = None,
        contents: Callable[[range], str] | None = None,
        snippet: Callable[[int], str] | None = None,
        columns: pa.Table | None = None,
        whole_text: Callable[[int], str] | None = None,
    ) -> None:
        check_ids(ids)
        digest = hashlib.sha256()
        for name in ids:
            digest.update(json.dumps(name).encode())
        self.folder = Path(folder)
        self.ids = ids
        self.dim = dim
        self.dtype = dtype
        self.ranges = shard_ranges(len(ids))
        self.identity = {**identity, "dim": dim, "dtype": dtype, "ids_checksum": digest.hexdigest()}
        self.notes = notes or {}
        self.contents = functools.cache(contents or (lambda _: ""))
        self.snippet = snippet
        self.columns = columns
        self.whole_text = whole_text
        self._has_checked = False
        self._create()
        # Killed workers leave lock files behind.
        if self._is_complete():
            self._remove_locks()
        self._initial_version = version_of(self.folder / "meta.json")
        recover_inside(self.folder)

    def _create(self) -> None:
        if check_embeddings_target(self.folder):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock(CREATION, wait=True):
            if not (self.folder / "meta.json").exists():
                self._write_meta(complete=False)

    def _is_complete(self) -> bool:
        """Whether the folder is finished, according to its meta.json, which must be of the same
        embeddings."""
        meta = read_meta(self.folder)
        for key, value in self.identity.items():
            if meta.get(key) != value:
                problem = (
                    f"holds embeddings with {key} {str(meta.get(key))[:40]}, not {str(value)[:40]}"
                )
                raise DualencError(f"{self.folder}: {problem}; choose another folder or remove it")
        return bool(meta["complete"])

    def _lock(self, name: str, wait: bool = False) -> AbstractContextManager[bool]:
        return work_lock(self.folder / f"{name}.lock", wait)

    def _remove_locks(self) -> None:
        """Remove the lock files; a worker that still holds one finds its shard written."""
        for path in self.folder.glob("*.lock"):
            remove(path)

    def write_all(self, encode: Callable[[int], tuple[np.ndarray, Skipped]]) -> Embeddings:
        """Write the shards that no other worker writes, until the folder is finished by this or
        another worker.

        Workers may join and die at any moment: a shard is claimed by a file lock, and one without a
        shard to write waits for the others, and writes the shards of those that die.
        """
        wait = MIN_WAIT
        while True:
            if self._write_next(encode):
                wait = MIN_WAIT
                continue
            with self._lock("finish") as is_mine:
                # Finished since this worker began, by another one.
                if (
                    is_mine
                    and self._is_complete()
                    and version_of(self.folder / "meta.json") != self._initial_version
                ):
                    self._remove_locks()
                    return Embeddings.open(self.folder)
                if is_mine and not self.unwritten() and not self.outdated():
                    return self.finish()
            time.sleep(wait)
            wait = min(1.5 * wait, MAX_WAIT)

    def _write_next(self, encode: Callable[[int], tuple[np.ndarray, Skipped]]) -> bool:
        """Write the first missing shard that no other worker writes; returns whether there was
        one."""
        for number in self.unwritten():
            with self._lock(f"data-{number:05d}") as is_mine:
                if is_mine and not shard_path(self.folder, number).exists():
                    vectors, skipped = encode(number)
                    self.write(number, vectors, skipped)
                    return True
        return False

    def unwritten(self) -> list[int]:
        """Shards whose file does not exist."""
        names = set(os.listdir(self.folder))
        return [
            number
            for number in range(len(self.ranges))
            if shard_path(self.folder, number).name not in names
        ]

    def outdated(self) -> list[int]:
        """Remove the shards that are damaged, or of items that have changed since; all are read,
        once per worker.

        Shards of unchanged items with other texts or columns are written again with their vectors.
        """
        outdated: list[int] = []
        if self._has_checked:
            return outdated
        self._has_checked = True
        for number, rows in enumerate(self.ranges):
            try:
                batch, vectors = read_shard(shard_path(self.folder, number), self.dim, self.dtype)
                note = self._note(number, batch)
            except DualencError:
                outdated.append(number)
                continue
            if note["contents"] != self.contents(rows) or note["sha256"] != _digest(batch):
                outdated.append(number)
            elif not batch.equals(
                self._batch(vectors, self._with_vectors(number, note["skipped"]))
            ):
                self.write(number, vectors, note["skipped"])
        if outdated:
            self._write_meta(complete=False)
            for number in outdated:
                remove(shard_path(self.folder, number))
        return outdated

    def write(
        self, number: int, vectors: np.ndarray, skipped: Sequence[tuple[int, str]] = ()
    ) -> None:
        """Write one shard: vectors (rows, D) of the items of its range that are not skipped, in
        order."""
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype, copy=False)
        rows = self._with_vectors(number, skipped)
        finite = np.isfinite(stored).all(axis=1)
        if not finite.all():
            name = self.ids[rows[int(np.argmin(finite))]]
            raise DualencError(
                f"the vector of {name!r} is not finite as {self.dtype}; check the model, or use float32"
            )
        batch = self._batch(stored, rows)
        note = {
            "contents": self.contents(self.ranges[number]),
            "sha256": _digest(batch),
            "skipped": list(skipped),
        }
        metadata = {_NOTE: json.dumps(note, sort_keys=True)}
        write_batches(shard_path(self.folder, number), [batch.replace_schema_metadata(metadata)])

    def _batch(self, vectors: np.ndarray, rows: Sequence[int]) -> pa.RecordBatch:
        ids = [self.ids[row] for row in rows]
        texts = None if self.snippet is None else [self.snippet(row) for row in rows]
        columns = None if self.columns is None else self.columns.take(list(rows))
        hashes = None
        if self.whole_text is not None:
            hashes = np.array([text_hash(self.whole_text(row)) for row in rows], np.uint64)
        return item_batch(ids, texts, columns, vectors, hashes)

    def finish(self) -> Embeddings:
        """Write the order of the ids and the final meta.json, after all shards, of which one has a
        vector."""
        paths = [shard_path(self.folder, number) for number in range(len(self.ranges))]
        notes = [self._note(number) for number in range(len(paths))]
        skipped = [entry for note in notes for entry in note["skipped"]]
        shard_rows = [len(rows) - len(note["skipped"]) for rows, note in zip(self.ranges, notes)]
        if not sum(shard_rows):
            why = skipped[0][1] if skipped else "there are none"
            raise DualencError(
                f"{self.folder}: none of {len(self.ids)} items could be used; first: {why}"
            )
        write_order(paths)
        files = recorded(self.folder, [path.name for path in paths] + [ORDER])
        entries = {"shard_rows": shard_rows, **skipped_entries(self.ids, skipped), **files}
        self._write_meta(complete=True, **entries)
        self._remove_locks()
        return Embeddings.open(self.folder)

    def _with_vectors(self, number: int, skipped: Sequence[tuple[int, str]]) -> Sequence[int]:
        bad = {row for row, _ in skipped}
        return [row for row in self.ranges[number] if row not in bad]

    def _write_meta(self, **state: Any) -> None:
        head = {"format": FORMAT, "version": FORMAT_VERSION}
        write_json(self.folder / "meta.json", {**head, **self.notes, **self.identity, **state})

    def _note(self, number: int, batch: pa.RecordBatch | None = None) -> dict[str, Any]:
        """The provenance of a shard: contents, sha256, skipped."""
        path = shard_path(self.folder, number)
        batch = batch or read_shard(path, self.dim, self.dtype)[0]
        try:
            note = json.loads((batch.schema.metadata or {})[_NOTE])
            is_valid = all(
                row in self.ranges[number] and isinstance(reason, str)
                for row, reason in note["skipped"]
            )
            if not is_valid or len(batch) != len(self.ranges[number]) - len(note["skipped"]):
                raise ValueError
            return {name: note[name] for name in ("contents", "sha256", "skipped")}
        except (KeyError, ValueError, TypeError, RecursionError):
            raise DualencError(
                f"{path}: corrupt (it does not say what it was made of); {AGAIN}"
            ) from None


def _digest(batch: pa.RecordBatch) -> str:
    return hashlib.sha256(batch.serialize()).hexdigest()


@contextmanager
def work_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Yield whether this worker got a file lock, held until the end of the context or the death of
    this process.

    With `wait` it waits until it does. A folder that is gone is a FileNotFoundError. The empty file
    stays.
    """
    lock = FileLock(path)
    while True:
        # FileLock would create the folder again, which another worker may have removed after
        # finishing.
        if not path.parent.is_dir():
            raise FileNotFoundError(path)
        try:
            lock.acquire(timeout=MIN_WAIT if wait else 0)
            break
        except Timeout:
            if not wait:
                yield False
                return
        except NotImplementedError:
            raise DualencError(
                f"{path.parent}: its file system has no locks; choose another disk"
            ) from None
    try:
        yield True
    finally:
        lock.release()
