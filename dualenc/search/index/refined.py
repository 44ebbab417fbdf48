"""Two-stage (refined) indexes: compact codes retrieve candidates, higher-precision codes rescore.

The higher-precision codes take most of the memory. They may be a separate file, refine.faiss beside
index.faiss, that is written in blocks and memory-mapped by searches, so that an index larger than
memory can be built.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from dualenc.errors import DualencError
from dualenc.io.files import explain_full_disk

REFINE = "refine.faiss"


def bytes_per_vector(index: Any) -> int:
    """Return the memory per vector in bytes: codes, row numbers and HNSW links."""
    if isinstance(index, faiss.IndexRefine):
        return sum(bytes_per_vector(part) for part in split(index))
    if isinstance(index, faiss.IndexPreTransform):
        return bytes_per_vector(faiss.downcast_index(index.index))
    if isinstance(index, faiss.IndexHNSW):
        graph: Any = index.hnsw
        # 4 bytes per link on the lowest level; upper levels and offsets add about 32 bytes.
        links = 4 * graph.nb_neighbors(0) + 32
        return bytes_per_vector(faiss.downcast_index(index.storage)) + links
    if isinstance(index, faiss.IndexIVF):
        return int(index.code_size) + 8  # inverted lists store an int64 row number per code
    return int(getattr(index, "code_size", 4 * index.d))


def split(index: Any) -> tuple[Any, Any]:
    """Return the base index and the refinement index, which is None if nothing is refined."""
    if not isinstance(index, faiss.IndexRefine):
        return index, None
    return faiss.downcast_index(index.base_index), faiss.downcast_index(index.refine_index)


def check_refinement(index: Any) -> None:
    """Raise FAISS's error now if it cannot score the refinement codes; a search would crash."""
    refine = split(index)[1]
    if refine is not None:
        refine.get_distance_computer()


def can_be_file(refine: Any) -> bool:
    """Return True if a refinement index has plain codes, which `write_codes` can write."""
    return isinstance(refine, (faiss.IndexFlat, faiss.IndexScalarQuantizer))


def open_index(path: Path, refine_file: Path | None = None) -> Any:
    """Memory-map an index, and the file of its refinement codes if there is one.

    Raises:
        ValueError: the file contains no index.
        RuntimeError: FAISS cannot read it.
    """
    # MMAP_IFC maps the codes. ONDISK_SAME_DIR keeps FAISS from opening a path that the index names,
    # which an untrusted file could point anywhere.
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_ONDISK_SAME_DIR)
    # FAISS has a file marker for "null index", which reads as None.
    if index is None:
        raise ValueError("it contains no index")
    return index if refine_file is None else refined_by(index, refine_file)


def refined_by(base: Any, refine_file: Path) -> Any:
    """Return a filled index whose results are rescored by the memory-mapped codes of a file."""
    refined = faiss.IndexRefine(base, faiss.read_index(str(refine_file), faiss.IO_FLAG_MMAP_IFC))
    refined.ntotal = base.ntotal
    return refined


def write_codes(refine: Any, blocks: Iterable[np.ndarray], count: int, path: Path) -> None:
    """Write an index of plain codes in blocks, so that memory never holds all of them.

    Args:
        refine: trained, empty index that encodes the vectors.
        blocks: vectors in blocks (n, D), `count` rows in total.
        count: N, the number of vectors.
        path: file to write.

    Raises:
        DualencError: this version of FAISS uses another file layout.
    """
    # FAISS cannot write such a file in blocks, so it is composed by hand from the file of an empty
    # index. Layout: 4 bytes of kind and 4 of dimension, then N as int64 at byte 8, …, and at the
    # end the length of the codes as int64, followed by the codes.
    head = faiss.serialize_index(refine).tobytes()
    size = 0
    with explain_full_disk(path), open(path, "wb") as stream:
        stream.write(head)
        for block in blocks:
            size += stream.write(refine.sa_encode(block).tobytes())
        stream.seek(8)
        stream.write(np.int64(count).tobytes())
        stream.seek(len(head) - 8)
        # The length counts floats in a flat index, and bytes in all others.
        unit = 4 if isinstance(refine, faiss.IndexFlat) else 1
        stream.write(np.int64(size // unit).tobytes())
    # Reading it back notices a version of FAISS with another layout.
    written: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if written.ntotal != count or written.codes.size() != size:
        raise DualencError(
            "this version of FAISS uses another file layout", fix="leave out Refine", where=path
        )


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Make a hard link, or a copy if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
