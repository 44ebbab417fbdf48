"""Appending and removing, against an index and a dict of what should be in it."""

from __future__ import annotations

import multiprocessing
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
from dualenc.search import Embeddings, Index, parts
from dualenc.search.change import append, remove
from dualenc.search.parts import lists_of
from tests.search.clusters import clustered, search_ids
from tests.search.test_index import on_disk

COUNT, MORE = 3000, 400
KINDS = ["Flat", "SQ8", "IVF16,Flat", "PCAR16,IVF16,SQ8", "IVF16,SQ8,Refine(SQfp16)"]
MERGED = ["IVF16,Flat", "PCAR16,IVF16,Flat", "IVF16,RaBitQ,Refine(SQfp16)", "IVF16,SQ8,Refine(Flat)"]
CASES = [(factory, False) for factory in KINDS] + [(factory, True) for factory in MERGED]


def built(tmp_path: Path, factory: str, merged: bool, count: int = COUNT) -> Path:
    embeddings = on_disk(tmp_path / f"emb{count}", clustered(COUNT + MORE)[:count], side="right", model_checksum="a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "ROWS_AT_ONCE", 500)
        memory = 1 << 16 if merged else None
        index = Index.build(embeddings, None, factory, folder=tmp_path / "index", memory=memory, nprobe=None)
    assert (lists_of(index.faiss) is not None) == merged
    return tmp_path / "index"


def more(names: list[str] | None = None, **meta: Any) -> Embeddings:
    names = [f"new {row}" for row in range(MORE)] if names is None else names
    vectors = clustered(COUNT + MORE)[COUNT:][: len(names)]
    return Embeddings(names, vectors, meta, [f"snippet of {name}" for name in names])


def check(folder: Path, expected: dict[str, np.ndarray]) -> None:
    """Every item is found by its own vector with all lists visited, under its id and with its snippet, and no other."""
    index = Index.open(folder, verify=True)
    assert set(index.ids) == set(expected)
    assert len(index) == index.faiss.ntotal == index.meta["count"] == len(expected)
    names = list(expected)[::37]
    options = {"nprobe": 16} if "IVF" in index.meta["factory"] else {}
    if "Refine" in index.meta["factory"]:
        index.faiss.k_factor = 50
    queries = np.stack([expected[name] for name in names])
    found = search_ids(index, queries, 3, **options)[1]
    assert np.mean([name in line for name, line in zip(names, found)]) > 0.97
    if index.meta["factory"] == "Flat":
        assert found[:, 0].tolist() == names
    everything = index.search_rows(queries[:4], len(index), **options)[1]
    assert sorted(everything[0].tolist()) == list(range(len(index)))
    for name in (names[0], names[-1]):
        row = int(index.ids.rows([name])[0])  # type: ignore[attr-defined]
        assert index.ids[row] == name
        assert index.hit(row, 0).snippet == (f"snippet of {name}" if name.startswith("new") else f"text {name[4:]}")
    plain = faiss.read_index(str(folder / "index.faiss"))
    if options:
        faiss.ParameterSpace().set_index_parameter(plain, "nprobe", 16)
    if "Refine" in index.meta["factory"]:
        plain.k_factor = 50
    np.testing.assert_array_equal(plain.search(queries, 3)[1], index.search_rows(queries, 3, **options)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "merged"), CASES)
def test_appended_removed_and_appended_again(tmp_path: Path, factory: str, merged: bool) -> None:
    folder = built(tmp_path, factory, merged)
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

    meta = append(folder, more(["doc 0", "new 7"])).meta
    expected |= {"doc 0": vectors[COUNT], "new 7": vectors[COUNT + 1]}
    index = Index.open(folder)
    assert index.hit(int(index.ids.rows(["doc 0"])[0]), 0).snippet == "snippet of doc 0"  # type: ignore[attr-defined]
    assert (meta["appended"], meta["removed"]) == (MORE + 2, len(set(gone)))
    assert "recall_at_10" not in meta
    assert meta["when_built"]["recall_at_10"] > 0
    assert sorted(os.listdir(tmp_path)) == [f"emb{COUNT}", "index"]
    assert (search_ids(opened, vectors[:5])[1] == before).all(), "who has the old one open goes on with it"


@pytest.mark.slow
def test_what_was_trained_stays(tmp_path: Path) -> None:
    """Appending to a part gives what FAISS gives that trains on the part and adds both."""
    folder = built(tmp_path, "IVF16,SQ8", True)
    vectors = clustered(COUNT + MORE)
    append(folder, more())
    index = Index.open(folder)
    parted = Index.open(built(tmp_path / "again", "IVF16,SQ8", True)).faiss
    raw: Any = faiss.deserialize_index(faiss.serialize_index(parted))
    fresh = faiss.ArrayInvertedLists(raw.nlist, raw.code_size)
    raw.replace_invlists(fresh, False)
    raw.ntotal = 0
    raw.add(vectors)
    raw.nprobe = 16
    np.testing.assert_array_equal(index.search_rows(vectors[:30], 5, nprobe=16)[1], raw.search(vectors[:30], 5)[1])


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_mistakes_change_nothing(tmp_path: Path, merged: bool) -> None:
    folder = built(tmp_path, "IVF16,Flat", merged)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    wide = Embeddings(["wide"], np.zeros((1, 17), np.float32))
    broken = more(["nan"])
    broken.vectors = np.full((1, 16), np.nan, np.float32)
    for added, message in [
        (more(["fresh", "doc 5"]), "has an item 'doc 5' already; remove it first"),
        (more(["twice", "twice"]), "'twice' is a duplicate"),
        (wide, "has vectors of dimension 16, not 17; embed the data with its model"),
        (more(["other"], model_checksum="b"), "has vectors of model_checksum a, not b"),
        (Embeddings([], np.zeros((0, 16), np.float32)), "there are no vectors"),
        (broken, "the vector of 'nan' is not finite"),
    ]:
        with pytest.raises(DualencError, match=message) as error:
            append(folder, added)
        assert "\n" not in str(error.value)
    for gone, message in [
        (["doc 5", "nobody"], "has no item 'nobody'"),
        ([], "no ids were given"),
        ([f"doc {row}" for row in range(COUNT)], "nothing would be left"),
    ]:
        with pytest.raises(DualencError, match=message) as error:
            remove(folder, gone)
        assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert sorted(os.listdir(tmp_path)) == [f"emb{COUNT}", "index"]


def test_a_kind_that_faiss_cannot_remove_from(tmp_path: Path) -> None:
    folder = built(tmp_path, "HNSW8", False)
    with pytest.raises(DualencError, match="FAISS cannot remove vectors from an IndexHNSWFlat") as error:
        remove(folder, ["doc 5"])
    assert "\n" not in str(error.value)
    assert len(append(folder, more())) == COUNT + MORE


def _append_at_once(folder: Path, number: int, start: Any) -> None:
    start.wait()
    append(folder, more([f"new {number} {row}" for row in range(5)]))


@pytest.mark.slow
def test_appends_and_removals_at_once_take_turns(tmp_path: Path) -> None:
    folder = built(tmp_path, "Flat", False, 300)
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(5)
    writers = [fork.Process(target=_append_at_once, args=(folder, number, start)) for number in range(4)]
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


@pytest.mark.slow
@pytest.mark.parametrize("folder_of_lists", ["kept", "missing", "linked"])
@pytest.mark.parametrize("factory", ["IVF16,Flat", "IVF16,SQ8,Refine(SQfp16)"])
def test_lists_outside_the_folder_are_not_opened(tmp_path: Path, factory: str, folder_of_lists: str) -> None:
    """Whoever makes an index may name any file as that of its lists: removing would copy it into the folder."""
    folder = built(tmp_path, factory, True)
    elsewhere = tmp_path / "elsewhere" / ("lists.ivfdata" if folder_of_lists == "linked" else "secret")
    elsewhere.parent.mkdir()
    if folder_of_lists == "linked":
        (folder / "lists.ivfdata").rename(elsewhere)
        (folder / "lists.ivfdata").symlink_to(elsewhere)
    else:
        opened = faiss.read_index(str(folder / "index.faiss"), parts.READ)
        shutil.copyfile(folder / "lists.ivfdata", elsewhere)
        lists_of(opened).filename = str(elsewhere)
        faiss.write_index(opened, str(tmp_path / "new.faiss"))
        (tmp_path / "new.faiss").rename(folder / "index.faiss")
        if folder_of_lists == "missing":
            (folder / "lists.ivfdata").unlink()
        names = [path.name for path in folder.iterdir() if path.name != "meta.json"]
        meta = read_json(folder / "meta.json")
        kept = {"files": checksums.checksums(folder, names), "sizes": checksums.sizes(folder, names)}
        write_json(folder / "meta.json", meta | kept)
    for act in (lambda: Index.open(folder), lambda: remove(folder, ["doc 7"])):
        with pytest.raises(DualencError, match="and no file outside its folder is opened; build the index again"):
            act()


def test_lists_that_were_moved_or_linked_with_their_folder_are_found(tmp_path: Path) -> None:
    folder = built(tmp_path, "IVF16,SQ8,Refine(SQfp16)", True)
    expected = search_ids(Index.open(folder), clustered(5), 3)[1]
    (tmp_path / "link").symlink_to(folder)
    np.testing.assert_array_equal(search_ids(Index.open(tmp_path / "link"), clustered(5), 3)[1], expected)
    shutil.copytree(folder, tmp_path / "copy")
    np.testing.assert_array_equal(search_ids(Index.open(tmp_path / "copy"), clustered(5), 3)[1], expected)


@pytest.mark.slow
def test_an_index_that_names_a_second_file_behind_the_first_is_refused(tmp_path: Path) -> None:
    folder = built(tmp_path, "IVF16,Flat", True)
    path = folder / "index.faiss"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(RuntimeError, match="holds more than lists"):
        parts.open_merged(path)
