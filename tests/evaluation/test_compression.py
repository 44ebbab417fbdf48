"""Smaller vectors: every way of keeping them against numpy, and the bytes that they take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.evaluation.compression import (
    RESCORED,
    Size,
    compressed_run,
    first_components,
    halvings,
    size_rows,
    sizes,
)
from dualenc.evaluation.retrieval import retrieve


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


QUERIES, DOCUMENTS = unit(7, 40, 0), unit(300, 40, 1)
NAMES = ([f"q{i}" for i in range(7)], [f"d{i}" for i in range(300)])


def run(size: Size, depth: int = 10) -> dict[str, dict[str, float]]:
    return compressed_run(NAMES[0], QUERIES, NAMES[1], DOCUMENTS, size, depth=depth)


@pytest.mark.parametrize("dim", [40, 24, 5])
def test_float32_is_exact_search_of_the_first_components(dim: int) -> None:
    cut = [v[:, :dim] / np.linalg.norm(v[:, :dim], axis=1, keepdims=True) for v in (QUERIES, DOCUMENTS)]
    expected = retrieve(NAMES[0], cut[0], NAMES[1], cut[1], depth=10)
    for query, found in run(Size(dim, "float32")).items():
        assert found.keys() == expected[query].keys()
        assert found == pytest.approx(expected[query], abs=1e-6)


@pytest.mark.parametrize("dim", [40, 24, 5])
def test_binary_counts_the_signs_that_differ(dim: int) -> None:
    differ = ((QUERIES[:, None, :dim] > 0) != (DOCUMENTS[None, :, :dim] > 0)).sum(axis=2)
    for number, found in enumerate(run(Size(dim, "binary")).values()):
        distances = {name: differ[number, int(name[1:])] for name in found}
        assert {name: -round(score * dim) for name, score in found.items()} == distances
        assert sorted(distances.values()) == sorted(differ[number])[:10]


@pytest.mark.parametrize("dim", [40, 24])
def test_int8_is_near_a_quantizer_written_out(dim: int) -> None:
    queries, documents = first_components(QUERIES, dim), first_components(DOCUMENTS, dim)
    low, span = documents.min(axis=0), np.ptp(documents, axis=0)
    stored = low + (np.floor((documents - low) / span * 255).clip(0, 255) + 0.5) / 255 * span
    for number, found in enumerate(run(Size(dim, "int8")).values()):
        scores = queries[number] @ stored.T
        for name, score in found.items():
            assert score == pytest.approx(scores[int(name[1:])], abs=2e-3)


@pytest.mark.parametrize("code", ["int8", "binary"])
def test_rescoring_orders_the_best_of_the_codes_by_their_float_scores(code: str) -> None:
    exact = QUERIES @ DOCUMENTS.T
    candidates = run(Size(40, code), depth=11 * RESCORED)  # type: ignore[arg-type]
    for number, (query, found) in enumerate(run(Size(40, code, rescored=True)).items()):  # type: ignore[arg-type]
        assert found == pytest.approx({name: float(exact[number, int(name[1:])]) for name in found}, abs=1e-5)
        best = sorted(candidates[query], key=lambda name: -exact[number, int(name[1:])])[:10]
        assert list(found) == best


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2000))
def test_bytes_are_those_of_arrays(dim: int) -> None:
    row = np.ones((1, dim), np.float32)
    assert Size(dim, "float32").memory == row.nbytes
    assert Size(dim, "int8").memory == row.astype(np.int8).nbytes
    assert Size(dim, "binary").memory == np.packbits(row > 0, axis=1).nbytes
    assert Size(dim, "binary", True).disk == row.nbytes
    assert halvings(dim)[0] == dim
    assert all(a // 2 == b >= 32 for a, b in zip(halvings(dim), halvings(dim)[1:]))


def test_the_table_begins_with_most_bytes_and_says_what_is_kept() -> None:
    every = sizes([64, 32])
    assert len(every) == 10
    assert every[0] == Size(64, "float32")
    assert [size.memory for size in every] == sorted((size.memory for size in every), reverse=True)
    rows = size_rows({every[0]: {"ndcg@10": 0.5}, every[-1]: {"ndcg@10": 0.4}}, ["ndcg@10"])
    assert [row["ndcg@10 kept"] for row in rows] == [1.0, 0.8]
    assert rows[0]["vectors"] == "64 float32"
    assert rows[0]["bytes"] == 256


def test_zero_stays_zero() -> None:
    assert not first_components(np.eye(3, 4, k=1), 1)[2].any()
