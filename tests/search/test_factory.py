"""What "auto" stands for, and FAISS's reason in one line when a string does not work."""

from __future__ import annotations

import re

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.search import Index, choose_factory
from dualenc.search.index.build import check_factory, new_index, training_rows
from dualenc.search.index.kinds import KINDS, Kind, parse_bytes
from dualenc.search.index.refined import bytes_per_vector, split


@pytest.mark.parametrize(
    ("num_vectors", "dim", "factory"),
    [
        (2**25 // 384, 384, "Flat"),
        (100_000, 384, "IVF1024,Flat"),
        (1_000_000, 384, "IVF4096,Flat"),
        (20_000, 4096, "IVF512,Flat"),
        (10_000_000, 384, "IVF16384_HNSW32,SQ8"),
        (100_000_000, 128, "IVF32768_HNSW32,SQ8"),
    ],
)
def test_auto(num_vectors: int, dim: int, factory: str) -> None:
    assert choose_factory(num_vectors, dim) == factory


@pytest.mark.parametrize(
    ("num_vectors", "dim", "memory", "target", "factory"),
    [
        (1_000, 8, "1GiB", 0.95, "Flat"),
        (1_000_000, 128, "2GiB", 0.99, "HNSW32"),
        (1_000_000, 128, "2GiB", 1.0, "IVF4096,Flat"),
        (1_000_000, 128, "400MiB", 0.95, "IVF4096_HNSW32,SQ8"),
        (1_000_000, 128, "400MiB", 0.98, "IVF4096_HNSW32,PQ32,Refine(SQfp16)"),
        (10_000_000, 128, "1GiB", 0.95, "IVF8192_HNSW32,PQ32,Refine(SQfp16)"),
        (100_000_000, 128, "8GiB", 0.95, "IVF32768_HNSW32,PQ32,Refine(SQfp16)"),
        (100_000_000, 128, "3.5GiB", 0.95, "IVF32768_HNSW32,RaBitQ,Refine(SQfp16)"),
        (100_000_000, 128, "16MiB", 0.95, "IVF128_HNSW32,RaBitQ,Refine(SQfp16)"),
        (10_000_000, 130, "1GiB", 0.95, "IVF8192_HNSW32,PQ26,Refine(SQfp16)"),
    ],
)
def test_auto_within_a_budget(
    num_vectors: int, dim: int, memory: str, target: float, factory: str
) -> None:
    assert choose_factory(num_vectors, dim, parse_bytes(memory), target) == factory


@given(
    st.integers(1, 10**9),
    st.integers(1, 8192),
    st.none() | st.integers(2**20, 2**40),
    st.sampled_from([0.5, 0.95, 1.0]),
)
def test_auto_makes_an_index_that_can_be_trained(
    num_vectors: int, dim: int, memory: int | None, target: float
) -> None:
    factory = choose_factory(num_vectors, dim, memory, target)
    lists = re.match(r"IVF(\d+)", factory)
    assert lists is None or int(lists[1]) * 39 <= max(num_vectors, 39)
    check_factory(factory, num_vectors)
    smallest = re.sub(r"IVF\d+(_HNSW32)?", "IVF2", factory)
    assert faiss.index_factory(dim, smallest, faiss.METRIC_INNER_PRODUCT).d == dim


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dim", [48, 128])
def test_the_bytes_of_a_kind_are_those_of_faiss(kind: Kind, dim: int) -> None:
    index = new_index(dim, kind.factory(4, dim), "ip")
    assert bytes_per_vector(split(index)[0]) == kind.resident(dim)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("500MB", 5 * 10**8),
        ("1.5g", 3 * 2**29),
        (" 20000000 ", 2 * 10**7),
        ("1 TiB", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    for wrong in ("", "9B", "-1GiB", "2 apples", "1e9"):
        with pytest.raises(DualencError, match="give a size such as 2GiB"):
            parse_bytes(wrong)


def test_training_follows_the_number_of_lists() -> None:
    assert training_rows(new_index(8, "HNSW16", "ip"), 10**6) == 0
    assert training_rows(new_index(8, "IVF4096,Flat", "ip"), 10**6) == 64 * 4096
    assert training_rows(new_index(8, "PCA4,IVF4096,Flat", "ip"), 10**5) == 10**5
    assert training_rows(new_index(8, "SQ8", "ip"), 10**6) == 65536


BAD = """
HNSW0 HNSW1 HNSW0,Flat HNSW-1 HNSW99999999 HNSW32_0+PQ4 HNSW32,PQ0 NSG0 NSG1 flat auto2 Flatt
IVF IVF0,Flat IVF-1,Flat IVF999999999,Flat IVF99999999999999999999,Flat IVF701,Flat IVF10,PQ7
IVF10_HNSW0,Flat IVF10(HNSW0),Flat IVF10,PQ0 IVF10,PQ4x0 IVF10,HNSW0 IDMap,Flat Flat,IDMap
PQ0 PQ7 PQ4x0 PQ4x24 PCA0,Flat PCA1000,Flat OPQ0,PQ4 OPQ7,PQ4 OPQ4_0,PQ4 OPQ4_99999999,PQ4
RR0,Flat Pad0,Flat LSH0 LSH SQ0 SQ3 RQ0x4 RQ4x0 RQ4x30 IMI2x0,Flat IMI2x40,Flat Refine(PQ0)
PQ4,Refine(HNSW0) Residual0,PQ4
"""


@pytest.mark.parametrize(
    "factory",
    [*BAD.split(), "", ",", "Flat,Flat", "\x00", "IVF16,Flat\n", "(" * 1000, "Flat," * 5000],
)
def test_a_bad_string_is_refused_in_a_line_and_never_ends_the_process(factory: str) -> None:
    """HNSW0 aborts in C++, HNSW1 and PQ4x0 crash, NSG0 hangs: only a process apart may try what is
    new in this list."""
    vectors = np.random.default_rng(0).normal(size=(700, 16)).astype(np.float32)
    with pytest.raises(
        DualencError, match=r"try auto, Flat|use fewer lists, Flat or auto"
    ) as error:
        Index.build(vectors, factory=factory)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


GOOD = """
Flat HNSW2 HNSW32 HNSW32,Flat HNSW16_SQ8 NSG32 IVF1,Flat IVF700,Flat IVF8_HNSW32,SQ8
SQ8 SQ4 SQfp16 SQbf16 PCA8,Flat PCAR8,SQ8 OPQ4_8,PQ4x4 RR8,Flat L2norm,Flat
PQ8x8 PQ4x4 PQ4x4fs IVF10,PQ4x4fs IVF10,PQ4x4,RFlat PQ4x4,Refine(Flat) IVF10(Flat),Flat Pad20,Flat
"""


@pytest.mark.slow
@pytest.mark.parametrize("factory", GOOD.split())
def test_good_strings_build(factory: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(700, 16)).astype(np.float32)
    assert len(Index.build(vectors, factory=factory, recall_queries=10)) == 700
