"""Models on disk, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import toy
from tests.helpers.image_models import save_image_model
from tests.helpers.in_process import run


@pytest.fixture(scope="session")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of kind image."""
    folder = tmp_path_factory.mktemp("models") / "image"
    save_image_model(folder)
    return folder


@pytest.fixture(scope="session")
def toy_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image-text model that knows the words of `toy`'s captions."""
    return toy.image_text_model(tmp_path_factory.mktemp("models") / "toy-clip")


@pytest.fixture(scope="module")
def columned_beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents with columns year and lang, and 8 queries."""
    folder = toy.write_beir(tmp_path_factory.mktemp("data") / "beir")
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"year": 2000 + number % 10, "lang": "no" if number % 2 else "en"}
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def emb(tmp_path_factory: pytest.TempPathFactory, toy_text: Path, columned_beir: Path) -> Path:
    """Embeddings of `columned_beir` with its columns."""
    folder = tmp_path_factory.mktemp("embeddings") / "emb"
    words = ("--columns", "year,lang", "--dtype", "float16")
    run("embed", toy_text, columned_beir, "--out", folder, *words)
    return folder
