"""Indexes refined by a file of their own against the same index that FAISS fills in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from faiss.contrib.ondisk import merge_ondisk

from dualenc.errors import DualencError
from dualenc.io import checksums
from dualenc.io.files import write_json
from dualenc.io.reading import read_json
from dualenc.search import Embeddings, Index
from dualenc.search.index import build, kinds
from tests.helpers.clusters import clustered, search_ids
from tests.helpers.embeddings_on_disk import on_disk

COUNT = 6000
MEMORY = 1 << 18
FACTORY = "IVF8,SQ8,Refine(SQfp16)"


@pytest.fixture
def embeddings(tmp_path: Path) -> Embeddings:
    return on_disk(tmp_path / "emb", clustered(COUNT), side="right")


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [
        "IVF16,RaBitQ,Refine(SQfp16)",
        "IVF16_HNSW8,PQ4x4,Refine(Flat)",
        "RR8,IVF16,SQ4,Refine(SQ8)",
        "PQ4x4,Refine(SQfp16)",
    ],
)
def test_the_same_results_as_an_index_filled_in_memory(
    tmp_path: Path, embeddings: Embeddings, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "MIN_TRAINING_ROWS", COUNT)
    built = Index.build(
        embeddings, None, factory, recall_queries=50, folder=tmp_path / "index", memory=MEMORY
    )
    assert (tmp_path / "index" / "refine.faiss").exists()
    assert sorted(os.listdir(tmp_path)) == ["emb", "index"]
    expected_index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    expected_index.train(clustered(COUNT))
    expected_index.add(clustered(COUNT))
    for name, value in built.provenance.search_parameters.items():
        faiss.ParameterSpace().set_index_parameter(expected_index, name, value)
    queries = clustered(40, seed=1)
    expected = expected_index.search(queries, 10)
    (tmp_path / "index").rename(tmp_path / "moved")
    opened = Index.open(tmp_path / "moved", verify=True)
    opened.save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "moved")
    for index in (built, opened, Index.open(tmp_path / "saved", verify=True)):
        scores, rows = index.search_rows(queries)
        np.testing.assert_allclose(scores, expected[0], atol=1e-5)
        assert (rows == expected[1]).mean() > 0.99, "but for ties"
    assert search_ids(built, queries[:1], 10)[1][0, 0] == f"doc {expected[1][0, 0]}"
    plain = faiss.read_index(str(tmp_path / "saved" / "index.faiss"))
    assert (plain.ntotal, isinstance(plain, faiss.IndexRefine)) == (COUNT, False), (
        "the candidates alone"
    )


def test_what_a_killed_build_left_is_removed(tmp_path: Path, embeddings: Embeddings) -> None:
    work = tmp_path / ".index.building"
    work.mkdir()
    (work / "refine.faiss").write_text("{}")
    index = Index.build(embeddings, None, FACTORY, folder=tmp_path / "index", memory=MEMORY)
    assert (
        index.search_rows(clustered(COUNT)[:50], 1, nprobe=8)[1].ravel() == np.arange(50)
    ).mean() > 0.9
    assert sorted(os.listdir(tmp_path)) == ["emb", "index"]


def test_refused_builds_leave_nothing(
    tmp_path: Path, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "index", "memory": MEMORY}
    with pytest.raises(
        DualencError, match=r"takes 0\.9 MiB for 6,000 vectors, and memory is 0\.2 MiB"
    ):
        Index.build(embeddings, None, "HNSW8", **options)
    monkeypatch.setattr(build, "training_rows_in", lambda *_: 20)
    with pytest.raises(DualencError, match="cannot be trained on 20 vectors"):
        Index.build(embeddings, None, "IVF64,PQ4x4,Refine(SQfp16)", **options)
    assert os.listdir(tmp_path) == ["emb"]


def test_auto_fits_the_memory_of_the_machine(
    tmp_path: Path, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "EXACT_VALUES", 1)
    monkeypatch.setattr(kinds, "FLOAT_VALUES", 1)
    monkeypatch.setattr(os, "sysconf", lambda _: 330)
    index = Index.build(embeddings, None, folder=tmp_path / "index")
    assert index.provenance.factory.endswith(",Refine(SQfp16)")
    assert (tmp_path / "index" / "refine.faiss").exists()


def test_lists_outside_the_folder_are_not_opened(tmp_path: Path, embeddings: Embeddings) -> None:
    """Whoever makes an index may name any file as that of its lists."""
    folder = tmp_path / "index"
    Index.build(embeddings, None, "IVF16,Flat", folder=folder)
    shutil.copyfile(folder / "index.faiss", tmp_path / "part.faiss")
    index = faiss.read_index(str(tmp_path / "part.faiss"))
    index.reset()
    merge_ondisk(index, [str(tmp_path / "part.faiss")], str(tmp_path / "elsewhere"))
    faiss.write_index(index, str(folder / "index.faiss"))
    names = [path.name for path in folder.iterdir() if path.name != "meta.json"]
    write_json(
        folder / "meta.json", read_json(folder / "meta.json") | checksums.recorded(folder, names)
    )
    with pytest.raises(DualencError, match=r"index\.faiss: corrupt"):
        Index.open(folder)
