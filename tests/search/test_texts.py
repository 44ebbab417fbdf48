"""Whole texts beside an index, never those of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dualenc.data import Corpus
from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.search.embed.writer import EmbeddingWriter
from dualenc.search.texts import TextStore, add_texts
from tests.helpers.in_process import failure, run

LONG = "fox " + "ant " * 100 + "hen"


def opened(folder: Path) -> TextStore:
    return TextStore(folder, Index.open(folder).items_checksum)


def test_the_whole_text_is_kept_and_not_its_snippet(made: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(json.dumps({"_id": "long", "text": LONG}))
    run("index", made / "model", tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    run("index", tmp_path / "index", "--texts")
    assert dict(zip(opened(tmp_path / "index").ids, opened(tmp_path / "index").texts)) == {
        "long": LONG
    }


def test_they_are_never_those_of_another_index(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(made / "index", folder)
    (folder / "texts" / "items.arrow").write_bytes(b"broken")
    with pytest.raises(DualencError, match=r"items\.arrow: truncated or corrupt"):
        opened(folder)
    for name in ("bm25", "texts"):
        shutil.rmtree(folder / name)
    (tmp_path / "gone.txt").write_text("d3\n")
    run("remove", folder, tmp_path / "gone.txt")
    with pytest.raises(DualencError, match=r"stores no texts; run dualenc index INDEX --texts"):
        opened(folder)
    shutil.copytree(made / "index" / "texts", folder / "texts")
    with pytest.raises(DualencError, match="is of other texts than the index"):
        opened(folder)


def edited(path: Path, name: str, **changes: str) -> Path:
    """The documents in another file, some texts of which differ in their last word."""
    rows = [
        {"_id": row, "text": f"{LONG} {changes.get(row, 'gnu')}"}
        for row in (f"{name}0", f"{name}1")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("is_of_earlier_version", [False, True])
def test_a_text_that_was_edited_after_its_snippet_is_noticed(
    made: Path,
    tmp_path: Path,
    is_of_earlier_version: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Folders of an earlier version have no hashes: of them the beginnings are compared."""
    folder, docs = tmp_path / "index", edited(tmp_path / "docs.jsonl", "d")
    changed = edited(tmp_path / "changed.jsonl", "d", d1="eel")
    with monkeypatch.context() as earlier:
        if is_of_earlier_version:
            earlier.setattr("dualenc.search.embed.encode.EmbeddingWriter", without_hashes)
        run("index", made / "model", docs, "--out", folder)
        run(
            "embed",
            made / "model",
            edited(tmp_path / "more.jsonl", "n"),
            "--out",
            tmp_path / "more",
        )
    assert (Index.open(folder).hashes is None) == is_of_earlier_version
    assert Index.open(folder).columns is None
    problem = (
        "the text of 'd1' in the data is not what was embedded; embed and index the data again"
    )

    def refused(*words: object) -> None:
        if is_of_earlier_version:
            run(*words)
        else:
            assert problem in failure(capsys, *words)

    refused("index", folder, changed, "--texts")
    refused("index", folder, changed, "--bm25")
    run("index", folder, docs, "--texts", "--bm25")
    # Of appended embeddings the texts are read from where they were made of.
    edited(tmp_path / "more.jsonl", "n", n1="eel")
    problem = "the text of 'n1' in the data is not what was embedded"
    refused("append", folder, tmp_path / "more")
    if is_of_earlier_version:
        run(
            "append",
            folder,
            made / "model",
            edited(tmp_path / "last.jsonl", "l"),
        )
        assert [bool(known) for known in Index.open(folder).hashes] == [False] * 4 + [True] * 2
    else:
        edited(tmp_path / "more.jsonl", "n")
        run("append", folder, tmp_path / "more")
    # Hashes follow a change.
    (tmp_path / "gone.txt").write_text("d0\n")
    run("remove", folder, tmp_path / "gone.txt")
    for name in ("texts", "bm25"):
        shutil.rmtree(folder / name)
    every = tmp_path / "every.jsonl"
    every.write_text(
        "".join((tmp_path / f"{name}.jsonl").read_text() for name in ("changed", "more"))
    )
    with every.open("a") as stream:
        stream.write(edited(tmp_path / "last.jsonl", "l").read_text())
    problem = "the text of 'd1' in the data is not what was embedded"
    refused("index", folder, every, "--texts")


def without_hashes(*arguments: object, **options: object) -> EmbeddingWriter:
    return EmbeddingWriter(*arguments, **{**options, "whole_text": None})  # type: ignore[arg-type]


def test_mistakes(made: Path) -> None:
    with pytest.raises(DualencError, match="the data lacks the item 'd0'"):
        add_texts(made / "index", Corpus(["x"], ["fox"]), whole=True)
    with pytest.raises(DualencError, match="its data consists of vectors"):
        add_texts(made / "index", Corpus(["d0"], [np.zeros(3)], "vector"), bm25=True)
