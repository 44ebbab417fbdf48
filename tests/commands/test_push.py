"""`dualenc push`, and `search` on the folder that it writes, as a user types them."""

from __future__ import annotations

import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.commands import toy
from tests.commands.in_process import failure, found, run

FILTER = '{"must": [{"key": "year", "range": {"gte": 2004}}, {"key": "lang", "match": {"value": "no"}}]}'


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents with columns year and lang, and 8 queries."""
    folder = toy.write_beir(tmp_path_factory.mktemp("data") / "beir")
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"year": 2000 + number % 10, "lang": "no" if number % 2 else "en"}
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def emb(tmp_path_factory: pytest.TempPathFactory, toy_text: Path, beir: Path) -> Path:
    folder = tmp_path_factory.mktemp("embeddings") / "emb"
    run("embed", toy_text, beir, "--out", folder, "--columns", "year,lang", "--dtype", "float16")
    return folder


@pytest.fixture
def engine(tmp_path: Path, emb: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """A folder that `push` wrote, and the option that names its embedded store."""
    run("push", emb, tmp_path / "data", "--out", tmp_path / "engine")
    shown = capsys.readouterr().out
    assert "40 vectors of dimension 32 (cosine)" in shown
    assert "collection 'emb'; 40 sent" in shown
    assert f"--qdrant-path {tmp_path / 'data'}" in shown
    return tmp_path / "engine", "--qdrant-path", tmp_path / "data"


@pytest.mark.slow
def test_push_search_and_push_again(
    tmp_path: Path, emb: Path, engine: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run("push", emb, tmp_path / "data", "--out", tmp_path / "engine")
    assert "; 0 sent" in capsys.readouterr().out
    run("index", emb, "--out", tmp_path / "index")
    by_faiss = found(capsys, tmp_path / "index", "wing flow", "-k", 7)
    by_engine = found(capsys, *engine, "wing flow", "-k", 7)
    for name in ("id", "snippet", "year"):
        assert [hit[name] for hit in by_engine] == [hit[name] for hit in by_faiss]
    np.testing.assert_allclose([h["score"] for h in by_engine], [h["score"] for h in by_faiss], atol=2e-3)
    everything = pd.DataFrame(found(capsys, *engine, "wing flow", "-k", 40))
    wanted = everything[(everything.year >= 2004) & (everything.lang == "no")].id.tolist()
    assert [hit["id"] for hit in found(capsys, *engine, "wing flow", "-k", 40, "--filter", FILTER)] == wanted


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["data", "x://../data", "{}/data"])
def test_an_embedded_qdrant_that_only_the_folder_names_is_not_opened(
    tmp_path: Path,
    beir: Path,
    engine: tuple[Any, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    with sqlite3.connect(next(tmp_path.glob("data/collection/*/storage.sqlite"))) as database:
        database.execute("UPDATE points SET point = ?", (pickle.dumps(Payload(tmp_path / "ran")),))
    meta = json.loads((tmp_path / "engine" / "meta.json").read_text())
    (tmp_path / "engine" / "meta.json").write_text(json.dumps(meta | {"target": target.format(tmp_path)}))
    (tmp_path / "x:").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "names an embedded Qdrant, whose files can run code" in failure(capsys, "search", engine[0], "wing")
    run("index", engine[0], beir, "--texts")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_mistakes_end_in_one_line(
    tmp_path: Path, emb: Path, engine: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run("index", emb, "--out", tmp_path / "index")
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("push", emb, tmp_path / "data", "--out", tmp_path / "data"), "name a folder other than --out"),
        (("push", emb, tmp_path / "data", "--out", tmp_path / "index"), "holds no collection"),
        (("search", *engine, "wing", "--where", "year>1"), "in its own language (JSON); give a filter"),
        (("search", tmp_path / "index", "wing", "--filter", "year>1"), "only an engine takes a filter"),
        (("search", tmp_path / "index", "wing", "--qdrant-path", "x"), "leave --qdrant-path out"),
    ]
    for words, message in cases:
        assert message in failure(capsys, *words), words
    meta = json.loads((engine[0] / "meta.json").read_text())
    for name, value in {"model": 5, "side": "up"}.items():
        (engine[0] / "meta.json").write_text(json.dumps(meta | {name: value}))
        message = failure(capsys, "search", *engine, "wing")
        assert f"meta.json: {name} is " in message
