"""Choose a FAISS factory string from corpus size, dimension, memory and target recall."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from dualenc.errors import DualencError

MIN_POINTS_PER_LIST = 39
MAX_LISTS = 2**17
MIN_TRAINING_ROWS = 1024
"""Minimum whatever the memory: a code book has 256 entries and needs several points for each."""
MIN_MEMORY = 2**24
EXACT_VALUES = 2**25
"""Up to this many numbers (128 MiB as float32) an exact search takes about ten milliseconds on one
core."""
FLOAT_VALUES = 2**30
"""Beyond this many numbers (4 GiB as float32) vectors are compressed, unless the user names a
memory size."""


class Kind(NamedTuple):
    """A type of index, with what decides whether it fits.

    `KINDS` lists them in order of preference.

        KINDS[0].factory(1024, 384)  # "Flat"

    Attributes:
        name: name for humans.
        factory: function of the number of lists and D that returns the FAISS factory string.
        resident: function of D that returns the bytes per vector that searches need in memory.
        recall: highest recall@10 to expect.
        max_values: largest N·D without a named memory size; 0 for no limit.
        min_target: lowest target recall@10 for which it is considered.
    """

    name: str
    factory: Callable[[int, int], str]
    resident: Callable[[int], int]
    recall: float
    max_values: int = 0
    min_target: float = 0.0


def _subquantizers(dim: int) -> int:
    """Return the bytes of a product-quantized code: the largest divisor of D up to D/4."""
    return max(m for m in range(1, max(1, dim // 4) + 1) if dim % m == 0)


KINDS = (
    Kind("Flat", lambda n, d: "Flat", lambda d: 4 * d, 1.0, EXACT_VALUES),
    # Links of 4 bytes: 64 on the lowest level, plus about 8 for the levels above.
    Kind("HNSW", lambda n, d: "HNSW32", lambda d: 4 * d + 288, 0.995, 2**28, 0.98),
    Kind("IVF", lambda n, d: f"IVF{n},Flat", lambda d: 4 * d + 8, 1.0, FLOAT_VALUES),
    Kind("IVF-SQ", lambda n, d: f"IVF{n}_HNSW32,SQ8", lambda d: d + 8, 0.97),
    Kind(
        "IVF-PQ, refined",
        lambda n, d: f"IVF{n}_HNSW32,PQ{_subquantizers(d)},Refine(SQfp16)",
        lambda d: _subquantizers(d) + 8,
        0.99,
    ),
    Kind(
        "RaBitQ, refined",
        lambda n, d: f"IVF{n}_HNSW32,RaBitQ,Refine(SQfp16)",
        lambda d: math.ceil(d / 8) + 16,
        0.97,
    ),
)
"""Kinds in order of preference: the first that fits is taken. Refinement codes are not counted,
because they can be mapped from disk."""


def choose_factory(
    num_vectors: int, dim: int, memory: int | None = None, target_recall: float = 0.95
) -> str:
    """Return the factory string of the first of `KINDS` that fits, or else of the smallest one.

    RaBitQ: Gao and Long 2024 (arXiv:2405.12497).

        choose_factory(1_000_000, 384, memory=parse_bytes("1GiB"))

    Args:
        num_vectors: N.
        dim: D.
        memory: bytes that searches may use; None uses each kind up to its `max_values`.
        target_recall: recall@10 to aim for.
    """
    lists = number_of_lists(num_vectors, dim, memory)
    values = num_vectors * dim
    fitting = []
    for kind in KINDS:
        # Scans and graph construction get slow in large sets even if memory suffices; IVF is
        # limited by memory alone.
        is_limited = memory is None or kind.name in ("Flat", "HNSW")
        is_too_large = is_limited and 0 < kind.max_values < values
        fits_memory = memory is None or num_vectors * kind.resident(dim) <= memory
        if fits_memory and not is_too_large and kind.min_target <= target_recall:
            if kind.recall >= target_recall:
                return kind.factory(lists, dim)
            fitting.append(kind)
    if fitting:  # none reaches the target
        return max(fitting, key=lambda kind: kind.recall).factory(lists, dim)
    # Nothing fits, so take the smallest; the caller reports what it needs.
    return min(KINDS, key=lambda kind: kind.resident(dim)).factory(lists, dim)


def machine_memory() -> int:
    """Return the bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def training_rows_in(memory: int, dim: int) -> int:
    """Return how many float32 vectors fit into a quarter of the memory.

    Args:
        memory: bytes.
        dim: D.
    """
    return max(MIN_TRAINING_ROWS, memory // 4 // (4 * dim))


def number_of_lists(num_vectors: int, dim: int, memory: int | None = None) -> int:
    """Return the number of inverted lists: the power of two nearest to 4√N.

    It is lower if lists would get fewer than 39 training vectors, the minimum of FAISS's k-means.

    Args:
        num_vectors: N.
        dim: D.
        memory: bytes, which limit the training sample; None for no limit.
    """
    trained_on = num_vectors if memory is None else min(num_vectors, training_rows_in(memory, dim))
    # Rounded down: rounding up would leave lists with too few vectors to train on.
    by_training = math.floor(math.log2(max(1, trained_on / MIN_POINTS_PER_LIST)))
    by_count = round(math.log2(4 * math.sqrt(num_vectors)))
    return min(MAX_LISTS, 2 ** min(by_count, by_training))


def parse_bytes(text: str) -> int:
    """Parse a memory size: "2GiB", "500 MB", "1.5G" or a plain number of bytes.

    As usual, MB is a power of 1000, and MiB and M are powers of 1024.

    Args:
        text: the size.

    Raises:
        DualencError: the text is not a size, or is too small.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)\s*", text, re.IGNORECASE)
    size = 0
    if match is not None:
        base = 1000 if match[3].upper() == "B" and match[2] else 1024
        size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < MIN_MEMORY:
        raise DualencError(
            f"memory is {text!r}",
            fix=f"give a size such as 2GiB or 500MB, at least {MIN_MEMORY / 2**20:g}MiB",
        )
    return size
