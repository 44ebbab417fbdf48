"""Indexes merged on disk against the same index that FAISS fills in memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.search import Embeddings, Index, parts
from dualenc.search.build import new_index
from dualenc.search.parts import bytes_per_vector, can_be_merged, claimed, lists_of, quiet
from tests.search.clusters import clustered, exact_rows, search_ids
from tests.search.test_index import on_disk

COUNT = 6000
MEMORY = 1 << 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROWS_AT_ONCE", 500)


@pytest.fixture
def embeddings(tmp_path: Path) -> Embeddings:
    return on_disk(tmp_path / "emb", clustered(COUNT), side="right")


def raw(vectors: np.ndarray, factory: str) -> Any:
    """What faiss fills in memory, trained on the same vectors."""
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    return index


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory", ["IVF16,Flat", "IVF16_HNSW8,SQ8", "IVF16,PQ4x4", "PCA8,IVF16,Flat", "IVF16,RaBitQ,Refine(SQfp16)"]
)
def test_the_same_results_as_an_index_filled_in_memory(tmp_path: Path, embeddings: Embeddings, factory: str) -> None:
    how: dict[str, Any] = {"folder": tmp_path / "index", "memory": MEMORY, "train_rows": COUNT, "recall_queries": 50}
    ours = Index.build(embeddings, None, factory, **how)
    assert ours.meta["parts"] > 3
    assert lists_of(ours.faiss) is not None
    assert sorted(os.listdir(tmp_path)) == ["emb", "index"]
    theirs = raw(clustered(COUNT), factory)
    for name, value in ours.meta["search_parameters"].items():
        faiss.ParameterSpace().set_index_parameter(theirs, name, value)
    queries = clustered(40, seed=1)
    expected = theirs.search(queries, 10)
    for found in (ours.search_rows(queries), Index.open(tmp_path / "index", verify=True).search_rows(queries)):
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
        assert (found[1] == expected[1]).mean() > 0.99, "but for ties"
    plain = faiss.read_index(str(tmp_path / "index" / "index.faiss"))
    np.testing.assert_array_equal(plain.search(queries, 10)[1], ours.search_rows(queries)[1])
    assert search_ids(ours, queries[:1], 1)[1][0, 0] == f"doc {expected[1][0, 0]}"


@pytest.mark.slow
def test_a_folder_that_was_moved_or_copied(
    tmp_path: Path, embeddings: Embeddings, capfd: pytest.CaptureFixture[str]
) -> None:
    factory = "IVF16,SQ8,Refine(SQfp16)"
    built = Index.build(embeddings, None, factory, folder=tmp_path / "index", memory=MEMORY)
    expected = search_ids(built, clustered(9))
    shutil.copytree(tmp_path / "index", tmp_path / "copied")
    (tmp_path / "index").rename(tmp_path / "moved")
    for name in ("moved", "copied"):
        opened = Index.open(tmp_path / name)
        assert lists_of(opened.faiss).filename == str(tmp_path / name / "lists.ivfdata")
        np.testing.assert_array_equal(search_ids(opened, clustered(9))[1], expected[1])
        opened.save(tmp_path / "saved")
        np.testing.assert_array_equal(search_ids(Index.open(tmp_path / "saved"), clustered(9))[1], expected[1])
    assert capfd.readouterr().out == "", "FAISS says on the standard output where it looks"


def test_a_killed_build_goes_on_with_what_is_missing(
    tmp_path: Path, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    fill = parts._fill

    def failing(database: Any, rows: range, number: int, *rest: Any) -> None:
        if len(filled) == 2:
            raise KeyboardInterrupt
        filled.append(number)
        fill(database, rows, number, *rest)

    how: dict[str, Any] = {"folder": tmp_path / "index", "memory": MEMORY}
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_fill", failing)
        with pytest.raises(KeyboardInterrupt):
            Index.build(embeddings, None, "IVF16,Flat", **how)
    with pytest.raises(DualencError, match=r"the beginning of an index with factory IVF16,Flat, not IVF8,Flat; remove"):
        Index.build(embeddings, None, "IVF8,Flat", **how)
    again = []
    monkeypatch.setattr(
        parts, "_fill", lambda d, rows, number, *rest: (again.append(number), fill(d, rows, number, *rest))
    )
    with monkeypatch.context() as patch:  # and once more, before the folder is written
        patch.setattr(Index, "save", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Index.build(embeddings, None, "IVF16,Flat", **how)
    index = Index.build(embeddings, None, "IVF16,Flat", **how)
    assert sorted(filled + again) == list(range(index.meta["parts"]))
    assert (index.search_rows(clustered(COUNT)[:50], 1, nprobe=16)[1].ravel() == np.arange(50)).all()
    assert not (tmp_path / ".index.building").exists()


@pytest.mark.slow
def test_several_processes_share_the_parts(tmp_path: Path, embeddings: Embeddings) -> None:
    script = """
import sys
from dualenc.search import Embeddings, Index, parts
parts.ROWS_AT_ONCE = 500
fill, mine = parts._fill, []
parts._fill = lambda *given: (mine.append(given[2]), fill(*given))
index = Index.build(Embeddings.open(sys.argv[1]), None, "IVF16,Flat", folder=sys.argv[2], memory=1 << 16)
print(*mine)
assert (index.search_rows(Embeddings.open(sys.argv[1]).vectors[:50], 1, nprobe=16)[1].ravel() == list(range(50))).all()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path / "emb"), str(tmp_path / "index")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    filled = sorted(int(number) for out, _ in outputs for number in out.split())
    number = json.loads((tmp_path / "index" / "meta.json").read_text())["parts"]
    # One that starts when all is done builds anew; none fills what another has filled in the same build.
    assert sorted(set(filled)) == list(range(number))
    assert len(filled) % number == 0


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with claimed(tmp_path / "a.lock") as first, claimed(tmp_path / "a.lock") as second:
        assert (first, second) == (True, False)
    with claimed(tmp_path / "a.lock") as third:
        assert third


def test_quiet_is_about_the_standard_output_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        os.write(1, b"FAISS")
        os.write(2, b"error")
    os.write(1, b"ours")
    assert capfd.readouterr() == ("ours", "error")


@pytest.mark.parametrize(
    ("factory", "per_vector"),
    [
        ("Flat", 64),
        ("SQ8", 16),
        ("HNSW8", 64 + 4 * 16 + 32),
        ("IVF4,Flat", 72),
        ("IVF4,PQ4", 12),
        ("PCA8,IVF4,Flat", 40),
        ("IVF4,PQ4,Refine(SQfp16)", 12 + 32),
    ],
)
def test_bytes_per_vector(factory: str, per_vector: int) -> None:
    index = new_index(16, factory, "ip")
    assert bytes_per_vector(index) == per_vector
    assert can_be_merged(index) == ("IVF" in factory)


def test_what_cannot_be_merged_and_does_not_fit_is_refused(tmp_path: Path, embeddings: Embeddings) -> None:
    with pytest.raises(
        DualencError, match=r"takes 0\.9 MiB for 6,000 vectors, and memory is 0\.1 MiB; give more"
    ) as error:
        Index.build(embeddings, None, "HNSW8", folder=tmp_path / "index", memory=MEMORY)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "index").exists()


@pytest.mark.slow
def test_recall_of_the_merged_index_is_that_of_its_results(tmp_path: Path, embeddings: Embeddings) -> None:
    queries = clustered(200, seed=5)
    index = Index.build(
        embeddings, None, "IVF16,Flat", folder=tmp_path / "index", memory=MEMORY, queries=queries, target_recall=0.9
    )
    found, exact = index.search_rows(queries[1::2])[1], exact_rows(clustered(COUNT), queries[1::2], 10)
    assert index.meta["recall_queries"] == 100
    assert index.meta["recall_at_10"] == pytest.approx(np.mean([np.isin(e, f).mean() for e, f in zip(exact, found)]))
    assert index.meta["latency_ms"].keys() == {"p50", "p95", "p99"}


def test_a_refused_build_leaves_nothing(tmp_path: Path, embeddings: Embeddings) -> None:
    with pytest.raises(DualencError, match="cannot be trained on 20 vectors"):
        Index.build(embeddings, None, "IVF64,Flat", folder=tmp_path / "index", memory=MEMORY, train_rows=20)
    assert os.listdir(tmp_path) == ["emb"]
