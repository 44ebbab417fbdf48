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


def new_index(dim: int, factory: str, metric: Metric) -> Any:
    """An empty FAISS index; cosine is the inner product of normalised vectors.

    Raises:
        DualencError: FAISS does not know the string, or it does not fit the dimension (with FAISS's reason).
    """
    if metric not in METRICS:
        raise DualencError(f"metric is {metric!r}: choose one of {', '.join(METRICS)}")
    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise DualencError(
            f"factory {factory!r} does not work for dimension {dim}: {reason(error)}; "
            "try auto, Flat, HNSW32 or IVF256,Flat"
        ) from None


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
    return re.sub(r"^Error: '.*' failed: ", "", text)
