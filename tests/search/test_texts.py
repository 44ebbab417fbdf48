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
from dualenc.search.texts import TextStore, add_texts
from tests.commands.in_process import run

LONG = "fox " + "ant " * 100 + "hen"


def opened(folder: Path) -> TextStore:
    return TextStore(folder, Index.open(folder).items_checksum)


def test_the_whole_text_is_kept_and_not_its_snippet(made: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(json.dumps({"_id": "long", "text": LONG}))
    run("index", made / "model", tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    run("index", tmp_path / "index", "--texts")
    assert dict(zip(opened(tmp_path / "index").ids, opened(tmp_path / "index").texts)) == {"long": LONG}


def test_they_are_never_those_of_another_index(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(made / "index", folder)
    (folder / "texts" / "items.arrow").write_bytes(b"broken")
    with pytest.raises(DualencError, match=r"items\.arrow: truncated or corrupt"):
        opened(folder)
    for name in ("bm25", "texts"):
        shutil.rmtree(folder / name)
    (tmp_path / "gone.txt").write_text("d3\n")
    run("index", folder, "--remove", tmp_path / "gone.txt")
    with pytest.raises(DualencError, match=r"keeps no texts; run dualenc index INDEX --texts"):
        opened(folder)
    shutil.copytree(made / "index" / "texts", folder / "texts")
    with pytest.raises(DualencError, match="is of other texts than the index"):
        opened(folder)


def test_mistakes(made: Path) -> None:
    with pytest.raises(DualencError, match="the data has no text 'd0'"):
        add_texts(made / "index", Corpus(["x"], ["fox"]), whole=True)
    with pytest.raises(DualencError, match="its data holds vectors"):
        add_texts(made / "index", Corpus(["d0"], [np.zeros(3)], "vector"), bm25=True)
