"""Indexes merged on disk against the same index that FAISS fills in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from dualenc import checksums
from dualenc.errors import DualencError
from dualenc.files import write_json
from dualenc.reading import read_json
from dualenc.search import Embeddings, Index, kinds, parts
from dualenc.search.parts import lists_on_disk
from tests.search.clusters import clustered, search_ids
from tests.search.test_index import on_disk

COUNT = 6000
MEMORY = 1 << 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROWS_AT_ONCE", 500)
    monkeypatch.setattr(kinds, "MIN_TRAINING_ROWS", COUNT)


@pytest.fixture
def embeddings(tmp_path: Path) -> Embeddings:
    return on_disk(tmp_path / "emb", clustered(COUNT), side="right")


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    ["IVF16,Flat", "IVF16_HNSW8,SQ8", "IVF16,PQ4x4", "PCA8,IVF16,Flat", "IVF16,RaBitQ,Refine(SQfp16)"],
)
def test_the_same_results_as_an_index_filled_in_memory(
    tmp_path: Path, embeddings: Embeddings, factory: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "index", "memory": MEMORY}
    built = Index.build(embeddings, None, factory, recall_queries=50, **options)
    assert lists_on_disk(built.faiss) is not None
    assert sorted(os.listdir(tmp_path)) == ["emb", "index"]
    expected_index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    expected_index.train(clustered(COUNT))
    expected_index.add(clustered(COUNT))
    for name, value in built.meta["search_parameters"].items():
        faiss.ParameterSpace().set_index_parameter(expected_index, name, value)
    queries = clustered(40, seed=1)
    expected = expected_index.search(queries, 10)
    if factory == "IVF16,Flat":
        plain = faiss.read_index(str(tmp_path / "index" / "index.faiss"))
        np.testing.assert_array_equal(plain.search(queries, 10)[1], built.search_rows(queries)[1])
    (tmp_path / "index").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    for index in (built, Index.open(tmp_path / "moved", verify=True), Index.open(tmp_path / "copied")):
        scores, rows = index.search_rows(queries)
        np.testing.assert_allclose(scores, expected[0], atol=1e-5)
        assert (rows == expected[1]).mean() > 0.99, "but for ties"
    assert search_ids(built, queries[:1], 1)[1][0, 0] == f"doc {expected[1][0, 0]}"
    assert capfd.readouterr().out == "", "FAISS says on the standard output where it looks"
    Index.open(tmp_path / "moved").save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "moved")
    np.testing.assert_array_equal(Index.open(tmp_path / "saved").search_rows(queries)[1], built.search_rows(queries)[1])


def test_what_a_killed_build_left_is_removed(tmp_path: Path, embeddings: Embeddings) -> None:
    work = tmp_path / ".index.building"
    work.mkdir()
    for name in ("part-00000.faiss", "part-00099.faiss", "lists.ivfdata"):
        (work / name).write_text("{}")
    index = Index.build(embeddings, None, "IVF8,Flat", folder=tmp_path / "index", memory=MEMORY)
    assert (index.search_rows(clustered(COUNT)[:50], 1, nprobe=8)[1].ravel() == np.arange(50)).all()
    assert sorted(os.listdir(tmp_path)) == ["emb", "index"]


def test_refused_builds_leave_nothing(tmp_path: Path, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "index", "memory": MEMORY}
    with pytest.raises(DualencError, match=r"takes 0\.9 MiB for 6,000 vectors, and memory is 0\.1 MiB"):
        Index.build(embeddings, None, "HNSW8", **options)
    monkeypatch.setattr(parts, "training_rows_in", lambda *_: 20)
    with pytest.raises(DualencError, match="cannot be trained on 20 vectors"):
        Index.build(embeddings, None, "IVF64,Flat", **options)
    assert os.listdir(tmp_path) == ["emb"]


def test_lists_outside_the_folder_are_not_opened(tmp_path: Path, embeddings: Embeddings) -> None:
    """Whoever makes an index may name any file as that of its lists."""
    folder = tmp_path / "index"
    Index.build(embeddings, None, "IVF16,Flat", folder=folder, memory=MEMORY)
    opened = parts.open_merged(folder / "index.faiss")
    (tmp_path / "elsewhere").mkdir()
    secret = tmp_path / "elsewhere" / "secret"
    (folder / "lists.ivfdata").rename(secret)
    lists_on_disk(opened).filename = str(secret)
    faiss.write_index(opened, str(folder / "index.faiss"))
    names = [path.name for path in folder.iterdir() if path.name != "meta.json"]
    sums = {"files": checksums.checksums(folder, names), "sizes": checksums.sizes(folder, names)}
    write_json(folder / "meta.json", read_json(folder / "meta.json") | sums)
    with pytest.raises(DualencError, match=r"index\.faiss: corrupt"):
        Index.open(folder)
    (folder / "lists.ivfdata").symlink_to(secret)
    with pytest.raises(DualencError, match="is a link"):
        parts.open_merged(folder / "index.faiss")
