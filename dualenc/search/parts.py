"""An IVF index that is larger than memory: filled part by part, by one process or several, and merged on disk.

Beside the index, in `.NAME.building`, until it is done:

    plan.json           what is built from what; whoever builds something else is told
    trained.faiss       the index without vectors
    part-00000.faiss …  inverted lists of consecutive rows; part-00000.npy …: their codes for refining, if there are any
    lists.ivfdata       the inverted lists of all parts (`faiss.contrib.ondisk`), mapped by searches

A part is claimed by a lock on a file, which ends with its process: a build that was killed goes on with the parts that
are missing, and so do several processes at once, on one machine or on a disk that they share.
"""

from __future__ import annotations

import contextlib
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
from dualenc.files import atomic_path, recover_inside, remove, removed_if_refused, save_array, write_json
from dualenc.full_disk import explain_full_disk
from dualenc.reading import read_json_object
from dualenc.search.build import Database, new_index, reason, train, training_rows
from dualenc.search.kinds import training_rows_in
from dualenc.search.locks import claimed

PART_BYTES = 2**28
"""Of the codes of a part, at most; a smaller budget has smaller parts."""
ROWS_AT_ONCE = 16384
LISTS = "lists.ivfdata"
READ_BYTES = 1 << 20
ELSEWHERE = "its inverted lists are in {}, and no file outside its folder is opened; build the index again"
READ = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_MMAP_IFC


def bytes_per_vector(index: Any) -> int:
    """Of the codes and row numbers that an index holds in memory for each vector; links of HNSW included."""
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
    """The index without what refines its results, and that, or None."""
    if not isinstance(index, faiss.IndexRefine):
        return index, None
    return faiss.downcast_index(index.base_index), faiss.downcast_index(index.refine_index)


def can_be_merged(index: Any) -> bool:
    """Whether the lists of an index can be on disk: an IVF index with plain codes, refined by plain vectors or not."""
    base, refine = split(index)
    plain = isinstance(_lists(base), faiss.ArrayInvertedLists)
    return plain and (refine is None or isinstance(refine, (faiss.IndexFlat, faiss.IndexScalarQuantizer)))


@contextlib.contextmanager
def built_in_parts(
    database: Database, factory: str, work: Path, *, train_rows: int | None, memory: int, seed: int, progress: bool
) -> Iterator[tuple[Any, dict[str, Any]] | None]:
    """Train an index, fill it part by part and merge the parts on disk; goes on where an earlier call was killed.

    Args:
        database: N vectors.
        factory: of an index that `can_be_merged`.
        work: folder for the parts; several processes that name the same one share the work. It is removed at the end of
            the context.
        train_rows: vectors to train on; by default as `training_rows` says, at most a fourth of the memory.
        memory: bytes that training and parts may take.
        seed: of the training sample.
        progress: show a bar.

    Yields:
        The merged index, its lists and refining codes mapped from `work`, with entries for its meta.json; in one
        process alone, and to the others None as soon as that one is done.

    Raises:
        DualencError: the folder is of another build, or FAISS cannot train or fill the index.
    """
    num_vectors, dim = len(database), database.embeddings.dim
    empty = new_index(dim, factory, database.metric, num_vectors)
    wanted = training_rows(empty, num_vectors) if train_rows is None else min(train_rows, num_vectors)
    trained_on = min(wanted, training_rows_in(memory, dim)) if train_rows is None else wanted
    rows = max(ROWS_AT_ONCE, min(PART_BYTES, memory // 8) // bytes_per_vector(empty))
    parts = [range(start, min(start + rows, num_vectors)) for start in range(0, num_vectors, rows)]
    plan = {"factory": factory, "metric": database.metric, "dim": dim, "count": num_vectors, "seed": seed}
    files = json.dumps(database.embeddings.meta.get("files", {}), sort_keys=True)
    plan |= {"trained_on": trained_on, "rows_of_a_part": rows, "files": hashlib.sha256(files.encode()).hexdigest()}
    started = time.perf_counter()
    with explain_full_disk(work), removed_if_refused(work, "*.faiss"):
        work.mkdir(parents=True, exist_ok=True)
        with claimed(work / "training.lock", wait=True):
            _check_plan(work, plan)
            recover_inside(work)
            if not (work / "trained.faiss").exists():
                train(empty, database.rows(database.sample(trained_on, seed)), factory)
                with atomic_path(work / "trained.faiss") as part:
                    faiss.write_index(empty, str(part))
        del empty
        with tqdm(total=num_vectors, desc="index", unit=" vectors", disable=not progress) as bar:
            waiting = dict(enumerate(parts))
            while waiting and (work / "plan.json").exists() and not (work / "merged.faiss").exists():
                for number, some in list(waiting.items()):
                    path = work / f"part-{number:05d}.faiss"
                    with contextlib.suppress(FileNotFoundError), claimed(path.with_suffix(".lock")) as mine:
                        is_wanted = (work / "plan.json").exists() and not (work / "merged.faiss").exists()
                        if mine and is_wanted and not path.exists():
                            _fill(database, some, number, work, factory)
                    if path.exists():
                        del waiting[number]
                        bar.update(len(some))
                time.sleep(0.2 if waiting else 0)  # another process is at work on what is left
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError):  # another process has merged the parts
                held.enter_context(claimed(work / "merging.lock", wait=True))
            if not (work / "plan.json").exists():
                yield None
                return
            if not (work / "merged.faiss").exists():
                _merge(work, len(parts))
            seconds = round(time.perf_counter() - started, 3)
            meta = {"trained_on": trained_on, "parts": len(parts), "build_seconds": seconds}
            yield open_merged(work / "merged.faiss"), meta
            (work / "plan.json").unlink()
            remove(work)


def lists_of(index: Any) -> Any:
    """The inverted lists of an index if they are on disk, or else None."""
    lists = _lists(split(index)[0])
    return lists if isinstance(lists, faiss.OnDiskInvertedLists) else None


def _lists(base: Any) -> Any:
    ivf: Any = faiss.try_extract_index_ivf(base)
    return None if ivf is None else faiss.downcast_InvertedLists(ivf.invlists)


def open_merged(path: Path) -> Any:
    """Map an index with lists on disk; where both files have been moved together, what refines is read instead.

    `faiss.IO_FLAG_ONDISK_SAME_DIR` finds moved lists, but prints to the standard output and cannot map an index.
    Without it FAISS opens whatever file the index names, which may be anybody's: the name is looked at first.

    Raises:
        DualencError: the lists are elsewhere.
    """
    named, lists = _named_lists(path), os.path.realpath(path.with_name(LISTS))
    if os.path.basename(named) != LISTS or os.path.dirname(lists) != os.path.realpath(path.parent):
        elsewhere = named if os.path.basename(named) != LISTS else lists
        raise DualencError(f"{path}: {ELSEWHERE.format(elsewhere)}")
    if os.path.realpath(named) == lists:
        return faiss.read_index(str(path), READ)
    with quiet():
        return faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)


def open_alone(path: Path) -> Any:
    """Map an index that has its lists, if any, in its own file; another one that it names is not opened."""
    try:
        # With both flags FAISS stops at lists in another file.
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_ONDISK_SAME_DIR)
    except RuntimeError as error:
        if "IO_FLAG_ONDISK_SAME_DIR" not in str(error):
            raise
        raise DualencError(f"{path}: {ELSEWHERE.format('another file')}") from None


def _named_lists(path: Path) -> str:
    """The file in which an index says that its lists are.

    FAISS parses the index as far as that name, the last that it reads, and stops at a reader that is no file. Only
    plain codes that refine may follow: other indexes could name further files.
    """
    last = b""
    with open(path, "rb") as stream:

        def read(count: int) -> bytes:
            nonlocal last
            last = stream.read(count)
            return last

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
    return os.fsdecode(last)


def _end_of_codes(stream: BinaryIO) -> int:
    """Where a plain index that is written at this place of a file ends; -1 if it is none."""

    def number() -> int:
        return int.from_bytes(stream.read(8), "little")

    kind = stream.read(4)
    stream.seek(33, os.SEEK_CUR)  # dimension, count, two numbers without use, whether it is trained, metric
    if kind == b"IxSQ":
        stream.seek(28, os.SEEK_CUR)  # type, range and sizes of the codes
        stream.seek(4 * number(), os.SEEK_CUR)  # trained values
        return number() + stream.tell()
    return 4 * number() + stream.tell() if kind in (b"IxFI", b"IxF2", b"IxFl") else -1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing on the standard output meanwhile: FAISS prints what it does to files there."""
    sys.stdout.flush()
    before = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        _flush_c()
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)


def _flush_c() -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def _check_plan(work: Path, plan: dict[str, Any]) -> None:
    path = work / "plan.json"
    if not (work / "trained.faiss").exists():  # nothing to lose
        write_json(path, plan)
    found = read_json_object(path)
    differs = next((key for key in plan if found.get(key) != plan[key]), None)
    if differs is not None:
        was, now = str(found.get(differs))[:40], str(plan[differs])[:40]
        raise DualencError(f"{work}: holds the beginning of an index with {differs} {was}, not {now}; remove it")


def _fill(database: Database, rows: range, number: int, work: Path, factory: str) -> None:
    whole = faiss.read_index(str(work / "trained.faiss"))  # owns what follows
    base, refine = split(whole)
    codes = []
    try:
        for start in range(rows.start, rows.stop, ROWS_AT_ONCE):
            some = np.arange(start, min(start + ROWS_AT_ONCE, rows.stop))
            block = database.rows(some)
            base.add_with_ids(block, some)
            if refine is not None:
                codes.append(refine.sa_encode(block))
    except (RuntimeError, MemoryError) as error:
        raise DualencError(f"factory {factory!r} cannot take {len(rows)} vectors: {reason(error)}; try auto") from None
    if codes:
        with atomic_path(work / f"part-{number:05d}.npy") as part:
            save_array(part, np.concatenate(codes))
    with atomic_path(work / f"part-{number:05d}.faiss") as part:
        faiss.write_index(base, str(part))


def _merge(work: Path, parts: int) -> None:
    """Lay the lists of all parts side by side, on disk, and the codes that refine one after the other."""
    trained: Any = faiss.read_index(str(work / "trained.faiss"))  # owns what follows
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
    """Lay the lists of some indexes side by side in a file, as `merge_ondisk` does with those of files.

    Args:
        empty: an index without vectors, trained as they are; it gets the lists.
        sources: the indexes, whose row numbers differ.
        path: of the lists.
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
    """An index refined as another one is, by codes that are mapped from a file and never in memory.

    In the file of an empty index of plain vectors their number stands behind a word of four letters and the dimension,
    and the length of the codes at the end; what is read back is compared.

    Args:
        base: N vectors.
        like: an index whose way of refining is taken over.
        codes: its codes (n, bytes) of the N vectors, in blocks.
        path: of the file, which is unlinked as soon as it is mapped.
    """
    refine = _without_codes(split(like)[1])
    head = faiss.serialize_index(refine).tobytes()
    count = size = 0
    with open(path, "wb") as stream:
        stream.write(head)
        for block in codes:
            for start in range(0, len(block), ROWS_AT_ONCE):
                stream.write(np.ascontiguousarray(block[start : start + ROWS_AT_ONCE]).tobytes())
            count, size = count + len(block), size + block.nbytes
        stream.seek(8)
        stream.write(np.int64(count).tobytes())
        stream.seek(len(head) - 8)
        stream.write(np.int64(size // (4 if isinstance(refine, faiss.IndexFlat) else 1)).tobytes())  # Flat: floats
    filled: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    path.unlink()
    if filled.ntotal != count or filled.codes.size() != size:
        raise DualencError(f"{path}: this version of FAISS writes it differently; leave out Refine")
    refined = faiss.IndexRefine(base, filled)
    refined.k_factor, refined.ntotal = like.k_factor, base.ntotal
    return refined


def _without_codes(refine: Any) -> Any:
    """An index of plain vectors that encodes as another one, without its vectors."""
    if isinstance(refine, faiss.IndexFlat):
        return faiss.IndexFlat(refine.d, refine.metric_type)
    empty = faiss.IndexScalarQuantizer(refine.d, refine.sq.qtype, refine.metric_type)
    empty.sq, empty.is_trained = refine.sq, True
    return empty
