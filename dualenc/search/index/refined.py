"""Refined indexes: short codes find candidates, and finer ones, which take most of the memory,
score them again.

The finer codes may be a file beside index.faiss, refine.faiss, which is written in blocks and
mapped by searches: so an index is built that exceeds the memory.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from dualenc.errors import DualencError
from dualenc.io.files import explain_full_disk

if TYPE_CHECKING:
    from dualenc.search.index.build import Database

REFINE = "refine.faiss"


def bytes_per_vector(index: Any) -> int:
    """Memory per vector: codes, row numbers and HNSW links."""
    if isinstance(index, faiss.IndexRefine):
        return sum(bytes_per_vector(part) for part in split(index))
    if isinstance(index, faiss.IndexPreTransform):
        return bytes_per_vector(faiss.downcast_index(index.index))
    if isinstance(index, faiss.IndexHNSW):
        links: Any = index.hnsw
        return (
            bytes_per_vector(faiss.downcast_index(index.storage)) + 4 * links.nb_neighbors(0) + 32
        )
    if isinstance(index, faiss.IndexIVF):
        return int(index.code_size) + 8
    return int(getattr(index, "code_size", 4 * index.d))


def split(index: Any) -> tuple[Any, Any]:
    """The base index and the refinement index; None if results are not refined."""
    if not isinstance(index, faiss.IndexRefine):
        return index, None
    return faiss.downcast_index(index.base_index), faiss.downcast_index(index.refine_index)


def check_refinement(index: Any) -> None:
    """Raise FAISS's error if an index is refined by codes that it cannot score; a search would end
    the process."""
    refine = split(index)[1]
    if refine is not None:
        refine.get_distance_computer()


def can_be_file(refine: Any) -> bool:
    """Whether a refinement index, if any, is of plain codes, which `write_codes` writes."""
    return isinstance(refine, (faiss.IndexFlat, faiss.IndexScalarQuantizer))


def open_index(path: Path, refine_file: Path | None = None) -> Any:
    """Map an index, and the file of its refinement if there is one, into memory."""
    # With both flags FAISS opens no file that the index names.
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_ONDISK_SAME_DIR)
    # A file may say that it has none.
    if index is None:
        raise ValueError("it holds no index")
    return index if refine_file is None else refined_by(index, refine_file)


def refined_by(base: Any, refine_file: Path) -> Any:
    """A filled index whose results are scored again by the codes of a file, mapped into memory."""
    refined = faiss.IndexRefine(base, faiss.read_index(str(refine_file), faiss.IO_FLAG_MMAP_IFC))
    refined.ntotal = base.ntotal
    return refined


def write_codes(refine: Any, database: Database, path: Path) -> None:
    """Write an index of the plain codes of a database in blocks, so that they are never in memory
    as a whole.

    FAISS cannot write such a file in blocks, so it is composed: the file of an empty index, the
    number of vectors at byte 8, the codes with their length before them. The sizes are compared
    after reading.
    """
    head = faiss.serialize_index(refine).tobytes()
    size = 0
    with explain_full_disk(path), open(path, "wb") as stream:
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
        raise DualencError(
            "this version of FAISS writes it differently", fix="leave out Refine", where=path
        )


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Make a hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
