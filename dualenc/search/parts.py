"""Out-of-core index build: an IVF index larger than memory, filled in parts and merged on disk.

Beside the index, in `.NAME.building`, until it is finished:

    plan.json           the build's parameters; parts of another plan are discarded
    trained.faiss       the trained index without vectors
    part-00000.faiss …  inverted lists of consecutive rows; part-00000.npy …: their codes for refinement, if any
    lists.ivfdata       the merged inverted lists (`faiss.contrib.ondisk`), mapped by searches
    refine.faiss        the merged codes for refinement, mapped by searches

A finished part is a file, which the next run skips.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from faiss.contrib.ondisk import merge_ondisk
from tqdm.auto import tqdm

from dualenc.data.identity import digest_of
from dualenc.errors import DualencError
from dualenc.files import atomic_path, recover_inside, remove, removed_if_refused, save_array, write_json
from dualenc.reading import read_json_object
from dualenc.search.build import Database, new_index, reason, train_index, training_rows
from dualenc.search.kinds import training_rows_in

PART_BYTES = 2**28
"""Maximum size of a part's codes; a smaller memory has smaller parts."""
ROWS_AT_ONCE = 16384
LISTS = "lists.ivfdata"
REFINE = "refine.faiss"
SAME_FOLDER = faiss.IO_FLAG_ONDISK_SAME_DIR
"""Inverted lists are opened beside their index only, whatever file it names."""


def bytes_per_vector(index: Any) -> int:
    """Memory per vector: codes, row numbers and HNSW links."""
    if isinstance(index, faiss.IndexRefine):
        return sum(bytes_per_vector(part) for part in split(index))
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


def lists_on_disk(index: Any) -> Any:
    """The inverted lists of an index if they are in a file of their own, else None."""
    lists = _lists(split(index)[0])
    return lists if isinstance(lists, faiss.OnDiskInvertedLists) else None


def _lists(base: Any) -> Any:
    ivf: Any = faiss.try_extract_index_ivf(base)
    return None if ivf is None else faiss.downcast_InvertedLists(ivf.invlists)


def open_merged(path: Path) -> Any:
    """Map an index whose lists, and codes for refinement if any, are in files beside it."""
    if path.with_name(LISTS).is_symlink():
        raise DualencError(
            f"{path.with_name(LISTS)}: is a link, and no file outside the folder is opened; copy it there"
        )
    with quiet():
        base = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | SAME_FOLDER)
    codes = path.with_name(REFINE)
    if not codes.exists():
        return base
    return _refined(base, faiss.read_index(str(codes), faiss.IO_FLAG_MMAP_IFC))


def open_alone(path: Path) -> Any:
    """Map an index whose lists, if any, are in its own file; with both flags FAISS opens no other."""
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | SAME_FOLDER)


def _refined(base: Any, refine: Any) -> Any:
    refined = faiss.IndexRefine(base, refine)
    refined.ntotal = base.ntotal
    return refined


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
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def build_in_parts(
    database: Database,
    factory: str,
    work: Path,
    *,
    train_rows: int | None,
    memory: int,
    seed: int,
    progress: bool,
) -> tuple[Any, dict[str, Any]]:
    """Train, fill in parts, and merge the parts on disk; a killed build is resumed.

    `work` holds the parts, and is removed by the caller when the index is saved. Returns the merged index, mapped from
    there, and entries for its meta.json.
    """
    num_vectors = len(database)
    dim = database.embeddings.dim
    empty = new_index(dim, factory, database.metric, num_vectors)
    trained_on = train_rows or min(training_rows(empty, num_vectors), training_rows_in(memory, dim))
    trained_on = min(trained_on, num_vectors)
    rows_per_part = max(ROWS_AT_ONCE, min(PART_BYTES, memory // 8) // bytes_per_vector(empty))
    plan = {"factory": factory, "metric": database.metric, "dim": dim, "count": num_vectors, "seed": seed}
    plan |= {"trained_on": trained_on, "rows_of_a_part": rows_per_part, "faiss": faiss.__version__}
    plan["files"] = digest_of(str(database.embeddings.meta.get("files")))
    started = time.perf_counter()
    with removed_if_refused(work, "*.faiss"):
        _start_or_resume(work, plan)
        if not (work / "trained.faiss").exists():
            train_index(empty, database.rows(database.sample(trained_on, seed)), factory)
            with atomic_path(work / "trained.faiss") as part:
                faiss.write_index(empty, str(part))
        del empty
        starts = range(0, num_vectors, rows_per_part)
        with tqdm(total=num_vectors, desc="index", unit=" vectors", disable=not progress) as bar:
            for number, start in enumerate(starts):
                rows = range(start, min(start + rows_per_part, num_vectors))
                if not (work / f"part-{number:05d}.faiss").exists():
                    _fill(database, rows, number, work, factory)
                bar.update(len(rows))
        merged = _merge(work, len(starts))
    seconds = round(time.perf_counter() - started, 3)
    return merged, {"trained_on": trained_on, "parts": len(starts), "build_seconds": seconds}


def _start_or_resume(work: Path, plan: dict[str, Any]) -> None:
    """Write the plan of a new build, discarding parts of another one."""
    path = work / "plan.json"
    if not path.exists() or read_json_object(path) != plan:
        remove(work)
        write_json(path, plan)
    recover_inside(work)


def _fill(database: Database, rows: range, number: int, work: Path, factory: str) -> None:
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
        raise DualencError(
            f"factory {factory!r} cannot take {len(rows)} vectors: {reason(error)}; try auto"
        ) from None
    # The lists come last: with them the part is complete.
    if codes:
        with atomic_path(work / f"part-{number:05d}.npy") as part:
            save_array(part, np.concatenate(codes))
    with atomic_path(work / f"part-{number:05d}.faiss") as part:
        faiss.write_index(base, str(part))


def _merge(work: Path, num_parts: int) -> Any:
    trained: Any = faiss.read_index(str(work / "trained.faiss"))  # owns `base` and `refine`
    base, refine = split(trained)
    (work / LISTS).unlink(missing_ok=True)
    names = [str(work / f"part-{number:05d}.faiss") for number in range(num_parts)]
    with quiet():
        merge_ondisk(base, names, os.path.abspath(work / LISTS))
    faiss.write_index(base, str(work / "merged.faiss"))
    if refine is not None:
        codes = (np.load(name.replace(".faiss", ".npy"), mmap_mode="r") for name in names)
        _write_codes(refine, codes, work / REFINE)
    return open_merged(work / "merged.faiss")


def _write_codes(refine: Any, codes: Iterable[np.ndarray], path: Path) -> None:
    """Write an index of plain codes (n, bytes) in blocks, so that they are never in memory as a whole.

    FAISS cannot write such a file in blocks, so it is composed: the file of an empty index, the number of vectors at
    byte 8, the codes with their length before them. The sizes are compared after reading.
    """
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
    written: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if written.ntotal != count or written.codes.size() != size:
        raise DualencError(f"{path}: this version of FAISS writes it differently; leave out Refine")
