"""Writes a folder of embeddings shard by shard, from any number of processes, and resumes after a kill.

The layout is a function of the number of items alone, so every number of processes writes the same files. A shard
appears under its name only once it is complete; `meta.json` says whether all of them are there.
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
from dualenc.embeddings import FORMAT_VERSION, Embeddings, open_shard, read_meta, shard_path, write_ids, write_snippets
from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json, remove, write_json

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

    Raises:
        DualencError: the folder holds something else, or embeddings with another identity.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        ids: Sequence[str],
        dim: int,
        dtype: str,
        identity: dict[str, Any],
        notes: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.ids, self.dim, self.dtype = Path(folder), ids, dim, dtype
        self.ranges = shard_ranges(len(ids))
        self.identity = {**identity, "dim": dim, "dtype": dtype, "ids_checksum": _text_checksum(ids)}
        self.notes = notes or {}
        self._check_folder()
        distributed.barrier()
        if distributed.is_main():
            self._start()
        distributed.barrier()

    def missing(self) -> list[int]:
        """Shards of this process that are absent or damaged."""
        own = range(distributed.rank(), len(self.ranges), distributed.world_size())
        return [number for number in own if not self._is_complete(number)]

    def write(self, number: int, vectors: np.ndarray, skipped: Skipped = ()) -> None:  # type: ignore[assignment]
        """Write one shard.

        Args:
            number: which shard.
            vectors: (rows, D), one row per item of the shard's range that is not skipped, in order.
            skipped: the items without a vector.
        """
        remove(self._skipped_path(number))
        if skipped:
            write_json(self._skipped_path(number), skipped)
        with atomic_path(shard_path(self.folder, number)) as beside, open(beside, "wb") as stream:
            np.save(stream, vectors.astype(self.dtype, copy=False))

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
        return Embeddings.open(self.folder)

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
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*.part-*"):
            remove(leftover)
        if not (self.folder / "meta.json").exists():
            self._write_meta(complete=False)

    def _finish(self, snippet: Callable[[int], str] | None) -> None:
        skipped = [entry for number in range(len(self.ranges)) for entry in self._skipped(number)]
        bad = {row for row, _ in skipped}
        kept = [row for row in range(len(self.ids)) if row not in bad]
        if not kept:
            raise DualencError(f"{self.folder}: none of {len(self.ids)} items could be used; first: {_first(skipped)}")
        with atomic_path(self.folder / "ids.txt") as beside:
            write_ids(beside, [self.ids[row] for row in kept])
        if snippet is not None and snippet(kept[0]):
            with atomic_path(self.folder / "snippets.jsonl") as beside:
                write_snippets(beside, (snippet(row) for row in kept))
        shard_rows = [len(rows) - len(self._skipped(number)) for number, rows in enumerate(self.ranges)]
        named = [{"id": self.ids[row], "reason": reason} for row, reason in skipped[:100]]
        self._write_meta(complete=True, shard_rows=shard_rows, skipped=len(skipped), first_skipped=named)

    def _write_meta(self, **state: Any) -> None:
        head = {"format": "dualenc embeddings", "version": FORMAT_VERSION}
        write_json(self.folder / "meta.json", {**head, **self.notes, **self.identity, **state})

    def _is_complete(self, number: int) -> bool:
        rows = len(self.ranges[number]) - len(self._skipped(number))
        try:
            open_shard(shard_path(self.folder, number), (rows, self.dim), self.dtype)
        except DualencError:
            return False
        return True

    def _skipped(self, number: int) -> Skipped:
        path = self._skipped_path(number)
        return [(row, reason) for row, reason in read_json(path)] if path.exists() else []

    def _skipped_path(self, number: int) -> Path:
        return self.folder / f"skipped-{number:05d}.json"


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
