"""Build a FAISS index: check the factory string, fit it into memory, train and fill."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from tqdm.auto import tqdm

from dualenc.errors import DualencError, explain
from dualenc.io.files import remove
from dualenc.search.index.database import METRICS, Database
from dualenc.search.index.kinds import choose_factory, machine_memory, training_rows_in
from dualenc.search.index.refined import (
    REFINE,
    bytes_per_vector,
    can_be_file,
    check_refinement,
    refined_by,
    split,
    write_codes,
)
from dualenc.types import Metric

POINTS_PER_LIST = 64
MIN_TRAINING_SAMPLE = 65536
MAX_FACTORY_NUMBER = 2**24
MAX_FACTORY_LENGTH = 256
"""FAISS parses factory strings recursively: thousands of parts overflow the stack."""
OTHER_FACTORIES = "try auto, Flat, HNSW32 or IVF256,Flat"
FACTORY_LIMITS = {
    "links of a vector": (r"(?:HNSW|NSG)(\d+)", 2, 1024),
    "bits of a code": (r"(?:PQ|RQ|LSQ|IMI|Residual)\w*?\d+x(\d+)", 1, 16),
    "dimensions": (r"(?:PCA[WR]*|RR|ITQ|OPQ\d+_|Pad)(\d+)", 1, 2**16),
}
"""Ranges of the numbers in a factory string; anything outside is a typo or exhausts the machine."""


def new_index(dim: int, factory: str, metric: Metric, num_vectors: int | None = None) -> Any:
    """Create an empty FAISS index. Cosine is the inner product of normalized vectors.

    Args:
        dim: D, the size of the vectors.
        factory: FAISS factory string.
        metric: "cosine" or "ip".
        num_vectors: N, if known, to refuse more lists than vectors.

    Raises:
        DualencError: the metric is unknown, or the factory string is invalid or unsafe.
    """
    if metric not in METRICS:
        raise DualencError(f"metric is {metric!r}", fix=f"choose one of {', '.join(METRICS)}")
    check_factory(factory, num_vectors)
    with explain(f"factory {factory[:80]!r} does not work for dimension {dim}", OTHER_FACTORIES):
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        check_refinement(index)
    # FAISS has some kinds, such as HNSW over PQ, by L2 distance only. For unit vectors the ranking
    # is the same, for others it is not.
    if metric == "ip" and index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise _unfit(factory, "is searched by distance, not by inner product; use --metric cosine")
    _disable_polysemous_training(index)
    return index


def _disable_polysemous_training(index: Any) -> None:
    """Disable the reordering of PQ codes: it takes 4 s per code byte and changes no distance."""
    index = faiss.downcast_index(index)
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False
    for part in ("index", "base_index", "refine_index", "storage", "quantizer"):
        if getattr(index, part, None) is not None:
            _disable_polysemous_training(getattr(index, part))


def check_factory(factory: str, num_vectors: int | None = None) -> None:
    """Reject factory strings that FAISS accepts but that crash, hang or can never be filled.

    `HNSW0`, `PQ4x0` and `IVF10_HNSW1,Flat` end in a C++ assertion, a division by zero or a wild
    pointer at the first vector, which no exception handler catches; `IVF999999999,Flat` exhausts
    the memory of the machine.

    Args:
        factory: FAISS factory string.
        num_vectors: N, if known, to refuse more lists than vectors.

    Raises:
        DualencError: the string is too long, has a number out of range, or names a kind that
            cannot be saved.
    """
    if len(factory) > MAX_FACTORY_LENGTH:
        length = f"is {len(factory):,} characters long, more than {MAX_FACTORY_LENGTH}"
        raise _unfit(factory, length)
    # Compare lengths first: Python refuses to convert thousands of digits.
    numbers = re.findall(r"\d+", factory)
    if any(len(number) > 9 or not 1 <= int(number) <= MAX_FACTORY_NUMBER for number in numbers):
        raise _unfit(factory, f"has a number that is not between 1 and {MAX_FACTORY_NUMBER:,}")
    for what, (pattern, lowest, highest) in FACTORY_LIMITS.items():
        for number in re.findall(pattern, factory):
            if not lowest <= int(number) <= highest:
                raise _unfit(factory, f"has {number} {what}, which may be {lowest} to {highest:,}")
    for lists in re.findall(r"IVF(\d+)", factory):
        if num_vectors is not None and int(lists) > num_vectors:
            raise _unfit(factory, f"has {lists} lists for {num_vectors} vectors")
    if "ZnLattice" in factory:
        raise _unfit(factory, "has lattice codes, which FAISS does not write to a file")
    if "IDMap" in factory:
        raise _unfit(
            factory,
            "numbers the vectors itself, and items.arrow does that already; leave IDMap out",
        )


def _unfit(factory: str, why: str) -> DualencError:
    return DualencError(f"factory {factory[:80]!r} {why}", fix=OTHER_FACTORIES)


def fit_factory(
    database: Database, factory: str, memory: int | None, target_recall: float, *, is_saved: bool
) -> tuple[str, bool]:
    """Resolve "auto", and decide whether the refinement codes must be a file to fit into memory.

    Args:
        database: N vectors.
        factory: "auto" or a FAISS factory string.
        memory: bytes for the index, or None for the machine's memory.
        target_recall: recall@10 that "auto" aims for.
        is_saved: whether the index gets a folder, which a file of codes needs.

    Returns:
        The factory string, and whether the refinement codes are a separate file.

    Raises:
        DualencError: the index exceeds `memory`.
    """
    num_vectors = len(database)
    dim = database.embeddings.dim
    budget = machine_memory() if memory is None else memory
    choices = [factory]
    if factory == "auto":
        # Without a limit the first choice may exceed the machine's memory; the second does not.
        limits = (memory, budget)
        choices = [choose_factory(num_vectors, dim, limit, target_recall) for limit in limits]
    for chosen in choices:
        # `empty` must stay alive: it owns both parts that `split` returns.
        empty = new_index(dim, chosen, database.metric, num_vectors)
        base, refine = split(empty)
        needed = num_vectors * bytes_per_vector(empty)
        is_apart = is_saved and needed > budget // 2 and can_be_file(refine)
        if is_apart:
            needed = num_vectors * bytes_per_vector(base)
        if needed <= budget:
            break
    if memory is not None and needed > memory:
        raise DualencError(
            f"factory {chosen!r} takes {needed / 2**20:,.1f} MiB for {num_vectors:,} vectors, "
            f"and memory is {memory / 2**20:,.1f} MiB",
            fix="give more, or auto with a folder to save to",
        )
    return chosen, is_apart


@contextmanager
def building_folder(target: Path) -> Iterator[Path]:
    """Create `.NAME.building` beside an index for this context, replacing one of a killed build.

    Raises:
        DualencError: the folder holds files that a build does not write.
    """
    work = target.with_name(f".{target.name}.building")
    if os.path.lexists(work) and not (work.is_dir() and set(os.listdir(work)) <= {REFINE}):
        raise DualencError(
            "exists and was not left by the build of an index", fix="move it away", where=work
        )
    # A killed build left only codes, which nobody else refers to.
    remove(work)
    work.mkdir()
    try:
        yield work
    finally:
        remove(work)


def training_rows(index: Any, num_vectors: int) -> int:
    """Return the number of training vectors: 64 per inverted list, at least 65,536, at most all.

    An index that needs no training takes 0.
    """
    if index.is_trained:
        return 0
    ivf = faiss.try_extract_index_ivf(index)
    by_lists = POINTS_PER_LIST * ivf.nlist if ivf else 0
    return min(num_vectors, max(MIN_TRAINING_SAMPLE, by_lists))


def _transforms(index: Any) -> list[Any]:
    """Return the transforms that vectors pass before an index, in order."""
    base = split(index)[0]
    if not isinstance(base, faiss.IndexPreTransform):
        return []
    chain: Any = base.chain
    return [faiss.downcast_VectorTransform(chain.at(number)) for number in range(chain.size())]


def subtracts_mean(index: Any) -> bool:
    """Return True if an index centers vectors before projecting them, as FAISS's PCA does."""
    return any(
        isinstance(transform, faiss.LinearTransform) and transform.have_bias
        for transform in _transforms(index)
    )


def _train_projections(index: Any, sample: np.ndarray) -> None:
    """Train the PCA of an index on a sample (n, D), and drop the mean that it subtracts.

    Inner products of centered vectors rank differently from those of the vectors, and decoded
    vectors would not reproduce them. The codes are trained afterwards, on uncentered projections.
    A whitening PCA keeps its mean, because its scaling is defined around it.
    """
    for transform in _transforms(index):
        if not transform.is_trained:
            transform.train(sample)
        if isinstance(transform, faiss.PCAMatrix) and transform.eigen_power == 0:
            transform.have_bias = False
        # The next transform, and the codes, are trained on what this one puts out.
        sample = transform.apply(sample)


def build_faiss(
    database: Database,
    factory: str,
    *,
    memory: int | None = None,
    refine_file: Path | None = None,
    progress: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Train a new index on a sample and add the database in blocks.

    Args:
        database: N vectors.
        factory: FAISS factory string.
        memory: bytes of memory, of which the training sample takes at most a quarter; by default
            the machine's.
        refine_file: file to which the refinement codes are written instead of keeping them in
            memory.
        progress: show a bar.

    Returns:
        The filled index, and its entries for meta.json.

    Raises:
        DualencError: FAISS cannot train the index, or cannot add the vectors.
    """
    num_vectors = len(database)
    dim = database.embeddings.dim
    filled = new_index(dim, factory, database.metric, num_vectors)
    limit = machine_memory() if memory is None else memory
    rows = min(training_rows(filled, num_vectors), training_rows_in(limit, dim))
    started = time.perf_counter()
    if rows:
        sample = database.rows(database.sample(rows, seed=0))
        with explain(
            f"factory {factory!r} cannot be trained on {rows} vectors",
            "use fewer lists, Flat or auto",
        ):
            _train_projections(filled, sample)
            filled.train(sample)
    index = filled if refine_file is None else split(filled)[0]
    with explain(f"factory {factory[:80]!r} cannot take {num_vectors} vectors", OTHER_FACTORIES):
        _reserve(index, num_vectors)
        with tqdm(
            total=num_vectors, desc="index", unit=" vectors", unit_scale=True, disable=not progress
        ) as bar:
            for block in database.blocks():
                index.add(block)
                bar.update(len(block))
    if refine_file is not None:
        write_codes(split(filled)[1], database.blocks(), num_vectors, refine_file)
        refined = refined_by(index, refine_file)
        # `filled` owns the base index in C++, so it must live as long as `refined`.
        refined.referenced_objects.append(filled)
        filled = refined
    seconds = round(time.perf_counter() - started, 3)
    return filled, {"trained_on": rows, "build_seconds": seconds}


def _reserve(index: Any, num_vectors: int) -> None:
    """Reserve flat storage up front: growing it copies it, which needs twice the memory."""
    # A graph keeps its vectors in a flat index of its own.
    is_graph = isinstance(index, faiss.IndexHNSW)
    storage = faiss.downcast_index(index.storage if is_graph else index)
    if isinstance(storage, faiss.IndexFlatCodes):
        # Shrinking a C++ vector keeps its capacity.
        storage.codes.resize(num_vectors * storage.code_size)
        storage.codes.resize(0)
