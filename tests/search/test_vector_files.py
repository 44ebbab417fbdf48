"""Vectors of FAISS files and matrices come back as they were written, or are refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from dualenc import adapt, push
from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.search.documents import open_documents
from dualenc.search.searcher import Searcher
from dualenc.search.vector_files import open_vector_file
from dualenc.workflows.build_index import index
from tests.helpers.clusters import clustered

NUM, DIM = 600, 16
VECTORS = clustered(NUM, DIM)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


def faiss_file(path: Path, factory: str, metric: int, ids: np.ndarray | None = None) -> Path:
    """A file as `faiss.write_index` makes it."""
    built = faiss.index_factory(DIM, factory, metric)
    built.train(VECTORS)
    if ids is None:
        built.add(VECTORS)
    else:
        built.add_with_ids(VECTORS, ids)
    faiss.write_index(built, str(path))
    return path


def build(source: Path, *data: Any, **options: Any) -> Index:
    return index(
        str(source),
        *map(str, data),
        out=source.with_suffix(".index"),
        recall_queries=0,
        progress=False,
        **options,
    ).open()


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF8,Flat", "PQ8", "IVF8,PQ8", "SQfp16"])
def test_what_faiss_gives_back_is_indexed(tmp_path: Path, factory: str, metric: int) -> None:
    file = faiss_file(tmp_path / "plain.faiss", factory, metric)
    original = faiss.read_index(str(file))
    if "IVF" in factory:
        original.make_direct_map()
    expected = original.reconstruct_n(0, NUM)
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    is_exact = "PQ" not in factory
    # Decoded codes differ in length, and distances between them rank otherwise than the cosine.
    opened = build(file, metric=None if is_exact else "cosine")
    assert opened.provenance.metric == "cosine"
    assert list(opened.ids) == [str(row) for row in range(NUM)]
    np.testing.assert_allclose(opened.reconstruct(np.arange(NUM)), expected / lengths, atol=1e-3)


def test_ids_of_the_file_are_kept(tmp_path: Path) -> None:
    """Those of an IndexIDMap, and those in inverted lists, whatever their order."""
    ids = np.arange(NUM)[::-1] * 7 - 3
    for number, factory in enumerate(
        ("IDMap,Flat", "IDMap2,HNSW16", "IVF8,Flat", "PCA16,IVF8,Flat")
    ):
        file = faiss_file(tmp_path / f"{number}.faiss", factory, faiss.METRIC_INNER_PRODUCT, ids)
        opened = build(file)
        row_of = {int(name): row for row, name in enumerate(opened.ids)}
        rows = np.array([row_of[each] for each in ids.tolist()])
        np.testing.assert_allclose(opened.reconstruct(rows), VECTORS, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_matrix_with_ids_and_texts(tmp_path: Path, dtype: Any) -> None:
    """Vector i is described by row i of the table; --ids joins them by id."""
    np.save(tmp_path / "vectors.npy", VECTORS.astype(dtype))
    lines = [{"_id": f"d{row}", "text": f"text {row}", "year": row} for row in range(NUM)]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = build(tmp_path / "vectors.npy", table, texts=True, columns=["year"])
    np.testing.assert_allclose(opened.reconstruct(np.arange(NUM)), VECTORS, atol=1e-3)
    hit = opened.search(VECTORS[7], k=1, where=["year=7"])[0][0]
    assert (hit.id, hit.snippet, hit.columns) == ("d7", "text 7", {"year": 7})
    backwards = [f"d{row}" for row in range(NUM)][::-1]
    (tmp_path / "ids.txt").write_text("\r\n".join(backwards) + "\r\n")
    opened = build(tmp_path / "vectors.npy", table, ids=tmp_path / "ids.txt", model="an-api-model")
    assert opened.hit(0, 1.0).snippet == f"text {NUM - 1}"
    assert opened.provenance.model == "an-api-model"
    np.save(tmp_path / "ids.npy", np.array(backwards))
    opened = build(tmp_path / "vectors.npy", ids=tmp_path / "ids.npy")
    assert list(opened.ids) == backwards
    opened = build(tmp_path / "vectors.npy", ids=table, id_column="year")
    assert list(opened.ids) == [str(row) for row in range(NUM)]


def test_lengths_decide_the_metric_and_unusable_vectors_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dualenc")
    longer = VECTORS * np.linspace(1, 2, NUM, dtype=np.float32)[:, None]
    longer[3] = 0
    longer[5, 1] = np.nan
    np.save(tmp_path / "vectors.npy", longer)
    opened = build(tmp_path / "vectors.npy")
    assert opened.provenance.metric == "cosine"
    assert len(opened) == NUM - 2
    assert "left out 2 of 600 items; the first, 3: its vector is zero" in caplog.text
    assert "lengths 1 to 2 (not normalized); compared by cosine" in caplog.text
    assert "ids are row numbers" in caplog.text
    used = np.delete(longer, [3, 5], axis=0)
    for metric, name in ((faiss.METRIC_INNER_PRODUCT, "ip"), (faiss.METRIC_L2, None)):
        flat = faiss.IndexFlat(DIM, metric)
        flat.add(used)
        faiss.write_index(flat, str(tmp_path / "flat.faiss"))
        if name is not None:
            opened = build(tmp_path / "flat.faiss")
            assert opened.provenance.metric == name
            np.testing.assert_array_equal(opened.reconstruct(np.arange(len(used))), used)
            continue
        with pytest.raises(DualencError, match="compares by l2 distance") as refused:
            build(tmp_path / "flat.faiss")
        assert "--metric cosine" in str(refused.value)
        assert build(tmp_path / "flat.faiss", metric="cosine").provenance.metric == "cosine"


def test_files_that_are_refused(tmp_path: Path) -> None:
    """One line each; nothing is unpickled, and nothing is left behind."""
    flat = faiss_file(tmp_path / "flat.faiss", "Flat", faiss.METRIC_L2)
    (tmp_path / "cut.faiss").write_bytes(flat.read_bytes()[:900])
    (tmp_path / "junk.faiss").write_bytes(b"IxFI" + bytes(20))
    (tmp_path / "text.npy").write_text("no matrix")
    np.save(tmp_path / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    np.save(tmp_path / "cube.npy", np.ones((2, 3, 4)))
    np.save(tmp_path / "zeros.npy", np.zeros((4, 3), np.float32))
    faiss.write_index(faiss.IndexFlatL2(4), str(tmp_path / "empty.faiss"))
    faiss_file(tmp_path / "estimates.faiss", "RaBitQ", faiss.METRIC_L2)
    expected = {
        "cut": "FAISS index",
        "junk": "FAISS index",
        "text": "not a readable .npy",
        "objects": "not a readable .npy",
        "cube": "shape",
        "zeros": "zero or not finite",
        "empty": "holds 0 vectors",
        "estimates": "gives back other vectors than it searches",
    }
    before = sorted(tmp_path.iterdir())
    for name, part in expected.items():
        (file,) = tmp_path.glob(f"{name}.*")
        with pytest.raises(DualencError, match=part) as refused:
            build(file)
        assert "\n" not in str(refused.value)
        assert str(file) in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(DualencError, match="FAISS index"):
        open_vector_file(tmp_path / "cut.faiss")


def test_ids_and_texts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "vectors.npy"
    np.save(source, VECTORS[:3])
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "same.txt").write_text("a\nb\na\n")
    (tmp_path / "blank.txt").write_text("a\n\nc\n")
    (tmp_path / "good.txt").write_text("a\nb\nc\n")
    np.save(tmp_path / "pickled.npy", np.array(["a", "b", 3], dtype=object), allow_pickle=True)
    (tmp_path / "table.jsonl").write_text(
        '{"_id": "x", "text": "one"}\n{"_id": "y", "text": "z"}\n'
    )
    (tmp_path / "part.jsonl").write_text('{"_id": "c", "text": "one"}\n{"_id": "a", "text": ""}\n')
    refused: list[tuple[tuple[str, ...], str | None, str]] = [
        ((), "two.txt", "2 rows for the 3 vectors"),
        ((), "same.txt", "duplicate"),
        ((), "blank.txt", "row 1 has no id"),
        ((), "missing.txt", "no such file"),
        ((), "pickled.npy", "not a readable .npy"),
        (("table.jsonl",), None, "2 rows for the 3 vectors"),
        (("part.jsonl",), None, "cannot be matched by their position"),
        (("table.jsonl",), "good.txt", "none of the vectors' ids"),
    ]
    for data, ids, part in refused:
        options = {} if ids is None else {"ids": tmp_path / ids}
        with pytest.raises(DualencError, match=part):
            build(source, *(tmp_path / name for name in data), **options)
    with pytest.raises(DualencError, match="holds no texts"):
        build(source, texts=True)
    # A vector without a text is left out, as when texts are embedded.
    opened = build(source, tmp_path / "part.jsonl", ids=tmp_path / "good.txt", texts=True)
    assert list(opened.ids) == ["c"]


def test_commands_name_the_way_to_index_a_file(tmp_path: Path) -> None:
    file = faiss_file(tmp_path / "plain.faiss", "Flat", faiss.METRIC_L2)
    calls = [
        lambda: adapt(str(file), "clicks.csv", out=tmp_path / "out"),
        lambda: Searcher.open(file),
        lambda: open_documents(file),
        lambda: Index.open(file),
        lambda: push(str(file), "postgresql://me@localhost/db"),
    ]
    for call in calls:
        with pytest.raises(DualencError, match=f"dualenc index {file} --out INDEX"):
            call()
