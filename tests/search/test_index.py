"""Building, saving, opening and searching an index; plain faiss opens it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pytest

from dualenc.data.items import write_items
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search import Index, is_index
from dualenc.search.embeddings import EmbeddingWriter
from dualenc.search.kinds import KINDS
from tests.search.clusters import clustered, exact_rows, search_ids

IDS = [f"doc {i}" for i in range(2000)]


def on_disk(folder: Path, vectors: np.ndarray, **identity: Any) -> Embeddings:
    names = [f"doc {i}" for i in range(len(vectors))]
    writer = EmbeddingWriter(
        folder, names, vectors.shape[1], "float32", identity, {"model": "models/m"}, snippet="text {}".format
    )
    for number in writer.unwritten():
        rows = writer.ranges[number]
        writer.write(number, vectors[rows.start : rows.stop])
    return writer.finish()


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
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ vectors.T, rows, axis=1), rtol=1e-4)
    assert index.meta["factory"] == "Flat"
    assert index.meta["recall_at_10"] == 1.0
    assert index.meta["metric"] == metric


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["IVF16,Flat", "HNSW16", "PCA8,IVF16,SQ8", "PQ4x4"])
def test_the_same_as_raw_faiss_with_the_same_factory_string(factory: str) -> None:
    vectors, queries = clustered(2000), clustered(30, seed=1)
    ours = Index.build(vectors, IDS, factory)
    raw = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    raw.train(vectors)
    raw.add(vectors)
    for name, value in ours.meta["search_parameters"].items():
        faiss.ParameterSpace().set_index_parameter(raw, name, value)
    np.testing.assert_array_equal(ours.search_rows(queries)[1], raw.search(queries, 10)[1])


def test_auto_on_a_larger_database_reaches_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualenc.search.kinds.KINDS", KINDS[2:])
    vectors, queries = clustered(6000, 32), clustered(100, 32, seed=1)
    index = Index.build(vectors, target_recall=0.9)
    assert index.meta["factory"] == "IVF128,Flat"
    assert index.meta["trained_on"] == 6000
    exact = exact_rows(vectors, queries, 10)
    found = index.search_rows(queries)[1]
    assert np.mean([np.isin(e, f).mean() for e, f in zip(exact, found)]) > 0.85
    assert index.meta["recall_at_10"] >= 0.9


def test_plain_faiss_opens_what_was_saved_tuned_as_it_was(tmp_path: Path) -> None:
    vectors = clustered(2000)
    ours = Index.build(vectors, IDS, "IVF32,Flat", target_recall=0.99)
    ours.save(tmp_path / "index")
    plain = faiss.read_index(str(tmp_path / "index" / "index.faiss"))
    meta = json.loads((tmp_path / "index" / "meta.json").read_text())
    assert plain.nprobe == meta["search_parameters"]["nprobe"] > 1
    assert meta["recall_at_10"] >= 0.98, "of other queries than those that it was tuned with"
    np.testing.assert_array_equal(plain.search(vectors[:9], 10)[1], ours.search_rows(vectors[:9])[1])


def test_saved_and_opened(tmp_path: Path) -> None:
    embeddings = on_disk(tmp_path / "emb", clustered(2000), side="right", model_checksum="abc")
    built = Index.build(embeddings, factory="HNSW8")
    built.save(tmp_path / "index")
    opened = Index.open(tmp_path / "index")
    assert is_index(tmp_path / "index")
    assert len(opened) == 2000
    assert opened.ids == embeddings.ids
    assert opened.meta.items() >= built.meta.items()
    assert opened.meta["model"] == "models/m"
    assert opened.meta["side"] == "right"
    assert opened.hit(1999, 0).snippet == "text 1999"
    for ours, theirs in zip(search_ids(built, clustered(5)), search_ids(opened, clustered(5))):
        np.testing.assert_array_equal(ours, theirs)


def test_an_index_is_replaced_only_by_an_index(tmp_path: Path) -> None:
    Index.build(clustered(20), IDS[:20]).save(tmp_path / "index")
    Index.build(clustered(30), IDS[:30]).save(tmp_path / "index")
    assert len(Index.open(tmp_path / "index")) == 30
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(DualencError, match="holds no index"):
        Index.build(clustered(20), IDS[:20]).save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "thesis.tex").exists()


@pytest.mark.slow
def test_the_database_is_streamed(tmp_path: Path) -> None:
    """More vectors do not take more of numpy's memory: they are never held in addition to FAISS's own copy."""

    def peak(num_vectors: int) -> int:
        embeddings = on_disk(tmp_path / str(num_vectors), clustered(num_vectors, 128), side="right")
        tracemalloc.start()
        Index.build(embeddings, factory="Flat", recall_queries=10)
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    assert peak(70_000) - peak(35_000) < 0.3 * 35_000 * 128 * 4


def test_fewer_results_than_asked_for() -> None:
    index = Index.build(clustered(3), IDS[:3])
    scores, ids = search_ids(index, clustered(2, seed=1), 5)
    assert ids[:, 3:].tolist() == [["", ""], ["", ""]]
    assert np.isneginf(scores[:, 3:]).all()
    assert set(ids[0, :3]) == set(IDS[:3])


def test_one_query_is_a_batch_of_one() -> None:
    index = Index.build(clustered(50), IDS[:50])
    assert search_ids(index, clustered(50)[7], 1)[1].tolist() == [[IDS[7]]]


def test_search_parameters_change_the_search() -> None:
    index = Index.build(clustered(2000), IDS, "IVF64,Flat", nprobe=1)
    few = search_ids(index, clustered(200, seed=1))[1]
    all_lists = search_ids(index, clustered(200, seed=1), nprobe=64)[1]
    exact = exact_rows(clustered(2000), clustered(200, seed=1), 10)
    assert (all_lists == np.array(IDS, dtype=object)[exact]).mean() > 0.99
    assert (few != all_lists).any()
    assert index.meta["search_parameters"] == {"nprobe": 1}


def test_half_precision_and_row_numbers_as_ids() -> None:
    index = Index.build(clustered(100).astype(np.float16))
    assert search_ids(index, clustered(100)[:5], 1)[1].ravel().tolist() == list("01234")


def test_zero_vectors_have_cosine_zero() -> None:
    vectors = clustered(20)
    vectors[3] = 0
    index = Index.build(vectors, IDS[:20])
    scores, ids = search_ids(index, vectors[0], 20)
    assert scores[0][ids[0] == "doc 3"] == 0


def test_nothing_is_measured_when_not_asked_to() -> None:
    meta = Index.build(clustered(200), IDS[:200], "HNSW8", recall_queries=0).meta
    assert "recall_at_10" not in meta


@pytest.mark.nightly
def test_control_c_ends_the_training_of_a_product_quantizer(tmp_path: Path) -> None:
    """FAISS itself looks at signals between the iterations of a k-means only, and in OPQ not for minutes."""
    script = """
import numpy as np
import pyarrow as pa
from dualenc.search import Index
vectors = np.random.default_rng(0).normal(size=(60_000, 256)).astype("float32")
print("training", flush=True)
Index.build(vectors, factory="OPQ64,PQ64")
"""
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": root}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Shells have what they run in the background ignore Ctrl-C.
    pipes["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "training\n"
        time.sleep(1.5)
        assert process.poll() is None, "otherwise the training is too short to be interrupted"
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        _, errors = process.communicate(timeout=120)
        assert time.monotonic() - sent < 5
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode == -signal.SIGINT


class TestErrors:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        Index.build(clustered(200), IDS[:200]).save(tmp_path / "index")
        return tmp_path / "index"

    @pytest.mark.parametrize(
        ("damage", "verify"),
        [
            (lambda b: b[:-50], True),
            (lambda b: b[:-50], False),
            (lambda b: b"", True),
            (lambda b: b"", False),
            # One byte of one vector: FAISS reads it, only the checksum can tell.
            (lambda b: b[:99] + b"x" + b[100:], True),
        ],
    )
    def test_a_corrupt_file(self, folder: Path, damage: Any, verify: bool) -> None:
        path = folder / "index.faiss"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(
            DualencError, match=r"index\.faiss: (truncated or )?corrupt.*build the index again"
        ) as error:
            Index.open(folder, verify=verify)
        assert "\n" not in str(error.value)

    def test_a_large_file_is_compared_on_request(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder / "index.faiss"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DualencError, match=r"index\.faiss: corrupt, its checksum"):
            Index.open(folder)
        others = sum(other.stat().st_size for other in folder.iterdir() if other != path)
        monkeypatch.setattr("dualenc.checksums.READ_AT_OPENING", others)
        assert len(Index.open(folder)) == 200
        with pytest.raises(DualencError, match=r"index\.faiss: corrupt, its checksum"):
            Index.open(folder, verify=True)
        path.write_bytes(content[:-1])
        with pytest.raises(DualencError, match=r"index\.faiss: truncated or corrupt"):
            Index.open(folder)
        path.write_bytes(content)
        items = (folder / "items.arrow").read_bytes()
        (folder / "items.arrow").write_bytes(items.replace(b"doc 7", b"doc X"))
        with pytest.raises(DualencError, match=r"items\.arrow: corrupt, its checksum"):
            Index.open(folder)

    @pytest.mark.parametrize("name", ["index.faiss", "items.arrow", "order.npy", "meta.json"])
    def test_a_missing_file(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(DualencError, match=name):
            Index.open(folder)

    def test_items_of_another_index(self, folder: Path) -> None:
        write_items(folder, ["a", "b"])
        with pytest.raises(DualencError, match=r"(items|order)\.\w+: truncated or corrupt \(\d+ bytes instead of"):
            Index.open(folder)

    @pytest.mark.parametrize(
        "change",
        [
            {"files": {}},
            {"files": []},
            {"files": {"../../etc/passwd": "0" * 64}},
            {"dim": "16"},
            {"dim": 10**30},
            {"count": -1},
            {"count": None},
            {"metric": "l2"},
            {"metric": ["cosine"]},
            {"side": "middle"},
            {"side": {}},
            {"output": 7},
            {"model": ["m"]},
            {"model_checksum": 7},
            {"version": "2"},
            {"version": 3},
            {"version": True},
            {"format": 7},
        ],
    )
    def test_a_meta_of_the_wrong_shape(self, folder: Path, change: dict[str, Any]) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, **change}))
        with pytest.raises(DualencError) as error:
            Index.open(folder)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("content", ["[]", "7", "null", "{}", "", "[" * 10**5, "\x00"])
    def test_a_meta_that_is_no_object(self, folder: Path, content: str) -> None:
        (folder / "meta.json").write_text(content)
        with pytest.raises(DualencError, match="index") as error:
            Index.open(folder)
        assert "\n" not in str(error.value)

    def test_a_killed_replacement_leaves_an_index(self, folder: Path) -> None:
        (folder.parent / ".index.part").mkdir()
        folder.rename(folder.parent / ".index.part" / "old-index")
        assert is_index(folder)
        assert len(Index.open(folder)) == 200

    def test_stored_vectors_that_are_not_what_they_say(self, tmp_path: Path) -> None:
        unit = clustered(200)
        for number, (factor, words) in enumerate([(3.0, "has length 3 instead of 1"), (0.9, "has length 0.9 ")]):
            scaled = unit * np.where(np.arange(200) == 150, factor, 1)[:, None].astype(np.float32)
            with pytest.raises(DualencError, match=f"the vector of 'doc 150' {words}"):
                Index.build(on_disk(tmp_path / str(number), scaled, normalized=True))
        embeddings = Embeddings(IDS[:200], unit.astype(np.float16), {"normalized": True})
        assert len(Index.build(embeddings)) == 200, "half precision is near enough"
        broken = unit.copy()
        broken[7, 3] = np.nan
        with pytest.raises(DualencError, match="the vector of 'doc 7' is not finite"):
            Index.build(Embeddings(IDS[:200], broken, {"normalized": True}))

    def test_a_duplicate_id(self) -> None:
        with pytest.raises(DualencError, match="'doc 3' is a duplicate, at rows 3 and 9"):
            Index.build(clustered(20), [*IDS[:9], "doc 3", *IDS[10:20]])

    @pytest.mark.parametrize(
        "options",
        [{"nprobe": 0}, {"nprobe": -1}, {"nprobe": 17}, {"ef_search": 0}],
    )
    def test_numbers_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(DualencError, match=r"is -?[0-9]+; give a number from 1 to"):
            Index.build(clustered(200), IDS[:200], "IVF16,Flat", **options)

    @pytest.mark.parametrize("options", [{"nprobe": 0}, {"nprobe": -5}, {"nprobe": 999}, {"ef_search": -1}])
    def test_search_parameters_out_of_range(self, options: dict[str, Any]) -> None:
        index = Index.build(clustered(200), IDS[:200], "IVF16,Flat")
        with pytest.raises(DualencError, match="; give"):
            search_ids(index, clustered(1), **options)

    @pytest.mark.parametrize(
        "vectors", [np.zeros(5), np.zeros((5, 0)), np.array([["a"]]), np.array([[None]]), np.zeros((2, 3), complex)]
    )
    def test_vectors_that_are_no_matrix_of_numbers(self, vectors: np.ndarray) -> None:
        with pytest.raises(DualencError, match="give"):
            Index.build(vectors)

    def test_no_index_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(DualencError, match="no such folder; make an index with"):
            Index.open(tmp_path / "nowhere")
        (tmp_path / "meta.json").write_text('{"format": "dualenc embeddings"}')
        with pytest.raises(DualencError, match="not an index"):
            Index.open(tmp_path)

    def test_a_newer_format(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, "version": 99}))
        with pytest.raises(DualencError, match="format 99 of another dualenc"):
            Index.open(folder)

    def test_queries_of_another_dimension(self, folder: Path) -> None:
        with pytest.raises(DualencError, match=r"\(5, 8\) for an index of dimension 16; embed them with the model"):
            search_ids(Index.open(folder), clustered(5, 8))

    def test_queries_that_are_not_finite(self, folder: Path) -> None:
        queries = clustered(5)
        queries[2, 3] = np.nan
        with pytest.raises(DualencError, match="row 2 is not finite"):
            search_ids(Index.open(folder), queries)

    def test_vectors_that_are_not_finite(self) -> None:
        vectors = clustered(200)
        vectors[150, 3] = np.inf
        with pytest.raises(DualencError, match="the vector of 'doc 150' is not finite"):
            Index.build(vectors, IDS[:200])

    def test_k_below_one(self, folder: Path) -> None:
        with pytest.raises(DualencError, match="k is 0"):
            search_ids(Index.open(folder), clustered(1), 0)

    def test_a_parameter_of_another_kind_of_index(self, folder: Path) -> None:
        with pytest.raises(DualencError, match="nprobe=8 does not apply"):
            search_ids(Index.open(folder), clustered(1), nprobe=8)
        with pytest.raises(DualencError, match="efSearch=8 does not apply"):
            Index.build(clustered(20), IDS[:20], ef_search=8)

    def test_more_lists_than_vectors(self) -> None:
        with pytest.raises(DualencError, match=r"'IVF1000,Flat' has 1000 lists for 200 vectors; try auto") as e:
            Index.build(clustered(200), IDS[:200], "IVF1000,Flat")
        assert "\n" not in str(e.value)
        assert ".cpp" not in str(e.value)
        with pytest.raises(DualencError, match=r"'IVF150,Flat' cannot be trained on 100 vectors: Number of") as e:
            Index.build(clustered(200), IDS[:200], "IVF150,Flat", train_rows=100)
        assert "\n" not in str(e.value)
        assert ".cpp" not in str(e.value)

    def test_no_vectors(self) -> None:
        with pytest.raises(DualencError, match="no vectors"):
            Index.build(np.empty((0, 4), np.float32), [])

    def test_one_id_per_vector(self) -> None:
        with pytest.raises(DualencError, match="3 ids for 200 vectors"):
            Index.build(clustered(200), IDS[:3])


def test_hits_have_id_score_text_and_columns() -> None:
    columns = pa.table({"year": [2000 + row for row in range(20)], "lang": ["en", None] * 10})
    table = Embeddings(
        [f"d{row}" for row in range(20)], clustered(20), None, [f"text {row}" for row in range(20)], columns
    )
    index = Index.build(table, progress=False)
    scores, ids = search_ids(index, clustered(20)[:2], 3)
    hits = index.search(clustered(20)[:2], 3)
    assert [[hit.id for hit in row] for row in hits] == ids.tolist()
    np.testing.assert_array_equal([[hit.score for hit in row] for row in hits], scores)
    best = hits[1][0]
    assert (best.id, best.snippet, best.columns) == ("d1", "text 1", {"year": 2001}), "missing values are left out"
    kept = np.arange(20) % 2 == 0
    assert {hit.columns["lang"] for hit in index.search(clustered(20)[:1], 20, allowed_rows=kept)[0]} == {"en"}
    assert len(index.search(clustered(20)[0], 50)[0]) == 20
