"""Embeddings on disk: a folder that numpy alone can read.

    shard-00000.npy …   (rows, D) float16 or float32, in the order of the ids
    ids.txt             one id per line, UTF-8
    snippets.jsonl      optional: one JSON string per line, what to show beside a search result
    meta.json           model, side, dtype, dimension, rows per shard, what was skipped

`EmbeddingWriter` in `dualenc.embedding_writer` writes it shard by shard and can resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import read_json

FORMAT_VERSION = 1
Array = Any  # np.ndarray or ShardedVectors


class Embeddings:
    """N vectors with their ids, in memory or on disk.

    Args:
        ids: (N,) distinct strings.
        vectors: (N, D) float16 or float32, an array or `ShardedVectors`.
        meta: what is known about them (`model`, `side`, `modality`, `dtype`, …).
        snippets: what to show beside each id, if anything.

    Raises:
        DualencError: not one id per vector, or vectors that are not a matrix.
    """

    def __init__(
        self,
        ids: Sequence[str],
        vectors: Array,
        meta: dict[str, Any] | None = None,
        snippets: Sequence[str] | Snippets | None = None,
    ) -> None:
        if len(vectors.shape) != 2:
            raise DualencError(f"vectors have shape {tuple(vectors.shape)}; give a matrix (N, D)")
        if len(ids) != len(vectors):
            raise DualencError(f"{len(ids)} ids for {len(vectors)} vectors; give one id per vector")
        self.ids = list(ids)
        self.vectors = vectors
        self.meta = dict(meta or {})
        self.snippets = snippets

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return int(self.vectors.shape[1])

    def blocks(self, rows: int = 16384) -> Iterator[np.ndarray]:
        """The vectors in order as float32 matrices of at most `rows` rows; only one is in memory at a time."""
        starts = list(range(0, len(self), rows))
        if isinstance(self.vectors, ShardedVectors):
            # Within a shard a block is a view of the file, not a copy.
            starts = sorted({*starts, *self.vectors.offsets[:-1].tolist()})
        for start, stop in zip(starts, [*starts[1:], len(self)]):
            yield np.ascontiguousarray(self.vectors[start:stop], dtype=np.float32)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Embeddings:
        """Map a folder of embeddings into memory; nothing is read before it is used.

        Raises:
            DualencError: no such folder, an unfinished one, or a truncated or corrupt file in it.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        if not meta["complete"]:
            raise DualencError(f"{folder}: not finished; run the same `dualenc embed` again to resume it")
        shape_of = [(rows, meta["dim"]) for rows in meta["shard_rows"]]
        shards = [open_shard(shard_path(folder, i), shape, meta["dtype"]) for i, shape in enumerate(shape_of)]
        ids = read_ids(folder / "ids.txt", sum(meta["shard_rows"]))
        snippets = folder / "snippets.jsonl"
        return cls(ids, ShardedVectors(shards), meta, Snippets(snippets) if snippets.exists() else None)


class ShardedVectors:
    """Matrices of equal width, read as the one (N, D) matrix they make when laid on top of each other.

    Rows are taken by a number, a slice or an array of numbers, and `np.asarray` gives the whole matrix.
    """

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self.shards = list(shards)
        self.offsets = np.cumsum([0, *(len(shard) for shard in self.shards)])
        self.dtype = self.shards[0].dtype
        self.shape = (int(self.offsets[-1]), self.shards[0].shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray) -> np.ndarray:
        if isinstance(rows, (int, np.integer)):
            return self[[int(rows)]][0]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._contiguous(start, max(start, stop))
            return self[np.arange(start, stop, step)]
        return self._scattered(np.asarray(rows))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def _contiguous(self, start: int, stop: int) -> np.ndarray:
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        parts = []
        for shard, offset in zip(self.shards[first:], self.offsets[first:]):
            if offset >= stop:
                break
            parts.append(shard[max(0, start - offset) : stop - offset])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, self.shape[1]), self.dtype)

    def _scattered(self, rows: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        wrong = (rows < -len(self)) | (rows >= len(self))
        if wrong.any():
            raise IndexError(f"row {rows[wrong][0]} of {len(self)}")
        rows = rows % max(1, len(self))
        result = np.empty((len(rows), self.shape[1]), self.dtype)
        shard_of = np.searchsorted(self.offsets, rows, side="right") - 1
        for number in np.unique(shard_of):
            here = shard_of == number
            result[here] = self.shards[number][rows[here] - self.offsets[number]]
        return result


class Snippets:
    """Lines of a `snippets.jsonl`, read one at a time; the file is scanned once, when the first is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: np.ndarray | None = None

    def __getitem__(self, row: int) -> str:
        if self._starts is None:
            self._starts = _line_starts(self.path)
        with open(self.path, "rb") as stream:
            stream.seek(int(self._starts[row]))
            return str(json.loads(stream.readline()))


def _line_starts(path: Path) -> np.ndarray:
    starts, position = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as stream:
        while block := stream.read(1 << 24):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1)
            position += len(block)
    return np.concatenate(starts)


def write_snippets(path: Path, snippets: Iterator[str]) -> None:
    """Write one JSON string per line, beside the target; the caller renames it."""
    with open(path, "w", encoding="utf-8") as stream:
        for snippet in snippets:
            stream.write(json.dumps(snippet, ensure_ascii=False) + "\n")


def is_embeddings(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds embeddings (finished or not), told by its meta.json."""
    path = Path(folder) / "meta.json"
    return path.is_file() and read_json(path).get("format") == "dualenc embeddings"


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta.json of a folder of embeddings.

    Raises:
        DualencError: it is missing, malformed, of another kind of folder or of a newer version.
    """
    meta = read_json(folder / "meta.json")
    if not isinstance(meta, dict) or meta.get("format") != "dualenc embeddings":
        raise DualencError(
            f"{folder}: not a folder of embeddings; make one with `dualenc embed MODEL DATA --out {folder}`"
        )
    if meta["version"] > FORMAT_VERSION:
        raise DualencError(
            f"{folder}: written by a newer dualenc (format {meta['version']}); update dualenc to read it"
        )
    return meta


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard of a folder is."""
    return folder / f"shard-{number:05d}.npy"


def open_shard(path: Path, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Map one shard into memory.

    Raises:
        DualencError: it is missing, truncated or not of the expected shape and dtype.
    """
    mend = "remove it and run the same `dualenc embed` again"
    try:
        shard = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise DualencError(f"{path}: missing; run the same `dualenc embed` again") from None
    except (ValueError, OSError, EOFError) as error:
        raise DualencError(f"{path}: truncated or corrupt ({error}); {mend}") from None
    if shard.shape != shape or shard.dtype != np.dtype(dtype):
        found = f"{shard.dtype} of shape {shard.shape}"
        raise DualencError(f"{path}: holds {found} instead of {dtype} of shape {shape}; {mend}")
    return shard


def write_ids(path: Path, ids: Sequence[str]) -> None:
    """Write one id per line, beside the target; the caller renames it.

    Raises:
        DualencError: an id contains a line break.
    """
    broken = next((i for i, name in enumerate(ids) if "\n" in name), None)
    if broken is not None:
        raise DualencError(f"id {ids[broken]!r} at row {broken} contains a line break; give it another id")
    path.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8", newline="\n")


def read_ids(path: Path, count: int) -> list[str]:
    """Read an ids file.

    Raises:
        DualencError: it is missing, not UTF-8, or holds another number of ids than `count`.
    """
    try:
        ids = path.read_bytes().decode("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise DualencError(f"{path}: missing; write the folder again") from None
    except UnicodeDecodeError as error:
        raise DualencError(f"{path}: corrupt ({error}); write the folder again") from None
    if len(ids) != count:
        raise DualencError(f"{path}: holds {len(ids)} ids for {count} vectors; write the folder again")
    return ids
