"""What "auto" stands for, and FAISS's reason in one line when a string does not work."""

from __future__ import annotations

import re

import faiss
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.index import choose_factory
from dualenc.index.factory import new_index, training_rows


@pytest.mark.parametrize(
    ("num_vectors", "dim", "factory"),
    [
        (1, 8, "Flat"),
        (5_183, 384, "Flat"),
        (2**25 // 384, 384, "Flat"),
        (100_000, 384, "IVF1024,Flat"),
        (1_000_000, 384, "IVF4096,Flat"),
        (20_000, 4096, "IVF512,Flat"),
        (10_000_000, 384, "IVF16384_HNSW32,SQ8"),
    ],
)
def test_auto(num_vectors: int, dim: int, factory: str) -> None:
    assert choose_factory(num_vectors, dim) == factory


@given(st.integers(1, 10**9), st.integers(1, 8192))
def test_auto_makes_an_index_that_can_be_trained(num_vectors: int, dim: int) -> None:
    factory = choose_factory(num_vectors, dim)
    lists = re.match(r"IVF(\d+)", factory)
    assert lists is None or int(lists[1]) * 39 <= num_vectors
    assert faiss.index_factory(4, factory).d == 4


def test_training_follows_the_number_of_lists() -> None:
    assert training_rows(new_index(8, "Flat", "ip"), 10**6) == 0
    assert training_rows(new_index(8, "HNSW16", "ip"), 10**6) == 0
    assert training_rows(new_index(8, "IVF4096,Flat", "ip"), 10**6) == 64 * 4096
    assert training_rows(new_index(8, "PCA4,IVF4096,Flat", "ip"), 10**5) == 10**5
    assert training_rows(new_index(8, "SQ8", "ip"), 10**6) == 65536


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("Flatt", "could not parse index string Flatt"),
        ("IVFx,Flat", "could not parse index string IVFx"),
        ("PQ3", "should be a multiple of the number of subquantizers"),
        ("", "could not parse"),
    ],
)
def test_a_bad_factory_string_is_told_in_faiss_words(factory: str, words: str) -> None:
    with pytest.raises(DualencError, match=words) as error:
        new_index(8, factory, "cosine")
    message = str(error.value)
    assert "\n" not in message
    assert "Error in" not in message
    assert ".cpp" not in message


def test_an_unknown_metric() -> None:
    with pytest.raises(DualencError, match="metric is 'l2': choose one of cosine, ip"):
        new_index(8, "Flat", "l2")  # type: ignore[arg-type]
