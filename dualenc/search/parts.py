"""Out-of-core index build: an IVF index larger than memory, filled in parts by any number of processes, merged on disk.

Beside the index, in `.NAME.building`, until it is finished:

    plan.json           the build's parameters; another build in the same folder is refused
    trained.faiss       the trained index without vectors
    part-00000.faiss …  inverted lists of consecutive rows; part-00000.npy …: their codes for refinement, if any
    lists.ivfdata       the merged inverted lists (`faiss.contrib.ondisk`), mapped by searches

Each part is claimed by a file lock, which ends with its process: a killed build resumes with the missing parts, and
several processes share them, on one machine or on a shared disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np
from faiss.contrib.ondisk import merge_ondisk
from tqdm.auto import tqdm

from dualenc.errors import DualencError
from dualenc.files import (
    atomic_path,
    locked,
    recover,
    recover_inside,
    remove_at_once,
    removed_if_refused,
    save_array,
    version_of,
    write_json,
)
from dualenc.reading import read_json_object
from dualenc.search.build import Database, new_index, reason, train, training_rows
from dualenc.search.kinds import training_rows_in
from dualenc.search.locks import claimed

PART_BYTES = 2**28
"""Maximum size of a part's codes; a smaller memory has smaller parts."""
ROWS_AT_ONCE = 16384
WAIT_SECONDS = 0.2
"""Between looks at the parts that other processes fill."""
LISTS = "lists.ivfdata"
READ_BYTES = 1 << 20
ELSEWHERE = "its inverted lists are in {}, and no file outside its folder is opened; build the index again"
READ = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_MMAP_IFC


def bytes_per_vector(index: Any) -> int:
    """Memory per vector: codes, row numbers and HNSW links."""
    if isinstance(index, faiss.IndexRefine):
        parts = (faiss.downcast_index(part) for part in (index.base_index, index.refine_index))
        return sum(map(bytes_per_vector, parts))
    if isinstance(index, faiss.IndexPreTransform):
        return bytes_per_vector(faiss.downcast_index(index.index))
    if isinstance(index, faiss.IndexHNSW):
        links: Any = index.hnsw
        return bytes_per_vector(faiss.downcast_index(index.storage)) + 4 * links.nb_neighbors(0) + 32
    if isinstance(index, faiss.IndexIVF):
        return int(index.code_size) + 8
    return int(getattr(index, "code_size", 4 * index.d))


def split(index: Any) -> tuple[Any, Any]:
    """The base index and the refinement index; None if results are not refined."""
    if not isinstance(index, faiss.IndexRefine):
        return index, None
    return faiss.downcast_index(index.base_index), faiss.downcast_index(index.refine_index)


def can_be_merged(index: Any) -> bool:
    """Whether inverted lists can be on disk: an IVF index of plain codes, refined by plain codes or not at all."""
    base, refine = split(index)
    if not isinstance(_lists(base), faiss.ArrayInvertedLists):
        return False
    return refine is None or isinstance(refine, (faiss.IndexFlat, faiss.IndexScalarQuantizer))


@contextlib.contextmanager
def built_in_parts(
    database: Database,
    factory: str,
    work: Path,
    target: Path,
    *,
    train_rows: int | None,
    memory: int,
    seed: int,
    progress: bool,
) -> Iterator[tuple[Any, dict[str, Any]] | None]:
    """Out-of-core index build: train, fill in parts, merge the parts on disk; a killed build is resumed.

    Args:
        database: N vectors.
        factory: of an index that `can_be_merged`.
        work: folder for the parts, shared by all processes that build this index; removed at the end of the context.
        target: folder of the index, whose lock is held for the merge and until the end of the context.
        train_rows: vectors to train on; by default `training_rows`, at most a quarter of the memory.
        memory: bytes for training and parts.
        seed: of the training sample.
        progress: show a bar.

    Yields:
        The merged index, mapped from `work`, with entries for its meta.json, in one of the processes; None in the
        others, once that one has left its context.

    Raises:
        DualencError: the folder is of another build, or FAISS cannot train or fill the index.
    """
    num_vectors = len(database)
    dim = database.embeddings.dim
    empty = new_index(dim, factory, database.metric, num_vectors)
    if train_rows is None:
        trained_on = min(training_rows(empty, num_vectors), training_rows_in(memory, dim))
    else:
        trained_on = min(train_rows, num_vectors)
    rows_per_part = max(ROWS_AT_ONCE, min(PART_BYTES, memory // 8) // bytes_per_vector(empty))
    plan = {"factory": factory, "metric": database.metric, "dim": dim, "count": num_vectors, "seed": seed}
    files = json.dumps(database.embeddings.meta.get("files", {}), sort_keys=True)
    plan |= {"trained_on": trained_on, "rows_of_a_part": rows_per_part}
    plan["files"] = hashlib.sha256(files.encode()).hexdigest()
    started = time.perf_counter()
    with removed_if_refused(work, "*.faiss"):
        recover(work, unfinished=True)
        work.mkdir(parents=True, exist_ok=True)
        with claimed(work / "training.lock", wait=True):
            _check_plan(work, plan)
            recover_inside(work)
            if not (work / "trained.faiss").exists():
                train(empty, database.rows(database.sample(trained_on, seed)), factory)
                with atomic_path(work / "trained.faiss") as part:
                    faiss.write_index(empty, str(part))
            build = version_of(work / "plan.json")
        del empty
        starts = range(0, num_vectors, rows_per_part)
        parts = [range(start, min(start + rows_per_part, num_vectors)) for start in starts]
        _fill_parts(database, parts, work, build, factory, progress)
        with locked(target):
            # Another process has merged the parts and removed them; a new build may have begun since.
            if version_of(work / "plan.json") != build:
                yield None
                return
            if not (work / "merged.faiss").exists():
                _merge(work, len(parts))
            seconds = round(time.perf_counter() - started, 3)
            meta = {"trained_on": trained_on, "parts": len(parts), "build_seconds": seconds}
            yield open_merged(work / "merged.faiss"), meta
            remove_at_once(work)


def _fill_parts(
    database: Database, parts: list[range], work: Path, build: tuple[int, int] | None, factory: str, progress: bool
) -> None:
    """Fill the missing parts that no other process has claimed; returns when all exist or have been merged."""

    def is_open() -> bool:
        return version_of(work / "plan.json") == build and not (work / "merged.faiss").exists()

    missing = dict(enumerate(parts))
    with tqdm(total=len(database), desc="index", unit=" vectors", disable=not progress) as bar:
        while missing and is_open():
            for number, rows in list(missing.items()):
                path = work / f"part-{number:05d}.faiss"
                with contextlib.suppress(FileNotFoundError), claimed(path.with_suffix(".lock")) as is_mine:
                    # Another process may have written or merged the part since the last look.
                    if is_mine and is_open() and not path.exists():
                        _fill(database, rows, number, work, factory)
                if path.exists():
                    del missing[number]
                    bar.update(len(rows))
            time.sleep(WAIT_SECONDS if missing else 0)


def lists_of(index: Any) -> Any:
    """The inverted lists of an index if they are on disk, else None."""
    lists = _lists(split(index)[0])
    return lists if isinstance(lists, faiss.OnDiskInvertedLists) else None


def _lists(base: Any) -> Any:
    ivf: Any = faiss.try_extract_index_ivf(base)
    return None if ivf is None else faiss.downcast_InvertedLists(ivf.invlists)


def open_merged(path: Path) -> Any:
    """Map an index with lists on disk; if both files have been moved together, the refinement is read, not mapped.

    `faiss.IO_FLAG_ONDISK_SAME_DIR` finds moved lists, but prints to the standard output and cannot map an index.
    Without it FAISS opens whatever file the index names, which may be anyone's: the name is checked first.

    Raises:
        DualencError: the lists are outside the folder.
    """
    named = _named_lists(path)
    lists = os.path.realpath(path.with_name(LISTS))
    is_named = os.path.basename(named) == LISTS
    # Of that name there may be a link to a file elsewhere.
    if not is_named or os.path.dirname(lists) != os.path.realpath(path.parent):
        raise DualencError(f"{path}: {ELSEWHERE.format(lists if is_named else named)}")
    if os.path.realpath(named) == lists:
        return faiss.read_index(str(path), READ)
    with quiet():
        return faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)


def open_alone(path: Path) -> Any:
    """Map an index whose lists, if any, are in its own file; any other file that it names is not opened."""
    try:
        # With both flags FAISS stops at lists in another file.
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_ONDISK_SAME_DIR)
    except RuntimeError as error:
        if "IO_FLAG_ONDISK_SAME_DIR" not in str(error):
            raise
        raise DualencError(f"{path}: {ELSEWHERE.format('another file')}") from None


def _named_lists(path: Path) -> str:
    """The file name of the inverted lists that an index file contains.

    FAISS parses the index as far as that name, its last read, and then fails because the reader is not a file. Only
    plain codes for refinement may follow: other indexes could name further files.
    """
    last_read = b""
    with open(path, "rb") as stream:

        def read(count: int) -> bytes:
            nonlocal last_read
            last_read = stream.read(count)
            return last_read

        reader = faiss.PyCallbackIOReader(read, READ_BYTES)  # type: ignore[attr-defined]
        try:
            faiss.read_index(reader, faiss.IO_FLAG_ONDISK_SAME_DIR)
        except RuntimeError as error:
            if "IO_FLAG_ONDISK_SAME_DIR" not in str(error):
                raise
        else:
            raise RuntimeError(f"it has no lists in {LISTS}")
        stream.seek(8, os.SEEK_CUR)  # the size of the lists
        size = os.fstat(stream.fileno()).st_size
        if stream.tell() != size and _end_of_codes(stream) + 4 != size:  # k_factor is behind them
            raise RuntimeError("it holds more than lists and codes to refine")
    return os.fsdecode(last_read)


def _end_of_codes(stream: BinaryIO) -> int:
    """File position of the end of the plain index that starts here; -1 for any other content."""

    def number() -> int:
        return int.from_bytes(stream.read(8), "little")

    kind = stream.read(4)
    stream.seek(33, os.SEEK_CUR)  # dimension, count, two unused numbers, trained flag, metric
    if kind == b"IxSQ":
        stream.seek(28, os.SEEK_CUR)  # type, range and sizes of the codes
        stream.seek(4 * number(), os.SEEK_CUR)  # trained values
        return number() + stream.tell()
    return 4 * number() + stream.tell() if kind in (b"IxFI", b"IxF2", b"IxFl") else -1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the standard output of C++, to which FAISS logs its file operations."""
    sys.stdout.flush()
    stdout = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        # What C has buffered would appear later.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def _check_plan(work: Path, plan: dict[str, Any]) -> None:
    """Write the plan of a new build, or check that the folder is of the same one."""
    path = work / "plan.json"
    # Before the training nothing is lost by another plan; files without a plan are of no build.
    if not path.exists():
        for stale in (*work.glob("*.faiss"), *work.glob("*.npy")):
            stale.unlink()
    if not (work / "trained.faiss").exists():
        write_json(path, plan)
    found = read_json_object(path)
    for key, value in plan.items():
        if found.get(key) != value:
            was = str(found.get(key))[:40]
            raise DualencError(
                f"{work}: holds the beginning of an index with {key} {was}, not {str(value)[:40]}; remove it"
            )


def _fill(database: Database, rows: range, number: int, work: Path, factory: str) -> None:
    """Write one part: the lists of some rows, and their codes for refinement."""
    trained = faiss.read_index(str(work / "trained.faiss"))  # owns `base` and `refine`
    base, refine = split(trained)
    codes = []
    try:
        for start in range(rows.start, rows.stop, ROWS_AT_ONCE):
            block_rows = np.arange(start, min(start + ROWS_AT_ONCE, rows.stop))
            block = database.rows(block_rows)
            base.add_with_ids(block, block_rows)
            if refine is not None:
                codes.append(refine.sa_encode(block))
    except (RuntimeError, MemoryError) as error:
        raise DualencError(f"factory {factory!r} cannot take {len(rows)} vectors: {reason(error)}; try auto") from None
    # The lists come last: with them the part is complete.
    if codes:
        with atomic_path(work / f"part-{number:05d}.npy") as part:
            save_array(part, np.concatenate(codes))
    with atomic_path(work / f"part-{number:05d}.faiss") as part:
        faiss.write_index(base, str(part))


def _merge(work: Path, parts: int) -> None:
    """Merge the inverted lists of all parts on disk, and concatenate their codes for refinement."""
    trained: Any = faiss.read_index(str(work / "trained.faiss"))  # owns `base` and `refine`
    base, refine = split(trained)
    lists = work / LISTS
    lists.unlink(missing_ok=True)
    with quiet():
        merge_ondisk(base, [str(work / f"part-{number:05d}.faiss") for number in range(parts)], os.path.abspath(lists))
    merged = base
    if refine is not None:
        codes = [np.load(work / f"part-{number:05d}.npy", mmap_mode="r") for number in range(parts)]
        merged = with_codes(base, trained, codes, work / "refine.faiss")
    with atomic_path(work / "merged.faiss") as part:
        faiss.write_index(merged, str(part))
    for path in (*work.glob("part-*.faiss"), *work.glob("part-*.npy")):
        path.unlink()


def merge_lists(empty: Any, sources: list[Any], path: Path) -> Any:
    """Merge the inverted lists of open indexes in a file, as `merge_ondisk` does for index files.

    Args:
        empty: a trained index without vectors, which gets the lists.
        sources: indexes with the same training and distinct row numbers.
        path: file for the lists.
    """
    ivf: Any = faiss.extract_index_ivf(empty)
    with quiet():
        lists = faiss.OnDiskInvertedLists(ivf.nlist, ivf.code_size, os.path.abspath(path))
        pointers = faiss.InvertedListsPtrVector()  # type: ignore[attr-defined]
        for source in sources:
            pointers.push_back(faiss.extract_index_ivf(source).invlists)
        ivf.ntotal = empty.ntotal = lists.merge_from_multiple(pointers.data(), pointers.size(), False)
    ivf.replace_invlists(lists, True)
    lists.this.disown()  # type: ignore[attr-defined]
    return empty


def with_codes(base: Any, like: Any, codes: Iterable[np.ndarray], path: Path) -> Any:
    """Add a refinement index whose codes are mapped from a file, so that they are never in memory as a whole.

    FAISS cannot write such a file in blocks, so it is composed: the file of an empty index, the number of vectors at
    byte 8, the codes with their length before them. The sizes are compared after reading.

    Args:
        base: index of N vectors.
        like: index with the same type of refinement.
        codes: codes (n, bytes) of the N vectors, in blocks.
        path: of the file, which is unlinked as soon as it is mapped.
    """
    refine = _without_codes(split(like)[1])
    head = faiss.serialize_index(refine).tobytes()
    count = 0
    size = 0
    with open(path, "wb") as stream:
        stream.write(head)
        for block in codes:
            for start in range(0, len(block), ROWS_AT_ONCE):
                stream.write(np.ascontiguousarray(block[start : start + ROWS_AT_ONCE]).tobytes())
            count += len(block)
            size += block.nbytes
        stream.seek(8)
        stream.write(np.int64(count).tobytes())
        stream.seek(len(head) - 8)
        # A flat index counts floats, all others bytes.
        stream.write(np.int64(size // (4 if isinstance(refine, faiss.IndexFlat) else 1)).tobytes())
    filled: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    path.unlink()
    if filled.ntotal != count or filled.codes.size() != size:
        raise DualencError(f"{path}: this version of FAISS writes it differently; leave out Refine")
    refined = faiss.IndexRefine(base, filled)
    refined.k_factor = like.k_factor
    refined.ntotal = base.ntotal
    return refined


def _without_codes(refine: Any) -> Any:
    """An empty copy of a trained index of plain codes."""
    if isinstance(refine, faiss.IndexFlat):
        return faiss.IndexFlat(refine.d, refine.metric_type)
    empty = faiss.IndexScalarQuantizer(refine.d, refine.sq.qtype, refine.metric_type)
    empty.sq = refine.sq
    empty.is_trained = True
    return empty
