"""A collection that dualenc pushed gets another model's vectors, and its folder describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qdrant_client
from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.search.engines import qdrant_migration, qdrant_owner
from dualenc.search.engines.factory import open_engine
from dualenc.search.engines.qdrant_collection import KEY
from dualenc.search.searcher import Searcher
from dualenc.workflows import migrate_collection as workflow
from tests.helpers import toy
from tests.helpers.in_process import failure, found, run
from tests.helpers.migrated_collection import URL, all_points
from tests.helpers.migrated_table import embedded
from tests.helpers.served_qdrant import ServedClient

pytestmark = pytest.mark.slow

COUNT = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long texts, two models, and the old model's embeddings."""
    folder = tmp_path_factory.mktemp("pushed")
    for seed, name in enumerate(("old", "new")):
        toy.text_model(folder / name, seed)
    rows = [{"_id": f"d{i}", "text": " ".join(texts_of(i)), "year": i} for i in range(COUNT)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "docs.jsonl").write_text(lines)
    words = ("--columns", "year", "--out", folder / "emb")
    run("embed", folder / "old", folder / "docs.jsonl", *words)
    return folder


def texts_of(row: int) -> list[str]:
    """A text that is longer than what is stored of it."""
    return [f"{toy.texts(COUNT)[row]} {toy.texts(COUNT)[-row]}"] * 20


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(qdrant_owner, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(qdrant_migration, "SETTLE_SECONDS", 0.1)
    client = ServedClient(None)
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: client)
    yield client
    client.client.close()


@pytest.fixture
def pushed(made: Path, tmp_path: Path, served: Any) -> Path:
    run("push", made / "emb", URL, "--table", "docs", "--out", tmp_path / "engine")
    return tmp_path / "engine"


def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())


def check_engine(folder: Path, model: Path, texts: dict[str, str]) -> None:
    """Each item has the model's vector of its whole text, and its text finds it."""
    with_vectors = open_engine(folder)
    ids = sorted(texts)
    expected = embedded(model, [texts[name] for name in ids])
    np.testing.assert_allclose(with_vectors.vectors(ids), expected, atol=2e-3)
    searcher = Searcher.open(folder)
    assert searcher.search(texts["d3"], k=1)[0].id == "d3"


def whole_texts(made: Path) -> dict[str, str]:
    rows = map(json.loads, (made / "docs.jsonl").read_text().splitlines())
    return {row["_id"]: row["text"] for row in rows}


def test_the_folder_describes_the_new_vectors_and_the_old_ones_again(
    made: Path, pushed: Path, served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = meta(pushed)
    texts = whole_texts(made)
    stored = {p.payload["id"]: p.payload["text"] for p in all_points(served, "docs")}
    assert all(len(stored[name]) < len(text) for name, text in texts.items())
    # A client has changed an item and added one.
    [changed] = [p.id for p in all_points(served, "docs") if p.payload["id"] == "d5"]
    served.set_payload("docs", {"text": "hen fox"}, points=[changed])
    old = [1.0] * before["dim"]
    payload = {"id": "theirs", "text": "gnu cat"}
    served.upsert("docs", [models.PointStruct(id=1, vector=old, payload=payload)])
    run("migrate", pushed, made / "new", "--device", "cpu")
    printed = capsys.readouterr().out
    assert f"'docs': searches find the vectors of {made / 'new'} now" in printed
    assert f"until dualenc migrate {pushed} --finish" in printed
    after = meta(pushed)
    assert (after["model"], after["dim"]) == (str(made / "new"), 32)
    assert after["fingerprint"] != before["fingerprint"]
    assert "embeddings" not in after
    texts |= {"d5": "hen fox"}
    [theirs] = served.retrieve("docs", [1], with_vectors=True)
    np.testing.assert_allclose(theirs.vector, embedded(made / "new", ["gnu cat"])[0], atol=2e-3)
    check_engine(pushed, made / "new", texts)
    hits = found(capsys, pushed, texts["d7"], "--where", "year>=7", "-k", "1")
    assert hits[0]["id"] == "d7"
    run("check", pushed)
    assert "made_by" not in after
    words = ("push", made / "emb", URL, "--table", "docs", "--out", pushed)
    assert "holds other embeddings" in failure(capsys, *words)
    run("migrate", pushed, "--rollback")
    assert meta(pushed) == before
    assert Searcher.open(pushed).search(texts["d3"], k=1)[0].id == "d3"
    run("migrate", pushed, made / "new", "--device", "cpu")
    run("migrate", pushed, "--finish")
    check_engine(pushed, made / "new", texts)
    assert len(served.get_collections().collections) == 1
    run("push", made / "emb", URL, "--table", "docs", "--out", pushed, "--replace")
    assert meta(pushed)["fingerprint"] == before["fingerprint"]
    assert len(served.get_collections().collections) == 1


def test_a_folder_that_was_not_written_in_time_is_written_by_the_same_command(
    made: Path, pushed: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workflow._Opened, "describe", killed)
        workflow.migrate_collection(str(pushed), None, str(made / "new"), progress=False)
    with pytest.raises(DualencError, match="holds other embeddings than"):
        open_engine(pushed)
    workflow.migrate_collection(str(pushed), None, str(made / "new"), progress=False)
    check_engine(pushed, made / "new", whole_texts(made))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workflow._Opened, "describe", killed)
        workflow.roll_back_collection(str(pushed), None)
    workflow.roll_back_collection(str(pushed), None)
    assert open_engine(pushed).provenance.model == meta(pushed)["model"] == str(made / "old")


def test_refusals(
    made: Path, pushed: Path, served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = ("migrate", URL, made / "new", "--table", "docs")
    assert "was filled by `dualenc push`, which cuts texts; name the folder" in failure(
        capsys, *base
    )
    said = failure(capsys, "migrate", pushed, made / "new", "--table", "docs")
    assert f"--table is recorded in {pushed}; leave it out" in said
    run("migrate", pushed, made / "new", "--device", "cpu")
    run("embed", made / "new", made / "docs.jsonl", "--out", tmp_path / "emb2")
    words = ("push", tmp_path / "emb2", URL, "--table", "docs", "--replace")
    assert "a migration is under way; end it first" in failure(capsys, *words)
    served.update_collection("docs", metadata={"x": 1})
    run("migrate", pushed, "--rollback", "--discard")
    gone = made / "docs.jsonl"
    moved = gone.rename(tmp_path / "moved.jsonl")
    try:
        said = failure(capsys, "migrate", pushed, made / "new")
        assert "is gone; name it by --data" in said
        run("migrate", pushed, made / "new", "--data", moved, "--device", "cpu")
    finally:
        moved.rename(gone)
    check_engine(pushed, made / "new", whole_texts(made))


def test_data_of_other_items_is_refused_before_anything_is_written(
    made: Path, pushed: Path, served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"_id": "x", "text": "hen fox"}\n{"_id": "y", "text": "gnu"}\n')
    before = meta(pushed)
    said = failure(capsys, "migrate", pushed, made / "new", "--data", other)
    assert "name the data that was embedded by --data" in said
    assert meta(pushed) == before
    assert KEY not in served.get_collection("docs").config.metadata
