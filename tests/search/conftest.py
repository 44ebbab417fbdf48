"""An index with everything beside it, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import toy
from tests.helpers.in_process import run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, documents and their index with columns, BM25 and texts."""
    folder = tmp_path_factory.mktemp("made")
    toy.text_model(folder / "model")
    (folder / "docs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in toy.filterable_documents())
    )
    words = ("--columns", "year,lang,weight,open", "--bm25", "--texts")
    run("index", folder / "model", folder / "docs.jsonl", "--out", folder / "index", *words)
    return folder
