"""The server that docs/serving.md shows."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.helpers import toy
from tests.helpers.in_process import found, run

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"


@pytest.mark.slow
def test_the_server_of_the_page_answers_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = toy.text_model(tmp_path / "model")
    toy.save_documents(tmp_path / "docs.jsonl", 20)
    run("index", model, tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "server.py").write_text(blocks[0])
    monkeypatch.syspath_prepend(tmp_path)
    client = TestClient(importlib.import_module("server").app)
    hits = client.get("/search", params={"text": "fox", "k": 3}).json()
    expected = found(capsys, "index", "fox", "-k", 3)
    assert [(hit["id"], round(hit["score"], 6)) for hit in hits] == [
        (row["id"], row["score"]) for row in expected
    ]
    assert len(client.get("/search", params={"text": "fox", "k": 500}).json()) == 20
