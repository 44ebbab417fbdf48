"""Services over small indexes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dualenc.data.sources import open_corpus
from dualenc.search.rerank import open_cross_encoder
from dualenc.search.searcher import Searcher
from dualenc.serve.app import Settings, create_app
from dualenc.serve.metrics import Metrics
from dualenc.serve.service import Service
from tests.commands import toy
from tests.commands.in_process import run

URL = "http://127.0.0.1"


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.text_model(tmp_path_factory.mktemp("models") / "serve-text")


@pytest.fixture(scope="session")
def text_index(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    """60 texts."""
    folder = tmp_path_factory.mktemp("texts")
    toy.save_documents(folder / "docs.jsonl", 60)
    run("index", text_model, folder / "docs.jsonl", "--out", folder / "index")
    return folder / "index"


@pytest.fixture(scope="session")
def image_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images, by a model that takes images and texts."""
    folder = tmp_path_factory.mktemp("images")
    model = toy.image_text_model(folder / "model")
    toy.save_images(folder / "pictures", 12)
    run("index", model, folder / "pictures", "--out", folder / "index")
    return folder / "index"


@pytest.fixture(scope="session")
def engine_index(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    """30 texts in LanceDB, with columns; one text is an attempt at an attack."""
    folder = tmp_path_factory.mktemp("engine")
    texts = [*toy.texts(29), "<img src=x onerror=alert(1)> fox & <b>dog</b>"]
    rows = [{"_id": f"d{i}", "text": t, "year": 2000 + i, "lang": "no" if i % 2 else "en"} for i, t in enumerate(texts)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("embed", text_model, folder / "docs.jsonl", "--columns", "year,lang", "--out", folder / "emb")
    run("push", folder / "emb", folder / "lake", "--to", "lancedb", "--out", folder / "pushed")
    return folder / "pushed"


Serve = Callable[..., TestClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a client of a new service over an index."""
    clients: list[TestClient] = []

    def start(
        folder: Path,
        *,
        images: Path | None = None,
        judge: Path | None = None,
        app: dict[str, Any] | None = None,
        **how: Any,
    ) -> TestClient:
        pictures = None if images is None else open_corpus(str(images), modality="image")

        rescore = None if judge is None else open_cross_encoder(str(judge))[0]

        def open_searcher(before: Searcher | None) -> Searcher:
            return Searcher.open(folder, before=before, judge=rescore)

        service = Service(open_searcher, pictures=pictures, metrics=Metrics(), **how)
        client = TestClient(create_app(service, Settings(watch=False, **(app or {}))), base_url=URL)
        client.service = service  # type: ignore[attr-defined]
        client.__enter__()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)
