"""Appending and removing, against an index and a dict of what should be in it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search import Embeddings, Index
from dualenc.search.index.change import append, remove
from tests.helpers.clusters import clustered, search_ids
from tests.helpers.embeddings_on_disk import on_disk

COUNT = 3000
MORE = 400


def built(tmp_path: Path, factory: str, count: int = COUNT, memory: int | None = None) -> Path:
    vectors = clustered(COUNT + MORE)[:count]
    embeddings = on_disk(tmp_path / f"emb{count}", vectors, side="right", model_checksum="a")
    Index.build(embeddings, None, factory, folder=tmp_path / "index", memory=memory)
    return tmp_path / "index"


def more(names: list[str] | None = None, **entries: Any) -> Embeddings:
    names = [f"new {row}" for row in range(MORE)] if names is None else names
    vectors = clustered(COUNT + MORE)[COUNT:][: len(names)]
    about = Provenance(**entries)
    return Embeddings(names, vectors, about, [f"snippet of {name}" for name in names])


def check(folder: Path, expected: dict[str, np.ndarray]) -> None:
    """Every item is found by its own vector with all lists visited, under its id and with its
    snippet, and no other."""
    index = Index.open(folder, verify=True)
    assert set(index.ids) == set(expected)
    assert len(index) == index.faiss.ntotal == index.provenance.count == len(expected)
    names = list(expected)[::37]
    options = {"nprobe": 16} if "IVF" in index.provenance.factory else {}
    if "Refine" in index.provenance.factory:
        index.faiss.k_factor = 50
    queries = np.stack([expected[name] for name in names])
    results = search_ids(index, queries, 3, **options)[1]
    assert np.mean([name in line for name, line in zip(names, results)]) > 0.97
    if index.provenance.factory == "Flat":
        assert results[:, 0].tolist() == names
    everything = index.search_rows(queries[:4], len(index), **options)[1]
    assert sorted(everything[0].tolist()) == list(range(len(index)))
    for name in (names[0], names[-1]):
        row = int(index.ids.rows([name])[0])  # type: ignore[attr-defined]
        assert index.ids[row] == name
        assert index.hit(row, 0).snippet == (
            f"snippet of {name}" if name.startswith("new") else f"text {name[4:]}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory", ["Flat", "SQ8", "IVF16,Flat", "PCAR16,IVF16,SQ8", "IVF16,SQ8,Refine(SQfp16)"]
)
def test_appended_removed_and_appended_again(tmp_path: Path, factory: str) -> None:
    folder = built(tmp_path, factory)
    vectors = clustered(COUNT + MORE)
    expected = {f"doc {row}": vectors[row] for row in range(COUNT)}
    opened = Index.open(folder)
    before = search_ids(opened, vectors[:5])[1]

    append(folder, more())
    expected |= {f"new {row}": vectors[COUNT + row] for row in range(MORE)}
    check(folder, expected)

    gone = [f"doc {row}" for row in range(0, COUNT, 3)] + ["new 7", "new 7", f"new {MORE - 1}"]
    remove(folder, gone)
    expected = {name: vector for name, vector in expected.items() if name not in set(gone)}
    check(folder, expected)

    changed = append(folder, more(["doc 0", "new 7"])).provenance
    assert (changed.appended, changed.removed) == (MORE + 2, len(set(gone)))
    assert changed.recall_at_10 is None
    assert changed.measured.recall_at_10 > 0
    index = Index.open(folder)
    assert index.hit(int(index.ids.rows(["doc 0"])[0]), 0).snippet == "snippet of doc 0"  # type: ignore[attr-defined]
    assert sorted(os.listdir(tmp_path)) == [f"emb{COUNT}", "index"]
    assert (search_ids(opened, vectors[:5])[1] == before).all(), (
        "who has the old one open goes on with it"
    )


@pytest.mark.slow
def test_mistakes_change_nothing(tmp_path: Path) -> None:
    folder = built(tmp_path, "IVF16,Flat")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    broken = more(["nan"])
    broken.vectors = np.full((1, 16), np.nan, np.float32)
    for added, message in [
        (more(["fresh", "doc 5"]), "already has an item 'doc 5'; remove it first"),
        (more(["twice", "twice"]), "'twice' is a duplicate"),
        (
            Embeddings(["wide"], np.zeros((1, 17), np.float32)),
            "has vectors of dimension 16, not 17",
        ),
        (more(["other"], model_checksum="b"), "has vectors of model_checksum a, not b"),
        (Embeddings([], np.zeros((0, 16), np.float32)), "vectors are missing"),
        (broken, "the vector of 'nan' is not finite"),
    ]:
        with pytest.raises(DualencError, match=message):
            append(folder, added)
    for gone, message in [
        (["doc 5", "nobody"], "lacks the item 'nobody'"),
        ([], "no ids were given"),
        ([f"doc {row}" for row in range(COUNT)], "nothing would be left"),
    ]:
        with pytest.raises(DualencError, match=message):
            remove(folder, gone)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_kinds_that_do_not_change(tmp_path: Path) -> None:
    folder = built(tmp_path / "graph", "HNSW8")
    with pytest.raises(DualencError, match="FAISS cannot remove vectors from an IndexHNSWFlat"):
        remove(folder, ["doc 5"])
    assert len(append(folder, more())) == COUNT + MORE
    folder = built(tmp_path / "refined", "IVF16,SQ8,Refine(SQfp16)", memory=1 << 17)
    for act in (lambda: append(folder, more()), lambda: remove(folder, ["doc 5"])):
        with pytest.raises(DualencError, match=r"refine\.faiss cannot be changed"):
            act()


def _append_at_once(folder: Path, number: int, start: Any) -> None:
    start.wait()
    append(folder, more([f"new {number} {row}" for row in range(5)]))


@pytest.mark.slow
def test_appends_and_removals_at_once_take_turns(tmp_path: Path) -> None:
    folder = built(tmp_path, "Flat", 300)
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(5)
    writers = [
        fork.Process(target=_append_at_once, args=(folder, number, start)) for number in range(4)
    ]
    for writer in writers:
        writer.start()
    start.wait()
    remove(folder, ["doc 7", "doc 8"])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    index = Index.open(folder, verify=True)
    assert len(index) == 300 + 4 * 5 - 2
    assert {f"new {number} {row}" for number in range(4) for row in range(5)} <= set(index.ids)
    assert not {"doc 7", "doc 8"} & set(index.ids)
