"""Filtered searches against brute force over the rows that are kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.search import Embeddings, Index
from dualenc.search.fusion import fuse
from dualenc.search.index import change
from dualenc.search.searcher import Searcher
from tests.helpers import toy
from tests.helpers.clusters import clustered, exact_rows
from tests.helpers.conditions import KINDS, met_by_pandas
from tests.helpers.in_process import found, run

VECTORS, QUERIES = clustered(2000), clustered(20, seed=1)
EXACT = ("Flat", "IVF16,Flat", "HNSW16", "IVF16,SQ8,Refine(Flat)", "OPQ16,IVF16,Flat")


@cache
def index_of(factory: str) -> Index:
    return Index.build(VECTORS, factory=factory, recall_queries=0)


@pytest.mark.slow
@given(st.sampled_from(EXACT), st.integers(1, 1500), st.integers(1, 20), st.integers(0, 9))
def test_up_to_a_number_all_rows_that_are_left_are_compared(
    factory: str, count: int, k: int, seed: int
) -> None:
    kept_rows = np.sort(np.random.default_rng(seed).choice(len(VECTORS), count, replace=False))
    kept = np.isin(np.arange(len(VECTORS)), kept_rows)
    scores, rows = index_of(factory).search_rows(QUERIES, k, allowed_rows=kept)
    expected = kept_rows[exact_rows(VECTORS[kept_rows], QUERIES, k)]
    np.testing.assert_array_equal(np.sort(rows[:, :count]), np.sort(expected))
    assert (rows[:, count:] == -1).all()
    slow = np.einsum("qkd,qd->qk", VECTORS[expected], QUERIES)
    np.testing.assert_allclose(scores[:, :count], slow, atol=1e-5)


@pytest.mark.parametrize(
    ("factory", "settings"), [("HNSW16", {}), ("IVF16,Flat", {"nprobe": 2}), ("Flat", {})]
)
@pytest.mark.parametrize("share", [0.5, 0.12])
def test_many_rows_are_found_as_well_as_without_a_filter(
    factory: str, settings: dict[str, int], share: float
) -> None:
    index = Index.build(VECTORS, factory=factory, recall_queries=0)
    index.record(settings={"exact_rows": 0})
    kept = np.random.default_rng(5).random(len(VECTORS)) < share
    kept_rows = np.flatnonzero(kept)

    def recall(found: np.ndarray, expected: np.ndarray) -> float:
        return float(
            np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), expected.tolist())])
        )

    whole = recall(index.search_rows(QUERIES, 10, **settings)[1], exact_rows(VECTORS, QUERIES, 10))
    rows = index.search_rows(QUERIES, 10, allowed_rows=kept, **settings)[1]
    assert kept[rows].all()
    assert recall(rows, kept_rows[exact_rows(VECTORS[kept_rows], QUERIES, 10)]) >= whole - 0.05


def test_a_filter_that_keeps_nothing() -> None:
    nothing = np.zeros(len(VECTORS), bool)
    assert (index_of("HNSW16").search_rows(QUERIES, 5, allowed_rows=nothing)[1] == -1).all()


UNFILTERED = (
    "PQ4x4",
    "PQ8x4fs",
    "RQ4x4",
    "IVF4,RQ4x4",
    "IVF4,RQ8x4fs",
    "NSG16",
    "NSG16,PQ8",
    "HNSW16,PQ8",
    "OPQ4,PQ4",
)


@pytest.mark.slow
@pytest.mark.parametrize("factory", UNFILTERED)
@pytest.mark.parametrize("exact_rows", [0, 2000])
def test_kinds_that_faiss_cannot_filter_compare_decoded_vectors(
    factory: str, exact_rows: int
) -> None:
    index = index_of(factory)
    kept = np.random.default_rng(1).random(len(VECTORS)) < 0.3
    kept_rows = np.flatnonzero(kept)
    scores, rows = index.search_rows(QUERIES, 5, allowed_rows=kept, exact_rows=exact_rows)
    assert kept[rows].all()
    decoded = index.reconstruct(np.arange(len(VECTORS)))
    expected = np.sort(-(QUERIES @ decoded[kept_rows].T), axis=1)[:, :5]
    if (factory, exact_rows) == ("HNSW16,PQ8", 0):  # through the graph
        assert (scores >= -expected - 0.1).mean() > 0.9
    else:
        np.testing.assert_allclose(scores, -expected, atol=1e-5)


def test_kinds_that_can_neither_be_filtered_nor_decoded_are_refused() -> None:
    kept = np.ones(len(VECTORS), bool)
    for factory in ("RaBitQfs", "PQ8x4fs_64"):
        reason = (
            r"FAISS cannot filter an Index\w+ \(or decode its codes\); "
            r"build the index with codes that it can"
        )
        with pytest.raises(DualencError, match=reason):
            index_of(factory).search_rows(QUERIES, 5, allowed_rows=kept)


WHERES = (
    ["year>=2004"],
    ["lang=en,de", "open=false"],
    ["lang!=en"],
    ["weight<3.5", "year!=2001"],
    ["year>2100"],
)


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("hybrid", [None, "rrf", "weighted"])
def test_conditions_hold_before_the_search(made: Path, where: list[str], hybrid: Any) -> None:
    searcher = Searcher.open(made / "index")
    assert searcher.index.column_kinds == KINDS
    frame = pd.DataFrame(toy.filterable_documents(), columns=["_id", *KINDS])
    frame["lang"] = frame["lang"].astype(object).where(frame["lang"].notna(), None)
    kept = np.flatnonzero(met_by_pandas(frame, where))
    query = "fox dog dog"
    model = load_model(made / "model")
    dense = (
        model.left(model.left.prepare([query])) @ model.right(model.right.prepare(toy.texts(60))).T
    ).detach()[0]
    best = kept[np.argsort(-dense[kept].numpy(), kind="stable")]
    expected = [(f"d{row}", float(dense[row])) for row in best]
    if hybrid:
        assert searcher.lexical is not None
        words = [
            (f"d{row}", score) for row, score in searcher.lexical.search(query, 60) if row in kept
        ]
        expected = fuse([expected, words], hybrid)
    hits = searcher.search(query, k=60, where=where, hybrid=hybrid)
    assert {hit.id: hit.score for hit in hits} == pytest.approx(dict(expected), abs=1e-5)
    for hit in hits:
        row = toy.filterable_documents()[int(hit.id[1:])]
        assert hit.columns == {name: row[name] for name in KINDS if row[name] is not None}


def test_the_command_shows_columns(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = found(
        capsys, made / "index", "fox", "--where", "year>=2005", "--where", "lang=de", "-k", 60
    )
    met = [row for row in toy.filterable_documents() if row["year"] >= 2005 and row["lang"] == "de"]
    assert {row["id"] for row in results} == {row["_id"] for row in met}
    assert all(row["lang"] == "de" for row in results)
    words = (made / "index", "fox", "--where", "year>=2005", "--where", "year<2003")
    assert found(capsys, *words) == []
    run("search", *words)
    assert capsys.readouterr().out.startswith(
        "nothing was found for 'fox' that meets all conditions"
    )


def test_columns_follow_what_is_appended_and_removed(tmp_path: Path) -> None:
    columns = pa.Table.from_pylist(toy.filterable_documents()).select(["year", "lang"])

    def part(first: int, columns: Any) -> Embeddings:
        rows = slice(first, first + 20)
        taken = None if columns is None else columns.slice(first, 20)
        return Embeddings([f"d{row}" for row in range(60)][rows], VECTORS[rows], columns=taken)

    folder = tmp_path / "index"
    Index.build(part(0, columns), folder=folder)
    change.append(folder, part(20, columns.select(["lang"])))
    change.append(folder, part(40, None))
    index = change.remove(folder, ["d0", "d25", "d59"])
    assert index.columns is not None
    assert len(index) == len(index.columns) == 57
    for row, name in enumerate(index.ids):
        number = int(name[1:])
        expected = toy.filterable_documents()[number]
        shown = {"year": expected["year"]} if number < 20 else {}
        shown |= {"lang": expected["lang"]} if number < 40 and expected["lang"] else {}
        assert index.hit(row, 0).columns == shown
    other = columns.slice(0, 1).select(["lang"]).rename_columns(["year"])
    with pytest.raises(
        DualencError,
        match="column 'year' holds integer values in the index and text values in what",
    ):
        change.append(folder, Embeddings(["new"], VECTORS[:1], columns=other))


@pytest.mark.parametrize(
    ("ours", "theirs", "joined"),
    [
        ([1, 2], [0.5], [1.0, 2.0, 0.5]),
        ([0.5, None], [2], [0.5, None, 2.0]),
        (["7a", None], [7], ["7a", None, "7"]),
        ([1, None], pa.nulls(1, pa.bool_()), [1, None, None]),
        (pa.nulls(2, pa.bool_()), ["a"], [None, None, "a"]),
        ([1, 2], pa.nulls(1, pa.float64()), [1, 2, None]),
        ([1, 2**60 + 1], [0.5], None),
        ([True, None], [1], None),
    ],
)
def test_appended_columns_join_others_of_their_kind(
    tmp_path: Path, ours: Any, theirs: Any, joined: Any
) -> None:
    """The type of a column is that of its values in one file, which are not all of its values."""
    Index.build(Embeddings(["a", "b"], VECTORS[:2], columns=pa.table({"x": ours}))).save(
        tmp_path / "index"
    )
    added = Embeddings(["c"], VECTORS[2:3], columns=pa.table({"x": theirs}))
    if joined is None:
        with pytest.raises(DualencError, match="embed the data with values of one type"):
            change.append(tmp_path / "index", added)
    else:
        columns = change.append(tmp_path / "index", added).columns
        assert columns is not None
        assert list(map(repr, columns.column("x").to_pylist())) == list(map(repr, joined))
