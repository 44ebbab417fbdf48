"""Recall against an exact search that is written out here, and the tuning of search parameters."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data.store.vector_shards import Embeddings
from dualenc.search.index import tune as tuning
from dualenc.search.index.database import Database
from dualenc.search.index.tune import (
    exact_probe,
    parameter_values,
    recall,
    set_parameter,
    tune,
)
from tests.helpers.clusters import clustered, exact_rows


def database(vectors: np.ndarray) -> Database:
    return Database(Embeddings([str(i) for i in range(len(vectors))], vectors), "ip")


def probe_of(vectors: np.ndarray, rows: np.ndarray) -> Any:
    probe = exact_probe(database(vectors), vectors[rows], rows)
    assert probe is not None
    return probe


def filled(vectors: np.ndarray, factory: str) -> faiss.Index:
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    return index


def by_sets(index: faiss.Index, vectors: np.ndarray, rows: np.ndarray) -> float:
    """Mean share of the 10 exact neighbours of database rows that the index returns, a row not its
    own neighbour."""
    shares = []
    for row, found, exact in zip(
        rows, index.search(vectors[rows], 11)[1], exact_rows(vectors, vectors[rows], 11)
    ):
        parts = [[other for other in each if other != row][:10] for each in (found, exact)]
        shares.append(len(set(parts[0]) & set(parts[1])) / 10)
    return float(np.mean(shares))


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["Flat", "IVF32,Flat", "HNSW8", "PQ4x4", "IVF16,PQ4x4"])
def test_recall_is_the_overlap_with_the_exact_neighbours(factory: str) -> None:
    vectors = clustered(2000)
    index, rows = filled(vectors, factory), np.arange(0, 2000, 20)
    probe = probe_of(vectors, rows)
    assert recall(index, database(vectors), probe) == pytest.approx(
        by_sets(index, vectors, rows), abs=2e-3
    )


def test_queries_from_elsewhere() -> None:
    vectors, queries = clustered(2000), clustered(50, seed=1)
    index = filled(vectors, "IVF32,Flat")
    probe = exact_probe(database(vectors), queries, np.full(50, -1))
    assert probe is not None
    exact, found = exact_rows(vectors, queries, 10), index.search(queries, 10)[1]
    expected = np.mean([len(set(e) & set(f)) / 10 for e, f in zip(exact, found)])
    assert recall(index, database(vectors), probe) == pytest.approx(expected)


@given(st.integers(1, 30), st.integers(1, 3))
def test_an_exact_index_has_recall_one_even_with_duplicates(num_vectors: int, repeats: int) -> None:
    vectors = np.repeat(clustered(num_vectors, 4), repeats, axis=0)
    rows = np.arange(len(vectors))
    probe = exact_probe(database(vectors), vectors, rows)
    if probe is None:
        assert len(vectors) == 1
    else:
        assert recall(filled(vectors, "Flat"), database(vectors), probe) == 1.0


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("IVF64_HNSW8,SQ8", "nprobe"),
        ("PCA8,HNSW8", "efSearch"),
        ("HNSW8,SQ8,RFlat", "efSearch"),
        ("PQ4x4", None),
    ],
)
def test_the_parameter_that_buys_recall(factory: str, name: str | None) -> None:
    index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    found = [each for each in parameter_values(index) if each != "k_factor_rf"]
    assert found == ([] if name is None else [name])
    if name is not None:
        set_parameter(index, name, 7)


def test_tuning_reaches_the_target_with_the_smallest_power_of_two() -> None:
    vectors, rows = clustered(4000, 32), np.arange(200)
    index = filled(vectors, "IVF64,Flat")
    probe = probe_of(vectors, rows)
    chosen = tune(index, database(vectors), probe, target=0.9)["nprobe"]
    assert index.nprobe == chosen
    assert recall(index, database(vectors), probe) >= 0.9
    set_parameter(index, "nprobe", chosen // 2)
    assert recall(index, database(vectors), probe) < 0.9


def test_tuning_reads_more_candidates_of_a_refined_index() -> None:
    vectors, rows = clustered(4000, 32), np.arange(200)
    index = filled(vectors, "IVF16,RaBitQ,Refine(Flat)")
    probe = probe_of(vectors, rows)
    lists = faiss.extract_index_ivf(faiss.downcast_index(index.base_index))
    chosen = tune(index, database(vectors), probe, target=0.95)
    assert chosen == {"nprobe": lists.nprobe, "k_factor_rf": index.k_factor}
    assert recall(index, database(vectors), probe) >= 0.95
    index.k_factor = 1
    assert recall(index, database(vectors), probe) < 0.95


def test_tuning_goes_on_where_a_step_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbours may lie in lists that the next doubling of nprobe reaches, or the one after
    it."""
    vectors = clustered(2000)
    index, rows = filled(vectors, "IVF32,Flat"), np.arange(0, 2000, 40)
    probe = probe_of(vectors, rows)
    at = {1: 0.5, 2: 0.501, 4: 0.501, 8: 0.6, 16: 0.97, 32: 1.0}
    monkeypatch.setattr(tuning, "recall", lambda *_: at[faiss.extract_index_ivf(index).nprobe])
    assert tune(index, database(vectors), probe, target=0.95) == {"nprobe": 16}
    at.update({8: 0.501, 16: 0.501})
    assert tune(index, database(vectors), probe, target=0.95)["nprobe"] <= 2, (
        "an eightfold value gains nothing"
    )
