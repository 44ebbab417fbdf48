"""Embeddings on disk: a folder that numpy alone can read.

    shard-00000.npy …   (rows, D) float16 or float32, in the order of the ids
    ids.txt             one id per line, UTF-8
    snippets.jsonl      optional: one JSON string per line, what to show with a search result
    columns.parquet     optional: a row per id, what search results can be filtered by
    shard-00000.json …  for resuming: checksum of the shard and of the items in it, which of them were skipped and why
    meta.json           model, side, dtype, dimension, rows per shard, what was skipped, SHA-256 of each other file

`EmbeddingWriter` in `dualenc.search.embeddings` writes it shard by shard and can resume.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
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
    verify_checksums,
    write_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "dualenc embeddings"
FORMAT_VERSION = 2
"""1 had no checksums."""
DTYPES = ("float16", "float32")
MAX_SHARD_ROWS = 16384
MIN_SHARD_ROWS = 1024
FEW_SHARDS = 8

Array = Any  # np.ndarray or ShardedVectors
Skipped = list[tuple[int, str]]
"""Rows of the corpus without a vector, each with the reason."""


class Embeddings:
    """N vectors with their ids, in memory or on disk.

    Args:
        ids: (N,) distinct strings.
        vectors: (N, D) float16 or float32, an array or `ShardedVectors`.
        meta: what is known about them (`model`, `side`, `modality`, `dtype`, …).
        snippets: what to show with each id, if anything.
        columns: (N,) rows of what else is known of each, if anything.

    Raises:
        DualencError: not one id per vector, or vectors that are not a matrix.
    """

    def __init__(
        self,
        ids: Sequence[str],
        vectors: Array,
        meta: dict[str, Any] | None = None,
        snippets: Sequence[str] | Snippets | None = None,
        columns: pa.Table | None = None,
    ) -> None:
        if len(vectors.shape) != 2:
            raise DualencError(f"vectors have shape {tuple(vectors.shape)}; give a matrix (N, D)")
        if len(ids) != len(vectors):
            raise DualencError(f"{len(ids)} ids for {len(vectors)} vectors; give one id per vector")
        self.ids = list(ids)
        self.vectors = vectors
        self.meta = dict(meta or {})
        self.snippets = snippets
        self.columns = columns

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
    def open(cls, folder: str | os.PathLike[str], verify: bool = True) -> Embeddings:
        """Map a folder of embeddings into memory.

        Args:
            folder: as `embed` or `dualenc embed` wrote it.
            verify: read every file once, several at a time, and compare its SHA-256 with meta.json (about 1.5 GB a
                second on each core). Without it nothing but the ids is read before it is used.

        Raises:
            DualencError: no such folder, an unfinished one, or a file in it that is missing, truncated or not the one
                that was written.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        if not meta["complete"]:
            raise DualencError(f"{folder}: not finished; run the same `dualenc embed` again to resume it")
        rows = meta["shard_rows"]
        if verify:
            verify_checksums(folder, file_names(folder, len(rows)), meta["files"], "run the same `dualenc embed` again")
        shards = [open_shard(shard_path(folder, i), (n, meta["dim"]), meta["dtype"]) for i, n in enumerate(rows)]
        ids = read_ids(folder / "ids.txt", sum(rows))
        snippets = folder / "snippets.jsonl"
        columns = read_columns(folder / "columns.parquet", len(ids))
        return cls(ids, ShardedVectors(shards), meta, Snippets(snippets) if snippets.exists() else None, columns)


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
            number = int(np.searchsorted(self.offsets, start, side="right")) - 1
            if step == 1 and start < stop <= self.offsets[number + 1]:
                first = self.offsets[number]
                return self.shards[number][start - first : stop - first]  # a view of the file
            rows = np.arange(start, stop, step)
        rows = np.asarray(rows)
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(np.concatenate(self.shards), dtype=dtype)


class Snippets:
    """Lines of a `snippets.jsonl`, read one at a time; the file is scanned once, when the first is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: np.ndarray | None = None

    def __getitem__(self, row: int) -> str:
        with open(self.path, "rb") as stream:
            if self._starts is None:
                starts, position = [np.zeros(1, np.int64)], 0
                while block := stream.read(1 << 24):
                    starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1)
                    position += len(block)
                self._starts = np.concatenate(starts)
            stream.seek(int(self._starts[row]))
            return str(json.loads(stream.readline()))


def write_snippets(path: Path, snippets: Iterator[str]) -> None:
    """Write one JSON string per line, beside the target; the caller renames it."""
    # Half a surrogate pair has no UTF-8; as \\ud800 it is JSON.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for snippet in snippets:
            stream.write(json.dumps(snippet, ensure_ascii=False) + "\n")


def read_columns(path: Path, count: int) -> pa.Table | None:
    """The columns of `count` items; None if none were kept."""
    if not path.exists():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0][:100]
        raise DualencError(f"{path}: corrupt ({why}); run the same `dualenc embed` again") from None
    if len(columns) != count:
        raise DualencError(f"{path}: has {len(columns)} rows for {count} ids; run the same `dualenc embed` again")
    return columns


def is_embeddings(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds embeddings (finished or not), told by its meta.json."""
    path = Path(folder) / "meta.json"
    return path.is_file() and read_json_object(path).get("format") == FORMAT


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta.json of a folder of embeddings; a `DualencError` tells what is wrong with it."""
    told = f"not a folder of embeddings; make one with `dualenc embed MODEL DATA --out {folder}`"
    meta = read_head(folder, FORMAT, FORMAT_VERSION, told, "run the same `dualenc embed` into another folder")
    path = folder / "meta.json"
    kinds = {"complete": bool, "dim": int, "dtype": str}
    meta = read_json_object(path, kinds | ({"shard_rows": list, "files": dict} if meta.get("complete") is True else {}))
    rows = meta.get("shard_rows", [0])
    good_rows = rows and all(type(count) is int and count >= 0 for count in rows)
    if not good_rows or meta["dim"] < 1 or meta["dtype"] not in DTYPES:
        what = f"dim {meta['dim']}, dtype {meta['dtype']} and shard_rows {str(rows)[:60]}"
        raise DualencError(f"{path}: {what} describe no embeddings; run the same `dualenc embed` into another folder")
    return meta


def read_head(folder: Path, wanted: str, version: int, told: str, mend: str) -> dict[str, Any]:
    """The meta.json of a folder of the wanted format, in the version that this dualenc writes.

    Args:
        folder: of embeddings or of an index.
        wanted: its format.
        version: of that format.
        told: what to say of a folder of another format.
        mend: what to do about another version.

    Raises:
        DualencError: the file is missing, malformed, of another format or of another version.
    """
    meta = read_json_object(folder / "meta.json")
    if meta.get("format") != wanted:
        raise DualencError(f"{folder}: {told}")
    found = meta.get("version")
    if type(found) is not int:
        raise DualencError(f"{folder / 'meta.json'}: its version is {str(found)[:40]!r}, not a number; {mend}")
    if found > version:
        raise DualencError(f"{folder}: written by a newer dualenc (format {found}); update dualenc to read it")
    if found < version:
        raise DualencError(f"{folder}: written by an older dualenc (format {found}, without checksums); {mend}")
    return meta


def file_names(folder: Path, num_shards: int) -> list[str]:
    """Names of the files of a finished folder, meta.json apart."""
    shards = [name for number in range(num_shards) for name in (f"shard-{number:05d}.npy", f"shard-{number:05d}.json")]
    return ["ids.txt", *(name for name in ("snippets.jsonl", "columns.parquet") if (folder / name).exists()), *shards]


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard of a folder is."""
    return folder / f"shard-{number:05d}.npy"


def open_shard(path: Path, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Map one shard into memory, if it is whole and of this shape and dtype."""
    mend = "remove it and run the same `dualenc embed` again"
    if not path.is_file():
        raise DualencError(f"{path}: missing; run the same `dualenc embed` again")
    try:
        shard = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy's own, and those of the tokenizer and the zip reader behind it
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise DualencError(f"{path}: truncated or corrupt ({why}); {mend}") from None
    if not isinstance(shard, np.ndarray):
        raise DualencError(f"{path}: holds an archive instead of one array; {mend}")
    if shard.shape != shape or shard.dtype != np.dtype(dtype):
        found = f"{shard.dtype} of shape {shard.shape}"
        raise DualencError(f"{path}: holds {found} instead of {dtype} of shape {shape}; {mend}")
    return shard


def check_ids(ids: Sequence[str]) -> None:
    """Insist that ids can be told apart and written as lines of UTF-8."""
    for row, name in enumerate(ids):
        if not isinstance(name, str):
            raise DualencError(f"id {name!r} at row {row} is {type(name).__name__}, not a text; give str(id)")
        if "\n" in name:
            raise DualencError(f"id {name!r} at row {row} contains a line break; give it another id")
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise DualencError(f"id {name!r} at row {row} is not valid Unicode; rename it")
    if len(set(ids)) < len(ids):
        first: dict[str, int] = {}
        row = next(row for row, name in enumerate(ids) if first.setdefault(name, row) != row)
        raise DualencError(f"id {ids[row]!r} stands twice, at rows {first[ids[row]]} and {row}; ids must differ")


def write_ids(path: Path, ids: Sequence[str]) -> None:
    """Write one id per line, beside the target; the caller has checked them and renames it."""
    path.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8", newline="\n")


def read_ids(path: Path, count: int) -> list[str]:
    """Read a file of `count` ids."""
    try:
        ids = path.read_bytes().decode("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise DualencError(f"{path}: missing; write the folder again") from None
    except UnicodeDecodeError as error:
        raise DualencError(f"{path}: corrupt ({error}); write the folder again") from None
    if len(ids) != count:
        raise DualencError(f"{path}: holds {len(ids)} ids for {count} vectors; write the folder again")
    return ids


def skipped_entries(ids: Sequence[str], skipped: Skipped) -> dict[str, Any]:
    """What meta.json says about items without a vector: how many, and the first hundred."""
    first = [{"id": ids[row], "reason": reason} for row, reason in skipped[:100]]
    return {"skipped": len(skipped), "first_skipped": first}


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
        digest = hashlib.sha256()
        for name in ids:
            digest.update(json.dumps(name).encode())
        self.folder, self.ids, self.dim, self.dtype = Path(folder), ids, dim, dtype
        self.ranges = shard_ranges(len(ids))
        self.identity = {**identity, "dim": dim, "dtype": dtype, "ids_checksum": digest.hexdigest()}
        self.notes = notes or {}
        self.contents = functools.cache(contents or (lambda _: ""))
        if self.folder.exists() and not (self.folder.is_dir() and not any(self.folder.iterdir())):
            if not (self.folder / "meta.json").is_file():
                raise DualencError(f"{self.folder}: exists and holds no embeddings; choose a new or empty folder")
            found = read_meta(self.folder)
            for key, value in self.identity.items():
                if (stored := found.get(key)) != value:
                    texts = str(stored), str(value)
                    was, wanted = (f"{text[:12]}…" if len(text) > 40 else text for text in texts)
                    remedy = "choose another folder or remove it"
                    raise DualencError(f"{self.folder}: holds embeddings with {key} {was}, not {wanted}; {remedy}")
        distributed.barrier()
        if distributed.is_main():
            with full_disk_told(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            recover_inside(self.folder)
            if not (self.folder / "meta.json").exists():
                try:
                    self._write_meta(complete=False)
                except DiskFull:
                    self.folder.rmdir()
                    raise
        distributed.barrier()

    def missing(self) -> list[int]:
        """Shards of this process that are absent, damaged, or made of items that have changed since.

        If there are any, on any process, the folder counts as unfinished from now on.
        """
        own = range(distributed.rank(), len(self.ranges), distributed.world_size())
        missing = []
        for number in own:
            path, rows = shard_path(self.folder, number), self.ranges[number]
            try:
                note = self._note(number)
                open_shard(path, (len(rows) - len(note["skipped"]), self.dim), self.dtype)
            except DualencError:
                missing.append(number)
                continue
            if note["contents"] != self.contents(rows) or note["sha256"] != checksum(path):
                missing.append(number)
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
            DiskFull: what was written so far stays, and a later run resumes from there.
        """
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype, copy=False)
        finite = np.isfinite(stored).all(axis=1)
        if not finite.all():
            bad = {row for row, _ in skipped}
            name = [self.ids[row] for row in self.ranges[number] if row not in bad][int(np.argmin(finite))]
            raise DualencError(f"the vector of {name!r} is not finite as {self.dtype}; check the model, or use float32")
        # In this order: a kill in between leaves a shard that is not said to be done.
        path = shard_path(self.folder, number)
        remove(path.with_suffix(".json"))
        with atomic_path(path) as part:
            save_array(part, stored)
        note = {"contents": self.contents(self.ranges[number]), "sha256": checksum(path), "skipped": list(skipped)}
        write_json(path.with_suffix(".json"), note)

    def finish(self, snippet: Callable[[int], str] | None = None, columns: pa.Table | None = None) -> Embeddings:
        """Write ids, snippets, columns and the final meta.json once every process has written its shards.

        Args:
            snippet: gives what to show for an item by its row; None or nothing but "": no snippets.
            columns: (N,) rows of what else is known of the items, to filter search results by.

        Returns:
            The embeddings, mapped into memory.

        Raises:
            DualencError: every item was skipped.
        """
        distributed.barrier()
        if distributed.is_main():
            notes = [self._note(number) for number in range(len(self.ranges))]
            skipped = [entry for note in notes for entry in note["skipped"]]
            bad = {row for row, _ in skipped}
            kept = [row for row in range(len(self.ids)) if row not in bad]
            if not kept:
                first = skipped[0][1] if skipped else "there are none"
                raise DualencError(f"{self.folder}: none of {len(self.ids)} items could be used; first: {first}")
            with atomic_path(self.folder / "ids.txt") as part:
                write_ids(part, [self.ids[row] for row in kept])
            if snippet is not None and snippet(kept[0]):
                with atomic_path(self.folder / "snippets.jsonl") as part:
                    write_snippets(part, (snippet(row) for row in kept))
            else:
                remove(self.folder / "snippets.jsonl")
            if columns is not None:
                import pyarrow.parquet as pq

                with atomic_path(self.folder / "columns.parquet") as part:
                    pq.write_table(columns.take(kept), part)
            else:
                remove(self.folder / "columns.parquet")
            known = {shard_path(self.folder, number).name: note["sha256"] for number, note in enumerate(notes)}
            others = [name for name in file_names(self.folder, len(notes)) if name not in known]
            shard_rows = [len(rows) - len(note["skipped"]) for rows, note in zip(self.ranges, notes)]
            files = known | checksums(self.folder, others)
            self._write_meta(complete=True, shard_rows=shard_rows, **skipped_entries(self.ids, skipped), files=files)
        distributed.barrier()
        return Embeddings.open(self.folder, verify=False)

    def _write_meta(self, **state: Any) -> None:
        head = {"format": FORMAT, "version": FORMAT_VERSION}
        write_json(self.folder / "meta.json", {**head, **self.notes, **self.identity, **state})

    def _note(self, number: int) -> dict[str, Any]:
        """What is written down of a shard: contents, sha256, skipped."""
        path = shard_path(self.folder, number).with_suffix(".json")
        note = read_json_object(path, {"contents": str, "sha256": str, "skipped": list})
        for entry in note["skipped"]:
            if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in self.ranges[number]):
                raise DualencError(f"{path}: {str(entry)[:80]} is no skipped item; run the same `dualenc embed` again")
        return note
