"""Building, saving, opening and searching an index; plain faiss opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search import Index, is_index
from dualenc.search.index.kinds import KINDS
from tests.helpers.clusters import clustered, exact_rows, search_ids
from tests.helpers.embeddings_on_disk import on_disk

IDS = [f"doc {i}" for i in range(2000)]


@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_exact_search_with_ids(metric: Any) -> None:
    vectors, queries = clustered(2000, unit=False), clustered(30, seed=1, unit=False)
    index = Index.build(vectors, IDS, metric=metric)
    scores, ids = search_ids(index, queries, 5)
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    rows = exact_rows(vectors, queries, 5)
    assert ids.tolist() == [[IDS[row] for row in line] for line in rows]
    np.testing.assert_allclose(
        scores, np.take_along_axis(queries @ vectors.T, rows, axis=1), rtol=1e-4
    )
    assert index.provenance.factory == "Flat"
    assert index.provenance.recall_at_10 == 1.0
    assert index.provenance.metric == metric


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["IVF16,Flat", "HNSW16", "RR8,IVF16,SQ8", "PQ4x4"])
def test_the_same_as_raw_faiss_with_the_same_factory_string(factory: str) -> None:
    vectors, queries = clustered(2000), clustered(30, seed=1)
    ours = Index.build(vectors, IDS, factory)
    raw = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    raw.train(vectors)
    raw.add(vectors)
    for name, value in ours.provenance.search_parameters.items():
        faiss.ParameterSpace().set_index_parameter(raw, name, value)
    np.testing.assert_array_equal(ours.search_rows(queries)[1], raw.search(queries, 10)[1])


def test_plain_faiss_opens_what_was_saved_tuned_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualenc.search.index.kinds.KINDS", KINDS[2:])
    vectors = clustered(6000, 32)
    ours = Index.build(vectors, target_recall=0.99)
    assert (ours.provenance.factory, ours.provenance.trained_on) == ("IVF128,Flat", 6000)
    ours.save(tmp_path / "index")
    plain = faiss.read_index(str(tmp_path / "index" / "index.faiss"))
    assert plain.nprobe == ours.provenance.search_parameters["nprobe"] > 1
    assert ours.provenance.recall_at_10 >= 0.98, (
        "of other queries than those that it was tuned with"
    )
    np.testing.assert_array_equal(
        plain.search(vectors[:9], 10)[1], ours.search_rows(vectors[:9])[1]
    )


def test_saved_and_opened(tmp_path: Path) -> None:
    embeddings = on_disk(tmp_path / "emb", clustered(2000), side="right", model_checksum="abc")
    built = Index.build(embeddings, factory="HNSW8")
    built.save(tmp_path / "index")
    opened = Index.open(tmp_path / "index")
    assert is_index(tmp_path / "index")
    assert len(opened) == 2000
    assert opened.ids == embeddings.ids
    assert opened.provenance.entries().items() >= built.provenance.entries().items()
    assert opened.provenance.model == "models/m"
    assert opened.provenance.side == "right"
    assert opened.hit(1999, 0).snippet == "text 1999"
    for ours, theirs in zip(search_ids(built, clustered(5)), search_ids(opened, clustered(5))):
        np.testing.assert_array_equal(ours, theirs)


def test_an_index_is_replaced_by_an_index(tmp_path: Path) -> None:
    Index.build(clustered(20), IDS[:20]).save(tmp_path / "index")
    Index.build(clustered(30), IDS[:30]).save(tmp_path / "index")
    assert len(Index.open(tmp_path / "index")) == 30


def test_search_parameters_change_the_search() -> None:
    index = Index.build(clustered(2000), IDS, "IVF64,Flat", recall_queries=0)
    queries = clustered(200, seed=1)
    few = index.search_rows(queries)[1]
    all_lists = index.search_rows(queries, nprobe=64)[1]
    assert (all_lists == exact_rows(clustered(2000), queries, 10)).mean() > 0.99
    assert (few != all_lists).any()
    assert index.provenance.search_parameters == {}


def test_half_precision_zero_vectors_and_more_results_than_there_are() -> None:
    vectors = clustered(20).astype(np.float16)
    vectors[3] = 0
    index = Index.build(vectors)
    scores, ids = search_ids(index, vectors[:3], 25)
    assert ids[:, 0].tolist() == list("012")
    assert (scores[ids == "3"] == 0).all()
    assert (ids[:, 20:] == "").all()
    assert set(ids[0, :20]) == set(index.ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Index.build(clustered(200), IDS[:200]).save(tmp_path / "index")
    return tmp_path / "index"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("damage", ["truncated", "one byte"])
def test_a_corrupt_file(folder: Path, damage: str, verify: bool) -> None:
    path = folder / "index.faiss"
    content = bytearray(path.read_bytes())
    content[99] ^= 1
    path.write_bytes({"truncated": content[:-50], "one byte": content}[damage])
    with pytest.raises(
        DualencError, match=r"index\.faiss: (truncated or )?corrupt.*build the index again"
    ):
        Index.open(folder, verify=verify)


def test_a_large_file_is_compared_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "index.faiss"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    others = sum(other.stat().st_size for other in folder.iterdir() if other != path)
    monkeypatch.setattr("dualenc.io.checksums.READ_AT_OPENING", others)
    assert len(Index.open(folder)) == 200
    with pytest.raises(DualencError, match=r"index\.faiss: corrupt, its checksum"):
        Index.open(folder, verify=True)
    path.write_bytes(content)
    items = (folder / "items.arrow").read_bytes()
    (folder / "items.arrow").write_bytes(items.replace(b"doc 7", b"doc X"))
    with pytest.raises(DualencError, match=r"items\.arrow: corrupt, its checksum"):
        Index.open(folder)


@pytest.mark.parametrize("name", ["index.faiss", "meta.json"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DualencError, match=name):
        Index.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../../etc/passwd": "0" * 64}}, "its files are not those of the folder"),
        ({"dim": 10**30}, "dim is 10+, but index.faiss has 16"),
        ({"metric": "l2"}, "'metric' is 'l2', not cosine or ip"),
        ({"side": {}}, "'side' is '{}', not left or right"),
        ({"search_parameters": 5}, "'search_parameters' is an integer, not an object"),
        ({"version": 99}, "has format 99 of another dualenc"),
        ({"format": "dualenc embeddings"}, "not an index"),
    ],
)
def test_a_meta_that_describes_no_index(folder: Path, change: dict[str, Any], message: str) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **change}))
    with pytest.raises(DualencError, match=message):
        Index.open(folder)


def test_stored_vectors_that_are_not_what_they_say() -> None:
    unit = clustered(200)
    for factor, words in ((3.0, "has length 3 instead of 1"), (0.9, "has length 0.9 ")):
        scaled = unit * np.where(np.arange(200) == 150, factor, 1)[:, None]
        with pytest.raises(DualencError, match=f"the vector of 'doc 150' {words}"):
            Index.build(
                Embeddings(IDS[:200], scaled.astype(np.float32), Provenance(normalized=True))
            )
    embeddings = Embeddings(IDS[:200], unit.astype(np.float16), Provenance(normalized=True))
    assert len(Index.build(embeddings)) == 200, "half precision is near enough"


BROKEN = np.where(np.arange(200)[:, None] == 150, np.nan, clustered(200))


@pytest.mark.parametrize(
    ("vectors", "options", "message"),
    [
        (
            clustered(20),
            {"ids": [*IDS[:9], "doc 3", *IDS[10:20]]},
            "'doc 3' is a duplicate, at rows 3 and 9",
        ),
        (clustered(20), {"ids": IDS[:3]}, "3 ids for 20 vectors"),
        (np.empty((0, 4), np.float32), {}, "vectors are missing"),
        (BROKEN, {}, "the vector of '150' is not finite"),
        (np.zeros(5), {}, "give numbers as a matrix"),
        (clustered(200), {"factory": "IVF1000,Flat"}, "has 1000 lists for 200 vectors; try auto"),
        (
            clustered(200),
            {"factory": "IVF4,PQ4x8"},
            r"cannot be trained on 200 vectors \(Number of",
        ),
    ],
)
def test_what_cannot_be_built(vectors: np.ndarray, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message) as error:
        Index.build(vectors, **options)
    assert "\n" not in str(error.value)
    assert ".cpp" not in str(error.value)


@pytest.mark.parametrize(
    ("queries", "options", "message"),
    [
        (clustered(5, 8), {}, r"\(5, 8\) for an index of dimension 16"),
        (np.full((1, 16), np.nan), {}, "row 0 is not finite"),
        (clustered(1), {"k": 0}, "k is 0"),
        (clustered(1), {"nprobe": 8}, "nprobe=8 does not apply"),
        (clustered(1), {"ef_search": -1}, "efSearch is -1"),
        (clustered(1), {"nprobe": 0}, "nprobe is 0; give a number from 1 to"),
    ],
)
def test_what_cannot_be_searched(
    folder: Path, queries: np.ndarray, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DualencError, match=message):
        Index.open(folder).search_rows(queries, **options)


def test_hits_have_id_score_text_and_columns() -> None:
    columns = pa.table({"year": [2000 + row for row in range(20)], "lang": ["en", None] * 10})
    index = Index.build(
        Embeddings(IDS[:20], clustered(20), None, [f"text {row}" for row in range(20)], columns)
    )
    scores, ids = search_ids(index, clustered(20)[:2], 3)
    hits = index.search(clustered(20)[:2], 3)
    assert [[hit.id for hit in row] for row in hits] == ids.tolist()
    np.testing.assert_array_equal([[hit.score for hit in row] for row in hits], scores)
    best = hits[1][0]
    assert (best.id, best.snippet, best.columns) == ("doc 1", "text 1", {"year": 2001}), (
        "missing values are left out"
    )
    kept = np.arange(20) % 2 == 0
    assert {
        hit.columns["lang"] for hit in index.search(clustered(20)[:1], 20, allowed_rows=kept)[0]
    } == {"en"}
    assert len(index.search(clustered(20)[0], 50)[0]) == 20


def test_columns_of_pandas_are_kept_as_the_commands_keep_them(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"day": pd.to_datetime(["2022-02-20", "2022-02-21"]), "kind": pd.Categorical(["a", "b"])}
    )
    frame["count"] = np.array([1, 2], np.int16)
    vectors = Embeddings(
        ["x", "y"], np.eye(2, dtype=np.float32), columns=pa.Table.from_pandas(frame)
    )
    Index.build(vectors, factory="Flat").save(tmp_path / "index")
    columns = Index.open(tmp_path / "index").columns
    assert columns.to_pydict() == {
        "day": ["2022-02-20", "2022-02-21"],
        "kind": ["a", "b"],
        "count": [1, 2],
    }
    assert [str(column.type) for column in columns.schema] == [
        "large_string",
        "large_string",
        "int64",
    ]
