"""Out-of-core index build: an IVF index larger than memory, filled in parts and merged on disk.

    lists.ivfdata    the merged inverted lists (`faiss.contrib.ondisk`), mapped by searches
    refine.faiss     the merged codes for refinement, if any, mapped by searches

They lie beside index.faiss; while they are made, in `.NAME.building` beside the index.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from faiss.contrib.ondisk import merge_ondisk
from tqdm.auto import tqdm

from dualenc.errors import DualencError
from dualenc.search.build import Database, new_index, reason, train_index, training_rows, unfit
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


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Make a hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


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


def build_on_disk(
    database: Database,
    factory: str,
    work: Path,
    *,
    memory: int,
    progress: bool,
) -> tuple[Any, dict[str, Any]]:
    """Train an index, fill files of consecutive rows, and merge their lists in the folder `work`.

    Returns the merged index, mapped from there, and entries for its meta.json.
    """
    num_vectors = len(database)
    dim = database.embeddings.dim
    index = new_index(dim, factory, database.metric, num_vectors)
    trained_on = min(training_rows(index, num_vectors), training_rows_in(memory, dim))
    rows_per_part = max(ROWS_AT_ONCE, min(PART_BYTES, memory // 8) // bytes_per_vector(index))
    started = time.perf_counter()
    train_index(index, database.rows(database.sample(trained_on, seed=0)), factory)
    base, refine = split(index)
    names: list[str] = []
    with tqdm(total=num_vectors, desc="index", unit=" vectors", disable=not progress) as bar:
        for start in range(0, num_vectors, rows_per_part):
            stop = min(start + rows_per_part, num_vectors)
            try:
                for first in range(start, stop, ROWS_AT_ONCE):
                    rows = np.arange(first, min(first + ROWS_AT_ONCE, stop))
                    base.add_with_ids(database.rows(rows), rows)
            except (RuntimeError, MemoryError) as error:
                raise unfit(factory, f"cannot take {stop - start} vectors: {reason(error)}") from None
            names.append(str(work / f"part-{len(names):05d}.faiss"))
            faiss.write_index(base, names[-1])
            base.reset()
            bar.update(stop - start)
    with quiet():
        merge_ondisk(base, names, os.path.abspath(work / LISTS))
    faiss.write_index(base, str(work / "merged.faiss"))
    if refine is not None:
        _write_codes(refine, database, work / REFINE)
    seconds = round(time.perf_counter() - started, 3)
    return open_merged(work / "merged.faiss"), {"trained_on": trained_on, "build_seconds": seconds}


def _write_codes(refine: Any, database: Database, path: Path) -> None:
    """Write an index of the plain codes of a database in blocks, so that they are never in memory as a whole.

    FAISS cannot write such a file in blocks, so it is composed: the file of an empty index, the number of vectors at
    byte 8, the codes with their length before them. The sizes are compared after reading.
    """
    head = faiss.serialize_index(refine).tobytes()
    size = 0
    with open(path, "wb") as stream:
        stream.write(head)
        for block in database.blocks():
            size += stream.write(refine.sa_encode(block).tobytes())
        stream.seek(8)
        stream.write(np.int64(len(database)).tobytes())
        stream.seek(len(head) - 8)
        # A flat index counts floats, all others bytes.
        stream.write(np.int64(size // (4 if isinstance(refine, faiss.IndexFlat) else 1)).tobytes())
    written: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if written.ntotal != len(database) or written.codes.size() != size:
        raise DualencError(f"{path}: this version of FAISS writes it differently; leave out Refine")
