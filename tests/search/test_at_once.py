"""Two processes at one index: readers keep the generation that they opened, writers exclude one
another."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.data import Corpus
from dualenc.errors import DualencError
from dualenc.io.files import locked
from dualenc.search import Embeddings, Index
from dualenc.search.index import refined
from dualenc.search.index.change import append, remove
from dualenc.search.lexical import Lexical
from dualenc.search.searcher import Searcher
from dualenc.search.texts import TextStore
from tests.helpers import toy
from tests.helpers.clusters import clustered
from tests.helpers.embeddings_on_disk import on_disk
from tests.helpers.in_process import failure, run

COUNT = 300
VECTORS = clustered(COUNT + 1000)


def small(folder: Path) -> Path:
    """An index of COUNT vectors."""
    embeddings = on_disk(folder / "emb", VECTORS[:COUNT], side="right")
    Index.build(embeddings, None, "IVF4,Flat", folder=folder / "index", recall_queries=0)
    return folder / "index"


def check_generation(index: Index) -> None:
    """Each id is found in its row, by the order of the ids and by its vector."""
    names = list(index.ids)[::23]
    own_rows = np.arange(len(index))[::23]
    expected = VECTORS[[int(name.split()[1]) for name in names]]
    np.testing.assert_allclose(index.reconstruct(own_rows), expected, atol=1e-5)
    rows = index.search_rows(expected, 1, nprobe=4)[1].ravel()
    assert [index.ids[row] for row in rows] == names


@pytest.mark.slow
def test_whoever_opened_a_generation_keeps_it(tmp_path: Path) -> None:
    """Nothing is read by its name later: not after an index of the same size took the place, nor
    after none did."""
    folder = small(tmp_path)
    before = Index.open(folder)
    remove(folder, ["doc 3"])
    append(folder, Embeddings(["doc 300"], VECTORS[COUNT : COUNT + 1]))
    after = Index.open(folder)
    assert "doc 300" in after.ids
    shutil.rmtree(folder)
    for index in (before, after):
        check_generation(index)
        index.save(tmp_path / "saved")
        saved = Index.open(tmp_path / "saved", verify=True)
        check_generation(saved)
        assert list(saved.ids) == list(index.ids)


def test_a_reader_between_the_two_renames_of_a_folder_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced at the worst moment: after meta.json was read, before the other files
    are."""
    folder = small(tmp_path)
    verify = refined.open_index
    replaced: list[Path] = []

    def replace_first(path: Path, *rest: Any) -> Any:
        if not replaced:
            replaced.append(path)
            append(folder, Embeddings(["doc 300"], VECTORS[COUNT : COUNT + 1]))
        return verify(path, *rest)

    monkeypatch.setattr("dualenc.search.index.open.open_index", replace_first)
    opened = Index.open(folder)
    assert len(opened) == COUNT + 1
    check_generation(opened)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, 30 texts, an index with BM25 and texts of the first 25, and the other
    five."""
    folder = tmp_path_factory.mktemp("at once")
    toy.text_model(folder / "model")
    toy.save_documents(folder / "all.jsonl", 30)
    lines = (folder / "all.jsonl").read_text().splitlines(keepends=True)
    (folder / "first.jsonl").write_text("".join(lines[:25]))
    (folder / "more.jsonl").write_text("".join(lines[25:]))
    run(
        "index",
        folder / "model",
        folder / "first.jsonl",
        "--out",
        folder / "index",
        "--bm25",
        "--texts",
    )
    return folder


def same_as_built_anew(folder: Path, texts: dict[str, str]) -> None:
    """BM25 and the texts of an index are those of these items, as a new index would have them."""
    index = Index.open(folder)
    kept = TextStore(folder, index.items_checksum)
    assert dict(zip(kept.ids, kept.texts)) == texts
    expected = Lexical.build(texts[name] for name in index.ids)
    for word in toy.ANIMALS:
        assert Lexical.open(folder, index.items_checksum).search(word, 40) == expected.search(
            word, 40
        )


@pytest.mark.slow
def test_what_is_appended_is_found_by_its_words_and_its_text_is_kept(
    made: Path, tmp_path: Path
) -> None:
    """An open searcher keeps its own words."""
    texts = dict(zip([f"d{i}" for i in range(30)], toy.texts(30)))
    shutil.copytree(made / "index", tmp_path / "index")
    searcher = Searcher.open(tmp_path / "index", str(made / "model"))
    before = searcher.search(texts["d0"], k=25, hybrid="rrf")
    run("append", tmp_path / "index", made / "model", made / "more.jsonl")
    same_as_built_anew(tmp_path / "index", texts)
    assert searcher.search(texts["d0"], k=25, hybrid="rrf") == before
    (tmp_path / "gone.txt").write_text("d3\nd27\n")
    run("remove", tmp_path / "index", tmp_path / "gone.txt")
    same_as_built_anew(
        tmp_path / "index",
        {name: text for name, text in texts.items() if name not in ("d3", "d27")},
    )
    # From a folder of embeddings, which says what it was made of.
    run("embed", made / "model", made / "more.jsonl", "--out", tmp_path / "emb")
    shutil.copytree(made / "index", tmp_path / "other")
    run("append", tmp_path / "other", tmp_path / "emb", "--bm25", "--texts")
    same_as_built_anew(tmp_path / "other", texts)


@pytest.mark.slow
def test_an_append_that_would_lose_words_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, added = tmp_path / "index", Embeddings(["x"], np.zeros((1, 32), np.float32))
    shutil.copytree(made / "index", index)
    words = ("append", index, made / "model", made / "more.jsonl")
    with pytest.raises(DualencError, match="stores whole texts; give those of the new items, too"):
        append(index, added)
    with pytest.raises(DualencError, match="the data lacks the item 'x'"):
        append(index, added, Corpus(["y"], ["fox"]))
    shutil.rmtree(index / "texts")
    assert "run dualenc index" in failure(capsys, *words, "--bm25")
    shutil.rmtree(index / "bm25")
    assert "has no BM25 or no texts to append to" in failure(capsys, *words, "--bm25")
    assert len(Index.open(index, verify=True)) == 25


@pytest.mark.slow
@pytest.mark.parametrize("command", ["index", "push", "mine"])
def test_an_output_that_another_writer_holds_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run("embed", made / "model", made / "all.jsonl", "--out", tmp_path / "emb")
    (tmp_path / "pairs.csv").write_text("query,document\nfox,fox hen\nhen,hen ant\n")
    words: dict[str, tuple[Any, ...]] = {
        "index": ("index", tmp_path / "emb"),
        "push": ("push", tmp_path / "emb", tmp_path / "store"),
        "mine": ("mine", made / "model", tmp_path / "pairs.csv"),
    }
    target = tmp_path / ("out.jsonl" if command == "mine" else "out")
    with ThreadPoolExecutor(1) as other, locked(target):
        message = other.submit(failure, capsys, *words[command], "--out", target).result()
    assert message.startswith(
        f"another dualenc process is writing {target}; wait for it or choose another "
    )
    assert not target.exists()
