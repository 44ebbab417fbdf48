"""Embeddings on disk: a folder that numpy alone can read.

    shard-00000.npy …   (rows, D) float16 or float32, in the order of the ids
    ids.txt             one id per line, UTF-8; ids.starts.npy and ids.order.npy find a row's id and an id's row
    snippets.jsonl      optional: one JSON string per line, what to show with a search result; snippets.starts.npy
    columns.parquet     optional: a row per id, what search results can be filtered by
    shard-00000.json …  for resuming: checksum of the shard and of the items in it, which of them were skipped and why
    meta.json           model, side, dtype, dimension, rows per shard, what was skipped, size and SHA-256 of each file
    shard-00001.claim   meanwhile: which worker writes that shard
    shard-00000.shown   meanwhile: its lines of snippets.jsonl

`EmbeddingWriter` in `dualenc.search.embeddings` writes it shard by shard, can resume, and shares the work with others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
from dualenc.data.identity import sum_checksums
from dualenc.errors import DiskFull, DualencError
from dualenc.files import (
    atomic_path,
    checksum,
    checksums,
    create_json,
    explain_full_disk,
    read_json_object,
    recover_inside,
    remove,
    save_array,
    sizes,
    verify_files,
    write_json,
)
from dualenc.search.claims import Claims
from dualenc.search.lines import MappedIds, Snippets, check_ids, lines_files, write_ids, write_snippets

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "dualenc embeddings"
FORMAT_VERSION = 3
"""1 had no checksums, 2 no arrays beside ids.txt and snippets.jsonl, and no sizes."""
OLDEST_VERSION = 2
DTYPES = ("float16", "float32")
MAX_SHARD_ROWS = 16384
MIN_SHARD_ROWS = 1024
FEW_SHARDS = 8
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
"""Seconds between looks at what other workers have done, which grow."""

Array = Any  # np.ndarray, ShardedVectors or FirstComponents
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
        self.ids: Sequence[str] = ids if isinstance(ids, MappedIds) else list(ids)
        self.vectors = vectors
        self.meta = dict(meta or {})
        self.snippets = snippets
        self.columns = columns

    def rows_of(self, ids: Sequence[str]) -> np.ndarray:
        """(n,) the row of each of some ids, -1 where there is no vector of it."""
        row_of = {name: row for row, name in enumerate(self.ids)}
        return np.array([row_of.get(name, -1) for name in ids], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return int(self.vectors.shape[1])

    def first(self, dim: int) -> Embeddings:
        """The same with the first components of each vector only, scaled to length one again where they had it.

        Args:
            dim: how many.

        Raises:
            DualencError: there are not so many.
        """
        if not 1 <= dim <= self.dim:
            raise DualencError(f"dim is {dim}: give 1 to {self.dim}, the size of the vectors")
        short = FirstComponents(self.vectors, dim, bool(self.meta.get("normalized")))
        return Embeddings(self.ids, short, {**self.meta, "dim": dim}, self.snippets, self.columns)

    def blocks(self, rows: int = 16384) -> Iterator[np.ndarray]:
        """The vectors in order as float32 matrices of at most `rows` rows; only one is in memory at a time."""
        starts = list(range(0, len(self), rows))
        if isinstance(self.vectors, ShardedVectors):
            # Within a shard a block is a view of the file, not a copy.
            starts = sorted({*starts, *self.vectors.offsets[:-1].tolist()})
        for start, stop in zip(starts, [*starts[1:], len(self)]):
            yield np.ascontiguousarray(self.vectors[start:stop], dtype=np.float32)

    def record_batches(self, rows: int = 16384) -> Iterator[pa.RecordBatch]:
        """The table in order, in batches of `rows`: id, vector, text where it is kept, and the user's columns."""
        import pyarrow as pa

        for start in range(0, len(self), rows):
            stop = min(start + rows, len(self))
            vectors = pa.array(np.ascontiguousarray(self.vectors[start:stop]).ravel())
            arrays: dict[str, Any] = {"id": pa.array(self.ids[start:stop], pa.string())}
            arrays["vector"] = pa.FixedSizeListArray.from_arrays(vectors, self.dim)
            if self.snippets is not None:
                arrays["text"] = pa.array([self.snippets[row] for row in range(start, stop)], pa.string())
            if self.columns is not None:
                columns = self.columns.slice(start, stop - start)
                arrays |= {name: columns.column(name).combine_chunks() for name in columns.column_names}
            yield pa.RecordBatch.from_pydict(arrays)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], verify: bool = False) -> Embeddings:
        """Map a folder of embeddings into memory.

        Args:
            folder: as `embed` or `dualenc embed` wrote it.
            verify: read every file once, several at a time, and compare its SHA-256 with meta.json (about 1.5 GB a
                second on each core). Otherwise sizes are compared, and 64 MiB are read at most, the smallest files
                first.

        Raises:
            DualencError: no such folder, an unfinished one, or a file in it that is missing, truncated or not the one
                that was written.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        if not meta["complete"]:
            raise DualencError(f"{folder}: not finished; run the same `dualenc embed` again to resume it")
        rows = meta["shard_rows"]
        names = file_names(folder, len(rows))
        verify_files(folder, names, meta, "run the same `dualenc embed` again", verify)
        shards = [open_shard(shard_path(folder, i), (n, meta["dim"]), meta["dtype"]) for i, n in enumerate(rows)]
        ids, snippets = MappedIds(folder / "ids.txt", sum(rows)), folder / "snippets.jsonl"
        shown = Snippets(snippets, sum(rows)) if snippets.exists() else None
        columns = read_columns(folder / "columns.parquet", len(ids))
        return cls(ids, ShardedVectors(shards), meta, shown, columns)


class FirstComponents:
    """The first d components of a matrix (N, D), taken when its rows are.

    Args:
        vectors: the matrix, an array or `ShardedVectors`.
        dim: d.
        are_unit: whether rows are scaled to length one; zero stays zero.
    """

    def __init__(self, vectors: Array, dim: int, are_unit: bool) -> None:
        self.vectors, self.are_unit = vectors, are_unit
        self.dtype = vectors.dtype
        self.shape = (len(vectors), dim)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray) -> np.ndarray:
        first = np.asarray(self.vectors[rows])[..., : self.shape[1]]
        if not self.are_unit:
            return first
        lengths = np.linalg.norm(first.astype(np.float32), axis=-1, keepdims=True)
        return np.asarray(first / np.where(lengths == 0, 1, lengths), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


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


def read_columns(path: Path, count: int, mend: str = "run the same `dualenc embed` again") -> pa.Table | None:
    """The columns of `count` items; None if none were kept. `mend` is what to do about damage."""
    if not path.exists():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0][:100]
        raise DualencError(f"{path}: corrupt ({why}); {mend}") from None
    if len(columns) != count:
        raise DualencError(f"{path}: has {len(columns)} rows for {count} ids; {mend}")
    return columns


def is_embeddings(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds embeddings (finished or not), told by its meta.json."""
    path = Path(folder) / "meta.json"
    return path.is_file() and read_json_object(path).get("format") == FORMAT


def are_embeddings(folder: Path) -> bool:
    """Whether a folder holds nothing but folders of embeddings, some of which may be empty still."""
    return all(child.is_dir() and (is_embeddings(child) or not os.listdir(child)) for child in folder.iterdir())


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta.json of a folder of embeddings; a `DualencError` tells what is wrong with it."""
    told = f"not a folder of embeddings; make one with `dualenc embed MODEL DATA --out {folder}`"
    meta = read_head(
        folder, FORMAT, (OLDEST_VERSION, FORMAT_VERSION), told, "run the same `dualenc embed` into another folder"
    )
    path = folder / "meta.json"
    kinds = {"complete": bool, "dim": int, "dtype": str}
    meta = read_json_object(path, kinds | ({"shard_rows": list, "files": dict} if meta.get("complete") is True else {}))
    rows = meta.get("shard_rows", [0])
    good_rows = rows and all(type(count) is int and count >= 0 for count in rows)
    if not good_rows or meta["dim"] < 1 or meta["dtype"] not in DTYPES:
        what = f"dim {meta['dim']}, dtype {meta['dtype']} and shard_rows {str(rows)[:60]}"
        raise DualencError(f"{path}: {what} describe no embeddings; run the same `dualenc embed` into another folder")
    return meta


def read_head(folder: Path, wanted: str, versions: tuple[int, int], told: str, mend: str) -> dict[str, Any]:
    """The meta.json of a folder of the wanted format, in a version that this dualenc reads.

    Args:
        folder: of embeddings or of an index.
        wanted: its format.
        versions: of that format: the oldest and the newest that can be read.
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
    if found > versions[1]:
        raise DualencError(f"{folder}: written by a newer dualenc (format {found}); update dualenc to read it")
    if found < versions[0]:
        raise DualencError(f"{folder}: written by an older dualenc (format {found}, without checksums); {mend}")
    return meta


def file_names(folder: Path, num_shards: int) -> list[str]:
    """Names of the files of a finished folder, meta.json apart."""
    shards = [name for number in range(num_shards) for name in (f"shard-{number:05d}.npy", f"shard-{number:05d}.json")]
    texts = [name for name in ("ids.txt", "snippets.jsonl") if name == "ids.txt" or (folder / name).exists()]
    columns = [name for name in ("columns.parquet",) if (folder / name).exists()]
    return [*(file for name in texts for file in lines_files(folder, name)), *columns, *shards]


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
    """Writes embeddings of N items to a folder; any number of workers that see it share the work, each with its own.

    Args:
        folder: where; a new or empty one, or one that workers with the same identity are writing or left unfinished.
        ids: (N,) ids of the items.
        dim: D, the size of the vectors.
        dtype: "float16" or "float32".
        identity: what made the vectors, and must be equal for a worker to join or resume (`model_checksum`, `side`, …).
        notes: further entries of meta.json that need not be equal (`model`, …).
        contents: checksum of the items of a range of rows; a shard whose items have another one now is written again,
            bad ones included. Without it items are told apart by their ids alone.
        texts: `texts_checksum` of some rows; that of all rows with a vector is kept in meta.json, so that what is put
            beside an index later (`--bm25`, `--texts`) is known to be what was embedded.

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
        texts: Callable[[Sequence[int]], str] | None = None,
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
        self.texts = texts
        self._written: dict[int, str] = {}
        """The contents of the shards that this worker wrote."""
        there = self.folder.exists() and not self.folder.is_dir()
        if self.folder.is_dir():  # another worker may be about to write its meta.json
            there = any(not name.startswith(".meta.json.") for name in os.listdir(self.folder))
        if there and not (self.folder / "meta.json").is_file():
            raise DualencError(f"{self.folder}: exists and holds no embeddings; choose a new or empty folder")
        if not there:
            with explain_full_disk(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                create_json(self.folder / "meta.json", self._meta(complete=False))
            except DiskFull:
                self.folder.rmdir()
                raise
        if self._is_complete():  # what a worker left that was killed over it
            self._tidy_up()
        self._meta_at_first = self._meta_stamp()
        recover_inside(self.folder)
        self._unwritten_at_first = set(self.unwritten())

    def _is_complete(self) -> bool:
        """Whether the folder is said to be finished; a `DualencError` if it is one of other embeddings."""
        found = read_meta(self.folder)
        for key, value in self.identity.items():
            if (stored := found.get(key)) != value:
                texts = str(stored), str(value)
                was, wanted = (f"{text[:12]}…" if len(text) > 40 else text for text in texts)
                remedy = "choose another folder or remove it"
                raise DualencError(f"{self.folder}: holds embeddings with {key} {was}, not {wanted}; {remedy}")
        return bool(found["complete"])

    def _tidy_up(self) -> None:
        """Remove what a finished folder needs no more, such as claims of workers that were killed behind a shard."""
        for pattern in ("shard-*.shown", "shard-*.claim"):
            for left in self.folder.glob(pattern):
                remove(left)

    def _completed_by_another(self) -> bool:
        """Whether the folder has been finished since this worker began."""
        return self._is_complete() and self._meta_stamp() != self._meta_at_first

    def _meta_stamp(self) -> tuple[int, int]:
        """Tells one meta.json from another that took its place."""
        facts = (self.folder / "meta.json").stat()
        return facts.st_ino, facts.st_mtime_ns

    def write_all(
        self,
        encode: Callable[[int], tuple[np.ndarray, Skipped]],
        snippet: Callable[[int], str] | None = None,
        take_over: float = 600.0,
        columns: pa.Table | None = None,
    ) -> Embeddings:
        """Write every shard that no other worker writes, until the folder is finished, by this worker or another.

        Shards are claimed one at a time (`dualenc.search.claims`), so that workers may come and go at any moment. Who
        finds none left waits for the others, and does what they do not bring to an end.

        Args:
            encode: the vectors of a shard and the items without one, as `write` takes them.
            snippet: as `finish` takes it.
            take_over: seconds without a sign of life after which the shard of another worker is taken over.
            columns: as `finish` takes them.

        Returns:
            The embeddings, mapped into memory.

        Raises:
            DualencError: what `write` and `finish` raise, or another worker wrote other contents under the same ids.
        """
        patience = _FIRST_WAIT
        with Claims(self.folder, take_over) as claims:
            while True:
                unwritten = self.unwritten()
                number = next((n for n in unwritten if claims.take(f"shard-{n:05d}")), None)
                if number is not None:
                    if number in self.unwritten([number]):  # not finished since we looked
                        vectors, skipped = encode(number)
                        if claims.held(f"shard-{number:05d}"):
                            self.write(number, vectors, skipped, snippet)
                    claims.release(f"shard-{number:05d}")
                    patience = _FIRST_WAIT
                    continue
                if self._completed_by_another():
                    # It may be tidying up, or was killed over it.
                    if not claims.exists("finish") or claims.take("finish"):
                        self._check_own()
                        self._tidy_up()
                        return Embeddings.open(self.folder)
                elif not unwritten and claims.take("finish"):
                    if not self._completed_by_another() and not self.missing():  # not since we looked
                        return self.finish(snippet, columns)
                    claims.release("finish")
                    continue
                time.sleep(patience)
                patience = min(1.5 * patience, _LONGEST_WAIT)

    def unwritten(self, among: Sequence[int] | None = None) -> list[int]:
        """Shards that are not said to be there, those that nobody claims first."""
        names = set(os.listdir(self.folder))
        wanted = range(len(self.ranges)) if among is None else among
        left = [n for n in wanted if not {f"shard-{n:05d}.npy", f"shard-{n:05d}.json"} <= names]
        return sorted(left, key=lambda n: f"shard-{n:05d}.claim" in names)

    def missing(self) -> list[int]:
        """Shards that are absent, damaged, or made of items that have changed since; all are read.

        If there are any, the folder counts as unfinished from now on, and those shards as unwritten.

        Raises:
            DualencError: another worker, at work together with this one, saw other contents of the items.
        """
        missing = []
        for number, rows in enumerate(self.ranges):
            path = shard_path(self.folder, number)
            try:
                note = self._note(number)
                open_shard(path, (len(rows) - len(note["skipped"]), self.dim), self.dtype)
                whole = note["sha256"] == checksum(path)
            except DualencError:
                missing.append(number)
                continue
            if note["contents"] != self.contents(rows):
                if number in self._unwritten_at_first and number not in self._written:
                    raise self._other_contents(number)
                whole = False
            if not whole:
                missing.append(number)
        if missing:
            self._write_meta(complete=False)
            for number in missing:
                remove(shard_path(self.folder, number).with_suffix(".json"))
        return missing

    def _check_own(self) -> None:
        """Insist that the shards that this worker wrote are still made of what it saw."""
        for number, contents in self._written.items():
            if self._note(number)["contents"] != contents:
                raise self._other_contents(number)

    def _other_contents(self, number: int) -> DualencError:
        return DualencError(
            f"{shard_path(self.folder, number)}: another worker saw other data under the same ids; let all of them "
            "read the same data, and run the same command again"
        )

    def write(
        self,
        number: int,
        vectors: np.ndarray,
        skipped: Skipped = (),  # type: ignore[assignment]
        snippet: Callable[[int], str] | None = None,
    ) -> None:
        """Write one shard.

        Args:
            number: which shard.
            vectors: (rows, D), one row per item of the shard's range that is not skipped, in order.
            skipped: the items without a vector.
            snippet: as `finish` takes it; called here, while the items are at hand, it need not be there.

        Raises:
            DualencError: a vector that is not finite, in the precision that is stored.
            DiskFull: what was written so far stays, and a later run resumes from there.
        """
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype, copy=False)
        finite = np.isfinite(stored).all(axis=1)
        if not finite.all():
            name = self.ids[self._kept(number, skipped)[int(np.argmin(finite))]]
            raise DualencError(f"the vector of {name!r} is not finite as {self.dtype}; check the model, or use float32")
        # In this order: a kill in between leaves a shard that is not said to be done.
        path = shard_path(self.folder, number)
        remove(path.with_suffix(".json"))
        with atomic_path(path) as part:
            save_array(part, stored)
            sha256 = checksum(part)
        if snippet is not None:
            with atomic_path(path.with_suffix(".shown")) as part, open(part, "w", encoding="ascii") as stream:
                stream.writelines(json.dumps(snippet(row)) + "\n" for row in self._kept(number, skipped))
        contents = self.contents(self.ranges[number])
        note = {"contents": contents, "sha256": sha256, "skipped": list(skipped)}
        if self.texts is not None:
            note["texts"] = self.texts(self._kept(number, skipped))
        write_json(path.with_suffix(".json"), note)
        self._written[number] = contents

    def finish(self, snippet: Callable[[int], str] | None = None, columns: pa.Table | None = None) -> Embeddings:
        """Write ids, snippets, columns and the final meta.json once every shard is written.

        Args:
            snippet: gives what to show for an item by its row; None or nothing but "": no snippets.
            columns: (N,) rows of what else is known of the items, to filter search results by.

        Returns:
            The embeddings, mapped into memory.

        Raises:
            DualencError: every item was skipped.
        """
        notes = [self._note(number) for number in range(len(self.ranges))]
        skipped = [entry for note in notes for entry in note["skipped"]]
        kept = [self._kept(number, note["skipped"]) for number, note in enumerate(notes)]
        first = next((row for rows in kept for row in rows), None)
        if first is None:
            why = skipped[0][1] if skipped else "there are none"
            raise DualencError(f"{self.folder}: none of {len(self.ids)} items could be used; first: {why}")
        write_ids(self.folder / "ids.txt", (self.ids[row] for rows in kept for row in rows))
        # Written over and not removed: another worker may have finished before, and somebody reads it already.
        if snippet is not None and snippet(first):
            shown = (text for number, rows in enumerate(kept) for text in self._shown(number, rows, snippet))
            write_snippets(self.folder / "snippets.jsonl", shown)
        else:
            for name in lines_files(self.folder, "snippets.jsonl"):
                remove(self.folder / name)
        if columns is not None:
            import pyarrow.parquet as pq

            with atomic_path(self.folder / "columns.parquet") as part:
                pq.write_table(columns.take([row for rows in kept for row in rows]), part)
        else:
            remove(self.folder / "columns.parquet")
        known = {shard_path(self.folder, number).name: note["sha256"] for number, note in enumerate(notes)}
        others = [name for name in file_names(self.folder, len(notes)) if name not in known]
        shard_rows = list(map(len, kept))
        files = known | checksums(self.folder, others)
        entries = {"shard_rows": shard_rows, **skipped_entries(self.ids, skipped), "sizes": sizes(self.folder, files)}
        if (texts := sum_checksums(note.get("texts") for note in notes)) is not None:
            entries["texts_checksum"] = texts
        self._write_meta(complete=True, **entries, files=files)
        self._tidy_up()
        return Embeddings.open(self.folder)

    def _shown(self, number: int, rows: Sequence[int], snippet: Callable[[int], str]) -> Iterator[str]:
        """The snippets of a shard: as they were written with it, or made now."""
        try:
            shown = open(shard_path(self.folder, number).with_suffix(".shown"), encoding="ascii")  # noqa: SIM115
        except FileNotFoundError:
            yield from map(snippet, rows)
            return
        with shown:
            yield from map(json.loads, shown)

    def _kept(self, number: int, skipped: Skipped) -> Sequence[int]:
        """The rows of a shard that have a vector."""
        bad = {row for row, _ in skipped}
        return [row for row in self.ranges[number] if row not in bad] if bad else self.ranges[number]

    def _meta(self, **state: Any) -> dict[str, Any]:
        return {"format": FORMAT, "version": FORMAT_VERSION, **self.notes, **self.identity, **state}

    def _write_meta(self, **state: Any) -> None:
        write_json(self.folder / "meta.json", self._meta(**state))

    def _note(self, number: int) -> dict[str, Any]:
        """What is written down of a shard: contents, sha256, skipped."""
        path = shard_path(self.folder, number).with_suffix(".json")
        note = read_json_object(path, {"contents": str, "sha256": str, "skipped": list})
        for entry in note["skipped"]:
            if not (isinstance(entry, list) and len(entry) == 2 and entry[0] in self.ranges[number]):
                raise DualencError(f"{path}: {str(entry)[:80]} is no skipped item; run the same `dualenc embed` again")
        return note
