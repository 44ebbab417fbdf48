"""Exact search equals sorting all scores, ties and blocks and processes notwithstanding."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import as_run, exact_search


@given(st.integers(0, 2**31), st.integers(1, 7), st.integers(1, 12), st.integers(1, 14), st.integers(1, 5))
def test_equals_a_full_sort_with_ties_by_descending_id(seed: int, q: int, n: int, k: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    queries = generator.integers(-1, 2, (q, 2)).astype(np.float32)
    documents = generator.integers(-1, 2, (n, 2)).astype(np.float32)
    ids = [str(number) for number in generator.permutation(n)]
    scores, columns = exact_search(queries, documents, k, document_ids=ids, query_block=2, document_block=block)
    for row, query in enumerate(queries):
        similarity = documents @ query
        expected = sorted(range(n), key=lambda column: (similarity[column], ids[column]), reverse=True)[:k]
        assert columns[row].tolist() == expected
        assert scores[row].tolist() == similarity[expected].tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_equals_a_flat_faiss_index(dtype: type) -> None:
    generator = np.random.default_rng(0)
    queries, documents = generator.standard_normal((40, 16)), generator.standard_normal((3000, 16))
    queries, documents = queries.astype(dtype), documents.astype(dtype)
    index = faiss.IndexFlatIP(16)
    index.add(documents.astype(np.float32))
    theirs, their_columns = index.search(queries.astype(np.float32), 50)
    scores, columns = exact_search(queries, documents, 50, document_block=700)
    assert (columns == their_columns).all()
    assert scores == pytest.approx(theirs, abs=1e-5)


def test_equal_embeddings_are_ordered_by_id_throughout() -> None:
    same = np.ones((500, 4), np.float32)
    ids = [f"{number:03d}" for number in range(500)]
    _, columns = exact_search(same[:2], same, 3, document_ids=ids, document_block=200)
    assert [[ids[column] for column in row] for row in columns] == [["499", "498", "497"]] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_processes_share_the_queries_and_get_the_same_bits(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    queries, documents = generator.standard_normal((50, 8)), generator.standard_normal((100, 8))
    alone = exact_search(queries, documents, 10, query_block=8)
    shares = []
    rank_slice = distributed.rank_slice
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "gather_objects", lambda own: shares.append(own) or [own])
        for rank in range(world):
            patch.setattr(distributed, "rank_slice", lambda total, rank=rank: rank_slice(total, rank, world))
            exact_search(queries, documents, 10, query_block=8)
    for part in (0, 1):
        together = np.concatenate([block[part] for share in shares for block in share])
        assert together.tobytes() == alone[part].tobytes()


def test_as_a_run() -> None:
    scores, columns = np.array([[0.5, 0.25]], np.float32), np.array([[1, 0]])
    assert as_run(["q"], ["a", "b"], scores, columns) == {"q": {"b": 0.5, "a": 0.25}}


@pytest.mark.parametrize(
    ("queries", "documents", "options", "message"),
    [
        (np.ones((1, 2)), np.ones((1, 3)), {}, "same dimension"),
        (np.ones((1, 2)), np.ones((0, 2)), {}, "no document"),
        (np.ones((1, 2)), np.ones((2, 2)), {"k": 0}, "k=0"),
        (np.ones((1, 2)), np.ones((2, 2)), {"document_ids": ["a"]}, "1 document ids for 2"),
        (np.full((1, 2), np.nan), np.ones((2, 2)), {}, "not finite"),
        (np.ones((1, 2)), np.array([[1, np.inf]]), {}, "not finite"),
    ],
)
def test_mistakes(queries: np.ndarray, documents: np.ndarray, options: dict, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        exact_search(queries, documents, **{"k": 1, **options})
