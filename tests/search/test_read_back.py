"""Vectors read back from every kind of FAISS index rank as its own searches do, or are refused;
nothing crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.search.documents import open_documents
from tests.helpers.clusters import clustered

NUM = 1200
VECTORS = clustered(NUM, 32) + 0.3 * np.ones(32, np.float32) / np.sqrt(32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
QUERIES = VECTORS[::60] + 0.1 * clustered(20, 32, seed=3)
AGREE = """
Flat SQ4 SQ6 SQ8 SQfp16 SQbf16 PQ8 PQ8x4 PQ8x4fs OPQ8,PQ8 OPQ8_16,PQ8 OPQ8,PQ8x4fs IVF8,Flat
IVF8,SQ8 IVF8,PQ8 IVF8,PQ8x4fs IVF8,PQ8x4fsr IVF8_HNSW,PQ8x4fs IVF8_HNSW,PQ8x4fsr
OPQ8_16,IVF8,PQ8x4fs IVF8,PQ8x4fs,RFlat IVF8_HNSW32,RaBitQ,Refine(SQfp16) IVF8,RaBitQfs,RFlat
PQ8,Refine(SQ8) PQ8,Refine(PQ16) HNSW16 HNSW16,SQ8 HNSW16,PQ8 HNSW16,PQ8,RFlat NSG16 NSG16,SQ8
NSG16,PQ8 L2norm,Flat RR16,Flat RR32,SQ8 Pad40,Flat PCA16,Flat PCAR8,Flat PCA16,HNSW16
PCA16,IVF8,Flat PCAR16,IVF8,PQ8x4fs PCA16,L2norm,Flat L2norm,PCA16,SQ8 PCA16,PQ8,RFlat RQ4x6
RQ8x4fs LSQ4x4 LSQ8x4fs PRQ2x2x6 PLSQ2x2x4 IVF8,RQ4x6 IVF8,RQ8x4fs IVF8,RQ8x4fsr IVF8,LSQ8x4fs
IVF8,PRQ2x4x4fs
"""
REFUSED = """
PCAW16,Flat ITQ16,Flat RR40,Flat OPQ8_40,PQ8 IVF8,FlatDedup PQ8x4fs_64 IVF8,PQ8x4fs_64
RaBitQ RaBitQ4 RaBitQfs RaBitQfs4 IVF8,RaBitQ IVF8,RaBitQ4 IVF8,RaBitQfs PCA16,RaBitQ
"""
UNFIT = (
    "PQ8,Refine(PQ16x4fs) PQ8,Refine(IVF8,Flat) PQ8,Refine(NSG16) ZnLattice2x4_2 LSH HNSW16,RaBitQ"
)


def built(folder: Path, factory: str, **options: Any) -> Path:
    Index.build(VECTORS, factory=factory, recall_queries=0, folder=folder, **options)
    return folder


def agreement(folder: Path) -> float:
    """The share of the best ten of a search that the vectors read back rank among their best
    ten."""
    options = {"nprobe": 8} if "IVF8" in str(Index.open(folder).provenance.factory) else {}
    vectors = np.asarray(open_documents(folder, folder.with_suffix(".work")).vectors[:], np.float32)
    scores = QUERIES @ vectors.T
    rows = Index.open(folder).search_rows(QUERIES, 10, **options)[1]
    # Fast scans round their scores, and short codes tie.
    tenth = np.sort(scores, axis=1)[:, -10:-9] - 0.005
    return float((np.take_along_axis(scores, rows, 1) >= tenth).mean())


def sweep(folder: Path) -> None:
    """Print a line for each kind of index; in a process of its own, which FAISS may end."""
    for number, factory in enumerate(f"{AGREE} {REFUSED} {UNFIT}".split()):
        print(factory, end="\t", flush=True)
        try:
            result = f"{agreement(built(folder / str(number), factory)):.2f}"
        except DualencError as error:
            result = str(error)
        print(result, flush=True)


@pytest.mark.slow
def test_every_kind_agrees_with_its_searches_or_is_refused(tmp_path: Path) -> None:
    code = f"from tests.search.test_read_back import *; sweep(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-1000:]
    results = dict(line.split("\t") for line in done.stdout.splitlines())
    for factory in AGREE.split():
        # Short codes choose the candidates of a refined index.
        assert float(results[factory]) >= (0.5 if factory.endswith((",RFlat", ")")) else 0.97), (
            factory
        )
    for factory in REFUSED.split():
        assert (
            "gives no vectors back" in results[factory]
            or "gives back other vectors" in results[factory]
        ), factory
    for factory in UNFIT.split():
        assert results[factory].startswith(f"factory '{factory}' "), factory


def test_an_index_whose_pca_subtracts_the_mean_is_refused(tmp_path: Path) -> None:
    """FAISS's own PCA does; those built here keep the inner product."""
    vectors = VECTORS + np.ones(32, np.float32) / np.sqrt(32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index = faiss.index_factory(32, "PCA24,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    ours = Index.build(vectors, factory="PCA24,Flat", recall_queries=0, folder=tmp_path / "index")
    Index(index, ours.ids, ours.provenance).save(tmp_path / "old")
    assert len(open_documents(tmp_path / "index", tmp_path / "work").vectors) == NUM
    with pytest.raises(
        DualencError,
        match=r"searches .scores differ by .*; build the index again, or embed the doc",
    ):
        open_documents(tmp_path / "old", tmp_path / "work")


def test_few_and_equal_vectors_pass(tmp_path: Path) -> None:
    for number, vectors in enumerate(
        (VECTORS[:1], VECTORS[:2], VECTORS[:3], np.repeat(VECTORS[:1], 300, axis=0))
    ):
        folder = tmp_path / str(number)
        Index.build(vectors, factory="SQfp16", recall_queries=0, folder=folder)
        assert len(open_documents(folder, folder / "work").vectors) == len(vectors)


@pytest.mark.parametrize("factory", ["HNSW16,PQ8", "NSG16,PQ8", "HNSW16,PQ8,RFlat"])
def test_an_index_that_faiss_searches_by_distance_gives_inner_products(factory: str) -> None:
    index = Index.build(VECTORS, factory=factory, recall_queries=0)
    queries = QUERIES / np.linalg.norm(QUERIES, axis=1, keepdims=True)
    scores, rows = index.search_rows(queries, 10)
    vectors = index.reconstruct(rows.ravel()).reshape(*rows.shape, -1)
    np.testing.assert_allclose(scores, np.einsum("qd,qkd->qk", queries, vectors), atol=1e-5)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert index.search_rows(queries, NUM + 5)[1][0, -1] == -1
    with pytest.raises(
        DualencError,
        match="is searched by distance, not by inner product; use --metric cosine; try",
    ):
        Index.build(VECTORS, factory=factory, recall_queries=0, metric="ip")
