"""Writes a folder of embeddings shard by shard, from any number of processes, and resumes after a kill.

The layout is a function of the number of items alone, so every number of processes writes the same files. Of each
shard, `shard-00000.json` says what it was made of and what its bytes are: a shard counts as done only if its items and
its bytes are still the same. `meta.json` says whether all of them are there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc import distributed
from dualenc.embeddings import (
    FORMAT_VERSION,
    Embeddings,
    check_ids,
    file_names,
    open_shard,
    read_meta,
    shard_path,
    write_ids,
    write_snippets,
)
from dualenc.errors import DiskFull, DualencError
from dualenc.files import (
    atomic_path,
    checksum,
    checksums,
    full_disk_told,
    read_json_object,
    recover_inside,
    remove,
    save_array,
    write_json,
)

MAX_SHARD_ROWS = 16384
MIN_SHARD_ROWS = 1024
FEW_SHARDS = 8

Skipped = list[tuple[int, str]]
"""Rows of the corpus without a vector, each with the reason."""


def shard_ranges(num_items: int) -> list[range]:
    """Rows of each shard: at most 16384, and about 8 shards for small corpora so that processes can share them."""
    number = max(math.ceil(num_items / MAX_SHARD_ROWS), min(FEW_SHARDS, math.ceil(num_items / MIN_SHARD_ROWS)), 1)
    parts = [distributed.rank_slice(num_items, i, number) for i in range(number)]
    return [range(part.start, part.stop) for part in parts]


class EmbeddingWriter:
    """Writes embeddings of N items to a folder; every process of a group makes one and writes its share of shards.

    Args:
        folder: where; a new or empty one, or one that an earlier run with the same identity left unfinished.
        ids: (N,) ids of the items.
        dim: D, the size of the vectors.
        dtype: "float16" or "float32".
        identity: what made the vectors, and must be equal for a run to resume another (`model_checksum`, `side`, …).
        notes: further entries of meta.json that need not be equal (`model`, …).
        contents: checksum of the items of a range of rows; a shard whose items have another one now is written again,
            bad ones included. Without it items are told apart by their ids alone.

    Raises:
        DualencError: ids that cannot be written, or the folder holds something else, or embeddings with another
            identity.
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
    ) -> None:
        check_ids(ids)
        self.folder, self.ids, self.dim, self.dtype = Path(folder), ids, dim, dtype
        self.ranges = shard_ranges(len(ids))
        self.identity = {**identity, "dim": dim, "dtype": dtype, "ids_checksum": _text_checksum(ids)}
        self.notes = notes or {}
        self.contents = contents
        self._contents_of: dict[int, str] = {}
        self._check_folder()
        distributed.barrier()
        if distributed.is_main():
            self._start()
        distributed.barrier()

    def missing(self) -> list[int]:
        """Shards of this process that are absent, damaged, or made of items that have changed since.

        If there are any, on any process, the folder counts as unfinished from now on.
        """
        own = range(distributed.rank(), len(self.ranges), distributed.world_size())
        missing = [number for number in own if not self._is_done(number)]
        if any(distributed.gather_objects(bool(missing))) and distributed.is_main():
            self._write_meta(complete=False)
        distributed.barrier()
        return missing

    def write(self, number: int, vectors: np.ndarray, skipped: Skipped = ()) -> None:  # type: ignore[assignment]
        """Write one shard.

        Args:
            number: which shard.
            vectors: (rows, D), one row per item of the shard's range that is not skipped, in order.
            skipped: the items without a vector.

        Raises:
            DualencError: a vector that is not finite, in the precision that is stored.
            DiskFull: what was written so far stays, and a later run goes on from there.
        """
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype, copy=False)
        finite = np.isfinite(stored).all(axis=1)
        if not finite.all():
            bad = {row for row, _ in skipped}
            name = [self.ids[row] for row in self.ranges[number] if row not in bad][int(np.argmin(finite))]
            raise DualencError(f"the vector of {name!r} is not finite as {self.dtype}; check the model, or use float32")
        # In this order: a kill in between leaves a shard that is not said to be done.
        remove(self._note_path(number))
        path = shard_path(self.folder, number)
        with atomic_path(path) as beside:
            save_array(beside, stored)
        note = {"contents": self._contents(number), "sha256": checksum(path), "skipped": list(skipped)}
        write_json(self._note_path(number), note)

    def finish(self, snippet: Callable[[int], str] | None = None) -> Embeddings:
        """Write ids, snippets and the final meta.json once every process has written its shards.

        Args:
            snippet: gives what to show for an item by its row; None or nothing but "": no snippets.

        Returns:
            The embeddings, mapped into memory.

        Raises:
            DualencError: every item was skipped.
        """
        distributed.barrier()
        if distributed.is_main():
            self._finish(snippet)
        distributed.barrier()
        return Embeddings.open(self.folder, verify=False)

    def _check_folder(self) -> None:
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return
        if not (self.folder / "meta.json").is_file():
            raise DualencError(f"{self.folder}: exists and holds no embeddings; choose a new or empty folder")
        found = read_meta(self.folder)
        for key, value in self.identity.items():
            if found.get(key) != value:
                raise DualencError(
                    f"{self.folder}: holds embeddings with {key} {_short(found.get(key))}, not {_short(value)}; "
                    "choose another folder or remove it"
                )

    def _start(self) -> None:
        with full_disk_told(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        recover_inside(self.folder)
        if not (self.folder / "meta.json").exists():
            try:
                self._write_meta(complete=False)
            except DiskFull:
                self.folder.rmdir()
                raise

    def _finish(self, snippet: Callable[[int], str] | None) -> None:
        notes = [self._note(number) for number in range(len(self.ranges))]
        skipped = [entry for note in notes for entry in note["skipped"]]
        bad = {row for row, _ in skipped}
        kept = [row for row in range(len(self.ids)) if row not in bad]
        if not kept:
            raise DualencError(f"{self.folder}: none of {len(self.ids)} items could be used; first: {_first(skipped)}")
        with atomic_path(self.folder / "ids.txt") as beside:
            write_ids(beside, [self.ids[row] for row in kept])
        if snippet is not None and snippet(kept[0]):
            with atomic_path(self.folder / "snippets.jsonl") as beside:
                write_snippets(beside, (snippet(row) for row in kept))
        else:
            remove(self.folder / "snippets.jsonl")
        known = {shard_path(self.folder, number).name: note["sha256"] for number, note in enumerate(notes)}
        names = file_names(self.folder, len(notes))
        files = known | checksums(self.folder, [name for name in names if name not in known])
        shard_rows = [len(rows) - len(note["skipped"]) for rows, note in zip(self.ranges, notes)]
        named = [{"id": self.ids[row], "reason": reason} for row, reason in skipped[:100]]
        state = {"shard_rows": shard_rows, "skipped": len(skipped), "first_skipped": named, "files": files}
        self._write_meta(complete=True, **state)

    def _write_meta(self, **state: Any) -> None:
        head = {"format": "dualenc embeddings", "version": FORMAT_VERSION}
        write_json(self.folder / "meta.json", {**head, **self.notes, **self.identity, **state})

    def _is_done(self, number: int) -> bool:
        path = shard_path(self.folder, number)
        try:
            note = self._note(number)
            open_shard(path, (len(self.ranges[number]) - len(note["skipped"]), self.dim), self.dtype)
        except DualencError:
            return False
        return note["contents"] == self._contents(number) and note["sha256"] == checksum(path)

    def _contents(self, number: int) -> str:
        if number not in self._contents_of:
            self._contents_of[number] = "" if self.contents is None else self.contents(self.ranges[number])
        return self._contents_of[number]

    def _note(self, number: int) -> dict[str, Any]:
        """What is written down of a shard: contents, sha256, skipped.

        Raises:
            DualencError: it is not there, or damaged.
        """
        path = self._note_path(number)
        note = read_json_object(path, {"contents": str, "sha256": str, "skipped": list})
        for entry in note["skipped"]:
            if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in self.ranges[number]):
                raise DualencError(f"{path}: {str(entry)[:80]} is no skipped item; run the same `dualenc embed` again")
        return note

    def _note_path(self, number: int) -> Path:
        return shard_path(self.folder, number).with_suffix(".json")


def _text_checksum(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps(text).encode())
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) > 40 else text


def _first(skipped: Skipped) -> str:
    return skipped[0][1] if skipped else "there are none"
