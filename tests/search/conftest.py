"""An index with everything beside it, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import toy
from tests.helpers.in_process import run

LANGUAGES = ("en", "de", None)


def documents() -> list[dict[str, Any]]:
    """60 texts with years, languages, weights and truth values."""
    rows = []
    for i, text in enumerate(toy.texts(60)):
        row = {
            "_id": f"d{i}",
            "text": text,
            "year": 2000 + i % 7,
            "lang": LANGUAGES[i % 3],
            "weight": i / 4,
        }
        rows.append(row | {"open": i % 5 == 0})
    return rows


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `documents` and their index with columns, BM25 and texts."""
    folder = tmp_path_factory.mktemp("made")
    toy.text_model(folder / "model")
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents()))
    words = ("--columns", "year,lang,weight,open", "--bm25", "--texts")
    run("index", folder / "model", folder / "docs.jsonl", "--out", folder / "index", *words)
    return folder
