"""Which FAISS index to make, and FAISS's own words when it cannot be made."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import faiss

from dualenc.errors import DualencError

Metric = Literal["cosine", "ip"]
METRICS = ("cosine", "ip")

EXACT_VALUES = 2**25
"""Up to this many numbers (128 MiB as float32) an exact search takes some ten milliseconds on one core."""
FLOAT_VALUES = 2**30
"""Beyond this many numbers (4 GiB as float32) vectors are stored with one byte per number."""
MIN_POINTS_PER_LIST = 39
POINTS_PER_LIST = 64
OTHER_TRAINING_ROWS = 65536

LARGEST_NUMBER = 2**24
MOST_LINKS = 1024
MOST_BITS = 16
MOST_DIMENSIONS = 2**16
"""Limits of a factory string: what is beyond them is a slip of the hand, or takes a machine down."""


def choose_factory(num_vectors: int, dim: int) -> str:
    """The factory string that "auto" stands for, by the size of the database N·D.

    ============================  =========================  ======================================
    N·D                           factory                    why
    ============================  =========================  ======================================
    up to 2²⁵ (128 MiB)           `Flat`                     exact, and fast enough
    up to 2³⁰ (4 GiB)             `IVF{n},Flat`              searches a few of n lists
    above                         `IVF{n}_HNSW32,SQ8`        as before, in a quarter of the memory
    ============================  =========================  ======================================

    n is the power of two nearest to 4√N, fewer where a list would get less than 39 training points.

    Args:
        num_vectors: N.
        dim: D.
    """
    if num_vectors * dim <= EXACT_VALUES:
        return "Flat"
    by_training = math.floor(math.log2(max(1, num_vectors / MIN_POINTS_PER_LIST)))
    lists = 2 ** min(round(math.log2(4 * math.sqrt(num_vectors))), by_training)
    return f"IVF{lists},Flat" if num_vectors * dim <= FLOAT_VALUES else f"IVF{lists}_HNSW32,SQ8"


def new_index(dim: int, factory: str, metric: Metric, num_vectors: int | None = None) -> Any:
    """An empty FAISS index; cosine is the inner product of normalised vectors.

    Args:
        dim: D.
        factory: a FAISS factory string.
        metric: "cosine" or "ip".
        num_vectors: N, if it is known; an index with more lists than vectors is refused.

    Raises:
        DualencError: FAISS does not know the string, or it does not fit the dimension or the number of vectors
            (with FAISS's reason).
    """
    if metric not in METRICS:
        raise DualencError(f"metric is {metric!r}: choose one of {', '.join(METRICS)}")
    check_factory(factory, num_vectors)
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, MemoryError) as error:
        raise _unfit(factory, f"does not work for dimension {dim}: {reason(error)}") from None


def check_factory(factory: str, num_vectors: int | None = None) -> None:
    """Refuse what FAISS accepts and then ends the whole process with, hangs on, or can never fill.

    `HNSW0`, `PQ4x0` and `IVF10_HNSW1,Flat` stop at an assertion in C++, a division by zero or a wild pointer when the
    first vector arrives, out of reach of any exception; `IVF999999999,Flat` takes the memory of the whole machine.

    Args:
        factory: a FAISS factory string, or "auto".
        num_vectors: N, if it is known.

    Raises:
        DualencError: with what is wrong.
    """
    numbers = [int(number) for number in re.findall(r"\d+", factory) if len(number) < 10]
    if len(numbers) < len(re.findall(r"\d+", factory)) or any(not 1 <= n <= LARGEST_NUMBER for n in numbers):
        raise _unfit(factory, f"has a number that is not between 1 and {LARGEST_NUMBER:,}")
    for name, links in re.findall(r"(HNSW|NSG)(\d+)", factory):
        if not 2 <= int(links) <= MOST_LINKS:
            raise _unfit(factory, f"gives each vector {links} links; {name} takes 2 to {MOST_LINKS}")
    for bits in re.findall(r"(?:PQ|RQ|LSQ|IMI|Residual)\w*?\d+x(\d+)", factory):
        if int(bits) > MOST_BITS:
            raise _unfit(factory, f"has codes of {bits} bits; at most {MOST_BITS} can be trained")
    for size in re.findall(r"(?:PCA[WR]*|RR|ITQ|OPQ\d+_|Pad)(\d+)", factory):
        if int(size) > MOST_DIMENSIONS:
            raise _unfit(factory, f"makes vectors of dimension {size}; at most {MOST_DIMENSIONS} are allowed")
    for lists in re.findall(r"IVF(\d+)", factory):
        if num_vectors is not None and int(lists) > num_vectors:
            raise _unfit(factory, f"has {lists} lists for {num_vectors} vectors")
    if "IDMap" in factory:
        raise _unfit(factory, "numbers the vectors itself, and ids.txt does that already; leave IDMap out")


def _unfit(factory: str, why: str) -> DualencError:
    return DualencError(f"factory {factory[:80]!r} {why}; try auto, Flat, HNSW32 or IVF256,Flat")


def training_rows(index: Any, num_vectors: int) -> int:
    """How many vectors to train on: 64 per inverted list, at least 65536, at most all; 0 if none are needed."""
    if index.is_trained:
        return 0
    ivf = faiss.try_extract_index_ivf(index)
    return min(num_vectors, max(OTHER_TRAINING_ROWS, POINTS_PER_LIST * ivf.nlist if ivf else 0))


def reason(error: BaseException) -> str:
    """The last part of a FAISS error: what is wrong, without the C++ function and file."""
    text = " ".join(str(error).split())
    text = re.sub(r"^Error in .* at \S+:\d+: ", "", text)
    text = re.sub(r"^Error: '.*' failed: ", "", text)
    return text if len(text) <= 200 else f"{text[:199]}…"
