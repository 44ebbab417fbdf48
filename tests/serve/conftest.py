"""Services over small indexes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from dualenc.search.rerank import open_cross_encoder
from dualenc.search.searcher import Searcher
from dualenc.serve.app import Service, create_app
from tests.commands import toy
from tests.commands.in_process import run

URL = "http://127.0.0.1"
MARKUP = "<img src=x onerror=alert(1)> fox & <b>dog</b>"


@pytest.fixture(scope="session")
def image_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images, by a model that takes images and texts."""
    folder = tmp_path_factory.mktemp("images")
    model = toy.image_text_model(folder / "model")
    toy.save_images(folder / "pictures", 12)
    run("index", model, folder / "pictures", "--out", folder / "index")
    return folder / "index"


@pytest.fixture(scope="session")
def text_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 texts with all that a query may use: whole texts, BM25, a column, and a cross-encoder beside it."""
    folder = tmp_path_factory.mktemp("texts")
    model = toy.text_model(folder / "model")
    toy.cross_encoder(folder / "judge")
    rows = [{"_id": f"d{i}", "text": text, "year": 2000 + i} for i, text in enumerate([*toy.texts(19), MARKUP])]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--texts", "--bm25", "--columns", "year")
    run("index", model, folder / "docs.jsonl", "--out", folder / "index", *options)
    return folder / "index"


@pytest.fixture(scope="session")
def service(text_index: Path) -> Service:
    """Over `text_index`; five results are reranked."""
    rescore = open_cross_encoder(str(text_index.parent / "judge"))[0]
    return Service(Searcher.open(text_index, cross_encoder=rescore), rerank_top=5)


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(create_app(service, ["127.0.0.1"]), base_url=URL) as made:
        yield made


@pytest.fixture(scope="session")
def image_client(image_index: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Service(Searcher.open(image_index))), base_url=URL) as made:
        yield made
