"""Documents of every source: the vectors that FAISS, numpy and Qdrant have, mapped, and the source
untouched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pandas as pd
import pytest

from dualenc.data.readers.clicks import IndexPairs
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search import Embeddings, Index
from dualenc.search.documents import fingerprint, open_documents
from dualenc.search.embed.writer import EmbeddingWriter
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.index import database
from tests.helpers.clusters import clustered
from tests.helpers.local_qdrant import url_of, use_folders

NUM = 3000
IDS = [f"d{row}" for row in range(NUM)]
LOSSLESS = ("Flat", "HNSW8", "IVF16,Flat", "PCAR16,IVF16,Flat")


def built(
    folder: Path, factory: str = "Flat", vectors: np.ndarray | None = None, **options: Any
) -> Path:
    source = Embeddings(
        IDS,
        clustered(NUM) if vectors is None else vectors,
        Provenance(model="m"),
        [f"text {i}" for i in IDS],
    )
    Index.build(source, factory=factory, recall_queries=0, folder=folder, **options)
    return folder


def written(folder: Path, vectors: np.ndarray, **notes: Any) -> Path:
    writer = EmbeddingWriter(folder, IDS[: len(vectors)], vectors.shape[1], "float32", {}, notes)
    writer.write_all(lambda number: (vectors[writer.ranges[number]], []))
    return folder


def assert_unit_half(opened: Embeddings, vectors: np.ndarray) -> None:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert opened.vectors.dtype == np.float16
    np.testing.assert_allclose(opened.vectors[:], unit, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [*LOSSLESS, "SQ8", "PQ8", "OPQ8,IVF16,PQ8", "IVF16,PQ8,Refine(SQfp16)", "IVF16,PQ8x4"],
)
def test_an_index_gives_what_faiss_reconstructs_row_by_row(tmp_path: Path, factory: str) -> None:
    source = built(tmp_path / "index", factory)
    before = fingerprint(source)
    opened = open_documents(source, tmp_path / "work")
    plain = faiss.read_index(str(source / "index.faiss"))
    ivf = faiss.try_extract_index_ivf(plain)
    if ivf is not None:
        ivf.make_direct_map(True)
    expected = np.stack([plain.reconstruct(row) for row in range(NUM)])
    np.testing.assert_allclose(opened.vectors[:], expected, atol=1e-3)
    if factory in LOSSLESS:
        assert_unit_half(opened, clustered(NUM))
    assert list(opened.ids) == IDS
    assert opened.snippets is not None
    assert opened.snippets[7] == "text d7"
    assert (opened.provenance.model, opened.provenance.metric) == ("m", "cosine")
    assert fingerprint(source) == before


@pytest.mark.slow
def test_an_index_that_a_file_refines(tmp_path: Path) -> None:
    source = built(tmp_path / "index", "IVF16,PQ8,Refine(SQfp16)", memory=100_000)
    assert (source / "refine.faiss").exists()
    opened = open_documents(source, tmp_path / "work")
    assert_unit_half(opened, clustered(NUM))


def test_unit_embeddings_are_mapped_where_they_are(tmp_path: Path) -> None:
    vectors = clustered(NUM)
    folder = written(tmp_path / "emb", vectors, model="m")
    opened = open_documents(folder)
    np.testing.assert_array_equal(opened.vectors[:], vectors)
    assert not opened.vectors[:100].flags.owndata
    other = written(tmp_path / "long", 3 * vectors)
    assert_unit_half(open_documents(other, tmp_path / "work"), vectors)
    with pytest.raises(DualencError, match="name a folder for them"):
        open_documents(other)


def test_beir_folders_of_vectors(tmp_path: Path) -> None:
    vectors = 2 * clustered(20)
    for name in ("folder", "table"):
        (tmp_path / name / "qrels").mkdir(parents=True)
    written(tmp_path / "folder" / "corpus", clustered(20), normalized=True)
    pd.DataFrame({"_id": IDS[:20], "vector": list(vectors)}).to_parquet(
        tmp_path / "table" / "corpus.parquet"
    )
    np.testing.assert_array_equal(open_documents(tmp_path / "folder").vectors[:], clustered(20))
    opened = open_documents(tmp_path / "table", tmp_path / "work")
    assert_unit_half(opened, vectors)
    assert opened.ids == IDS[:20]
    before = fingerprint(tmp_path / "table")
    (tmp_path / "table" / "qrels" / "test.tsv").write_text("q\td0\t1\n")
    assert fingerprint(tmp_path / "table") == before
    (tmp_path / "table" / "corpus.parquet").unlink()
    (tmp_path / "table" / "corpus.jsonl").write_text(json.dumps({"_id": "a", "text": "b"}))
    with pytest.raises(DualencError, match="its corpus consists of texts; index them"):
        open_documents(tmp_path / "table", tmp_path / "work")


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_a_pushed_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: Any) -> None:
    monkeypatch.setattr("dualenc.search.engines.engine.VECTORS_AT_ONCE", 7)
    use_folders(monkeypatch)
    store, folder = url_of(tmp_path / "store"), tmp_path / "pushed"
    vectors = 3 * clustered(40)
    source = Embeddings(IDS[:40], vectors, Provenance(model="m"), [f"text {i}" for i in IDS[:40]])
    index = push_embeddings(source, store, "items", metric=metric)[0]
    index.close()
    index.save(folder)
    before = fingerprint(folder)
    opened = open_documents(folder, tmp_path / "work")
    assert_unit_half(opened, vectors[[int(name[1:]) for name in opened.ids]])
    assert sorted(opened.ids) == sorted(IDS[:40])
    assert opened.snippets == [f"text {name}" for name in opened.ids]
    assert opened.provenance.model == "m"
    again = open_documents(folder, tmp_path / "work")
    assert again.ids == opened.ids
    assert fingerprint(folder) == before
    other = push_embeddings(
        Embeddings(IDS[:40], clustered(40, seed=1)), store, "items", replace=True
    )[0]
    other.close()
    with pytest.raises(DualencError, match="holds other embeddings than"):
        fingerprint(folder)


def test_a_second_call_reads_what_is_written_of_the_same_source_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = built(tmp_path / "index")
    open_documents(source, tmp_path / "work")
    blocks = database.Database.blocks
    monkeypatch.setattr(database.Database, "blocks", lambda *_: pytest.fail("read again"))
    assert_unit_half(open_documents(source, tmp_path / "work"), clustered(NUM))
    monkeypatch.setattr(database.Database, "blocks", blocks)
    other = built(tmp_path / "other", vectors=clustered(NUM, seed=1))
    assert fingerprint(other) != fingerprint(source)
    assert_unit_half(open_documents(other, tmp_path / "work"), clustered(NUM, seed=1))


@pytest.mark.parametrize("scales", [(1, 1, 1), (5, 5, 5), (1, 1, 1.009)])
def test_inner_products_of_equal_lengths_are_cosines(
    tmp_path: Path, scales: tuple[float, ...]
) -> None:
    vectors = clustered(NUM) * np.resize(np.float32(scales), NUM)[:, None]
    source = built(tmp_path / "index", vectors=vectors, metric="ip")
    assert_unit_half(open_documents(source, tmp_path / "work"), vectors)


def test_inner_products_of_different_lengths_are_refused(tmp_path: Path) -> None:
    source = built(
        tmp_path / "index", vectors=clustered(NUM) * np.linspace(1, 1.03, NUM)[:, None], metric="ip"
    )
    with pytest.raises(
        DualencError, match=r"by inner product, and lengths are 1 to 1\.03; index the vectors with"
    ):
        open_documents(source, tmp_path / "work")


def test_sources_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    lossy, corrupt = built(tmp_path / "lossy", "PCAW16,Flat"), built(tmp_path / "corrupt")
    with pytest.raises(DualencError, match="PCAW16,Flat gives no vectors back"):
        Index.open(lossy).reconstruct(np.arange(2))
    (corrupt / "index.faiss").write_bytes(b"broken")
    with pytest.raises(DualencError) as theirs:
        Index.open(corrupt)
    messages = {
        tmp_path / "missing": "no such folder",
        tmp_path
        / "empty": "not an index, embeddings, a BEIR folder of vectors or a pushed collection",
        lossy: "an index of kind PCAW16,Flat gives no vectors back",
        corrupt: str(theirs.value),
    }
    for source, message in messages.items():
        with pytest.raises(DualencError) as error:
            open_documents(source, tmp_path / "work")
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not list((tmp_path / "work").glob("*"))


def test_nothing_in_the_place_of_documents_or_a_target_is_one_line(tmp_path: Path) -> None:
    vectors = Embeddings(["a", "b"], np.eye(2, 4, dtype=np.float32))
    with pytest.raises(DualencError, match="push_embeddings: embeddings is NoneType; give"):
        push_embeddings(None, "postgresql://localhost/x", "docs")  # type: ignore[arg-type]
    with pytest.raises(DualencError, match="push_embeddings: target is None; give the URL"):
        push_embeddings(vectors, None, "docs")  # type: ignore[arg-type]
    with pytest.raises(DualencError, match="push_embeddings: name is ''; give"):
        push_embeddings(vectors, "http://localhost:1", "")
    with pytest.raises(DualencError, match="open_documents: source is None; name an index"):
        open_documents(None)  # type: ignore[arg-type]
    (tmp_path / "clicks.csv").write_text("query,id\na,b\n")
    with pytest.raises(DualencError, match="IndexPairs: documents is NoneType; give open_doc"):
        IndexPairs(str(tmp_path / "clicks.csv"), None)  # type: ignore[arg-type]
