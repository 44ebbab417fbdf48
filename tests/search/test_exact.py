"""Exact search against full sorts and a flat FAISS index, by FAISS and by torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.search import exact_search as subject
from dualenc.search.exact_search import exact_search, search_by_torch

By = Literal["faiss", "torch"]
EITHER = pytest.mark.parametrize("by", ["faiss", "torch"])


@contextmanager
def searching(by: By) -> Iterator[None]:
    """What a GPU does is done on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if by == "torch":
            patch.setattr(subject, "_search_by_faiss", search_by_torch)
        yield


@EITHER
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(0, 7), st.integers(1, 12)),
    k=st.integers(1, 14),
    block=st.integers(1, 5),
    dtype=st.sampled_from([np.float16, np.float32, np.float64, np.int64]),
)
def test_equals_a_full_sort_with_ties_by_descending_id(
    by: By, seed: int, sizes: tuple[int, int], k: int, block: int, dtype: type
) -> None:
    generator = np.random.default_rng(seed)
    queries, documents = (generator.integers(-1, 2, (size, 2)).astype(dtype) for size in sizes)
    ids = [str(number) for number in generator.permutation(len(documents))]
    with searching(by), pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "MAX_QUERY_BLOCKS", 2)
        patch.setattr(subject, "QUERY_BLOCK", 2)
        patch.setattr(subject, "DOCUMENT_BLOCK", block)
        scores, columns = exact_search(queries, documents, k, document_ids=ids)
    assert scores.shape == columns.shape == (len(queries), min(k, len(documents)))
    assert (scores.dtype, columns.dtype) == (np.float32, np.int64)
    for row, query in enumerate(queries):
        similarity = documents @ query
        expected = sorted(
            range(len(ids)), key=lambda column: (similarity[column], ids[column]), reverse=True
        )[:k]
        assert columns[row].tolist() == expected
        assert scores[row].tolist() == similarity[expected].tolist()


@EITHER
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_equals_a_flat_faiss_index(by: By, dtype: type) -> None:
    generator = np.random.default_rng(0)
    queries, documents = generator.standard_normal((40, 16)), generator.standard_normal((3000, 16))
    queries, documents = queries.astype(dtype), documents.astype(dtype)
    index = faiss.IndexFlatIP(16)
    index.add(documents.astype(np.float32))
    theirs, their_columns = index.search(queries.astype(np.float32), 50)
    with searching(by), pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "DOCUMENT_BLOCK", 700)
        scores, columns = exact_search(queries, documents, 50)
    assert (columns == their_columns).all()
    assert scores == pytest.approx(theirs, abs=1e-5)
    similarity = queries.astype(np.float64) @ documents.T.astype(np.float64)
    np.testing.assert_allclose(scores, -np.sort(-similarity)[:, :50], rtol=1e-6, atol=1e-6)


@EITHER
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_processes_share_the_queries_and_get_the_same_bits(by: By, world: int) -> None:
    generator = np.random.default_rng(1)
    queries, documents = generator.standard_normal((50, 8)), generator.standard_normal((100, 8))
    shares: list[subject.Results] = []
    rank_slice = distributed.rank_slice
    with searching(by), pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "QUERY_BLOCK", 8)
        alone = exact_search(queries, documents, 10)
        patch.setattr(distributed, "gather_objects", lambda own: shares.append(own) or [own])
        for rank in range(world):
            patch.setattr(
                distributed, "rank_slice", lambda total, rank=rank: rank_slice(total, rank, world)
            )
            exact_search(queries, documents, 10)
    for part in (0, 1):
        together = np.concatenate([block[part] for share in shares for block in share])
        assert together.tobytes() == alone[part].tobytes()


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_settings_of_the_training_around_it_are_kept_and_do_not_count(precision: str) -> None:
    """bfloat16 by autocast would round scores to three digits, and so would TF32 on a GPU."""
    generator = np.random.default_rng(2)
    queries, documents = generator.standard_normal((4, 32)), generator.standard_normal((50, 32))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16), searching("torch"):
            scores, _ = exact_search(queries, documents, 50)
            assert torch.get_float32_matmul_precision() == precision
            assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    np.testing.assert_allclose(scores, -np.sort(-queries @ documents.T), rtol=1e-5, atol=1e-5)


@EITHER
@pytest.mark.parametrize(
    ("queries", "documents", "options", "message"),
    [
        (np.ones((1, 2)), np.ones((1, 3)), {}, "one dimension"),
        (np.ones((1, 2)), np.ones((0, 2)), {}, "with 0 ids"),
        (np.ones((1, 2)), np.ones((2, 2)), {"k": 0}, "k=0"),
        (np.ones((1, 2)), np.ones((2, 2)), {"document_ids": ["a"]}, "with 1 ids"),
        (np.full((1, 2), np.nan), np.ones((2, 2)), {}, "of a query is not finite"),
        (np.ones((1, 2)), np.array([[1, np.inf]]), {}, "of a document is not finite"),
    ],
)
def test_mistakes(
    by: By, queries: np.ndarray, documents: np.ndarray, options: dict, message: str
) -> None:
    with searching(by), pytest.raises(DualencError, match=message):
        exact_search(queries, documents, **{"k": 1, **options})
