"""Embedding writer: any number of workers write the shards of a shared folder and can resume.

The files are those of `dualenc.data.store.vector_shards`, and while the folder is unfinished:

data-00001.lock      lock of the worker that writes this shard
finish.lock          lock of the worker that writes the other files
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
    read_provenance,
    read_shard,
    shard_path,
)
from dualenc.errors import DualencError
from dualenc.io.checksums import recorded
from dualenc.io.files import recover_inside, remove, version_of
from dualenc.io.provenance import META, Provenance
from dualenc.io.targets import check_outside

MAX_SHARD_ROWS = 16384
MIN_SHARD_ROWS = 1024
MIN_SHARDS = 8
"""Minimum number of shards of a small corpus, unless they would get too small."""
CREATION = "create"
"""Name of the lock that one worker holds to write the first meta.json."""
MIN_WAIT = 0.05
MAX_WAIT = 2.0
"""Bounds of the growing interval, in seconds, between polls for other workers' shards."""
_NOTE = b"dualenc"
"""Key of a shard's provenance in the metadata of its schema."""

Skipped = list[tuple[int, str]]
"""Skipped corpus rows and why they were skipped."""


def skipped_entries(ids: Sequence[str], skipped: Skipped) -> dict[str, Any]:
    """Return entries of meta.json on items without a vector: number, and the first 100."""
    first = [{"id": ids[row], "reason": reason} for row, reason in skipped[:100]]
    return {"skipped": len(skipped), "first_skipped": first}


def shard_ranges(num_items: int) -> list[range]:
    """Return the rows of each shard.

    A shard has at most 16,384 rows. Small corpora get about 8 shards, so that processes can share
    them.

    Args:
        num_items: N, number of items.
    """
    number = max(
        math.ceil(num_items / MAX_SHARD_ROWS),
        min(MIN_SHARDS, math.ceil(num_items / MIN_SHARD_ROWS)),
        1,
    )
    parts = [distributed.rank_slice(num_items, i, number) for i in range(number)]
    return [range(part.start, part.stop) for part in parts]


def check_embeddings_target(folder: Path) -> bool:
    """Return True if a folder holds embeddings, finished or not; raise for other content."""
    check_outside(folder)
    exists = folder.exists() and not folder.is_dir()
    if folder.is_dir():
        # The temporary files of a worker that is about to write meta.json do not count.
        exists = any(
            not name.startswith((".meta.json.", f"{CREATION}.lock")) for name in os.listdir(folder)
        )
    if exists and not (folder / META).is_file():
        raise DualencError(
            "already exists and is not a folder of embeddings",
            fix="choose a new or empty folder",
            where=folder,
        )
    return exists and read_provenance(folder) is not None


class EmbeddingWriter:
    """Write embeddings of N items to a folder that any number of workers share.

    Each worker creates a writer and calls `write_all`.

        writer = EmbeddingWriter("out", ["a", "b"], 8, "float32", {"side": "left"})
        embeddings = writer.write_all(
            lambda number: (np.ones((len(writer.ranges[number]), 8), np.float32), [])
        )

    Args:
        folder: new or empty folder, or one that workers with the same identity wrote or left
            unfinished.
        ids: (N,) ids of the items.
        dim: D, size of the vectors.
        dtype: precision of the stored vectors, "float16" or "float32".
        identity: entries of meta.json that must be equal to join or resume (`model_checksum`,
            `side`, …).
        notes: further entries of meta.json that may differ (`model`, …).
        contents: function from a range of rows to the fingerprint of their items; a shard whose
            items have changed is written again.
        snippet: function from a row to the text to show for it; None stores no texts.
        whole_text: function from a row to its full text, of which a hash is stored; None stores
            none.
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
        # JSON quotes each id, so that no two lists of ids give the same bytes.
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
        # Workers that were killed leave lock files behind.
        if self._is_complete():
            self._remove_locks()
        self._initial_version = version_of(self.folder / META)
        recover_inside(self.folder)

    def _create(self) -> None:
        """Create the folder with an unfinished meta.json, unless another worker has done so."""
        if check_embeddings_target(self.folder):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # Several workers may start at once; the first one writes meta.json.
        with self._lock(CREATION, wait=True):
            if not (self.folder / META).exists():
                self._write_meta(complete=False)

    def _is_complete(self) -> bool:
        """Return True if meta.json says complete; raise if it describes other embeddings."""
        provenance = read_provenance(self.folder)
        if difference := provenance.difference(self.identity):
            name, present, own = difference
            problem = f"holds embeddings with {name} {str(present)[:40]}, not {str(own)[:40]}"
            if name == "model_checksum":
                problem = f"holds embeddings by other weights ({provenance.model or 'unnamed'})"
            raise DualencError(
                problem,
                fix="choose another folder or remove it",
                where=self.folder,
            )
        return provenance.complete

    def _lock(self, name: str, wait: bool = False) -> AbstractContextManager[bool]:
        """Lock a name within the folder."""
        return work_lock(self.folder / f"{name}.lock", wait)

    def _remove_locks(self) -> None:
        """Remove the lock files; a worker that still holds one finds its shard written."""
        for path in self.folder.glob("*.lock"):
            remove(path)

    def write_all(self, encode: Callable[[int], tuple[np.ndarray, Skipped]]) -> Embeddings:
        """Write shards until the folder is finished, by this worker or another one.

        Workers may join and die at any moment. A file lock claims a shard. A worker without a shard
        to
        write waits for the others, and writes the shards of those that die.

        Args:
            encode: function from the number of a shard to its vectors (rows, D) and skipped rows.
        """
        wait = MIN_WAIT
        while True:
            if self._write_next(encode):
                wait = MIN_WAIT
                continue
            with self._lock("finish") as is_mine:
                # Another worker has finished the folder since this one began.
                if (
                    is_mine
                    and self._is_complete()
                    and version_of(self.folder / META) != self._initial_version
                ):
                    self._remove_locks()
                    return Embeddings.open(self.folder)
                if is_mine and not self.unwritten() and not self.outdated():
                    return self.finish()
            # Back off, because polling a network file system slows all workers.
            time.sleep(wait)
            wait = min(1.5 * wait, MAX_WAIT)

    def _write_next(self, encode: Callable[[int], tuple[np.ndarray, Skipped]]) -> bool:
        """Write the first missing shard that no other worker writes; False if there is none."""
        for number in self.unwritten():
            with self._lock(f"data-{number:05d}") as is_mine:
                # The previous owner may have written the shard just before releasing the lock.
                if is_mine and not shard_path(self.folder, number).exists():
                    vectors, skipped = encode(number)
                    self.write(number, vectors, skipped)
                    return True
        return False

    def unwritten(self) -> list[int]:
        """Return the numbers of the shards whose file does not exist."""
        names = set(os.listdir(self.folder))
        return [
            number
            for number in range(len(self.ranges))
            if shard_path(self.folder, number).name not in names
        ]

    def outdated(self) -> list[int]:
        """Remove shards that are damaged or whose items have changed, and return their numbers.

        Reads all shards, once per worker. Shards of unchanged items with other texts or columns are
        written again with their vectors.
        """
        outdated: list[int] = []
        # Reading all shards is slow, and `write_all` asks again after each wait.
        if self._has_checked:
            return outdated
        self._has_checked = True
        for number, rows in enumerate(self.ranges):
            try:
                batch, vectors = read_shard(shard_path(self.folder, number), self.dim, self.dtype)
                # The note holds what the items were when the shard was written.
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
        # Mark the folder as unfinished first, so a kill in between cannot leave it incomplete.
        if outdated:
            self._write_meta(complete=False)
            for number in outdated:
                remove(shard_path(self.folder, number))
        return outdated

    def write(
        self, number: int, vectors: np.ndarray, skipped: Sequence[tuple[int, str]] = ()
    ) -> None:
        """Write one shard.

        Args:
            number: number of the shard.
            vectors: vectors (rows, D) of the items of its range that are not skipped, in order.
            skipped: rows without a vector, with reasons.
        """
        # Overflow in float16 gives infinity, which is reported below with the item's id.
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype, copy=False)
        rows = self._with_vectors(number, skipped)
        finite = np.isfinite(stored).all(axis=1)
        if not finite.all():
            name = self.ids[rows[int(np.argmin(finite))]]
            raise DualencError(
                f"the vector of {name!r} is not finite as {self.dtype}",
                fix="check the model, or use float32",
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
        """Return ids, texts, columns and vectors of some rows as a record batch."""
        ids = [self.ids[row] for row in rows]
        texts = None if self.snippet is None else [self.snippet(row) for row in rows]
        columns = None if self.columns is None else self.columns.take(list(rows))
        hashes = None
        if self.whole_text is not None:
            hashes = np.array([text_hash(self.whole_text(row)) for row in rows], np.uint64)
        return item_batch(ids, texts, columns, vectors, hashes)

    def finish(self) -> Embeddings:
        """Write the order of the ids and the final meta.json, after all shards are written."""
        paths = [shard_path(self.folder, number) for number in range(len(self.ranges))]
        notes = [self._note(number) for number in range(len(paths))]
        skipped = [entry for note in notes for entry in note["skipped"]]
        shard_rows = [len(rows) - len(note["skipped"]) for rows, note in zip(self.ranges, notes)]
        if not sum(shard_rows):
            why = skipped[0][1] if skipped else "there are none"
            raise DualencError(
                f"none of {len(self.ids)} items could be used; first: {why}",
                fix="correct the items",
                where=self.folder,
            )
        # meta.json comes last: a folder counts as finished from its `complete` on.
        write_order(paths)
        files = recorded(self.folder, [path.name for path in paths] + [ORDER])
        entries = {"shard_rows": shard_rows, **skipped_entries(self.ids, skipped), **files}
        self._write_meta(complete=True, **entries)
        self._remove_locks()
        return Embeddings.open(self.folder)

    def _with_vectors(self, number: int, skipped: Sequence[tuple[int, str]]) -> Sequence[int]:
        """Return the rows of a shard that are not skipped."""
        bad = {row for row, _ in skipped}
        return [row for row in self.ranges[number] if row not in bad]

    def _write_meta(self, **state: Any) -> None:
        """Write meta.json with the given state."""
        head = {"format": FORMAT, "version": FORMAT_VERSION}
        entries = {**head, **self.notes, **self.identity, **state}
        Provenance.from_entries(entries).write(self.folder)

    def _note(self, number: int, batch: pa.RecordBatch | None = None) -> dict[str, Any]:
        """Return the provenance of a shard: contents, sha256, skipped."""
        path = shard_path(self.folder, number)
        batch = batch or read_shard(path, self.dim, self.dtype)[0]
        # A shard may be damaged or foreign, so do not trust its metadata.
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
                "corrupt (its provenance is missing or invalid)",
                fix=AGAIN,
                where=path,
            ) from None


def _digest(batch: pa.RecordBatch) -> str:
    """Return the SHA-256 of a record batch."""
    return hashlib.sha256(batch.serialize()).hexdigest()


@contextmanager
def work_lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Yield True if this worker gets a file lock, held until the context or this process ends.

    The empty lock file stays.

    Args:
        path: the lock file.
        wait: wait until the lock is free; by default yield False if another worker holds it.

    Raises:
        FileNotFoundError: the folder was removed.
    """
    lock = FileLock(path)
    while True:
        # FileLock would recreate the folder, which another worker may have removed on finishing.
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
                "its file system does not support locks",
                fix="choose another disk",
                where=path.parent,
            ) from None
    try:
        yield True
    finally:
        lock.release()
